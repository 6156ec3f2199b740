"""The page of recipes, made from their descriptions."""

from __future__ import annotations

from vitrail.recipes.registry import RECIPES

PLACE = "reference/recipes.md"
ABOUT = """\
# Recipes

A recipe is a run with a name: `vitrail train DIR --recipe NAME`. `vitrail recipes show NAME` prints its notes, cost and
sources, and `vitrail recipes cp NAME FILE` copies its settings into a file that you can change. This page is made from
the recipes when the site is built. The expected results are the published ones, unless they say otherwise.
"""


def page() -> str:
    """Return a table for each family of recipes: name, verb, purpose and expected result."""
    families: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        first, *rest = recipe.description.splitlines()
        expected = " ".join(" ".join(rest).partition("Expected: ")[2].partition("Sources, and")[0].split())
        row = f"| `{name}` | {recipe.verb} | {first} | {expected} |".replace("*", r"\*")
        families.setdefault(name.partition("/")[0] if "/" in name else "", []).append(row)
    lines = [ABOUT]
    for family, rows in families.items():
        title = f"`{family}/...`" if family else "For your own images, and without labels"
        lines += [f"## {title}", "", "| recipe | verb | what | expected |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)
