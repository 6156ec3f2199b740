"""Predict the classes of image files: one row per file, in the order of the files, for any number of files.

Images are decoded, resized and cropped as in evaluation. An unreadable file becomes a row with the reason.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
import torch

from vitrail.data.images.decode import decode
from vitrail.data.images.ops import eval_transform
from vitrail.data.loading.prefetch import Pool, ordered, stuck
from vitrail.data.settings import Preprocess
from vitrail.data.sources.folder import is_image_name, is_junk, read_file
from vitrail.errors import DataError, DecodeError, WeightsError
from vitrail.evaluation.classify import Precision, Predict, predictor
from vitrail.files import replacing

Kind = Literal["csv", "jsonl"]


class Prediction(NamedTuple):
    """The best classes of one image, best first, with their softmax probabilities."""

    path: str
    classes: list[str]
    probabilities: list[float]


class Unreadable(NamedTuple):
    """A file that could not be read as an image; `reason` is the reason of its `DecodeError`."""

    path: str
    reason: str
    message: str


Row = Prediction | Unreadable


def find_images(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files of `paths`: files, folders (all images below them) and patterns such as "photos/**/*.jpg".

    In folders and patterns, hidden files and files without an image suffix are skipped. A file that is itself in
    `paths` is always yielded, even if it is missing, and its row then gives the reason. Raises DataError if none of
    `paths` exists.
    """
    named = [Path(path).expanduser() for path in paths]
    found = [(path, _matches(path)) for path in named]
    if not any(matches for _, matches in found):
        what = ", ".join(str(path) for path in named[:3]) or "no path"
        raise DataError(f"nothing to predict at {what}. Give image files, folders of images, or a glob pattern")
    return _expanded(found)


def _matches(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]


def _expanded(found: list[tuple[Path, list[Path]]]) -> Iterator[Path]:
    for path, matches in found:
        if not matches:
            yield path
        for match in matches:
            named = match == path
            if match.is_dir():
                if named or not is_junk(match.name):
                    yield from _below(match)
            elif named or _is_wanted(match.name):
                yield match


def _below(folder: Path) -> Iterator[Path]:
    """Yield all images below a folder, sorted. A folder that links lead to several times is visited once."""
    visited: set[tuple[int, int]] = set()
    closed: list[OSError] = []
    for root, folders, files in os.walk(folder, followlinks=True, onerror=closed.append):
        while closed:  # a folder that cannot be listed: reading it fails with the reason
            yield Path(closed.pop().filename)
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not is_junk(name))
        yield from (Path(root) / name for name in sorted(files) if _is_wanted(name))
    while closed:
        yield Path(closed.pop().filename)


def _is_wanted(name: str) -> bool:
    return is_image_name(name) and not is_junk(name)


def predict_files(
    model: Any,
    paths: Iterable[str | Path],
    *,
    top: int = 5,
    batch_size: int = 32,
    workers: int = 1,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    predict: Predict | None = None,
    skip: int = 0,
) -> Iterator[Row]:
    """Yield a row for each file of `paths` (see `find_images`), in their order, batch by batch.

    `model` is a network with a card (from `vitrail.load`); `predict` replaces its computation by another engine. The
    first `skip` files are skipped. Each row has the `top` best classes, or all if there are fewer. `workers` threads
    decode; at most a few batches are in memory. Raises DataError if there is no file, or if reading one in a thread
    takes longer than `prefetch.TIMEOUT`, and WeightsError for a model without a card.
    """
    card = getattr(model, "card", None)
    if card is None:
        raise WeightsError("this model has no card, so its preprocessing is unknown. Load it with vitrail.load")
    names = [as_text(name) for name in card.class_names] or [str(i) for i in range(card.config.classes)]
    ask = predict or predictor(model, device, precision)
    files = islice(find_images(paths), skip, None)
    return _rows(files, _preparer(card.preprocess), ask, names, top, batch_size, workers)


def _rows(
    files: Iterator[Path],
    prepare: Callable[[Path], np.ndarray | Unreadable],
    predict: Predict,
    names: list[str],
    top: int,
    batch_size: int,
    workers: int,
) -> Iterator[Row]:
    paths: list[Path] = []  # files that are being prepared, in order

    def remembered() -> Iterator[Path]:
        for path in files:
            paths.append(path)
            yield path

    pool = Pool(workers) if workers else None
    try:
        prepared = ordered(pool, prepare, remembered(), ahead=2 * batch_size, hung=lambda path: stuck(as_text(path)))
        while chunk := list(islice(prepared, batch_size)):
            images = [item for item in chunk if isinstance(item, np.ndarray)]
            answers = iter(_best(predict, images, names, top))
            for path, item in zip(paths[: len(chunk)], chunk, strict=True):
                yield item if isinstance(item, Unreadable) else Prediction(as_text(path), *next(answers))
            del paths[: len(chunk)]
    finally:
        if pool is not None:
            pool.close()


def _preparer(preprocess: Preprocess) -> Callable[[Path], np.ndarray | Unreadable]:
    """Return a function: file -> the network's input uint8 [H, W, 3], or the reason why it is unreadable."""
    transform = eval_transform(preprocess)
    unused = np.random.default_rng(0)  # nothing is random in evaluation

    def prepare(path: Path) -> np.ndarray | Unreadable:
        try:
            return transform(decode(read_file(path)), unused)
        except DecodeError as error:
            return Unreadable(as_text(path), error.reason, as_text(str(error)))

    return prepare


def _best(
    predict: Predict, images: list[np.ndarray], names: list[str], top: int
) -> list[tuple[list[str], list[float]]]:
    """Return classes and probabilities of each image, best first."""
    if not images:
        return []
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    probabilities = predict(batch).float().softmax(dim=1)
    values, classes = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
    return [
        ([names[number] for number in numbers], shares)
        for numbers, shares in zip(classes.tolist(), values.tolist(), strict=True)
    ]


def as_text(value: str | Path) -> str:
    """Return a name that can be written as UTF-8, whatever bytes the file system allows in it."""
    return os.fsencode(value).decode("utf-8", "backslashreplace")


@dataclass
class Summary:
    """Counts of a stream of rows."""

    predicted: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)
    errors: Path | None = None
    """CSV with the unreadable files; None if all were readable or the rows went to a stream."""

    def __str__(self) -> str:
        text = f"{self.predicted} images predicted"
        if not self.unreadable:
            return text
        counts = Counter(row.reason for row in self.unreadable)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        listed = f", listed in {self.errors}" if self.errors else ""
        return f"{text}; {len(self.unreadable)} files could not be read ({reasons}){listed}"


def write_predictions(rows: Iterable[Row], out: Path | TextIO, *, kind: Kind = "csv") -> Summary:
    """Write predictions one by one and return their counts.

    kind "csv": columns path, class, probability, class_2, probability_2, ...; "jsonl": one object per line with
    path, class, probability and top. A Path is replaced atomically when all rows are written, and unreadable files
    are listed (path, reason, message) in a CSV next to it, `<name>.errors.csv`. A stream gets only the predictions.
    """
    summary = Summary()
    write = {"csv": _write_csv, "jsonl": _write_json_lines}[kind]
    if not isinstance(out, Path):
        write(_counted(rows, summary), out)
        out.flush()
        return summary
    with _replacing_text(out) as file:
        write(_counted(rows, summary), file)
    errors = out.with_name(f"{out.name}.errors.csv")
    errors.unlink(missing_ok=True)  # of an earlier run
    if summary.unreadable:
        with _replacing_text(errors) as file:
            csv.writer(file, lineterminator="\n").writerows([Unreadable._fields, *summary.unreadable])
        summary.errors = errors
    return summary


def _counted(rows: Iterable[Row], summary: Summary) -> Iterator[Prediction]:
    for row in rows:
        if isinstance(row, Unreadable):
            summary.unreadable.append(row)
        else:
            summary.predicted += 1
            yield row


def _write_csv(rows: Iterable[Prediction], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    header: list[str] = []
    for row in rows:
        if not header:
            more = range(2, len(row.classes) + 1)
            header = ["path", "class", "probability"]
            header += [name for rank in more for name in (f"class_{rank}", f"probability_{rank}")]
            writer.writerow(header)
        pairs = zip(row.classes, row.probabilities, strict=True)
        writer.writerow([row.path, *(cell for name, share in pairs for cell in (name, f"{share:.6f}"))])
    if not header:
        writer.writerow(["path", "class", "probability"])


def _write_json_lines(rows: Iterable[Prediction], file: TextIO) -> None:
    for row in rows:
        pairs = zip(row.classes, row.probabilities, strict=True)
        top = [{"class": name, "probability": round(share, 6)} for name, share in pairs]
        file.write(json.dumps({"path": row.path, **top[0], "top": top}, ensure_ascii=False) + "\n")


@contextmanager
def _replacing_text(path: Path) -> Iterator[TextIO]:
    """Replace a text file atomically; folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        yield file
