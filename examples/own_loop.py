"""A training loop of one's own, in plain torch: `python own_loop.py photos/ model/`, with one folder per class."""

import sys

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import vitrail

folder, out = sys.argv[1:]
data = ImageFolder(folder, v2.Compose([v2.PILToTensor(), v2.Resize((32, 32))]))  # the model normalises uint8 images
model = vitrail.create("Ti/8", image_size=(32, 32), depth=2, classes=len(data.classes)).train()
model.card = vitrail.Card(model.config, data.classes, vitrail.Preprocess((32, 32), "squash", crop=1.0))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(5):
    for images, labels in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
vitrail.save(model, out)
print(vitrail.load(out)(data[0][0][None]).softmax(-1))
for row in vitrail.predict(out, folder, device="cpu").rows:
    print(row.path, row.classes[0], f"{row.probabilities[0]:.2f}")
