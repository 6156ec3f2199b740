"""Settings of recipes that belong to one network."""

from __future__ import annotations

import logging

from vitrail.recipes.registry import RECIPES, find
from vitrail.training.run import Run

log = logging.getLogger("vitrail")


def warn_of_rate(name: str, run: Run) -> None:
    """Log a warning if `run` trains another network than the recipe `name` of a paper, at the recipe's rate."""
    recipe = find(name)
    theirs = recipe.run
    if "/" not in name or recipe.verb != "train" or run.model == theirs.model or run.optim.lr != theirs.optim.lr:
        return
    family = name.partition("/")[0]
    other = [
        known.name
        for known in RECIPES.values()
        if known.name.startswith(f"{family}/") and known.verb == "train" and known.run.model == run.model
    ]
    instead = f"Use --recipe {' or '.join(other)}, or" if other else "To change it,"
    log.warning(
        "The learning rate %g of recipe %s is for %s, but the network is %s. %s give --lr.",
        run.optim.lr, name, theirs.model, run.model, instead,
    )  # fmt: skip
