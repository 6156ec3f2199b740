"""Class names that a reader takes for one name: equal but for case, spaces, the form of letters, or as numbers."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator

from vitrail.data.item import Listed
from vitrail.data.labels.numbers import Numbers

_SHOWN = 3
"""Number of groups of names in a warning."""


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of two or more names that are alike, each sorted, in the order of their first names."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(names)):
        groups[_plain(name)].append(name)
    return sorted(group for group in groups.values() if len(group) > 1)


def alike_classes(sources: Iterable[Listed]) -> Iterator[str]:
    """Yield a warning if the classes of these splits have names that are alike. Targets of numbers are no classes."""
    names = {name for source in sources if not isinstance(source.labels, Numbers) for name in source.class_names}
    if groups := alike(names):
        shown = "; ".join(", ".join(map(repr, group)) for group in groups[:_SHOWN])
        more = f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
        yield (
            "names of different classes are equal but for case, spaces, letters or the way a number is written: "
            f"{shown}{more}. If they are one class, give them one name"
        )


def _plain(name: str) -> str:
    """Return a name without what a reader overlooks: 7 for "007" and "7.0", cat for "Cat ", one form of each letter."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    try:
        number = float(text)
    except ValueError:
        return unicodedata.normalize("NFKC", text)
    # a long number is an identifier: as a float it would equal its neighbours
    digits = text.lstrip("+-0").replace(".", "")
    return repr(number + 0.0) if abs(number) < 2**53 and len(digits) <= 15 else text
