"""Predict the classes of image files: one row per file, in the order of the files, for any number of files.

Images are decoded, resized and cropped as in evaluation. An unreadable file becomes a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from vitrail.data.images.geometry import Op
from vitrail.data.images.ops import eval_transform, tile_transform
from vitrail.data.images.tiles import TileBox, Tiling, prepared_tiles
from vitrail.data.images.work import within_memory
from vitrail.data.item import Findings, IndexedSource
from vitrail.data.loading.loader import check_batch_size
from vitrail.data.loading.prefetch import ordered, stuck, threads
from vitrail.data.sources.files import find_images
from vitrail.data.sources.folder import read_file, read_pipe
from vitrail.device import Precision
from vitrail.errors import DecodeError, WeightsError, finite_rows, not_finite
from vitrail.evaluation.ahead import ahead
from vitrail.evaluation.classify import NOT_FINITE, Predict, predictor
from vitrail.evaluation.confidence import calibrated
from vitrail.tasks.catalog import task_of
from vitrail.tasks.prediction import Prediction, Row, Unreadable

if TYPE_CHECKING:
    from vitrail.weights.card import Card

T = TypeVar("T")


def predict_files(
    model: Any,
    paths: Iterable[str | Path] | IndexedSource,
    *,
    top: int = 5,
    batch_size: int = 32,
    workers: int = 1,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    predict: Predict | None = None,
    skip: int = 0,
    reject: float | None = None,
    tiles: Tiling | None = None,
    findings: Findings | None = None,
) -> Iterator[Row]:
    """Yield a row for each file of `paths` (see `find_images`), or each image of a source, in order, batch by batch.

    A network that predicts numbers gives these, in the units of its data.

    `model` is a network with a card (from `vitrail.load`); `predict` replaces its computation by another engine, and
    `precision` is then what that engine computes in. The first `skip` files are skipped. Each row has the `top` best
    classes, or all if there are fewer, with probabilities of the card's temperature. An image whose best class is less
    probable than `reject` gets none. `workers` threads decode; at most a few batches are in memory. With `tiles` there
    is a row for each tile of each file, and the first `skip` rows are skipped. `findings` counts what is ignored.

    Raises DataError if there is no file, or if reading one in a thread takes longer than `prefetch.TIMEOUT`,
    WeightsError for a model without a card, and UsageError for an impossible batch size or number of threads.
    """
    check_batch_size(batch_size)
    card = getattr(model, "card", None)
    if card is None:
        raise WeightsError("this model has no card, so its preprocessing is unknown. Load it with vitrail.load")
    outputs = calibrated(predict or predictor(model, device, precision), card.temperature)
    answer = partial(_predictions, card, top, tiles)
    if isinstance(paths, IndexedSource):
        read = partial(_prepared_item, eval_transform(card.preprocess), paths)
        prepared = _each_prepared(islice(range(len(paths)), skip, None), read, paths.id, 2 * batch_size, workers)
    else:
        given = list(paths)
        files, named = find_images(given, findings=findings), {Path(path).expanduser() for path in given}
        if tiles is None:
            prepare = partial(_prepared, eval_transform(card.preprocess), given=named)
            prepared = _each_prepared(islice(files, skip, None), prepare, str, 2 * batch_size, workers)
        else:
            cut, ahead = tile_transform(card.preprocess), 2 * batch_size
            found = prepared_tiles(files, tiles, cut, ahead=ahead, workers=workers, given=named, skip=skip)
            prepared = (
                PreparedFile(path, _unreadable(path, image) if isinstance(image, DecodeError) else image, box)
                for path, box, image in found
            )
    rows = _rows(prepared, outputs, answer, batch_size, not_finite("output for this image", precision))
    if reject is None:
        return rows
    return (
        row if isinstance(row, Unreadable) else row._replace(rejected=row.probabilities[0] < reject) for row in rows
    )


class PreparedFile(NamedTuple):
    """A file, or a tile of it, and the network's input [H, W, channels] or the reason why there is none."""

    path: Path
    image: np.ndarray | Unreadable
    box: TileBox | None = None


Answer = Callable[[torch.Tensor, Sequence[TileBox | None]], Iterable[Prediction | None]]
"""Outputs and tiles -> what is predicted, still without a path; None if the network's output is not finite."""


def _rows(
    prepared: Generator[PreparedFile],
    predict: Predict,
    answer: Answer,
    batch_size: int,
    no_result: str = not_finite("output for this image"),
) -> Iterator[Row]:
    """Yield the rows of each batch. An accelerator computes the next batch while this one is ranked and written."""

    def ranked(batch: list[PreparedFile], outputs: torch.Tensor | None) -> Iterator[Row]:
        boxes = [box for _, image, box in batch if not isinstance(image, Unreadable)]
        answers = iter(() if outputs is None else answer(outputs, boxes))
        for path, image, box in batch:
            best = None if isinstance(image, Unreadable) else next(answers)
            if isinstance(image, Unreadable):
                yield image
            elif best is None:
                yield Unreadable(str(path), NOT_FINITE, no_result)
            else:
                yield best._replace(path=str(path), box=box)

    def launch(batch: list[PreparedFile]) -> torch.Tensor | None:
        images = [file.image for file in batch if isinstance(file.image, np.ndarray)]
        return predict(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)) if images else None

    with closing(prepared):
        batches = iter(lambda: list(islice(prepared, batch_size)), [])
        for batch, outputs in ahead(batches, launch):
            yield from ranked(batch, outputs)


def _each_prepared(
    images: Iterator[T], prepare: Callable[[T], PreparedFile], name: Callable[[T], str], ahead: int, workers: int
) -> Generator[PreparedFile]:
    with threads(workers) as pool:
        yield from ordered(pool, prepare, images, ahead=ahead, hung=lambda image: stuck(name(image)))


def _prepared_item(transform: Op, source: IndexedSource, index: int) -> PreparedFile:
    """Read and prepare an image of a source."""
    return _prepared_as(Path(source.id(index)), transform, lambda: source[index].image)


def _prepared(transform: Op, path: Path, given: Collection[Path] = ()) -> PreparedFile:
    """Read and prepare a file. A pipe is read only if it was given by name: `<(curl ...)`, /dev/stdin."""
    read = read_pipe if path in given and path.is_fifo() else read_file
    return _prepared_as(path, transform, lambda: read(path))


def _prepared_as(path: Path, transform: Op, read: Callable[[], bytes | np.ndarray]) -> PreparedFile:
    """Return what `read` returns as the network's input, or the reason why there is none."""
    try:
        with within_memory():
            image = transform.pixels.read(read())
            return PreparedFile(path, transform(image, np.random.default_rng(0)))  # nothing is random in evaluation
    except DecodeError as error:
        return PreparedFile(path, _unreadable(path, error))


def _unreadable(path: Path, error: DecodeError) -> Unreadable:
    return Unreadable(str(path), error.reason, str(error))


def _predictions(
    card: Card, top: int, tiles: Tiling | None, logits: torch.Tensor, boxes: Sequence[TileBox | None]
) -> Iterator[Prediction | None]:
    """Yield what is predicted for each image; see `Answer`."""
    if tiles is None:
        predictions = task_of(card).predictions(logits, card, top)
    else:
        filled = [(box.height / tiles.height, box.width / tiles.width) for box in boxes if box is not None]
        predictions = task_of(card).of_tiles(logits, card, top, filled)
    for prediction, finite in zip(predictions, finite_rows(logits).tolist(), strict=True):
        yield prediction if finite else None
