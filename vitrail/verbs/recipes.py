"""`vitrail recipes`: what there is to start from, and a copy of it to change."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vitrail.config import plain, to_yaml
from vitrail.errors import UsageError
from vitrail.model.variants import variant
from vitrail.recipes.registry import BRING_DATA, RECIPES, description, recipe, starts_from_weights
from vitrail.training.run import Run


def list_recipes() -> dict[str, str]:
    """List the recipes: name and what each is for."""
    return {name: description(name).partition("\n")[0] for name in RECIPES}


def show_recipe(name: str, *, yaml: bool = False) -> str:
    """Show a recipe: what it does, its command, what it costs, what to expect, and all of its settings.

    The network's settings are those of its name where the recipe changes nothing. What is null is decided from the
    data and the machine, and `vitrail train DIR --recipe NAME --dry-run` says how.

    Args:
        name: One of `vitrail recipes`.
        yaml: Its settings alone, as `vitrail train --config` reads them.
    """
    if yaml:
        return to_yaml(_settings(recipe(name), name)).rstrip()
    settings = to_yaml(_settings(_named(recipe(name)), name)).rstrip()
    return f"{name}\n\n{description(name)}\n\n{settings}"


def copy_recipe(name: str, file: str | Path) -> Path:
    """Write a recipe to a YAML file, to change it and train with --config FILE.

    Args:
        name: One of `vitrail recipes`.
        file: Where to write; an existing file is left alone.
    """
    target = Path(file)
    text = "".join(f"# {line}".rstrip() + "\n" for line in description(name).splitlines())
    try:
        with open(target, "x", encoding="utf-8") as out:
            out.write(f"{text}\n{to_yaml(_settings(recipe(name), name))}")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def _settings(run: Run, name: str) -> dict[str, Any]:
    """Return a recipe's settings, without an address of data where it is for any data, or a network for any weights."""
    settings: dict[str, Any] = plain(run)
    if starts_from_weights(name):
        del settings["model"], settings["vit"]
    if name not in BRING_DATA:
        del settings["data"]["path"]
    return settings


def _named(run: Run) -> Run:
    """Return `run` with the values that its network's name stands for."""
    chosen = {field.name: value for field in fields(run.vit) if (value := getattr(run.vit, field.name)) is not None}
    config = variant(run.model, **chosen)
    values = {field.name: getattr(config, field.name, None) for field in fields(run.vit)}
    return replace(run, vit=replace(run.vit, **values))


def show(result: dict[str, str] | str | Path) -> str:
    """Return the result of any of these verbs as text for a terminal."""
    if isinstance(result, Path):
        return f"wrote {result}: change it, then vitrail train (or finetune) DIR --config {result}"
    if isinstance(result, str):
        return result
    width = max(map(len, result))
    lines = [f"{name:{width}}  {what}" for name, what in result.items()]
    return "\n".join([*lines, "", "More: vitrail recipes show NAME; to change one: vitrail recipes cp NAME FILE"])
