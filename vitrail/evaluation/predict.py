"""Classes of images in files: a stream of rows in the order of the files, whatever the number of files.

The same decoder and the same resize and crop as in evaluation. A file that is no image becomes a row that says
why, and the stream goes on.
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

Kind = Literal["csv", "jsonl"]


class Prediction(NamedTuple):
    """The best classes of one image, best first, with their softmax probabilities."""

    path: str
    classes: list[str]
    probabilities: list[float]


class Unreadable(NamedTuple):
    """A file that could not become an image; `reason` is that of `DecodeError`."""

    path: str
    reason: str
    message: str


Row = Prediction | Unreadable


def find_images(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files that `paths` mean: files, folders (all images below them) and glob patterns such as
    "photos/**/*.jpg".

    In folders and patterns, hidden files and files that do not end like images are passed over; a file named
    itself is always yielded, even one that is missing, for its row to say so. Raises DataError if nothing that
    was named is there.
    """
    named = [Path(path).expanduser() for path in paths]
    found = [(path, _matches(path)) for path in named]
    if not any(matches for _, matches in found):
        what = ", ".join(str(path) for path in named[:3]) or "no path"
        raise DataError(f"nothing to predict at {what}: give image files, folders of images, or a glob pattern")
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
    """All images below a folder, sorted; links to folders are followed once."""
    seen: set[tuple[int, int]] = set()
    closed: list[OSError] = []
    for root, folders, files in os.walk(folder, followlinks=True, onerror=closed.append):
        while closed:  # a folder that cannot be listed: reading it fails with the reason
            yield Path(closed.pop().filename)
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
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
    """Yield a row for each file of `paths` (see `find_images`), in their order, as the batches are done.

    `model` is a network with a card (from `vitrail.load`); `predict` runs another engine in its place; the first
    `skip` files are left out. Each row has the `top` best classes, or fewer if there are not as many. `workers`
    threads decode; at most a few batches are held. Raises DataError if there is no file, and when one takes longer to
    read than `prefetch.TIMEOUT` (without threads it is waited for), WeightsError for a model without card.
    """
    card = getattr(model, "card", None)
    if card is None:
        raise WeightsError("this model has no card, which says how its images are prepared: use vitrail.load")
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
    paths: list[Path] = []  # of what is being prepared, in order

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
    """File -> uint8 [H, W, 3] as the network takes it, or why not."""
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
    """Classes and probabilities of each image, best first."""
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
    """What a stream of rows came to."""

    predicted: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)
    errors: Path | None = None
    """Where the files that could not be read are listed, if there are any and a place was given."""

    def __str__(self) -> str:
        text = f"{self.predicted} images predicted"
        if not self.unreadable:
            return text
        counts = Counter(row.reason for row in self.unreadable)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
        listed = f", listed in {self.errors}" if self.errors else ""
        return f"{text}; {len(self.unreadable)} files could not be read ({reasons}){listed}"


def write_predictions(rows: Iterable[Row], out: Path | TextIO, *, kind: Kind = "csv") -> Summary:
    """Write predictions as they come and return what they came to.

    kind "csv": columns path, class, probability, class_2, probability_2, ...; "jsonl": one object per line with
    path, class, probability and top. A Path is written atomically: it appears when all rows are in it, and
    unreadable files are listed (path, reason, message) in a CSV beside it, `<name>.errors.csv`. To a stream go
    the predictions alone.
    """
    summary = Summary()
    write = {"csv": _write_csv, "jsonl": _write_json_lines}[kind]
    if not isinstance(out, Path):
        write(_counted(rows, summary), out)
        out.flush()
        return summary
    with _replacing(out) as file:
        write(_counted(rows, summary), file)
    errors = out.with_name(f"{out.name}.errors.csv")
    errors.unlink(missing_ok=True)  # of an earlier run
    if summary.unreadable:
        with _replacing(errors) as file:
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
def _replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` on leaving; on an error it is removed."""
    partial = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
