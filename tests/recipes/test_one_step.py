"""Every recipe trains: its network, narrow and shallow, on small random images, by its own optimiser, loss and
augmentations. The first loss has a closed form where the classifier starts at zero, and is near it elsewhere."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_inputs import MANY

from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.loading.loader import Batch
from vitrail.data.loading.order import stream
from vitrail.data.settings import Preprocess
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.recipes.by_data import TrainingSet, fit_warmup
from vitrail.recipes.registry import RECIPES, recipe
from vitrail.training.assemble import build_model, build_objective
from vitrail.training.decide import Decision
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer, divisor_of_gradients, set_learning_rate, update
from vitrail.training.run import Run
from vitrail.training.step import backward, seed_step
from vitrail.training.timetable import Timetable

CLASSES, BATCH = 5, 6
CODES = Tokenizer(codes=7, width=8, depth=1)


def smaller(run: Run, patch: int, folder: Path) -> Run:
    """With a tokenizer, or a decoder, as small as the network."""
    if isinstance(run.objective, MAE):
        return replace(run, objective=replace(run.objective, decoder_width=16, decoder_depth=1, decoder_heads=2))
    if isinstance(run.objective, Tokenizer):
        return replace(run, objective=CODES)
    if isinstance(run.objective, DINO):
        return replace(run, objective=replace(run.objective, outputs=16, hidden=16, bottleneck=8, local_crops=2))
    if isinstance(run.objective, BEiT):
        ImageTokenizer(CODES, patch).save(folder)
        return replace(run, objective=replace(run.objective, tokenizer=str(folder)))
    return run


def reduced(run: Run) -> ViTConfig | ResNetConfig:
    """The network of a recipe with as little of it as there can be of everything it has."""
    overrides = {key: value for key, value in vars(run.vit).items() if value is not None}
    config = variant(run.network, **overrides, classes=CLASSES if run.supervised else 0)
    if isinstance(config, ResNetConfig):
        return replace(config, units=(1, 1, 1, 1), width=8, image_size=(64, 64))
    if len(config.stem_units) > 3:  # the fourth stage of a ResNet has half of its parameters
        config = replace(config, stem_units=config.stem_units[:3], patch=config.patch // 2)
    side = 2 * config.patch
    hidden = 16 if config.pre_logits else None
    narrow = dict(width=16, depth=2, heads=2, mlp_dim=32, pre_logits=hidden, stem_units=(1,) * len(config.stem_units))
    return replace(config, **narrow, image_size=(side, side))


def images(run: Run, size: tuple[int, int]) -> Batch:
    """Random pictures as the recipe would show them to the network."""
    preprocess = replace(run.preprocess or Preprocess(), image_size=size)
    transform = train_transform(run.augment, preprocess)
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (40, 48, 3), np.uint8) for _ in range(BATCH)]
    assert eval_transform(preprocess)(pictures[0], stream(0, 0, 0)).shape == (*size, 3)
    shown = np.stack([transform(picture, stream(0, 0, index)) for index, picture in enumerate(pictures)])
    labels = torch.arange(BATCH) % CLASSES
    return Batch(torch.from_numpy(shown).permute(0, 3, 1, 2), labels, torch.arange(BATCH))


def first_loss(config: Any) -> float | None:
    """The loss of an example where all logits are the head's bias; targets add up to 1 whatever is mixed.

    None where it has no closed form: the others predict pixels.
    """
    if isinstance(config, MaskedPatch):
        return math.log(512)  # colours
    if isinstance(config, BEiT):
        return math.log(CODES.codes)
    if not isinstance(config, Supervised):
        return None
    bias = config.head_bias
    if config.loss == "softmax":
        return math.log(CLASSES)
    # sum over classes of log(1 + e^b) - t b
    total = CLASSES * math.log1p(math.exp(bias)) - bias
    return total if config.loss == "sigmoid" else total / CLASSES


def fitted_run(name: str) -> Run:
    return fit_warmup(replace(recipe(name), batch_size=BATCH), TrainingSet(images=10 * BATCH, side=40))[0]


def parts(name: str) -> set[Any]:
    """Every value by which four steps of a recipe differ from those of others, and kinds of it that meet."""
    run = fitted_run(name)
    config = reduced(run)
    rate = replace(run.optim, lr=1.0)  # the steps have a higher one
    loss = getattr(run.objective, "loss", "")
    kinds = (type(run.objective), loss, run.optim.name, run.average.kind, type(config), getattr(config, "stem", ""))
    sections = (rate, run.objective, run.augment, run.average, config)
    values = {(type(each), field.name, repr(getattr(each, field.name))) for each in sections for field in fields(each)}
    return {*values, *itertools.combinations(enumerate(kinds), 2)}


def few() -> list[str]:
    """Names of recipes that have all parts of all recipes; all names where somebody asked for a long search."""
    having = {name: parts(name) for name in RECIPES}
    missing, chosen = set().union(*having.values()), []
    while missing:
        chosen.append(max(having, key=lambda name: len(having[name] & missing)))
        missing -= having[chosen[-1]]
    return list(RECIPES) if MANY else chosen


@pytest.mark.parametrize("name", few())
def test_a_recipe_takes_steps(name: str, tmp_path: Path) -> None:
    run = fitted_run(name)
    plan = Timetable(run, per_epoch=10)
    assert plan.learning_rate(plan.warmup, 0.0) == pytest.approx(run.optim.lr)
    torch.manual_seed(0)
    config = reduced(run)
    run = smaller(run, getattr(config, "patch", 0), tmp_path)
    run = replace(run, preprocess=run.preprocess or Preprocess())
    decision = Decision(run, config, torch.device("cpu"), {})
    model = build_model(decision)[0] if isinstance(run.objective, Tokenizer) else build(config)
    objective = build_objective(decision, model, CLASSES)[0].train()
    batch = images(run, config.image_size)
    optimizer, average = build_optimizer(objective, run.optim), Averager(model, run.average)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for step in range(4):  # classifiers and branches that start at zero let the gradient through one after another
        seed_step(run.seed, step, 0)
        outcome = backward(objective, batch, step=step, parts=2, autocast=False)
        if step == 0 and (expected := first_loss(run.objective)) is not None:
            assert outcome.loss == pytest.approx(expected, rel=1e-5 if run.vit.init in (None, "paper") else 0.1)
        norm, divisor = divisor_of_gradients(objective.parameters(), run.optim.clip)
        assert math.isfinite(float(norm))
        set_learning_rate(optimizer, max(run.optim.lr, 0.03))  # four steps shall be seen
        update(optimizer, torch.isfinite(norm), divisor)
        optimizer.zero_grad(set_to_none=True)
        average.update(step)
    after = model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())
    still = [key for key, value in after.items() if key.endswith(".weight") and torch.equal(value, before[key])]
    assert still == []
    assert average.active == (run.average.kind != "none")


FAMILIES = ("paper/vit-b16-imagenet", "augreg/vit-s16-imagenet", "deit/vit-s16", "deit3/vit-s16-imagenet",
            "three-things/vit-s16-300", "mae", "beit", "dino")  # fmt: skip


@pytest.mark.train
@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_keep_their_size_while_a_family_trains(name: str, tmp_path: Path) -> None:
    """Behind a classifier of zeros they have hardly a gradient at first, and LAMB only lets them decay."""
    run = fitted_run(name)
    assert kernels_after(run, tmp_path) > (0.95 if run.optim.name == "lamb" else 0.75)
    if name == "three-things/vit-s16-300":
        assert kernels_after(replace(run, vit=replace(run.vit, init="paper")), tmp_path) < 0.9


def kernels_after(run: Run, folder: Path, steps: int = 200, classes: int = 80) -> float:
    """The norm of the blocks' kernels after some steps at the peak rate, as a share of that at the start."""
    torch.manual_seed(0)
    config = reduced(run)
    config = replace(config, classes=classes if config.classes else 0)
    run = smaller(replace(run, preprocess=run.preprocess or Preprocess()), config.patch, folder)
    objective = build_objective(Decision(run, config, torch.device("cpu"), {}), build(config), classes)[0].train()
    kernels = [each for key, each in objective.model.named_parameters() if ".mlp." in key and each.ndim == 2]
    before = torch.stack([each.norm() for each in kernels]).norm()
    batch, optimizer = images(run, config.image_size), build_optimizer(objective, run.optim)
    set_learning_rate(optimizer, run.optim.lr)
    for step in range(steps):
        seed_step(run.seed, step, 0)
        backward(objective, batch, step=step, parts=1, autocast=False)
        norm, divisor = divisor_of_gradients(objective.parameters(), run.optim.clip)
        update(optimizer, torch.isfinite(norm), divisor)
        optimizer.zero_grad(set_to_none=True)
    return (torch.stack([each.norm() for each in kernels]).norm() / before).item()
