"""`vitrail predict`: name the classes of images."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError
from vitrail.exports.kinds import find_program
from vitrail.verbs.network import bulk
from vitrail.verbs.network.bulk import Answered, classes_of, is_bulk, open_job, run
from vitrail.verbs.network.classifier import load_classifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vitrail.evaluation.classify import Precision, Predict
    from vitrail.evaluation.predict import Kind, Prediction, Row, Summary, Unreadable

log = logging.getLogger("vitrail")
KINDS: dict[str, Kind] = {".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl"}


@dataclass
class Predictions:
    """The predictions, unless they were written to a file, and the unreadable files."""

    rows: list[Prediction]
    unreadable: list[Unreadable]
    summary: str
    out: str | None = None
    exit_code: int = 0
    """Exit status of the command: 1 if `strict` is set and a file could not be read."""


def predict(
    model: str | Path,
    *images: str | Path,
    top: int = 5,
    strict: bool = False,
    out: str | Path | None = None,
    merge: str | Path | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
) -> Predictions | Answered:
    """Name the classes of images, the most likely class first.

    Unreadable files are skipped and listed (with --out FILE, in FILE.errors.csv). The same command with the same --out
    continues where an interrupted one stopped.

    With a folder as --out, one Parquet file is written for each shard of the data set, which may have any size. The
    command may be killed and repeated, and several processes (torchrun, a Slurm array) share the shards.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub, or a program that
            `vitrail export` wrote for ONNX Runtime or OpenVINO, which then computes.
        images: Files, folders and patterns such as 'photos/**/*.jpg', any number of them.
        top: Number of classes to name for each image.
        strict: Exit with 1 if a file could not be read. The results for all other files are still written.
        out: Write to this .csv or .jsonl file, one image after another, or to a folder (default: CSV on stdout).
        merge: With a folder as --out: write all results to this .parquet file, too, once they are complete.
        batch_size: Number of images per batch.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    if not images:
        raise UsageError(
            f"no images are given. Give files, folders or patterns: vitrail predict {model} FILE|FOLDER|PATTERN ..."
        )
    if precision not in ("auto", "bf16", "float32"):
        raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
    if out is not None and not is_bulk(out) and Path(out).suffix.lower() not in KINDS:
        raise UsageError(f"{out}: write predictions to a file that ends in {', '.join(KINDS)}, or to a folder")
    if merge is not None and not is_bulk(out):
        raise UsageError(f"merge is for a folder of results (--out), not for {out or 'the terminal'}")
    from vitrail.device import available_cores
    from vitrail.evaluation.predict import Prediction, Summary, Unreadable, predict_files
    from vitrail.weights.load import weights_fingerprint

    network, ask = _engine(model, device, precision)
    threads = available_cores() // 2 if workers is None else workers
    if out is not None and is_bulk(out):
        job = open_job("predict", model, images, out, top=top, precision=precision)
        loading = {"batch_size": batch_size, "workers": threads}
        return run(job, classes_of(network.card, ask, top, loading), merge, strict=strict)
    rows = partial(
        predict_files,
        network,
        images,
        top=top,
        batch_size=batch_size,
        workers=threads,
        predict=ask,
    )
    if out is not None:
        written = _write(Path(out), [weights_fingerprint(model), top, precision], images, rows)
        return Predictions([], written.unreadable, str(written), str(out), int(strict and bool(written.unreadable)))
    found = list(rows())
    bad = [row for row in found if isinstance(row, Unreadable)]
    for row in bad:
        log.warning("skipped %s: %s", row.path, row.message)
    good = [row for row in found if isinstance(row, Prediction)]
    return Predictions(good, bad, str(Summary(len(good), bad)), exit_code=int(strict and bool(bad)))


def _engine(model: str | Path, device: str | None, precision: Precision) -> tuple[Any, Predict]:
    """What has the card, and what answers: a network, or a program in its own runtime."""
    from vitrail.device import choose_device
    from vitrail.evaluation.classify import predictor

    if program := find_program(model):
        if device not in (None, "cpu") or precision != "auto":
            raise UsageError(f"{program} is a program for the CPU, in the precision it was exported in: leave them out")
        from vitrail.exports.engine import Engine

        engine = Engine(program)
        return engine, engine
    network = load_classifier(model)
    return network, predictor(network, choose_device(device), precision)


def _write(out: Path, key: list[Any], images: tuple[str | Path, ...], rows: Callable[..., Iterator[Row]]) -> Summary:
    """Write predictions to `out`, continuing after the rows of an interrupted call with the same `key`."""
    from vitrail.evaluation.journal import Journal
    from vitrail.evaluation.predict import find_images, write_predictions

    journal = Journal(out, key, find_images(images))
    if journal.finished:
        log.info("continuing after %d files that an earlier call finished", journal.finished)
    try:
        written = write_predictions(
            journal.rows(lambda finished: rows(skip=finished)), out, kind=KINDS[out.suffix.lower()]
        )
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}. The same command continues from here"
        ) from error
    journal.close()
    return written


def show(result: Predictions | Answered) -> str:
    """Return the result as CSV, or where it was written."""
    if isinstance(result, Answered):
        return bulk.show(result)
    from vitrail.evaluation.predict import write_predictions

    if result.out is not None:
        return f"{result.summary}; written to {result.out}"
    text = io.StringIO()
    write_predictions(result.rows, text)
    return text.getvalue().rstrip("\n")


def as_json(result: Predictions | Answered) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, Answered):
        return bulk.as_json(result)
    rows = [
        {
            "path": row.path,
            "class": row.classes[0],
            "probability": row.probabilities[0],
            "top": [{"class": c, "probability": p} for c, p in zip(row.classes, row.probabilities, strict=True)],
        }
        for row in result.rows
    ]
    bad = [row._asdict() for row in result.unreadable]
    return {"images": rows, "unreadable": bad, "summary": result.summary, "out": result.out}
