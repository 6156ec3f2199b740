"""A recipe, and how a row of a paper's table becomes one."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.durations import Epochs, Percent
from vitrail.objective.settings import Supervised
from vitrail.recipes.preprocessing import inception
from vitrail.training.run import Run

RecipeVerb = Literal["train", "finetune"]

TITLES = {"jft300m": "JFT-300M", "imagenet21k": "ImageNet-21k", "imagenet": "ImageNet"}
"""The papers' names of pre-training sets in the catalogue (`vitrail.data.benchmarks.catalog`)."""

HEAD_BIAS = {"jft300m": -10.0, "imagenet21k": -10.0, "imagenet": -6.9}
"""Initial bias of the classifier with a sigmoid loss, about -log(classes), as in google-research/vision_transformer
(issue 2) and big_vision. The bias for JFT-300M is not published; it has about as many classes as ImageNet-21k."""


@dataclass(frozen=True)
class Recipe:
    """A run with its name and description."""

    name: str
    run: Run
    description: str
    """Its purpose in one line, then notes, command, cost and expected result."""
    verb: RecipeVerb = "train"
    """The verb that runs it. With finetune, the network is that of the weights."""
    brings_data: bool = False
    """Whether it names its data set. All other recipes need a path to images."""
    by_data: Callable[[int, int], Run] | None = None
    """Return the run for the number of training images and the side of a typical image in pixels, if the recipe depends
    on them."""

    def __call__(self) -> Run:
        """Return the run. Its name is the recipe's, with "-" for "/"."""
        return replace(self.run, name=self.name.replace("/", "-"))


def by_name(recipes: Iterable[Recipe], source: str = "") -> dict[str, Recipe]:
    """Return the recipes of a family by their names.

    `source` is the module whose docstring names their sources and differences; each description ends with it.
    """
    line = f"\nSources, and differences that cannot be expressed: {source.replace('.', '/')}.py" if source else ""
    return {recipe.name: replace(recipe, description=recipe.description + line) for recipe in recipes}


def described(make: Callable[[], Run], verb: RecipeVerb = "train", brings_data: bool = False) -> Recipe:
    """Return the recipe of a function that returns a run: its name is the function's, its description the docstring."""
    return Recipe(make.__name__.replace("_", "-"), make(), inspect.getdoc(make) or "", verb, brings_data)


def published(
    name: str,
    run: Run,
    what: str,
    *,
    expected: str,
    data: str = "imagenet",
    cost: str | None = None,
    notes: str = "",
    verb: RecipeVerb = "train",
    by_data: Callable[[int, int], Run] | None = None,
) -> Recipe:
    """Return the recipe `name` for `run`, with a description made of these parts.

    `what` is one line. The default cost is the length of the run on `data`.
    """
    weights = " --from WEIGHTS" if verb == "finetune" else ""
    paragraphs = [
        "",
        *([notes, ""] if notes else []),
        f"Command: `vitrail {verb} DIR{weights} --recipe {name}`",
        f"Cost: {cost or length(run, data)}",
        f"Expected: {expected}",
    ]
    wrapped = (textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False) for text in paragraphs)
    return Recipe(name, run, "\n".join([what, *wrapped]), verb, by_data=by_data)


def length(run: Run, data: str) -> str:
    """Return the length of a run on a data set of the catalogue, in words: epochs, images and pixels."""
    assert isinstance(run.duration, Epochs)
    images = CATALOG[data].splits["train"]
    size = f"{images / 1e6:.0f}" if images >= 1e8 else f"{images / 1e6:.3g}"
    return f"{run.duration.value:g} epochs of {size} million images at {run.image_size} pixels."


def pre_training(model: str, data: str, epochs: int) -> Run:
    """Return what the pre-training of ViT, BiT and AugReg has in common: batch 4096, 224 pixels and a sigmoid loss."""
    run = Run(
        model=model,
        objective=Supervised(loss="sigmoid", head_bias=HEAD_BIAS[data]),
        duration=Epochs(epochs),
        batch_size=4096,
        evaluate_every=Percent(2),
        checkpoint_every=Percent(2),
    )
    return inception().of(run)
