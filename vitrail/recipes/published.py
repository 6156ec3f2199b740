"""How a published procedure becomes a recipe: a function without arguments whose docstring says what it costs and
what to expect. Tables of such procedures are rows; this makes a function of a row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.training.run import Run

Recipe = Callable[[], Run]

COLUMNS = 110
"""Width of a docstring's lines."""

TITLES = {"jft300m": "JFT-300M", "imagenet21k": "ImageNet-21k", "imagenet": "ImageNet"}
"""Pre-training sets of the catalogue (`vitrail.data.benchmarks.catalog`) as the papers write them."""

HEAD_BIAS = {"jft300m": -10.0, "imagenet21k": -10.0, "imagenet": -6.9}
"""Initial bias of the classifier under a sigmoid loss, about -log(classes): what google-research/vision_transformer
(issue 2) and big_vision use. For JFT-300M it is not published; it has about as many classes as ImageNet-21k."""


@dataclass(frozen=True)
class Pretrained:
    """A network, the data set it is pre-trained on and for how long: what the rows of the papers' tables share."""

    recipe: str
    model: str
    data: str
    epochs: int


def as_recipe(
    name: str,
    run: Run,
    what: str,
    *,
    module: str,
    cost: str,
    expected: str,
    notes: str = "",
    command: str | None = None,
) -> Recipe:
    """Return the function that makes `run` anew, named after the recipe, with a docstring of these parts.

    `what` is one line; `module` is where the recipe stands, and what it says of sources and differences. The run
    folder's name is the recipe's, with "-" for "/".
    """
    command = command or f"vitrail train DIR --recipe {name}"
    run = replace(run, name=name.replace("/", "-"))

    def build() -> Run:
        return replace(run)

    parts = [what, "", *_wrapped(notes), *([""] if notes else []), f"Command: `{command}`"]
    parts += _wrapped(f"Cost: {cost}") + _wrapped(f"Expected: {expected}")
    parts += [f"Sources, and what cannot be expressed here: {module.replace('.', '/')}.py"]
    build.__doc__ = "\n".join(parts)
    build.__name__ = build.__qualname__ = run.name.replace("-", "_")
    return build


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def passes(epochs: float, data: str) -> str:
    """Return how many images a run of so many epochs of a data set of the catalogue sees, in words."""
    images = CATALOG[data].splits["train"]
    size = f"{images / 1e6:.0f}" if images >= 1e8 else f"{images / 1e6:.3g}"
    return f"{epochs:g} passes over {size} million images"
