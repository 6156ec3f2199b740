"""A script of a user, which a strict type checker accepts (test_types.py). It is not run."""

import torch
from torch import nn

import vitrail

model = vitrail.create("S/16", classes=10, depth=2)
images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
logits: torch.Tensor = model(images)
features: torch.Tensor = model.features(images)
width: int = model.config.width
heads: int = model.config.heads
print(len(model.blocks), model.config.classes, logits.shape, features.shape)
tokens: torch.Tensor = model.encode(model.embed(images))
(last,) = model.intermediate(images, layers=1)
print(last.shape, width, heads, tokens.shape)
model.reset_head(5)
model.head = nn.Linear(width, 5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 1]))
torch.autograd.backward(loss)
optimizer.step()
saved = vitrail.save(model, "model", overwrite=True)
print(saved.path, saved.error)
loaded = vitrail.load("model", classes=3)
print(loaded.config.image_size, loaded.config.mean, loaded.features(images))
if isinstance(loaded, vitrail.ViT):
    print(loaded.config.heads, len(loaded.blocks))
resnet = vitrail.create("R50x1", classes=10)
print(resnet.config.units, len(resnet.stages))
run = vitrail.recipe("scratch-small")
print(run.optim.lr, vitrail.ViTConfig(depth=2).grid)


def blocks(network: vitrail.ViT) -> int:
    return len(network.blocks)


own = vitrail.load("runs/train-1", kind=vitrail.ViT)
print(blocks(own), own.config.heads, own.encode(own.embed(images)).shape)
print(vitrail.load("runs/train-2", kind=vitrail.ResNet).config.units)
print(blocks(vitrail.reset_head(own, 5)))
grid, front = loaded.intermediate(images, [-1], prefix=True)[0]
trained = vitrail.train("photos/", epochs=5, lr=1e-3, recipe="scratch-small", seed=3)
print(trained.best["top1"], grid.shape, front.shape)
result: vitrail.Result = vitrail.finetune("photos/", weights=trained.folder, tune="attention")
preview: vitrail.Preview = vitrail.train("photos/", dry_run=True, epochs=3)
print(preview.checked, vitrail.to_yaml(vitrail.finetune("photos/", weights="a", print_config=True).run))
either = vitrail.train("photos/", dry_run=bool(width))
print(either.checked if isinstance(either, vitrail.Preview) else either.folder)
print(vitrail.sweep("photos/", weights=result.folder, lr=(0.01,)), vitrail.sweep("photos/", dry_run=True).count)
for row in vitrail.predict(result.folder, "a.jpg", "b.jpg").rows:
    print(row.path, row.classes, row.probabilities)
written = vitrail.predict(result.folder, "photos/", out="answers.csv")
print(written.out, written.unreadable, written.summary)
embedded = vitrail.embed(result.folder, "photos/", out="f.npz", tokens=True, layers=(0, -1))
print(embedded.out, embedded.unreadable, vitrail.evaluate(result.folder, "photos/").results)
