"""The prediction for an image, and files of predictions: CSV and JSON lines, which an interrupted call continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from vitrail.data.images.tiles import TileBox
from vitrail.data.labels.sets import SEPARATOR
from vitrail.data.spreadsheet import LABEL_PREDICTIONS, PREDICTIONS, SafeWriter
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.evaluation.confidence import NONE
from vitrail.files import locked, replacing_text, result_json

FileKind = Literal["csv", "jsonl"]


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
    answers: dict[str, Prediction] | None = None
    """For a network that gives several answers: name -> answer, without a path."""

    def as_json(self, digits: int | None = None) -> dict[str, Any]:
        """Return the row as JSON values, with probabilities of `digits` decimals."""
        return {"path": self.path, **({} if self.box is None else self.box._asdict()), **self.values(digits)}

    def values(self, digits: int | None = None, most: int | None = None) -> dict[str, Any]:
        """Return what is predicted as JSON values, with the `most` best classes."""
        if self.answers is not None:
            return {"answers": {name: one.values(digits, most) for name, one in self.answers.items()}}
        if self.numbers is not None:
            return {"numbers": self.numbers}
        top = _pairs(zip(self.classes[:most], self.probabilities[:most], strict=True), digits)
        if self.rejected is not None:
            answer = {**top[0], "class": NONE} if self.rejected else top[0]
            return {**answer, "rejected": self.rejected, "top": top}
        if self.labels is None:
            return {**top[0], "top": top}
        return {"labels": _pairs(self.labels, digits), "top": top}

    def columns(self) -> list[tuple[str, Any]]:
        """Return the columns of a table of such predictions and their values: lists of several labels are one value."""
        path, best, probable = PREDICTIONS
        place = [(path, self.path), *zip(TileBox._fields, self.box or (), strict=False)]
        if self.answers is not None:
            return place + [column for name, one in self.answers.items() for column in _of_answer(name, one)]
        if self.numbers is not None:
            return [*place, *self.numbers.items()]
        if self.labels is not None:
            _, *names = LABEL_PREDICTIONS
            return [*place, *zip(names, ([one[part] for one in self.labels] for part in (0, 1)), strict=True)]
        found = list(place)
        shown = [NONE, *self.classes[1:]] if self.rejected else self.classes
        for rank, (name, share) in enumerate(zip(shown, self.probabilities, strict=True), 1):
            suffix = "" if rank == 1 else f"_{rank}"
            found += [(best + suffix, name), (probable + suffix, share)]
        return found if self.rejected is None else [*found, ("rejected", self.classes[0] if self.rejected else "")]


def _of_answer(answer: str, one: Prediction) -> Iterator[tuple[str, Any]]:
    """Yield the columns of one of several answers: its class or number under its name, others behind it."""
    for name, value in one.columns()[1:]:
        if one.numbers is not None:
            yield name, value
        elif name.startswith("class") or name == "labels":
            yield answer + name.removeprefix("class").removeprefix("labels"), value
        else:  # as many decimals as elsewhere, because numbers beside it have all
            yield f"{answer} {name}", [round(each, 6) for each in value] if isinstance(value, list) else round(value, 6)


class Unreadable(NamedTuple):
    """A file that could not be read as an image; `reason` is the reason of its `DecodeError`."""

    path: str
    reason: str
    message: str


def _pairs(pairs: Iterable[Sequence[Any]], digits: int | None) -> list[dict[str, Any]]:
    return [{"class": name, "probability": share if digits is None else round(share, digits)} for name, share in pairs]


Row = Prediction | Unreadable


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
    probabilities, with "|" between them; for numbers path and a column for each target; for several answers path and
    the columns of each, such as species and "species probability". "jsonl": one object per line
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
                table.writerow([name for name, _ in row.columns()])
            decimals = 6 if row.numbers is None and row.answers is None else None
            table.writerow([_text(value, decimals) for _, value in row.columns()])
        summary.predicted += 1
        summary.what = "image" if row.box is None else "tile"
    if kind == "csv" and not summary.predicted:
        table.writerow(PREDICTIONS)
    file.flush()
    return summary


def _text(value: Any, decimals: int | None) -> str:
    """Return the value of a column as text; a list is joined, and a float has this number of decimals, or all."""
    if isinstance(value, list):
        return SEPARATOR.join(_text(one, decimals) for one in value)
    if isinstance(value, float):
        return repr(value) if decimals is None else f"{value:.{decimals}f}"
    return str(value)


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
        self._lock = ExitStack()
        busy = f"another process is writing {out}: wait for it, or choose another file"
        self._lock.enter_context(locked(out.with_name(f".{out.name}.lock"), UsageError, busy))
        with writing(self.path, UsageError), open(self.path, "a+b") as file:
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
        self._lock.close()


def _read(line: bytes) -> Row | None:
    """Return a row of the partial file; None if the line is incomplete."""
    try:
        path, first, *more = json.loads(line)
        row = Unreadable(path, first, *more) if isinstance(first, str) else Prediction(path, first, *more)
        if isinstance(row, Prediction) and row.box is not None:
            row = row._replace(box=TileBox(*row.box))
        if isinstance(row, Prediction) and row.answers is not None:
            row = row._replace(answers={name: Prediction(*one) for name, one in row.answers.items()})
    except (ValueError, TypeError):
        return None
    return row if line.endswith(b"\n") else None
