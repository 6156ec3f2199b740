"""Every recipe by name. Torch-free: a recipe is a function that returns a `Run`, and its docstring says what
command runs it, what that costs and what to expect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from vitrail.errors import UsageError, did_you_mean
from vitrail.recipes.augreg import AUGREG
from vitrail.recipes.bit import BIT, hyperrule
from vitrail.recipes.deit import DEIT
from vitrail.recipes.deit3 import DEIT3
from vitrail.recipes.finetune import finetune
from vitrail.recipes.paper import PAPER
from vitrail.recipes.paper_finetune import PAPER_FINETUNE
from vitrail.recipes.self_supervised import SELF_SUPERVISED
from vitrail.recipes.self_supervised_small import SELF_SUPERVISED_SMALL
from vitrail.recipes.small import digits, scratch_photos, scratch_small
from vitrail.recipes.smoke import smoke
from vitrail.recipes.three_things import THREE_THINGS
from vitrail.training.run import Run

RECIPES: dict[str, Callable[[], Run]] = {
    "smoke": smoke,
    "digits": digits,
    "scratch-small": scratch_small,
    "scratch-photos": scratch_photos,
    "finetune": finetune,
    **PAPER,
    **PAPER_FINETUNE,
    **BIT,
    **AUGREG,
    **DEIT,
    **DEIT3,
    **THREE_THINGS,
    **SELF_SUPERVISED,
    **SELF_SUPERVISED_SMALL,
}

BRING_DATA = ("smoke", "digits")
"""Recipes that name their data themselves; every other one is told where the images are."""

BY_DATA: dict[str, Callable[[int, int], Run]] = {"bit/hyperrule": hyperrule}
"""Recipes whose settings follow from the number of training images and the side of a usual one, in pixels."""


def recipe(name: str) -> Run:
    """Return the run that the recipe `name` describes. Raises UsageError with the nearest valid name."""
    if name not in RECIPES:
        families = sorted({known.partition("/")[0] + "/..." if "/" in known else known for known in RECIPES})
        raise UsageError(
            f"no recipe is named {name!r}.{did_you_mean(name, RECIPES)} Valid: {', '.join(families)} (all of them: "
            "vitrail recipes)"
        )
    return RECIPES[name]()


def starts_from_weights(name: str) -> bool:
    """Is the recipe for `vitrail finetune`, where the weights bring the network along?"""
    return "Command: `vitrail finetune" in description(name)


def description(name: str) -> str:
    """Return what the recipe says of itself: what it does, its command, cost and expected number."""
    recipe(name)
    return inspect.getdoc(RECIPES[name]) or ""
