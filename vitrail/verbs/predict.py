"""`vitrail predict`: name the classes of images."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from vitrail.device import Precision
from vitrail.disk import writing
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName
from vitrail.files import check_writable
from vitrail.ranges import Count, Share, Side, Threads, Whole, checked
from vitrail.verbs import bulk
from vitrail.verbs.bulk import BulkProgress, OnWorkers, is_bulk, open_job, predicted_columns, run_job
from vitrail.verbs.features import paths_or_images, warn_of_ignored
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import ImagesLike, LenientDataKeywords, NetworksLike
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.verbs.network import (
    each_network,
    explained_rejection,
    fingerprint_of,
    load_together,
    said_of_networks,
    temperature_of,
)
from vitrail.verbs.tiles import TABLE, TileMaps, check_folder, check_tiles, files_of_rows
from vitrail.words import as_text, listing, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pandas import DataFrame

    from vitrail.tasks.prediction import FileKind, Prediction, Row, Summary, Unreadable
    from vitrail.weights.confidence import Rejection

log = logging.getLogger("vitrail")
KINDS: dict[str, FileKind] = {".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl"}


@one_line
@dataclass
class Predictions:
    """The predictions, unless they were written to a file, and the unreadable files."""

    rows: list[Prediction]
    unreadable: list[Unreadable]
    summary: str
    out: str | None = None
    raw: bool = False
    """Whether names stand in a CSV as they are."""
    exit_code: int = 0
    """Exit status of the command: 1 if the network's output for an image is not finite, if no file could be read, or
    with `strict` if one could not."""
    rejection: Rejection | None = None
    """What `reject` means on the validation images of the network, if its card says so."""
    maps: list[str] = field(default_factory=list)
    """With tiles and a folder as `out`: the pictures of the predictions."""

    def to_frame(self) -> DataFrame:
        """Return the predictions as a table of pandas, with the columns of the CSV file.

        Raises UsageError without pandas, and for predictions that were written to a file.
        """
        from vitrail.data.spreadsheet import PREDICTIONS

        if self.out is not None:
            raise UsageError(f"the predictions are in {self.out}, which pandas reads: pandas.read_csv({self.out!r})")
        try:
            import pandas
        except ImportError:
            raise UsageError("to_frame needs pandas, which is not installed: pip install pandas") from None
        names = [name for name, _ in self.rows[0].columns()] if self.rows else list(PREDICTIONS)
        return pandas.DataFrame([[value for _, value in row.columns()] for row in self.rows], columns=names)


@overload
def predict(
    model: NetworksLike,
    *images: ImagesLike,
    top: Count = 5,
    reject: Share | None = None,
    calibrate: bool = True,
    strict: bool = False,
    out: None = None,
    tiles: Side | None = None,
    overlap: Whole = 0,
    raw: bool = False,
    batch_size: Count = 32,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[LenientDataKeywords],
) -> Predictions: ...
@overload
def predict(
    model: NetworksLike,
    *images: ImagesLike,
    top: Count = 5,
    reject: Share | None = None,
    calibrate: bool = True,
    strict: bool = False,
    out: str | Path | None,
    merge: str | Path | None = None,
    ray: str | None = None,
    tiles: Side | None = None,
    overlap: Whole = 0,
    raw: bool = False,
    batch_size: Count = 32,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[LenientDataKeywords],
) -> Predictions | BulkProgress: ...
@checked
def predict(
    model: NetworksLike,
    *images: ImagesLike,
    top: Count = 5,
    reject: Share | None = None,
    calibrate: bool = True,
    strict: bool = False,
    out: str | Path | None = None,
    merge: str | Path | None = None,
    ray: str | None = None,
    tiles: Side | None = None,
    overlap: Whole = 0,
    raw: bool = False,
    batch_size: Count = 32,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[LenientDataKeywords],
) -> Predictions | BulkProgress:
    """Name the classes of images, the most likely class first; or the labels, for a network that predicts several.

    A network that was trained on images with several labels names those whose probability reaches the threshold of the
    label (chosen on validation images), or none. A network that was trained on numbers (objective regression) predicts
    these, in the units of its data.

    Probabilities are calibrated by the temperature that was fitted on validation images at the end of training.

    Unreadable files are skipped and listed (with --out FILE, in FILE.errors.csv). The same command with the same --out
    continues where an interrupted one stopped.

    With a folder as --out, one Parquet file is written for each shard of the data set, which may have any size. The
    command may be killed and repeated, and several processes (torchrun, a Slurm array) share the shards.

    With --tiles each image is cut into tiles, which are resized to the network's input without a crop, and each tile
    gets a row. TIFF files of any size are read in parts, in bounded memory. A folder as --out then gets tiles.csv and a
    map of the classes of each image.

    A network that was trained on images with masks (objective segmentation) predicts the share of the pixels of each
    class. A folder as --out then gets a mask for each image: a PNG with a palette, of the image's size. With --tiles
    the outputs of the tiles are put together.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub, or a program that
            `vitrail export` wrote for ONNX Runtime or OpenVINO, which then computes. Of several, before the images, the
            mean of the calibrated probabilities is taken, or of the numbers. In Python they are a list.
        images: Files, folders and patterns such as 'photos/**/*.jpg', any number of them; /dev/stdin for a pipe. In
            Python also pictures of Pillow, uint8 arrays [H, W, 3] and tensors [3, H, W], many in one array, and lists.
        top: Number of classes to name for each image.
        strict: Exit with 1 if a file could not be read, and not only if none could. The results for all other files are
            still written.
        out: Write to this .csv or .jsonl file, one image after another, or to a folder (default: CSV on stdout).
        reject: Smallest probability of the best class. An image with a lower one is "none of these" (default: every
            image gets a class).
        calibrate: Divide the network's outputs by the temperature of its card, if it has one.
        merge: With a folder as --out: write all results to this .parquet file, too, once they are complete.
        ray: With a folder as --out: compute with the workers of this Ray cluster: 'auto' or ray://HOST:10001. Without
            a value, a cluster is started on this machine.
        tiles: Side of a tile in pixels of the image (default: images are predicted as a whole).
        overlap: With --tiles: number of pixels by which neighbouring tiles overlap.
    """
    arguments = dict(locals())
    check_tiles(tiles, overlap, merge=merge, ray=ray)
    compute = Compute(None, batch_size, workers, device, precision, engine)
    if not images:
        raise UsageError(
            "no images are given. Give files, folders or patterns: vitrail predict "
            f"{' '.join(map(str, each_network(model)))} FILE|FOLDER|PATTERN ..."
        )
    _check_kind(out, merge, ray)
    paths, held = paths_or_images(images, out=out, tiles=tiles, **reading)
    from vitrail.data.images.tiles import tiling
    from vitrail.data.item import Findings
    from vitrail.data.sources.files import find_images
    from vitrail.data.sources.indexed import GivenImages
    from vitrail.tasks.predict import predict_files

    findings = Findings("files")
    images_of_data_set = out is not None and is_bulk(out) and tiles is None
    data = read_settings(reading, next(iter(paths), None), used=READ if images_of_data_set else ("include", "exclude"))
    _check_file(out)
    network, folder = load_together(model, compute, calibrate=calibrate), None
    if network.card.task == "segmentation":
        paths = tuple(_photographs(path) for path in paths)
    if not images_of_data_set and reading:
        paths = tuple(find_images(paths, data.columns.selection, findings))
    rejection = None if reject is None else explained_rejection(network.card, said_of_networks(model), reject)
    if network.card.task == "segmentation" and is_bulk(out):
        chosen = paths if held else list(find_images(paths, data.columns.selection, findings))
        return _masks(network, chosen, Path(str(out)), compute, tiles, overlap, strict, held=held, merge=merge, ray=ray)
    if tiles is not None and out is not None and is_bulk(out):
        folder = check_folder(out, paths)
        out = folder / TABLE
        _check_file(out)
    job = None
    if out is not None and is_bulk(out):
        changed = {"reject": (reject, None), "temperature": (temperature_of(network), 1)}
        about = {name: value for name, (value, usual) in changed.items() if value != usual}
        job = open_job("predict", model, paths, out, data, network.card, top=top, precision=precision, **about)
    predictions_of = compute.predictor(network, images=lambda: job.images if job else len(list(find_images(paths))))
    if network is predictions_of:  # an exported program has the precision of its export
        compute = replace(compute, precision="float32")
    if job is not None:
        columns = predicted_columns(network.card, predictions_of, top, compute, reject)
        return run_job(job, columns, merge, strict=strict, on=OnWorkers(predict, arguments, "images", ray))
    cut = None if tiles is None else tiling(tiles, overlap, network.card.preprocess.image_size)
    subject = GivenImages(held, bands=network.card.preprocess.bands is not None) if held else paths
    rows = partial(predict_files, network, subject, predict=predictions_of, precision=compute.precision, top=top)
    rows = partial(rows, batch_size=batch_size, workers=compute.threads(), reject=reject, tiles=cut, findings=findings)
    if out is None:
        collected = _collected(rows(), cut is not None, raw, rejection, strict)
        warn_of_ignored(findings)
        return collected
    key: list[Any] = [fingerprint_of(model), top, precision, reject, temperature_of(network)]
    key += [tiles, overlap] if cut else []
    maps = TileMaps(paths, cut, network.card.preprocess) if folder and cut else None
    written = _write(Path(out), key, files_of_rows(paths, cut, network.card.preprocess), rows, raw, maps)
    warn_of_ignored(findings)
    drawn = maps.draw(folder) if maps and folder else []
    code = _exit_code(written, strict)
    return Predictions([], written.unreadable, str(written), str(out), rejection=rejection, exit_code=code, maps=drawn)


def _photographs(path: str | Path) -> str | Path:
    """Return a path, or for a folder of images and their masks that of the images, which is logged."""
    from vitrail.data.masks import are_masked

    root = Path(path).expanduser()
    if not are_masked(root):
        return path
    log.warning("%s holds images and their masks: those in %s are predicted", path, root / "images")
    return root / "images"


def _masks(
    network: Any,
    paths: Sequence[str | Path],
    out: Path,
    compute: Compute,
    tiles: int | None,
    overlap: int,
    strict: bool,
    **others: Any,
) -> Predictions:
    """Write a mask for each image into the folder `out`."""
    from vitrail.data.images.tiles import tiling
    from vitrail.data.sources.files import find_images
    from vitrail.verbs.masks import write_masks

    if wrong := [name for name, given in others.items() if given]:
        what = "images in Python have no names of files" if wrong[0] == "held" else f"{wrong[0]} is for tables"
        raise UsageError(f"masks of images are written to {out}: {what}")
    cut = None if tiles is None else tiling(tiles, overlap, network.card.preprocess.image_size)
    predict = compute.predictor(network, images=lambda: sum(1 for _ in find_images(paths)))
    written = write_masks(network, paths, out, predict, compute, cut)
    return Predictions([], written.unreadable, str(written), str(out), exit_code=_exit_code(written, strict))


def _check_file(out: str | Path | None) -> None:
    """Raise UsageError if a file of predictions, or of the unreadable images beside it, cannot be written."""
    from vitrail.tasks.prediction import errors_file

    if out is not None and not is_bulk(out):
        for file in (Path(out), errors_file(Path(out))):
            check_writable(file, UsageError)


def _check_kind(out: str | Path | None, merge: str | Path | None, ray: str | None) -> None:
    """Raise UsageError for a file of an unknown kind, and for settings of a folder of results without one."""
    if is_bulk(out):
        return
    if out is not None and Path(out).suffix.lower() not in KINDS:
        raise UsageError(f"{out}: write predictions to a file that ends in {', '.join(KINDS)}, or to a folder")
    if wrong := "merge" * (merge is not None) or "ray" * (ray is not None):
        raise UsageError(f"{wrong} is for a folder of results (--out), not for {out or 'the terminal'}")


def _collected(rows: Iterator[Row], tiles: bool, raw: bool, rejection: Rejection | None, strict: bool) -> Predictions:
    """Return all predictions, and log what could not be read."""
    from vitrail.tasks.prediction import Prediction, Summary, Unreadable

    found = list(rows)
    bad = [row for row in found if isinstance(row, Unreadable)]
    for row in bad:
        log.warning("skipped %s: %s", as_text(row.path), as_text(row.message))
    good = [row for row in found if isinstance(row, Prediction)]
    summary = Summary(len(good), bad, what="tile" if tiles else "image")
    return Predictions(good, bad, str(summary), raw=raw, rejection=rejection, exit_code=_exit_code(summary, strict))


def _exit_code(summary: Summary, strict: bool) -> int:
    """Return 1 if the network failed on an image, if no file could be read, or with `strict` if one could not."""
    from vitrail.data.image_names import bad_kinds
    from vitrail.evaluation.classify import NOT_FINITE

    bad = summary.unreadable
    if not summary.predicted:
        log.warning("nothing was predicted: %s", bad_kinds((row.path, row.reason) for row in bad))
    return int(bool(bad) and (strict or not summary.predicted or any(row.reason == NOT_FINITE for row in bad)))


def _write(
    out: Path,
    key: list[Any],
    files: Iterable[Path],
    rows: Callable[..., Iterator[Row]],
    raw: bool,
    maps: TileMaps | None = None,
) -> Summary:
    """Write predictions to `out`, continuing after the rows of an interrupted call with the same `key`.

    files: The file of each row. `maps` sees all rows.
    """
    from vitrail.tasks.prediction import PartialPredictions, write_predictions

    earlier = PartialPredictions(out, key, files)
    if earlier.finished:
        log.info("continuing after %d results of an earlier call", earlier.finished)
    with writing(out, UsageError, advice="The same command continues from here"):
        found = earlier.rows(lambda finished: rows(skip=finished))
        found = found if maps is None else maps.seen(found)
        written = write_predictions(found, out, kind=KINDS[out.suffix.lower()], raw=raw)
    earlier.close()
    return written


def show(result: Predictions | BulkProgress) -> str:
    """Return the result as CSV, or where it was written."""
    if isinstance(result, BulkProgress):
        return bulk.show(result)
    from vitrail.tasks.prediction import write_predictions

    if result.out is not None:
        return f"{result.summary}; written to {listing([result.out, *result.maps], 5, quoted=False)}"
    text = io.StringIO()
    write_predictions(result.rows, text, raw=result.raw)
    return text.getvalue().rstrip("\n")


def as_json(result: Predictions | BulkProgress) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, BulkProgress):
        return bulk.as_json(result)
    rows = [row.as_json() for row in result.rows]
    bad = [row._asdict() for row in result.unreadable]
    found = None if result.rejection is None else result.rejection._asdict()
    about: dict[str, Any] = {} if found is None else {"rejection": found}
    about |= {"maps": result.maps} if result.maps else {}
    return {"images": rows, "unreadable": bad, "summary": result.summary, "out": result.out, **about}
