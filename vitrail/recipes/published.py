"""A recipe, and how a row of a paper's table becomes one."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.training.run import Run

COLUMNS = 110
"""Width of a docstring's lines."""

TITLES = {"jft300m": "JFT-300M", "imagenet21k": "ImageNet-21k", "imagenet": "ImageNet"}
"""Pre-training sets of the catalogue (`vitrail.data.benchmarks.catalog`) as the papers write them."""

HEAD_BIAS = {"jft300m": -10.0, "imagenet21k": -10.0, "imagenet": -6.9}
"""Initial bias of the classifier under a sigmoid loss, about -log(classes): what google-research/vision_transformer
(issue 2) and big_vision use. For JFT-300M it is not published; it has about as many classes as ImageNet-21k."""


@dataclass(frozen=True)
class Pretrained:
    """A row of a paper's table: a network, the data set it is pre-trained on, and the number of epochs."""

    recipe: str
    model: str
    data: str
    epochs: int


@dataclass(frozen=True)
class Recipe:
    """A named run, and what it says about itself: its command, cost and expected number."""

    name: str
    make: Callable[[], Run]
    """Returns the run; its docstring describes it."""
    verb: Literal["train", "finetune"] = "train"
    """The verb that runs it. With finetune, the weights bring their network along."""
    brings_data: bool = False
    """It names its data set itself; every other recipe needs a path to images."""
    by_data: Callable[[int, int], Run] | None = None
    """Makes the run from the number of training images and the side of a typical image in pixels."""

    def __call__(self) -> Run:
        """Return the run."""
        return self.make()

    @property
    def description(self) -> str:
        """What it does, its command, cost and expected number."""
        return inspect.getdoc(self.make) or ""


def by_name(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """Return the recipes of a family by their names."""
    return {recipe.name: recipe for recipe in recipes}


def published(
    name: str,
    run: Run,
    what: str,
    *,
    module: str,
    cost: str,
    expected: str,
    notes: str = "",
    verb: Literal["train", "finetune"] = "train",
    by_data: Callable[[int, int], Run] | None = None,
) -> Recipe:
    """Return the recipe `name` for copies of `run`, with a description of these parts.

    `what` is one line; `module` is the module of the recipe, whose docstring names sources and differences. The run
    folder's name is the recipe's, with "-" for "/".
    """
    run = replace(run, name=name.replace("/", "-"))

    def make() -> Run:
        return replace(run)

    weights = " --from WEIGHTS" if verb == "finetune" else ""
    parts = [what, "", *_wrapped(notes), *([""] if notes else [])]
    parts += [f"Command: `vitrail {verb} DIR{weights} --recipe {name}`"]
    parts += _wrapped(f"Cost: {cost}") + _wrapped(f"Expected: {expected}")
    parts += [f"Sources, and differences that cannot be expressed: {module.replace('.', '/')}.py"]
    make.__doc__ = "\n".join(parts)
    return Recipe(name, make, verb, by_data=by_data)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def passes(epochs: float, data: str) -> str:
    """Return the length of a run in words: its epochs, and the number of images of a data set of the catalogue."""
    images = CATALOG[data].splits["train"]
    size = f"{images / 1e6:.0f}" if images >= 1e8 else f"{images / 1e6:.3g}"
    return f"{epochs:g} epochs of {size} million images"
