"""Every public name in the two lines that somebody would try first, with what they must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail


def sections(text: str) -> dict[str, str]:
    """Name -> lines of a text with titles "# name"."""
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in ("\n" + text.strip()).split("\n# ")[1:]}


USES = sections(
    """
# ViT
config = vitrail.ViTConfig(width=16, depth=1, heads=2, mlp_dim=32)
vitrail.ViT(config)(images).shape[1] == 1000
# ViTConfig
config = vitrail.ViTConfig(depth=2)
config.depth == 2 and config.width == 768
# ResNet
config = vitrail.ResNetConfig(units=(1,), width=8, classes=5)
vitrail.ResNet(config)(images).shape[1] == 5
# ResNetConfig
config = vitrail.ResNetConfig(units=(1, 1))
len(config.units) == 2
# variant
config = vitrail.variant('B/16', classes=10)
(config.width, config.classes) == (768, 10)
# create
model = vitrail.create('Ti/16', classes=3, depth=1)
model(images).shape == (2, 3)
# Positions
model = vitrail.create('Ti/16', classes=3, depth=1)
isinstance(model.positions, vitrail.Positions) and model.positions.added(None, (14, 14)).shape[1] == 197
# AtLayer
model = vitrail.create('Ti/16', classes=3, depth=1)
vitrail.AtLayer(model.positions, 0, torch.arange(196), (14, 14)).rotation() is None
# SelfSupervised
model = vitrail.create('Ti/16', classes=0, depth=1)
vitrail.SelfSupervised.of.__doc__ is not None and issubclass(vitrail.SelfSupervised, vitrail.Objective)
# Card
card = vitrail.Card(vitrail.variant('Ti/16', classes=2), ['cat', 'dog'])
card.class_names[1] == 'dog'
# reset_head
model = vitrail.reset_head(vitrail.load('model'), 7)
model(images).shape == (2, 7)
# freeze
model = vitrail.load('model')
torch.allclose(vitrail.freeze(model)(images), model(images), atol=1e-4)
# regroup
model = vitrail.regroup(vitrail.load('model'), branches=2)
len(model.blocks) == 1
# load
model = vitrail.load('model')
model.card.class_names == ['cat', 'dog'] and not model.training
# save
saved = vitrail.save(vitrail.load('model'), 'other')
(saved.path / 'model.safetensors').is_file()
# attention_maps
maps = vitrail.attention_maps(vitrail.load('model'), images, layers=[-1])
torch.allclose(maps[0].maps.sum(-1), torch.ones(()))
# tap_attention
model, seen = vitrail.load('model'), []
with vitrail.tap_attention(model, seen.append):
    model(images)
len(seen) == 2
# head_maps
maps = vitrail.head_maps(vitrail.load('model'), images, head=0)
maps[0].shares.shape == (2, 1, 4, 4)
# patch_attention
maps = vitrail.patch_attention(vitrail.load('model'), images, (3, 1))
bool((maps[0].shares >= 0).all())
# rollout
shares = vitrail.rollout(vitrail.load('model'), images)
shares.shape == (2, 4, 4)
# relevance
found = vitrail.relevance(vitrail.load('model'), images, target=1)
found.classes.tolist() == [1, 1]
# attention_distance
found = vitrail.attention_distance(vitrail.load('model'), [images])
found.mean.shape == (2, 2) and found.images == 2
# principal_filters
filters = vitrail.principal_filters(vitrail.load('model'), 3)
filters.components.shape == (3, 8, 8, 3)
# position_tiles
tiles = vitrail.position_tiles(vitrail.load('model'))
tiles.values.shape == (4, 4, 4, 4)
# patch_components
found = vitrail.patch_components(vitrail.load('model'), [images])
found.tokens == 2 * 16
# component_maps
model = vitrail.load('model')
vitrail.component_maps(model, images, vitrail.patch_components(model, [images])).shape == (2, 3, 4, 4)
# embedding_map
found = vitrail.embedding_map(numpy.random.rand(20, 8), 'pca')
found.points.shape == (20, 2)
# neighbours
rows = numpy.eye(4)
vitrail.neighbours(rows[:1], rows, 1)[0].tolist() == [[0]]
# Run
run = vitrail.Run(seed=1)
run.seed == 1
# Data
run = vitrail.Run(data=vitrail.Data('photos', holdout=0.2))
run.data.holdout == 0.2
# Model
run = vitrail.Run(model='Ti/16', vit=vitrail.Model(depth=2))
run.vit.depth == 2
# Augment
run = vitrail.Run(augment=vitrail.Augment(crop='pad', mixup=0.2))
run.augment.mixup == 0.2
# Preprocess
run = vitrail.Run(preprocess=vitrail.Preprocess((32, 32)))
run.preprocess.image_size == (32, 32)
# Optim
run = vitrail.Run(optim=vitrail.Optim('sgd', lr=0.1))
run.optim.lr == 0.1
# Schedule
run = vitrail.Run(schedule=vitrail.Schedule('linear', warmup=vitrail.Steps(5)))
run.schedule.shape == 'linear'
# Average
run = vitrail.Run(average=vitrail.Average('ema'))
run.average.kind == 'ema'
# Epochs
duration = vitrail.Epochs(3)
duration.steps(per_epoch=10, batch_size=4, total=1) == 30
# Steps
run = vitrail.Run(duration=vitrail.Steps(7))
run.duration.steps(per_epoch=10, batch_size=4, total=1) == 7
# Examples
run = vitrail.Run(duration=vitrail.Examples(40))
run.duration.steps(per_epoch=9, batch_size=4, total=1) == 10
# Percent
warmup = vitrail.Percent(5)
warmup.steps(per_epoch=10, batch_size=4, total=200) == 10
# Duration
duration = vitrail.Run().duration
isinstance(duration, vitrail.Duration)
# Supervised
run = vitrail.Run(objective=vitrail.Supervised(smoothing=0.1))
run.objective.smoothing == 0.1
# Regression
run = vitrail.Run(objective=vitrail.Regression(loss="huber"))
run.objective.huber_delta == 1
# SeveralAnswers
run = vitrail.Run(objective=vitrail.SeveralAnswers(answer_weights=("species=1", "weight_g=0.5")))
run.objective.number_loss == "mse"
# MAE
run = vitrail.Run(objective=vitrail.MAE(ratio=0.6))
run.objective.ratio == 0.6
# BEiT
run = vitrail.Run(objective=vitrail.BEiT(tokenizer='runs/tokenizer'))
run.objective.tokenizer == 'runs/tokenizer'
# DINO
run = vitrail.Run(objective=vitrail.DINO(local_crops=4))
run.objective.local_crops == 4
# MaskedPatch
run = vitrail.Run(objective=vitrail.MaskedPatch(corrupt=0.4))
run.objective.corrupt == 0.4
# Segmentation
run = vitrail.Run(objective=vitrail.Segmentation(), vit=vitrail.Model(segmentation="linear"))
run.objective.kind == "segmentation"
# DINOv2
run = vitrail.Run(objective=vitrail.DINOv2(gram_weight=2.0), weights="vitrail/tiny")
run.objective.centring == 'sinkhorn'
# Tokenizer
run = vitrail.Run(objective=vitrail.Tokenizer(codes=64))
run.objective.codes == 64
# Objective
class Own(vitrail.Objective):
    def loss(self, prepared):
        return self.model(prepared.images).sum(), 1, {}


isinstance(Own(vitrail.load('model')), torch.nn.Module)
# recipe
run = vitrail.recipe('scratch-small')
isinstance(run, vitrail.Run)
# to_yaml
text = vitrail.to_yaml(vitrail.Run(seed=3))
'seed: 3' in text
# from_yaml
run = vitrail.from_yaml('run.yaml', vitrail.Run())
run.seed == 3
# fit
result = vitrail.fit(vitrail.from_yaml('run.yaml', vitrail.Run()))
result.steps == 2
# train
result = vitrail.train(config=('run.yaml',))
result.steps == 2
# finetune
result = vitrail.finetune('photos', weights='model', duration='2 steps', batch_size=4)
result.steps == 2
# evaluate
found = vitrail.evaluate('model', 'photos')
found.results.count == 12
# predict
found = vitrail.predict('model', 'photos/cat/0.png')
found.rows[0].classes[0] in ('cat', 'dog')
# embed
written = vitrail.embed('model', 'photos', out='f.npz')
written.images == {'': 12} and written.width == 32
# search
found = vitrail.search('model', 'photos', like='photos/cat/0.png', top=3)
found.images == 12 and len(found.matches) == 3 and found.matches[0].image != 'photos/cat/0.png'
# inspect
found = vitrail.inspect('model', 'photos/cat/0.png', what=('rollout',))
found.pages[0].what == 'rollout'
# probe
found = vitrail.probe.knn('model', 'photos', k=(1,))
found.classes == 2
# sweep
found = vitrail.sweep('photos', weights='model', dry_run=True)
bool(found.trials)
# study
listed = vitrail.study()
'figure4' in listed
# Metric
metric = vitrail.Metric(name='nll')
metric.rank(1.0) < metric.rank(0.5)
# ObjectiveSettings
settings = vitrail.Supervised(smoothing=0.1)
isinstance(settings, vitrail.ObjectiveSettings)
# OwnPart
config = vitrail.ViTConfig(width=16, depth=1, heads=2, mlp_dim=32)
not isinstance(config.stem, vitrail.OwnPart)
# vtab
listed = vitrail.vtab(data='photos', show_list=True)
len(listed.tasks) == 19
# bench
found = vitrail.bench('Ti/16', batch_size=(1,), mode='inference', seconds=0.1)
found.measured[0].mode == 'inference'
# cost
rows = vitrail.cost('B/16')
round(rows.cost.params / 1e6) == 87
# plan
found = vitrail.plan('photos', seconds=0.1, image_size=16)
bool(found)
# doctor
found = vitrail.doctor()
found['vitrail']['vitrail'] == vitrail.__version__
# export
written = vitrail.export('model', to='program', out='program')
written.folder.is_dir()
# Engine
engine = vitrail.load(vitrail.export('model', to='onnx', out='onnx').folder, kind=vitrail.Engine)
engine(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 2)
# report
run = vitrail.fit(vitrail.from_yaml('run.yaml', vitrail.Run()))
vitrail.report(run.folder).path.is_file()
# Result
found = vitrail.fit(vitrail.from_yaml('run.yaml', vitrail.Run()))
isinstance(found, vitrail.Result) and found.steps == 2
# Preview
found = vitrail.train(config=('run.yaml',), print_config=True)
isinstance(found, vitrail.Preview) and found.run.seed == 3
# __version__
text = vitrail.__version__
text[0].isdigit()
"""
)
"""Name -> lines; the last is an expression that must be true. Folders: `model` and `photos`; `run.yaml`."""

ERRORS = sections(
    """
# demo
vitrail.demo(out='broken.png')
# serve
vitrail.serve('nothing')
# VitrailError
vitrail.load('nothing')
# WeightsError
vitrail.load('nothing')
# UsageError
vitrail.create('Q/16')
# DataError
vitrail.evaluate('model', 'empty')
# DecodeError
from vitrail.data.images.decode import decode
decode(b'no picture')
# CheckpointError
vitrail.fit(vitrail.Run(), resume='photos')
# ExportError
vitrail.export('model', to='program', out='program')
vitrail.predict('program/model.pt2', 'photos')
# TrainingError
vitrail.train(config=('run.yaml',), duration='9 steps', optim=dict(name='sgd', lr=1e30))
"""
)
"""Exception -> a line that raises it; and of the two verbs that train or serve for long, a call that is refused."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, images of two classes and the settings of a short run."""
    folder = tmp_path_factory.mktemp("uses")
    torch.manual_seed(0)
    model = vitrail.create("Ti/8", width=32, depth=2, heads=2, mlp_dim=64, classes=2, image_size=(32, 32))
    model.card = vitrail.Card(model.config, ["cat", "dog"], vitrail.Preprocess((32, 32)))
    torch.nn.init.normal_(model.head.weight)
    vitrail.save(model, folder / "model")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    (folder / "empty").mkdir()
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "run.yaml").write_text(
        "{seed: 3, model: Ti/8, image_size: 32, batch_size: 4, duration: 2 steps, data: {path: photos}, "
        "vit: {width: 16, depth: 1, heads: 2, mlp_dim: 32}, precision: float32}"
    )
    return folder


def test_every_name_has_a_use() -> None:
    assert sorted([*USES, *ERRORS]) == sorted(vitrail.__all__)


NEEDS = {
    **dict.fromkeys(("fit", "train", "finetune", "report", "Result"), pytest.mark.train),
    **dict.fromkeys(("export", "Engine"), pytest.mark.export),
    **dict.fromkeys(("plan", "bench"), pytest.mark.full_size),
    "doctor": pytest.mark.processes,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in USES])
def test_two_lines_are_enough(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(name, USES[name], folder, tmp_path, monkeypatch)


@pytest.mark.train
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_can_be_caught(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = getattr(vitrail, name)
    with pytest.raises(error if isinstance(error, type) else vitrail.VitrailError):
        use(name, ERRORS[name], folder, tmp_path, monkeypatch)


def use(name: str, lines: str, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run lines beside a model and images; the last one must be true."""
    for given in folder.iterdir():
        (place / given.name).symlink_to(given)
    monkeypatch.chdir(place)
    names: dict[str, Any] = {"vitrail": vitrail, "torch": torch, "numpy": np}
    names["images"] = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    *before, last = lines.split("\n")
    exec("\n".join(before), names)
    assert eval(last, names) is True, name
