"""The settings of the data and of what happens to each image. Torch-free.

The docstring of each field is the help text of its flag.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from vitrail.data.wording import Worded
from vitrail.errors import UsageError
from vitrail.import_path import Extensible, find, own_object
from vitrail.ranges import (
    LARGEST_SIDE,
    Channels,
    Count,
    FoldNumber,
    NotNegative,
    Part,
    Positive,
    Range,
    Settings,
    Share,
    Side,
)
from vitrail.strip import strip_size
from vitrail.words import with_slashes

LIST = ".csv"
"""Ending of a value of `Data.exclude` that is a list of images, not a pattern."""
SPLIT = ("train", "validation", "holdout", "test", "subset", "fold", "group")
"""Fields of `Data` that divide the images."""


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
        path = with_slashes(path)
        path = path.removeprefix(f"{with_slashes(self.root)}/") if self.root else path
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


if TYPE_CHECKING:
    import numpy as np

    Operation = Callable[[np.ndarray, np.random.Generator], np.ndarray]

PerImage = Literal["auto", "one", "several", "numbers"]
FOLDER = "folder"
"""Value of `Data.group`: images of one folder belong together."""
ImageResize = Literal["squash", "squash-crop", "small", "pad", "native"]
Bits = Literal["8", "16", "32f"]
"""Depth of an image's values: 8 and 16 bits, and everything that float32 holds."""
Colour = tuple[Annotated[int, Range(0, 255)], Annotated[int, Range(0, 255)], Annotated[int, Range(0, 255)]]
"""Red, green and blue."""
GREY = (128, 128, 128)
"""Colour of the area outside a picture: the middle of the range."""
IGNORED = 255
"""Class of the pixels of a mask that do not count."""
LARGEST_RESIZED = 2 * LARGEST_SIDE
"""Maximum height and width of an image that is resized before the crop."""


@dataclass(frozen=True)
class Data(Extensible, section="data"):
    """Where the images are and how they are split. A source of one's own is a subclass with another `find`."""

    path: str = "digits"
    """A folder, a CSV or parquet file, tar shards, an .npz of arrays, a hub data set, an address, or 'digits'."""
    train: str = "train"
    """Split to train on. 'train+val' joins two splits."""
    validation: str | Literal["none", "subset"] | None = None
    """Split by which the best model is chosen (default: validation, val or dev if there is one). Without such a split,
    or with 'none', part of the training split is held out; with 'subset', part of the images of `subset`."""
    holdout: Annotated[float, Range(0, 1, below=True)] = 0.1
    """Share of the training images held out for validation, stratified by class and drawn by the seed, if the
    data have no validation split."""
    fold: Annotated[str, FoldNumber()] | None = None
    """Fold of a cross-validation: '2/5' divides the training images into five folds, stratified by class and drawn by
    the seed, trains on four and validates on the second. `vitrail report` joins the runs (default: no folds)."""
    group: str | None = None
    """What says which images belong together, such as those of a patient, camera or day: a part that is held out, and
    each fold, has whole groups. 'folder': the folder of an image; 'name: PATTERN': a regular expression whose group ( )
    is in the name of a file; 'table: FILE ID -> COLUMN': two columns of a CSV; or a column of the data set, if it is a
    CSV, a parquet file or one of the hub (default: each image is on its own)."""
    test: str | Literal["none"] | None = None
    """Split that is measured once at the end; 'none' for no test (default: test or testing if there is one)."""
    image_column: str | None = None
    """Column of a table that holds the images (default: the usual names are tried)."""
    label_column: str | None = None
    """Column of a table that holds the labels (default: the usual names are tried)."""
    label_columns: tuple[str, ...] | None = None
    """Columns of a table that are classes, with 1 for an image of the class and 0 for another; or columns of numbers to
    predict (default: all columns of zeros and ones, if no column holds labels)."""
    answers: tuple[str, ...] | None = None
    """Columns of a CSV that are several answers for an image, each predicted by itself: species weight_g. A column is
    one class, a set of labels or a number; with ':classes', ':labels' or ':numbers' behind its name it is that. A cell
    may be empty (default: one column holds the labels)."""
    label_separator: str | None = None
    """Text between the labels of an image in a cell of a table, such as '|' (default: '|' or ';' if the cells are sets
    of labels that occur in other cells, too)."""
    labels_per_image: PerImage = "auto"
    """Number of labels of an image. one: exactly one class; several: any number of classes, or none (multi-label);
    auto: several, if the data have lists of labels and an image has not exactly one. With one, cells of text are names
    of classes, whatever characters they contain, unless `label_separator` is set. numbers: one or several numbers to
    predict, as objective regression reads labels."""
    label_from: str | None = None
    """Where the labels of the images in a folder are, if not in the names of its folders. 'name: PATTERN': a regular
    expression whose group ( ) is the class in the name of a file. 'list: FILE': lines of a path and a label. 'table:
    FILE ID -> LABEL': two columns of a CSV. 'json: KEY': a key of a JSON file beside each image. Files are looked for
    in the folder of the images, then in the current folder (default: the names of the folders)."""
    ignore: tuple[Annotated[int, Range(0, 255)], ...] = (255,)
    """Values in the masks of a folder images/ and masks/ whose pixels count neither in the loss nor in the score. Of
    ADE20K, it is 0."""
    max_bad: Share = 0.05
    """Largest share of training images that may be unreadable. Training stops if there are more."""
    strict: bool = False
    """Reject data with any defect: an empty class folder, a broken link, an unreadable image."""
    include: tuple[str, ...] = ()
    """Pattern of the images that are used, such as '*.jpg' or 'images/*'. It is compared with the name of each file and
    folder, and with each part of the path below the data set; case does not matter. May be repeated (default: all
    images)."""
    exclude: tuple[str, ...] = ()
    """Pattern of images that are left out, such as '*_mask.png' or 'thumbnails'; or a CSV file with columns split and
    id, such as the list of `vitrail data audit --out`. May be repeated (default: none)."""
    subset: Count | Part | None = None
    """Number of training images to use, or their share (0.1), drawn by the seed in proportion to the classes. A smaller
    subset is part of a larger one; the validation images stay the same (default: all images)."""
    sampler: Literal["uniform", "balanced", "sqrt"] = "uniform"
    """How often each class is shown in an epoch. uniform: every image once; balanced: all classes equally often; sqrt:
    in proportion to the square root of their number of images. The number of images in an epoch does not change."""
    channels: Channels | None = None
    """Number of bands of an image, such as 13 for a satellite image or 1 for a grey one (default: images are read as
    RGB with 8 bits, except arrays of NumPy and grey DICOM files, which keep their bands and bits)."""
    bits: Bits | None = None
    """Depth of the stored values: 8 bits, 16 bits, or 32f for floating-point numbers. All images must have it (default:
    8 for RGB, otherwise that of most images)."""
    display: tuple[Channels, ...] | None = None
    """The bands that pictures show as red, green and blue, counted from 1, such as 4 3 2, or a single band to show as
    grey (default: the first three bands; the first one of two)."""
    together: Count = 1
    """Number of neighbouring images that are read in one piece and stay in one batch; 1 shuffles single images. Use it
    for remote shards that were packed in random order (`vitrail data pack --shuffle`)."""

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            if not isinstance(value := getattr(self, name), tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        super().__post_init__()

    def find(self, *, labels: bool = True) -> Any:
        """Return the data set at `path`, before it is split for training.

        That is a `vitrail.data.item.DataSet`; or a mapping from names of splits to data sets of torch's kind, which
        have a length and return (image, label) by number (`vitrail.data.sources.indexed`); or one such data set.
        labels: The run learns from labels. Raises DataError if there are no data.
        """
        return find("vitrail.data.sources.open:open_path")(self.path, self.columns, labels=labels)

    @property
    def banded(self) -> bool:
        """Do `channels` and `bits` ask for other images than RGB with 8 bits?"""
        return self.channels not in (None, 3) or self.bits not in (None, "8")

    @property
    def columns(self) -> Columns:
        """Columns of the images and the labels, where and how labels are read, and which images are used."""
        splits = [*self.train.split("+"), self.validation, self.test]
        return Columns(
            self.image_column,
            self.label_column,
            self.label_columns,
            self.label_separator,
            self.labels_per_image,
            self.label_from,
            Selection.of(self.include, self.exclude),
            self.group,
            self.answers,
            tuple(name for name in splits if name and name not in ("train", "none", "subset")),  # train is the default
            tuple(self.ignore),
        )


REPEATED = ("include", "exclude")
"""Settings with several values whose flag is repeated for each value, so that a subject may follow."""


def as_flags(data: Data) -> Iterator[str]:
    """Yield the words of a command line that give `data` its settings."""
    for name in (field.name for field in fields(Data) if field.name != "path"):
        value, flag = getattr(data, name), f"--{Data.section}.{name}".replace("_", "-")
        if value == getattr(Data(), name):
            continue
        if name in REPEATED:
            yield from (word for each in value for word in (flag, each))
        elif isinstance(value, bool):
            yield flag
        else:
            yield from (flag, *map(str, value if isinstance(value, tuple) else [value]))


class Columns(NamedTuple):
    """How data are read: the columns of a table that hold the images and the labels, and which images are used.

    None: the usual names are tried.
    """

    image: str | None = None
    label: str | None = None
    classes: tuple[str, ...] | None = None
    """`Data.label_columns`."""
    separator: str | None = None
    """`Data.label_separator`."""
    per_image: PerImage = "auto"
    """`Data.labels_per_image`."""
    label_from: str | None = None
    """`Data.label_from`."""
    selection: Selection = Selection()
    """`Data.include` and `Data.exclude`."""
    group: str | None = None
    """`Data.group`, which may be a column."""
    answers: tuple[str, ...] | None = None
    """`Data.answers`."""
    splits: tuple[str, ...] = ()
    """Splits that `Data.train`, `Data.validation` and `Data.test` name: folders of these names are splits."""
    ignore: tuple[int, ...] = (255,)
    """`Data.ignore`."""

    @property
    def target(self) -> str | None:
        """The column of the only target, as it is named; None if none is."""
        if self.answers is None or len(self.answers) > 1:
            return self.label
        return self.answers[0].removesuffix(":numbers")

    @property
    def group_column(self) -> str | None:
        """The column that `Data.group` names; None for its other forms."""
        return None if self.group is None or self.group == FOLDER or ":" in self.group else self.group


@dataclass(frozen=True)
class Bands(Settings):
    """The bands of images that are not RGB with 8 bits, and their statistics on the training images.

    A network reads (value - mean) / std of each band.
    """

    bits: Bits = "8"
    """Depth of the stored values."""
    mean: tuple[float, ...] = ()
    """Mean of the stored values of each band."""
    std: tuple[Positive, ...] = ()
    """Standard deviation of the stored values of each band."""
    low: tuple[float, ...] = ()
    """Smallest stored value of each band."""
    high: tuple[float, ...] = ()
    """Largest stored value of each band."""
    display: tuple[Channels, ...] = (1,)
    """The bands that pictures show as red, green and blue, counted from 1; or a single one, shown as grey."""

    def require_consistent(self) -> None:
        """Raise UsageError if there is no band, for lists of different lengths, and for a display of other bands."""
        if not self.mean:
            raise UsageError(
                "preprocess.bands needs mean, std, low and high of each band. Without it they are measured"
            )
        for name in ("std", "low", "high"):
            if len(getattr(self, name)) != len(self.mean):
                raise UsageError(f"{name} has {len(getattr(self, name))} values for {len(self.mean)} bands")
        if len(self.display) not in (1, 3) or max(self.display) > len(self.mean):
            raise UsageError(
                f"display is {' '.join(map(str, self.display))}: name one band or three, from 1 to {len(self.mean)}"
            )

    @property
    def channels(self) -> int:
        """Number of bands."""
        return len(self.mean)

    @property
    def white(self) -> float:
        """The stored value that counts as 1 where a network's mean and std are given for values from 0 to 1."""
        return {"8": 255.0, "16": 65535.0, "32f": 1.0}[self.bits]


@dataclass(frozen=True)
class Preparation(Settings):
    """What a run sets of its `Preprocess`; the network and the images decide on the values that are None.

    Raises UsageError for a size or a crop that is out of range.
    """

    image_size: tuple[Side, Side] | None = None
    """Height and width of the network's input in pixels (default: those of the network)."""
    resize: ImageResize | None = None
    """How an image is resized. squash: to the input size, whatever its aspect ratio; squash-crop: to image_size / crop,
    whatever its aspect ratio, then the central crop; small: by its short side, then the central crop; pad: the whole
    image with its aspect ratio, and the rest filled with a colour; native: the whole image with its aspect ratio, as
    many patches as image_size has, whatever their rows and columns (default: from the images)."""
    crop: Part = 0.875
    """Side of the crop as a share of the resized image (0.875: resize to 256, crop 224). Evaluation uses it with
    resize small and squash-crop only."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation for resizing."""
    fill: Colour | None = None
    """For resize pad: colour of the rest, as red, green and blue from 0 to 255. The rest of other bands is their mean
    (default: the mean by which the network normalises, usually the grey 128 128 128)."""
    patch: Annotated[int, Range(1, 2**14)] | None = None
    """For resize native: side of the network's patches in pixels (default: that of the network)."""
    bands: Bands | None = None
    """The bands of images that are not RGB with 8 bits (default: measured on the training images if `data.channels`,
    `data.bits` or the images ask for it)."""

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        if self.image_size is not None:
            object.__setattr__(self, "image_size", tuple(self.image_size))
        super().__post_init__()
        if self.image_size is not None and max(self.image_size) / self.crop > LARGEST_RESIZED:
            height, width = self.image_size
            raise UsageError(
                f"crop is {self.crop!r}, so images of {height} x {width} pixels would be cut from larger ones than "
                f"{LARGEST_RESIZED:,} pixels: choose a larger crop"
            )

    def completed(self, usual: Preprocess) -> Preprocess:
        """Return the preparation with the values of `usual` where it has none."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(usual, **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class Preprocess(Preparation):
    """How an image is prepared for evaluation: resize, then crop. Sizes in pixels.

    Raises UsageError for a size or a crop that is out of range.
    """

    image_size: tuple[Side, Side] = (224, 224)
    """Height and width of the network's input in pixels."""
    resize: ImageResize = "small"
    """How an image is resized. squash: to the input size, whatever its aspect ratio; squash-crop: to image_size / crop,
    whatever its aspect ratio, then the central crop; small: by its short side, then the central crop; pad: the whole
    image with its aspect ratio, and the rest filled with a colour; native: the whole image with its aspect ratio, as
    many patches as image_size has, whatever their rows and columns."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels of the array of an image: `image_size`, with resize native those of a strip.

        Raises UsageError for patches of which there can be no strip (`vitrail.strip`).
        """
        if self.resize != "native":
            return self.image_size
        if self.patch is None:
            raise UsageError("preprocess.patch is missing: resize native needs the side of the network's patches")
        return strip_size(self.image_size, self.patch)


@dataclass(frozen=True)
class Augment(Extensible, section="augment"):
    """Random changes to training images. With every field at its default images are cropped, resized and flipped. An
    augmentation of one's own is a subclass with other `operations`."""

    crop: Literal["inception", "random", "pad", "center"] = "inception"
    """How a training image is cropped. inception: random area and aspect ratio, then resize (paper, B.1); random:
    resize to image_size / preprocess.crop, then a random crop; pad: shift by up to `pad` pixels (for small images);
    center: as in evaluation."""
    scale: tuple[Part, Part] = (0.05, 1.0)
    """For crop inception: smallest and largest share of the image's area."""
    ratio: tuple[Positive, Positive] | None = None
    """For crop inception: smallest and largest aspect ratio of the part, width over height (default: 3/4 to 4/3 times
    that of what evaluation shows, which is the whole image with preprocess.resize squash or pad)."""
    pad: Annotated[int, Range(0, 2**14)] = 4
    """For crop pad: largest shift in pixels."""
    flip: bool = True
    """Flip half of the images horizontally."""
    randaugment: tuple[Annotated[int, Range(0, 100)], Annotated[float, Range(0, 30)]] | None = None
    """RandAugment: number of operations and their magnitude, 0 to 30, usually up to 10 (default: off)."""
    randaugment_form: Literal["timm", "big_vision"] | None = None
    """Whose RandAugment. timm: half of the operations are applied, at a magnitude with noise, up to 10. big_vision: all
    of them, at that of its authors, as in AugReg (default: timm, and above magnitude 10 big_vision)."""
    three_augment: bool = False
    """Apply one of grayscale, solarise and blur, at random (3-Augment of DeiT-III)."""
    color_jitter: Share = 0.0
    """Strength of random changes to brightness, contrast and saturation; 0 for none."""
    erasing: Share = 0.0
    """Probability of erasing a random rectangle of the image."""
    also: tuple[str, ...] = ()
    """Further changes in words, in order, after cropping and flipping: NAME, NAME:STRENGTH or an import path with its
    arguments, each perhaps with @SHARE of the images, such as vflip rotate:15 grayscale@0.2. `vitrail data augment`
    draws what they do (default: none)."""
    mixup: NotNegative = 0.0
    """Alpha of the Beta distribution of mixup; 0 switches mixup off."""
    cutmix: NotNegative = 0.0
    """Alpha of the Beta distribution of CutMix; 0 switches CutMix off. If mixup is on too, each batch uses one of them
    at random."""
    repeats: Count = 1
    """Number of copies of an image in one batch, each augmented differently (repeated augmentation)."""

    def __post_init__(self) -> None:
        if not isinstance(self.also, tuple):
            object.__setattr__(self, "also", (self.also,) if isinstance(self.also, str) else tuple(self.also or ()))
        super().__post_init__()
        self.worded  # noqa: B018  # an unknown word is told before anything is opened

    @property
    def worded(self) -> list[Worded]:
        """`also`, read. Raises UsageError for an unknown word, and for a value that is out of its range."""
        return [Worded.of(text) for text in self.also]

    def import_code(self, typed: Collection[str]) -> None:
        """See Extensible."""
        for one in self.worded if "also" in typed else ():
            if one.is_path:
                own_object(one.name, imports=True, what="function or class")

    @property
    def random(self) -> bool:
        """Does a training image change from one epoch to the next? One of one's own may."""
        fixed = Augment(crop="center", flip=False)
        unused = ("scale", "ratio", "pad", "repeats")  # of crop center, and copies that would be equal
        return replace(self, **{name: getattr(fixed, name) for name in unused}) != fixed

    def operations(self, preprocess: Preprocess) -> list[Operation]:
        """Return the operations on a training image, in order; after the last it has the size `preprocess.image_size`.

        Each is a function (image uint8 [H, W, 3], random numbers) -> image. All its random numbers must come from the
        generator that it gets.
        """
        operations: list[Operation] = find("vitrail.data.images.ops:operations")(self, preprocess)
        return operations
