"""Predict the classes of image files: one row per file, in the order of the files, for any number of files.

Images are decoded, resized and cropped as in evaluation. An unreadable file becomes a row with the reason.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeVar

import numpy as np
import torch

from vitrail.data.image_names import KINDS, images_among, in_junk, is_junk, other_files
from vitrail.data.images.geometry import Op
from vitrail.data.images.ops import eval_transform, tile_transform
from vitrail.data.images.tiles import TileBox, Tiling, prepared_tiles
from vitrail.data.images.work import within_memory
from vitrail.data.item import SYSTEM_FILE, Findings, IndexedSource
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.labels.sets import SEPARATOR
from vitrail.data.loading.loader import check_batch_size
from vitrail.data.loading.prefetch import ordered, stuck, threads
from vitrail.data.settings import ALL, Selection
from vitrail.data.sources.folder import read_file, read_pipe
from vitrail.data.spreadsheet import LABEL_PREDICTIONS, PREDICTIONS, SafeWriter
from vitrail.device import Precision
from vitrail.disk import writing
from vitrail.errors import DataError, DecodeError, UsageError, WeightsError, finite_rows, not_finite
from vitrail.evaluation.classify import NOT_FINITE, Predict, predictor
from vitrail.evaluation.confidence import NONE, calibrated
from vitrail.evaluation.number_scores import predicted_numbers
from vitrail.evaluation.ranked import ranked
from vitrail.files import lock, replacing_text, result_json
from vitrail.words import as_text, listing

FileKind = Literal["csv", "jsonl"]
T = TypeVar("T")


class Prediction(NamedTuple):
    """The best classes of one image, best first, with their probabilities (softmax, or sigmoid for several labels).

    For a network that predicts numbers there are no classes.
    """

    path: str
    classes: list[str]
    probabilities: list[float]
    labels: list[tuple[str, float]] | None = None
    """For a network that predicts several labels: those it predicts, with their probabilities, best first."""
    rejected: bool | None = None
    """With `reject`: whether the best class is less probable, so that the image gets no class."""
    numbers: dict[str, float] | None = None
    """For a network that predicts numbers: target -> number, in the units of its data."""
    box: TileBox | None = None
    """For a tile of an image: where it lies."""

    def as_json(self, digits: int | None = None) -> dict[str, Any]:
        """Return the row as JSON values, with probabilities of `digits` decimals."""
        place = {"path": self.path, **({} if self.box is None else self.box._asdict())}
        if self.numbers is not None:
            return {**place, "numbers": self.numbers}
        top = _pairs(zip(self.classes, self.probabilities, strict=True), digits)
        if self.rejected is not None:
            answer = {**top[0], "class": NONE} if self.rejected else top[0]
            return {**place, **answer, "rejected": self.rejected, "top": top}
        if self.labels is None:
            return {**place, **top[0], "top": top}
        return {**place, "labels": _pairs(self.labels, digits), "top": top}


class Unreadable(NamedTuple):
    """A file that could not be read as an image; `reason` is the reason of its `DecodeError`."""

    path: str
    reason: str
    message: str


def _pairs(pairs: Iterable[Sequence[Any]], digits: int | None) -> list[dict[str, Any]]:
    return [{"class": name, "probability": share if digits is None else round(share, digits)} for name, share in pairs]


Row = Prediction | Unreadable


def find_images(
    paths: Iterable[str | Path], selection: Selection = ALL, findings: Findings | None = None
) -> Iterator[Path]:
    """Yield the files of `paths`: files, folders (all images below them) and patterns such as "photos/**/*.jpg".

    Only files that `selection` leaves are among them. `findings` counts what is ignored. Raises DataError if there is
    no file.

    In folders and patterns, hidden files and files without an image suffix are skipped. A file that is itself in
    `paths` is always yielded, even if it is missing, and its row then gives the reason.
    """
    named = [Path(path).expanduser() for path in paths]
    found = [(path, [path] if path.exists() else sorted(glob.glob(str(path), recursive=True))) for path in named]
    if not any(matches for _, matches in found):
        what = ", ".join(str(path) for path in named[:3]) or "no path"
        raise DataError(
            f"nothing to predict at {what}: no file or folder has this name or fits this pattern (looked from "
            f"{Path.cwd()}). Give image files, folders of images, or a pattern such as 'photos/*.jpg'"
        )
    if selection.lists:
        raise UsageError(
            f"data.exclude {selection.lists[0]!r} is a list of images of a data set, and these are files. Give "
            "patterns, such as '*_mask.png'"
        )
    findings = findings or Findings("files")
    files = (file for file in _expanded(found, findings) if not (selection.patterns and selection.reason(str(file))))
    first = next(files, None)
    if first is None:
        what = listing([str(path) for path in named], 3, quoted=False)
        if selection.patterns and next(_expanded(found, Findings("files")), None) is not None:
            raise DataError(f"none of the images in {what} is left by {selection}. Change or remove a pattern")
        folders = [path for path in named if path.is_dir()]
        raise DataError(f"no images in {what}{other_files(folders[0]) if folders else ''}")
    return chain([first], files)


def _expanded(found: Iterable[tuple[Path, Sequence[str | Path]]], findings: Findings) -> Iterator[Path]:
    for path, matches in found:
        for match in map(Path, matches or [path]):
            # the user wrote the folders of a pattern up to its first part with a wildcard
            fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
            if match != path and in_junk(match.relative_to(fixed).as_posix()):
                findings.ignore(SYSTEM_FILE, str(match))
            elif match.is_dir():
                yield from _below(match, set(), findings)
            elif match == path or any(is_image(str(match)) for is_image in KINDS):
                yield match


def _below(folder: Path, visited: set[tuple[int, int]], findings: Findings) -> Iterator[Path]:
    """Yield all images below a folder, sorted. A folder that several links lead to is visited once."""
    try:
        names = sorted(os.listdir(folder))
        status = folder.stat()
    except OSError:
        yield folder  # reading it as an image fails with the reason
        return
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    for name in filter(is_junk, names):
        findings.ignore(SYSTEM_FILE, str(folder / name))
    paths = [folder / name for name in names if not is_junk(name)]
    yield from (Path(path) for path in images_among(map(str, paths)) if not os.path.isdir(path))
    for path in paths:
        if path.is_dir():
            yield from _below(path, visited, findings)


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
    names = [as_text(name) for name in card.class_names] or [str(i) for i in range(card.config.classes)]
    outputs = calibrated(predict or predictor(model, device, precision), card.temperature)
    answer: Ranking = partial(_best, outputs, names, top, thresholds=card.thresholds)
    if card.scale is not None:
        answer = partial(_numbers, outputs, names, card.scale)
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
    rows = _rows(prepared, answer, batch_size, not_finite("output for this image", precision))
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


Best = Prediction | None
"""What is predicted, still without a path; None if the network's output is not finite."""
Ranking = Callable[[list[np.ndarray]], Iterable[Best]]


def _rows(
    prepared: Generator[PreparedFile],
    answer: Ranking,
    batch_size: int,
    no_result: str = not_finite("output for this image"),
) -> Iterator[Row]:
    with closing(prepared):
        while batch := list(islice(prepared, batch_size)):
            answers = iter(answer([file.image for file in batch if isinstance(file.image, np.ndarray)]))
            for path, image, box in batch:
                best = None if isinstance(image, Unreadable) else next(answers)
                if isinstance(image, Unreadable):
                    yield image
                elif best is None:
                    yield Unreadable(str(path), NOT_FINITE, no_result)
                else:
                    yield best._replace(path=str(path), box=box)


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


def _best(
    predict: Predict, names: list[str], top: int, images: list[np.ndarray], thresholds: Sequence[float] = ()
) -> Iterator[Best]:
    """Yield the best classes of each image, and the labels that reach their thresholds."""
    if not images:
        return
    logits = predict(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)).float()
    found = ranked(logits, top, thresholds)
    for row, finite in enumerate(finite_rows(logits).tolist()):
        classes, shares = [names[number] for number in found.classes[row].tolist()], found.probabilities[row].tolist()
        labels = None
        if found.predicted is not None:
            rows = zip(classes, shares, found.predicted[row].tolist(), strict=True)
            labels = [(name, share) for name, share, reached in rows if reached]
        yield Prediction("", classes[:top], shares[:top], labels) if finite else None


def _numbers(predict: Predict, names: list[str], scale: TargetScale, images: list[np.ndarray]) -> Iterator[Best]:
    """Yield the numbers of each image, rounded to the digits of float32."""
    if not images:
        return
    outputs = predict(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2))
    for row, finite in zip(predicted_numbers(outputs, scale), finite_rows(outputs).tolist(), strict=True):
        found = {name: float(f"{value:.7g}") for name, value in zip(names, row.tolist(), strict=True)}
        yield Prediction("", [], [], numbers=found) if finite else None


@dataclass
class Summary:
    """Counts of a stream of rows."""

    predicted: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)
    errors: Path | None = None
    """CSV with the unreadable files; None if all were readable or the rows went to a stream."""
    what: str = "image"
    """What a row is about: an image or a tile."""

    def __str__(self) -> str:
        text = f"{self.predicted} {self.what}{'s' * (self.predicted != 1)} predicted"
        if not self.unreadable:
            return text
        counts = Counter(row.reason for row in self.unreadable)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        listed = f", listed in {self.errors}" if self.errors else ""
        one, several = ("file", "files") if self.what == "image" else ("tile or file", "tiles or files")
        files = f"1 {one}" if len(self.unreadable) == 1 else f"{len(self.unreadable)} {several}"
        return f"{text}; {files} could not be read ({reasons}){listed}"


def write_predictions(rows: Iterable[Row], out: Path | TextIO, *, kind: FileKind = "csv", raw: bool = False) -> Summary:
    """Write predictions one by one and return their counts.

    kind "csv": columns path, class, probability, class_2, probability_2, ...; for several labels path, labels and
    probabilities, with "|" between them; for numbers path and a column for each target. "jsonl": one object per line
    with path, class, probability and top; for several labels path, labels and top; for numbers path and numbers. With
    rejection, an image that gets no class has NONE as class, and CSV has another column: the class that was rejected.
    A Path is replaced atomically when all rows are written, and unreadable files are listed (path, reason, message) in
    a CSV next to it, `<name>.errors.csv`. A stream gets only the predictions. `raw` is SafeWriter's.
    """
    if not isinstance(out, Path):
        return _write(rows, out, kind, raw)
    with replacing_text(out) as file:
        summary = _write(rows, file, kind, raw)
    errors = errors_file(out)
    errors.unlink(missing_ok=True)  # of an earlier run
    if summary.unreadable:
        with replacing_text(errors) as file:
            SafeWriter(file, raw=raw).writerows([Unreadable._fields, *summary.unreadable])
        summary.errors = errors
    return summary


def errors_file(out: Path) -> Path:
    """Return the CSV of the unreadable files next to the predictions in `out`."""
    return out.with_name(f"{out.name}.errors.csv")


def _write(rows: Iterable[Row], file: TextIO, kind: FileKind, raw: bool) -> Summary:
    """Write the predictions as they arrive and count all rows."""
    summary = Summary()
    table = SafeWriter(file, raw=raw)
    for row in rows:
        if isinstance(row, Unreadable):
            summary.unreadable.append(row)
            continue
        if kind == "jsonl":
            file.write(result_json(row.as_json(digits=6)) + "\n")
        else:
            if not summary.predicted:
                table.writerow(header(row))
            table.writerow(_cells(row))
        summary.predicted += 1
        summary.what = "image" if row.box is None else "tile"
    if kind == "csv" and not summary.predicted:
        table.writerow(PREDICTIONS)
    file.flush()
    return summary


def _cells(row: Prediction) -> list[str]:
    def text(value: Any) -> str:
        if isinstance(value, list):
            return SEPARATOR.join(map(text, value))
        if isinstance(value, float):
            return repr(value) if row.numbers is not None else f"{value:.6f}"
        return str(value)

    return [text(value) for value in values(row)]


def values(row: Prediction) -> list[Any]:
    """Return the values of the columns that `header` names; several labels and their probabilities are lists."""
    place = [row.path, *(row.box or ())]
    if row.numbers is not None:
        return [*place, *row.numbers.values()]
    if row.labels is not None:
        return [*place, [name for name, _ in row.labels], [share for _, share in row.labels]]
    classes = [NONE, *row.classes[1:]] if row.rejected else row.classes
    found = [*place, *(value for pair in zip(classes, row.probabilities, strict=True) for value in pair)]
    return found if row.rejected is None else [*found, row.classes[0] if row.rejected else ""]


def header(row: Prediction) -> Sequence[str]:
    """Return the names of the columns of predictions such as this one."""
    path, *found = PREDICTIONS if row.labels is None else LABEL_PREDICTIONS
    place = [path, *(() if row.box is None else TileBox._fields)]
    if row.numbers is not None:
        return [*place, *row.numbers]
    if row.labels is not None:
        return [*place, *found]
    more = [name for rank in range(2, len(row.classes) + 1) for name in (f"class_{rank}", f"probability_{rank}")]
    return [*place, *found, *more, *([] if row.rejected is None else ["rejected"])]


class PartialPredictions:
    """The finished rows of earlier calls for `out` with the same `key`, up to the first file that differs.

    An interrupted call continues where it stopped: `.answers.csv.part` beside answers.csv is JSON lines, first the key
    of the call (its network and settings), then a row for each file, or tile of a file, in order. It is deleted when
    answers.csv is complete.

    `files` are the files of the rows, in order. `finished` is the number of rows that are already predicted. Raises
    UsageError if the partial file cannot be written or another process is writing it.
    """

    def __init__(self, out: Path, key: Any, files: Iterable[Path]) -> None:
        self.path = out.with_name(f".{out.name}.part")
        self.finished = 0
        head = (json.dumps(key, sort_keys=True) + "\n").encode()
        with writing(self.path, UsageError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = file = open(self.path, "a+b")  # noqa: SIM115 - open, and so locked, until `close`
            try:
                lock(file, wait=False)
            except BlockingIOError as error:
                raise UsageError(f"another process is writing {out}: wait for it, or choose another file") from error
            file.seek(0)
            whole = len(head) if file.readline(len(head)) == head else 0
            for line, path in zip(file if whole else (), files, strict=False):
                row = _read(line)
                if row is None or row.path != str(path):
                    break
                whole += len(line)
                self.finished += 1
            file.truncate(whole)  # removes an incomplete last row, or the rows of another call
            if not whole:
                file.write(head)
            file.flush()

    def rows(self, predict: Callable[[int], Iterable[Row]]) -> Iterator[Row]:
        """Yield the finished rows, then those of `predict(finished)`, each after it is written to the partial file."""
        with open(self.path, "rb") as file:
            for line in islice(file, 1, None):
                row = _read(line)
                assert row is not None
                yield row
        with open(self.path, "a", encoding="utf-8", buffering=1) as file:
            for row in predict(self.finished):
                file.write(json.dumps(row) + "\n")
                yield row

    def close(self) -> None:
        """Delete the partial file, because all rows are in their final file."""
        self.path.unlink(missing_ok=True)
        self._file.close()


def _read(line: bytes) -> Row | None:
    """Return a row of the partial file; None if the line is incomplete."""
    try:
        path, first, *more = json.loads(line)
        row = Unreadable(path, first, *more) if isinstance(first, str) else Prediction(path, first, *more)
        if isinstance(row, Prediction) and row.box is not None:
            row = row._replace(box=TileBox(*row.box))
    except (ValueError, TypeError):
        return None
    return row if line.endswith(b"\n") else None
