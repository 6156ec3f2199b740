"""The page of the Python API: every public name, which mkdocstrings fills in from its docstring."""

from __future__ import annotations

import vitrail
from vitrail import results

PLACE = "reference/api.md"
TITLES = {
    "Verbs": "vitrail.verbs",
    "Training": (
        "vitrail.training vitrail.recipes vitrail.durations vitrail.config vitrail.objective vitrail.evaluation"
    ),
    "Data": "vitrail.data",
    "Networks, weights and programs": "vitrail.model vitrail.weights vitrail.exports",
    "Looking inside": "vitrail.inspection",
    "Errors": "vitrail.errors",
}
"""Title -> the packages whose public names stand under it."""


ABOUT = """\
# Python API

Everything below is imported as `vitrail.NAME`. A name's module is imported when the name is first used, so
`import vitrail` takes no time. This page is made from the docstrings when the site is built.
"""


RESULTS = """\
What the functions above return. `from vitrail.results import Predictions` imports such a class, for annotations.
"""


def page() -> str:
    """Return the page. Every name of `vitrail.__all__` stands on it, under the title of its package."""
    lines = [ABOUT]
    for title, packages in TITLES.items():
        names = [name for name in vitrail.__all__ if under(name) in packages.split()]
        lines += [f"## {title}", "", *(f"::: vitrail.{name}\n" for name in sorted(names, key=str.lower))]
    lines += ["## In scikit-learn's shape", "", "::: vitrail.sklearn.ViTClassifier", "", "## Results", "", RESULTS, ""]
    return "\n".join([*lines, *(f"::: vitrail.results.{name}\n" for name in results.__all__)])


def under(name: str) -> str:
    """Return the package of a public name: vitrail.verbs for `train`."""
    return ".".join(vitrail._MODULE_OF[name].split(".")[:2])
