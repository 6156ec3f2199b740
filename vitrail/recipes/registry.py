"""All recipes by name. Torch-free."""

from __future__ import annotations

from vitrail.errors import UsageError, did_you_mean
from vitrail.recipes.augreg import AUGREG
from vitrail.recipes.bit import BIT
from vitrail.recipes.deit import DEIT
from vitrail.recipes.deit3 import DEIT3
from vitrail.recipes.finetune_by_data import FINETUNE_BY_DATA
from vitrail.recipes.paper import PAPER
from vitrail.recipes.paper_finetune import FINETUNE, PAPER_FINETUNE
from vitrail.recipes.published import Recipe
from vitrail.recipes.self_supervised import SELF_SUPERVISED
from vitrail.recipes.self_supervised_small import SELF_SUPERVISED_SMALL
from vitrail.recipes.small import SMALL
from vitrail.recipes.three_things import THREE_THINGS
from vitrail.training.run import Run

RECIPES: dict[str, Recipe] = {
    **SMALL,
    FINETUNE_BY_DATA.name: FINETUNE_BY_DATA,
    FINETUNE.name: FINETUNE,
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


def find_recipe(name: str) -> Recipe:
    """Return the recipe `name`. Raises UsageError with the nearest valid name."""
    if name not in RECIPES:
        families = sorted({known.partition("/")[0] + "/..." if "/" in known else known for known in RECIPES})
        raise UsageError(
            f"no recipe is named {name!r}.{did_you_mean(name, RECIPES)} Valid: {', '.join(families)} "
            "(`vitrail recipes` lists all)"
        )
    return RECIPES[name]


def recipe(name: str) -> Run:
    """Return the run that the recipe `name` describes. Raises UsageError with the nearest valid name."""
    return find_recipe(name)()
