"""Which images of a data set are used: the patterns of `Data.include` and `Data.exclude`. Torch-free."""

from __future__ import annotations

import fnmatch
import re
from functools import cache
from typing import NamedTuple

LIST = ".csv"
"""Ending of a value of `Data.exclude` that is a list of images, not a pattern."""


class Selection(NamedTuple):
    """Patterns of the images that are used and of those that are left out. Without patterns all images are used."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    """CSV files of excluded images."""
    given: str = ""
    """Pattern at the end of the path of the data, such as '*/*.jpg' of 'photos/*/*.jpg', which images must fit, too."""
    root: str = ""
    """Folder of the data. Patterns are compared with paths below it."""

    @classmethod
    def of(cls, include: tuple[str, ...], exclude: tuple[str, ...]) -> Selection:
        """Return the selection by the values of the two settings."""
        lists = tuple(value for value in exclude if value.lower().endswith(LIST))
        return cls(tuple(include), tuple(value for value in exclude if value not in lists), lists)

    @property
    def patterns(self) -> bool:
        """Whether there are patterns."""
        return bool(self.include or self.exclude or self.given)

    def reason(self, path: str) -> str:
        """Return why an image is left out, with the setting; "" if it is used."""
        path = path.removeprefix(f"{self.root}/") if self.root else path
        if fitting := [pattern for pattern in self.exclude if _compiled(pattern).fullmatch(path)]:
            return f"left out by data.exclude {', '.join(map(repr, fitting))}"
        if self.include and not any(_compiled(pattern).fullmatch(path) for pattern in self.include):
            return f"not among the images of data.include ({', '.join(map(repr, self.include))})"
        if self.given and not _compiled(self.given).fullmatch(path):
            return f"not among the images of the pattern {self.given!r}"
        return ""

    def __str__(self) -> str:
        """Return the settings in words."""
        parts = (
            ("data.include", self.include),
            ("data.exclude", self.exclude),
            ("the pattern", (self.given,) if self.given else ()),
        )
        return " and ".join(f"{name} {', '.join(map(repr, values))}" for name, values in parts if values)


ALL = Selection()
"""All images."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern that fits a path if one or several neighbouring names of the path fit, in any case.

    Its "*" stands for any characters, "/" included, and "**/" also for nothing, as in a shell.
    """
    body = fnmatch.translate(pattern.removeprefix("./").strip("/").replace("**/", "*"))
    body = re.sub(r"\\[Zz]$", "", body)
    return re.compile(f"(?:.*/)?{body}(?:/.*)?", re.IGNORECASE | re.DOTALL)
