"""`vitrail recipes list | show | cp`: list the recipes, show one, or copy one to change it."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vitrail.config import plain, to_yaml
from vitrail.errors import UsageError
from vitrail.files import replacing_text
from vitrail.model.variants import variant
from vitrail.ranges import checked
from vitrail.recipes.finetune_by_data import FINETUNE_BY_DATA
from vitrail.recipes.published import Recipe
from vitrail.recipes.registry import RECIPES, find_recipe
from vitrail.terminal import page, table
from vitrail.training.run import Run

FIXED = "The recipe chooses some of its settings for each data set. This file fixes them for every one."
log = logging.getLogger("vitrail")


@checked
def list_recipes() -> dict[str, str]:
    """List the recipes with their purpose."""
    return {name: recipe.description.partition("\n")[0] for name, recipe in RECIPES.items()}


@checked
def show_recipe(name: str, *, yaml: bool = False) -> str:
    """Show a recipe: what it does, its command, its cost, the expected result, and all of its settings.

    Settings of the network that the recipe does not change are those of the named architecture. A setting that is null
    is decided by the data and the machine; `vitrail train DIR --recipe NAME --dry-run` shows how.

    Args:
        name: Name of the recipe (`vitrail recipes` lists them).
        yaml: Print only the settings, as `vitrail train --config` reads them.
    """
    recipe = find_recipe(name)
    if yaml:
        return to_yaml(_settings(recipe, recipe())).rstrip()
    return f"{name}\n\n{recipe.description}\n\n{to_yaml(_settings(recipe, _named(recipe()))).rstrip()}"


@checked
def copy_recipe(name: str, file: str | Path) -> Path:
    """Write a recipe to a YAML file, to change it and train with --config FILE.

    A file holds settings, not the rule by which some recipes choose settings for a data set. The file of such a recipe
    says so, and finetune-by-data, which is nothing but a rule, is refused.

    Args:
        name: Name of the recipe (`vitrail recipes` lists them).
        file: The YAML file to write. An existing file is not replaced.
    """
    target = Path(file)
    recipe = find_recipe(name)
    if recipe == FINETUNE_BY_DATA:
        raise UsageError(
            f"{name} is a rule: the images, the network and the time decide on its settings, and a copy would fix "
            "them. Put what you want to change alone into a file of your own: vitrail finetune DIR --config FILE"
        )
    text = "".join(f"# {line}".rstrip() + "\n" for line in recipe.description.splitlines())
    if recipe.by_data is not None:
        log.warning("%s", FIXED)
        text += f"#\n# {FIXED}\n"
    if target.is_file():
        raise UsageError(f"cannot write {target}: File exists. Choose another name")
    with replacing_text(target, UsageError) as out:
        out.write(f"{text}\n{to_yaml(_settings(recipe, recipe()))}")
    return target


def _settings(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return the settings of a recipe's run, without the data or the network that the command must bring."""
    settings: dict[str, Any] = plain(run)
    if recipe.verb == "finetune":
        del settings["model"], settings["vit"]
    if not recipe.brings_data:
        del settings["data"]["path"]
    return settings


def _named(run: Run) -> Run:
    """Return `run` with the values that its network's name stands for."""
    config = variant(run.network, **run.vit.changes())
    values = {field.name: getattr(config, field.name, None) for field in fields(run.vit)}
    return replace(run, vit=replace(run.vit, **values))


def show(result: dict[str, str] | str | Path) -> Any:
    """Return the result of any of these verbs as text for a terminal."""
    if isinstance(result, Path):
        return f"wrote {result}: change it, then vitrail train (or finetune) DIR --config {result}"
    if isinstance(result, str):
        return result
    more = "More: vitrail recipes show NAME; to change one: vitrail recipes cp NAME FILE"
    return page(table(("", ""), result.items()), more)
