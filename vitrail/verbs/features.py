"""The images and the network from which `probe` and `embed` compute features."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from vitrail.data.settings import SPLIT, Bands, Data
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.ranges import Layers, selected
from vitrail.terminal import ProgressLine
from vitrail.training.recorded import recorded_run
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.reading import READ, read_settings, warn_of_unused
from vitrail.verbs.network import is_table, load_runnable, run_splits, with_answers
from vitrail.words import as_text, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from torch import Tensor

    from vitrail.data.images.tiles import TileBox, Tiling
    from vitrail.data.item import Findings, IndexedSource
    from vitrail.data.loading.loader import Loader
    from vitrail.data.sources.indexed import GivenImages
    from vitrail.data.sources.open import OpenedData
    from vitrail.evaluation.ahead import Computed
    from vitrail.evaluation.classify import Predict
    from vitrail.evaluation.features import Features
    from vitrail.weights.card import Card

    Arrays = dict[str, np.ndarray]
    Tokens = Computed[dict[str, Tensor], Arrays]

log = logging.getLogger("vitrail")
Prepare = Literal["model", "protocol"]
TokenType = Literal["float32", "float16"]
T = TypeVar("T")
NO_IMAGES = "there are no images: the list or array is empty. Give at least one path, picture, array or tensor"


@dataclass(frozen=True)
class TrainAndTestImages:
    """The training and the test images of a probe."""

    train: IndexedSource
    test: IndexedSource
    name: str
    """Description of the images, for the user."""


def open_train_and_test(
    model: str | Path,
    data: str | Path | None,
    split: str | None,
    opened: OpenedData | None = None,
    reading: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> TrainAndTestImages:
    """Return training and test images of `data`; without `data`, those of the run `model`.

    The test images are the test split if it has labels, else the validation split, else a tenth of the training images,
    which is held out, by `seed` or that of the run. `opened` are data of the command that may be open already.
    `reading` are settings of the data. Raises UsageError and DataError.
    """
    from vitrail.data.groups import groups_of, said_of_groups
    from vitrail.data.item import Subset
    from vitrail.data.labels.sets import known
    from vitrail.data.sources.open import OpenedData
    from vitrail.data.split import hold_out

    run = recorded_run(model) if data is None else None
    if run is None and data is None:
        raise UsageError(f"no images are given, and {model} is not a run folder with images. Give DATA after it")
    settings = Data(holdout=0.0) if run is None else run.data
    settings = read_settings(reading or {}, data, settings, (*READ, *SPLIT))
    settings = settings if split is None else replace(settings, test=split)
    if run is None:
        splits, notes = (opened or OpenedData()).splits(settings, seed), list[str]()
    else:
        splits, notes = run_splits(model, run, settings)
    if opened is None:  # else the command shows them
        for line in [*splits.report.warnings, *notes]:
            log.warning("%s", line)
    train, test = splits.train, splits.test
    if test is None or not known(test.labels).any():
        test = splits.validation
    if test is not None:
        return TrainAndTestImages(train, test, settings.path)
    if data is None:
        raise UsageError(f"{model} was trained without test or validation images. Give DATA after it")
    groups = None
    if settings.group is not None:
        groups = groups_of(train, settings)
        log.warning("%s", said_of_groups(train, groups, settings))
    remaining, held_out = hold_out(train, Data().holdout, seed, groups)
    share = len(held_out) / len(train)  # of groups and of small classes it is more than a tenth
    name = f"{settings.path}, {share:.0%} held out"
    return TrainAndTestImages(Subset(train, remaining), Subset(train, held_out), name)


def paths_or_images(images: Iterable[Any], **for_files: Any) -> tuple[tuple[str | Path, ...], list[Any]]:
    """Return paths, or if there are others among the images, all of them, one by one. Lists are taken apart.

    Raises UsageError for lists and arrays without an image, and if one of `for_files`, settings of files, is set for
    images that Python holds.
    """
    from vitrail.data.sources.indexed import one_by_one

    images = tuple(images)
    each = list(one_by_one(images))
    if images and not each:
        raise UsageError(NO_IMAGES)
    if all(isinstance(one, str | Path) for one in each):
        return tuple(each), []
    if unfit := [name for name, value in for_files.items() if value is not None]:
        returned = " and use the result that is returned" if unfit[0] == "out" else ""
        raise UsageError(
            f"{unfit[0]} is a setting of files, and some of these images are held in Python's memory. Remove it"
            f"{returned}, or save the images to files and give their paths"
        )
    return (), each


def open_images(
    model: str | Path,
    paths: tuple[str | Path, ...],
    split: str | None,
    reading: Mapping[str, Any],
    card: Callable[[], Card] | None = None,
) -> dict[str, IndexedSource]:
    """Return the images of a data set with splits as "train" and "test", or all images as one source called "".

    Images of further splits are left out, which is said. `reading` are settings of the data. card: Returns that of a
    network whose answers a table may have (see `with_answers`), if an image may have several labels.
    """
    from vitrail.data.sources.folder import Located

    data = read_settings(reading, paths[0], used=(*READ, *SPLIT))
    if card is not None and is_table(data) and (asked := with_answers(data, card())) != data:
        data, reading = asked, {**reading, "answers": asked.answers, "labels_per_image": asked.labels_per_image}
    splits = _splits(data) if len(paths) == 1 else None
    if splits is not None and len(splits) > 1:
        images = open_train_and_test(model, paths[0], split, reading=reading)
        found = {"train": images.train, "test": images.test}
        if left := sum(map(len, splits.values())) - sum(map(len, found.values())):
            log.warning(
                "%s of %s in the splits %s are neither training nor test images: they get no features. --split names "
                "the test split; a folder as --out gets the features of all splits",
                counted(left, "image"),
                paths[0],
                ", ".join(splits),
            )
        return {name: Located(source, name, paths[0]) for name, source in found.items()}
    if split is not None:
        raise UsageError(f"{paths[0]} has no splits: remove --split {split}")
    warn_of_unused(reading, READ)
    return _files(paths, data) if splits is None else splits


def open_every_image(paths: tuple[str | Path, ...], reading: Mapping[str, Any], card: Card) -> dict[str, IndexedSource]:
    """Return all images, of a data set by its splits, or as one source called "".

    reading: See `open_images`. card: See `with_answers`.
    """
    data = with_answers(read_settings(reading, paths[0]), card)
    splits = _splits(data) if len(paths) == 1 else None
    return _files(paths, data) if splits is None else splits


def _files(paths: tuple[str | Path, ...], data: Data) -> dict[str, IndexedSource]:
    """Return the images of files, folders and patterns as one source called ""."""
    from vitrail.data.item import Findings
    from vitrail.data.sources.files import find_images
    from vitrail.data.sources.indexed import GivenImages

    findings = Findings("files")
    files = GivenImages(list(find_images(paths, data.columns.selection, findings)))
    warn_of_ignored(findings)
    return {"": files}


def warn_of_ignored(findings: Findings) -> None:
    """Log what was ignored in folders of images."""
    for line in findings.lines():
        log.warning("%s", as_text(line))


def _splits(data: Data) -> dict[str, IndexedSource] | None:
    """Return the splits of a data set; None for image files, patterns, and folders of images without splits."""
    from vitrail.data.image_names import is_image_name
    from vitrail.data.sources.files import find_images
    from vitrail.data.sources.open import open_and_warn

    place = Path(data.path).expanduser()
    if is_image_name(place.name) or (glob.has_magic(data.path) and not place.exists()):
        return None
    try:
        found = open_and_warn(data)
    except DataError:
        if data.label_from is None and place.is_dir():
            find_images([place], data.columns.selection)  # raises if there are no images, too
            return None
        raise
    if len(found.splits) > 1:
        return found.splits
    if found.findings.kind == "folder" and "" in found.splits:
        return None
    return {"": next(iter(found.splits.values()))}


def _refuse_bands(bands: Bands | None, model: str | Path) -> None:
    """Raise UsageError for a network of other bands than RGB, whose images the few-shot protocol does not read."""
    if bands is not None:
        raise UsageError(
            f"the few-shot protocol reads images as RGB with 8 bits, and {model} has {bands.channels} bands of "
            f"{bands.bits} bits. --prepare model prepares them as in evaluation"
        )


class Embedder:
    """Compute features with one network. Images are prepared as its card or as the few-shot protocol prescribes.

    whole: Resize whole images to the network's input, also if its card crops them.
    """

    images = 0
    """Number of images that it will be given, if that is known before the first."""

    def __init__(self, model: str | Path, compute: Compute, prepare: Prepare = "model", *, whole: bool = False) -> None:
        if prepare not in ("model", "protocol"):
            raise UsageError(f"prepare is {prepare!r}. Valid: model, protocol")
        from vitrail.data.images.ops import CROPPED, eval_transform
        from vitrail.evaluation.fewshot import FewShotImages

        self.network: Any = load_runnable(model, compute, features=True)
        preprocess = self.network.card.preprocess
        if prepare == "protocol":
            _refuse_bands(preprocess.bands, model)
        if whole and preprocess.resize in CROPPED:
            preprocess = replace(preprocess, resize="squash")
        self.size: tuple[int, int] = preprocess.image_size if prepare == "protocol" else preprocess.size
        self.transform = FewShotImages(self.size) if prepare == "protocol" else eval_transform(preprocess)
        self._compute = compute
        self._model = model

    def source(self, held: list[Any]) -> GivenImages:
        """Return images that Python holds, and paths, as a source."""
        from vitrail.data.sources.indexed import GivenImages

        return GivenImages(held, bands=self.network.card.preprocess.bands is not None)

    @cached_property
    def identity(self) -> tuple[str, str]:
        """The hash of the weights, and the name that the user gave."""
        from vitrail.weights.load import weights_fingerprint

        return weights_fingerprint(self._model), as_text(Path(self._model))

    @cached_property
    def embed(self) -> Predict:
        """Function of images that returns their features, float32 [batch, width], on the device."""
        return self._compute.predictor(self.network, features=True, images=lambda: self.images)

    @cached_property
    def array(self) -> Computed[Tensor, np.ndarray]:
        """Function of images that returns their features, float32 [batch, width]."""
        from vitrail.evaluation.ahead import Computed

        return Computed(self.embed, lambda found: found.numpy(), self._compute.precision)

    @cached_property
    def features(self) -> Computed[Tensor, Arrays]:
        """Function of images that returns their features under the name that they have in files."""
        return self.array.then(lambda found: {"features": found})

    @cached_property
    def blank_features(self) -> np.ndarray:
        """Features of a blank image, float32 [width], by which a file of features is recognised as this network's."""
        found: np.ndarray = self.array(self.blank())[0]
        return found

    @property
    def width(self) -> int:
        """Number of features of an image."""
        return len(self.blank_features)

    def blank(self) -> Tensor:
        """Return one image of the network's size, [1, channels, height, width]."""
        import torch

        card = self.network.card
        return torch.zeros(1, card.config.channels, *self.size, dtype=getattr(torch, card.input_type))

    def layers(self, chosen: Layers) -> list[int]:
        """Return the numbers of chosen layers, in order. Raises UsageError for a layer that does not exist."""
        return sorted(set(selected(chosen, self.network.layers, "layer")))

    def tokens(self, layers: Layers, *, norm: bool = True, dtype: TokenType = "float32") -> Tokens:
        """Return the function of images that returns their tokens. Raises UsageError for a layer that does not exist.

        The names of the arrays are tokens_LAYER, `dtype` [batch, rows, columns, width], and prefix_LAYER
        [batch, prefix, width] if there are tokens in front of the grid's. With `norm` all have gone through the final
        LayerNorm. The function raises DataError for a value that float16 cannot hold.
        """
        from vitrail.evaluation.ahead import Computed
        from vitrail.evaluation.classify import applied

        if dtype not in get_args(TokenType):
            raise UsageError(f"dtype is {dtype!r}. Valid: {', '.join(get_args(TokenType))}")
        numbers = self.layers(layers)

        def call(network: Any, images: Tensor) -> dict[str, Tensor]:
            found = zip(numbers, network.intermediate(images, numbers, norm=norm, prefix=True), strict=True)
            named = (
                (f"{name}_{number}", part.float())
                for number, (tokens, first) in found
                for name, part in (("tokens", tokens.movedim(1, -1)), ("prefix", first))
            )
            return {name: part for name, part in named if part.numel()}

        launch = applied(call, self.network, self._compute.place(), self._compute.precision)
        ask = Computed(launch, partial(_as_arrays, dtype), self._compute.precision)
        ask(self.blank())
        return ask

    def loader(self, source: IndexedSource) -> Loader:
        """Return a loader of the prepared images. The caller closes it."""
        return self._compute.loader(source, self.transform, self.size, ProgressLine("computed"))

    def __call__(self, source: IndexedSource) -> Features:
        """Return the features of all readable images. The others are logged. Raises DataError."""
        from vitrail.evaluation.ahead import Refusing
        from vitrail.evaluation.features import collect

        with closing(self.loader(source)) as loader, Refusing(self.embed, self._compute.precision) as embed:
            found = collect(embed, loader, source.class_names)
        _log_unreadable(found.bad)
        return found

    def each_batch(
        self, source: IndexedSource, compute: Computed[Any, T], receive: Callable[[T], None]
    ) -> tuple[np.ndarray, list[tuple[str, str]]]:
        """Call `receive` with the result for each batch of images, in order.

        Return the index of each readable image, and (id, reason) of the others, which are logged. Raises DataError if
        no image can be read.
        """
        import numpy as np

        from vitrail.data.image_names import bad_kinds

        index: list[np.ndarray] = []
        with closing(self.loader(source)) as loader:
            for batch, found in compute.over(loader.epoch(0)):
                receive(found)
                index.append(batch.index.numpy())
        _log_unreadable(loader.bad)
        if not index:
            raise DataError(f"no result: no image could be read: {bad_kinds(loader.bad)}")
        return np.concatenate(index), loader.bad

    def each_tile(
        self,
        paths: tuple[str | Path, ...],
        tiling: Tiling,
        compute: Computed[Any, T],
        receive: Callable[[T], None],
    ) -> tuple[list[tuple[Path, TileBox]], list[tuple[str, str]]]:
        """Call `receive` with the result for each batch of tiles of image files, in order.

        Return the file and the place of each readable tile, and (file or tile, reason) of the others, which are logged.
        Raises DataError if no tile can be read.
        """
        import numpy as np
        import torch

        from vitrail.data.images.ops import tile_transform
        from vitrail.data.images.tiles import prepared_tiles
        from vitrail.data.sources.files import find_images

        size = self._compute.batch_size
        tiles = prepared_tiles(
            find_images(paths),
            tiling,
            tile_transform(self.network.card.preprocess),
            ahead=2 * size,
            workers=self._compute.threads(),
            given={Path(path).expanduser() for path in paths},
        )
        places: list[tuple[Path, TileBox]] = []
        bad: list[tuple[str, str]] = []

        def stacked() -> Iterator[TileBatch]:
            while batch := list(islice(tiles, size)):
                images = []
                for path, box, image in batch:
                    if isinstance(image, DecodeError):
                        bad.append((str(path), str(image)))
                    elif box is not None:
                        images.append(image)
                        places.append((path, box))
                if images:
                    yield TileBatch(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))

        with closing(tiles):
            for _, found in compute.over(stacked()):
                receive(found)
        _log_unreadable(bad)
        if not places:
            raise DataError(f"no result: no tile could be read ({len(bad):,} failed)")
        return places, bad


class TileBatch(NamedTuple):
    """The readable tiles of a batch."""

    images: Tensor


def _as_arrays(dtype: TokenType, found: dict[str, Tensor]) -> Arrays:
    """Return float32 tokens, `NAME_LAYER`, as arrays of `dtype`. Raises DataError for one that float16 cannot hold."""
    if dtype == "float32":
        return {name: part.numpy() for name, part in found.items()}
    for name, part in found.items():
        if (largest := float(part.abs().max())) > 65_504:
            raise DataError(
                f"a token after layer {name.rpartition('_')[2]} holds {largest:,.0f}, and float16 ends at 65,504. Use "
                "--dtype float32, or the final LayerNorm (without --no-norm)"
            )
    return {name: part.numpy().astype(dtype) for name, part in found.items()}


def _log_unreadable(images: list[tuple[str, str]]) -> None:
    for id_, reason in images:
        log.warning("unreadable image, skipped: %s (%s)", as_text(id_), as_text(reason))
