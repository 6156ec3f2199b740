"""Augmentations in words: `NAME`, `NAME:STRENGTH`, `module:name(arguments)`, each perhaps with `@SHARE`. Torch-free.

`Augment.also` is a list of them. A word with a strength changes every image, by a random amount up to the strength; a
word without one, and `solarize` and `posterize`, whose number is fixed, change half of the images. @SHARE sets another
share. What the words do stands in `vitrail.data.images.worded`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import Range

HALF = 0.5


@dataclass(frozen=True)
class Meaning:
    """What a word takes: its strength if none is given, the valid ones, and the share of the images that it changes."""

    strength: float = 0.0
    valid: Range | None = None
    """None: It takes no strength."""
    share: float = 1.0
    colours: bool = False
    """Whether it is for red, green and blue with 8 bits only."""


def _up_to(most: float) -> Range:
    return Range(0, most, above=True)


MEANINGS: dict[str, Meaning] = {
    "vflip": Meaning(share=HALF),
    "rotate90": Meaning(),
    "rotate": Meaning(15, _up_to(180)),
    "shear": Meaning(10, _up_to(60)),
    "translate": Meaning(0.1, _up_to(1)),
    "zoom": Meaning(0.2, Range(0, 1, above=True, below=True)),
    "perspective": Meaning(0.3, _up_to(1)),
    "elastic": Meaning(0.03, _up_to(0.1)),
    "noise": Meaning(0.1, _up_to(1)),
    "blur": Meaning(2, _up_to(4), colours=True),
    "brightness": Meaning(0.4, _up_to(1), colours=True),
    "contrast": Meaning(0.4, _up_to(1), colours=True),
    "saturation": Meaning(0.4, _up_to(1), colours=True),
    "hue": Meaning(0.05, _up_to(0.5), colours=True),
    "sharpness": Meaning(0.9, _up_to(1), colours=True),
    "grayscale": Meaning(share=HALF, colours=True),
    "autocontrast": Meaning(share=HALF, colours=True),
    "equalize": Meaning(share=HALF, colours=True),
    "invert": Meaning(share=HALF, colours=True),
    "solarize": Meaning(128, Range(0, 255), HALF, colours=True),
    "posterize": Meaning(4, Range(1, 7), HALF, colours=True),
}
"""Word -> what it takes. The table in docs/augmentation.md says what each does."""


def vocabulary() -> list[str]:
    """Return all words, with their usual strengths."""
    return [name if it.valid is None else f"{name}:{it.strength:g}" for name, it in MEANINGS.items()]


SETTINGS = {
    **dict.fromkeys(("flip", "hflip"), "augment.flip"),
    "erasing": "augment.erasing",
    "jitter": "augment.color_jitter",
    **{name: f"augment.{name}" for name in ("color_jitter", "crop", "randaugment", "three_augment", "mixup", "cutmix")},
}
"""Word that people may try -> the setting that does it."""

PATH = re.compile(r"(?:[A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*:[A-Za-z_]|[A-Za-z_]\w*\.[A-Za-z_]")
"""How an import path begins."""


@dataclass(frozen=True)
class Worded:
    """One augmentation in words, read."""

    text: str
    name: str
    """The word, or an import path."""
    share: float
    """Share of the images that it changes."""
    strength: float = 0.0
    arguments: tuple[Any, ...] | None = None
    """Arguments of an import path; None for a word."""
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_path(self) -> bool:
        """Whether this is an import path."""
        return self.arguments is not None

    @classmethod
    def of(cls, text: str) -> Worded:
        """Return a text, read. Raises UsageError that says what would be valid."""
        what, at, end = text.rpartition("@")
        if not at or ")" in end:  # of a text among the arguments
            what, share = text, None
        else:
            share = _number(end, f"the share in {text!r}", Range(0, 1, above=True))
        name, colon, number = what.partition(":")
        if name not in MEANINGS and PATH.match(what):
            return _path(text, what, 1.0 if share is None else share)
        if name not in MEANINGS:
            near = f" Use {SETTINGS[name]}." if name in SETTINGS else did_you_mean(name, MEANINGS)
            raise UsageError(
                f"augment.also has no word {name!r}.{near} Words: {', '.join(MEANINGS)}; or the import path of a "
                "transform, such as 'torchvision.transforms.v2:RandomInvert(p=0.2)'"
            )
        meaning = MEANINGS[name]
        if colon and meaning.valid is None:
            raise UsageError(f"augment.also {text!r}: {name} takes no strength. Write {name}, or {name}@SHARE")
        strength = meaning.strength
        if colon and meaning.valid is not None:
            strength = _number(number, f"the strength in {text!r}", meaning.valid)
        return cls(text, name, meaning.share if share is None else share, strength)


def _number(text: str, what: str, valid: Range) -> float:
    """Return a number within its range. Raises UsageError."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not valid.holds(number):
        raise UsageError(f"augment.also: {what} is {text!r}; it must be {valid.words()}")
    return number


def _path(text: str, call: str, share: float) -> Worded:
    """Return an import path with its arguments, which are literals of Python. Raises UsageError."""
    name, bracket, _ = call.partition("(")
    if not bracket:
        return Worded(text, name, share, arguments=())
    try:
        parsed = ast.parse(f"f({call[len(name) + 1 :]}", mode="eval").body
        if not isinstance(parsed, ast.Call) or not isinstance(parsed.func, ast.Name):
            raise ValueError
        arguments = tuple(ast.literal_eval(each) for each in parsed.args)
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in parsed.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise UsageError(
            f"augment.also {text!r}: the arguments cannot be read. Write numbers, texts, lists and tuples of Python, "
            "such as 'torchvision.transforms.v2:RandomAffine(degrees=10, shear=(-5, 5))'"
        ) from error
    return Worded(text, name, share, arguments=arguments, keywords=keywords)
