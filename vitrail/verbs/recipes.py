"""`vitrail recipes`: what there is to start from, and a copy of it to change."""

from __future__ import annotations

from pathlib import Path

from vitrail.config_yaml import to_yaml
from vitrail.errors import UsageError
from vitrail.recipes.registry import RECIPES, description, recipe


def list_recipes() -> dict[str, str]:
    """List the recipes: name and what each is for."""
    return {name: description(name).partition("\n")[0] for name in RECIPES}


def show_recipe(name: str, *, yaml: bool = False) -> str:
    """Show a recipe: what it does, its command, what it costs, what to expect, and all of its settings.

    A setting that is null is decided from the data and the machine; `vitrail train DIR --recipe NAME --dry-run`
    says how.

    Args:
        name: One of `vitrail recipes`.
        yaml: Its settings alone.
    """
    settings = to_yaml(recipe(name)).rstrip()
    return settings if yaml else f"{name}\n\n{description(name)}\n\n{settings}"


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
            out.write(f"{text}\n{to_yaml(recipe(name))}")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def show(result: dict[str, str] | str | Path) -> str:
    """Return the result of any of these verbs as text for a terminal."""
    if isinstance(result, Path):
        return f"wrote {result}: change it, then vitrail train DIR --config {result}"
    if isinstance(result, str):
        return result
    width = max(map(len, result))
    lines = [f"{name:{width}}  {what}" for name, what in result.items()]
    return "\n".join([*lines, "", "More: vitrail recipes show NAME; to change one: vitrail recipes cp NAME FILE"])
