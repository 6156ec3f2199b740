"""`vitrail probe segment`: measure the tokens of a frozen network by the classes of pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.device import Precision
from vitrail.errors import DataError, UsageError
from vitrail.files import check_writable, refuse_other_files, replacing_text, result_json
from vitrail.ranges import Count, InputSize, Range, Seed, Threads, checked
from vitrail.terminal import ProgressLine, page, table, unreadable_json, unreadable_lines
from vitrail.verbs.features import Embedder, open_train_and_test
from vitrail.verbs.flags.compute import Compute
from vitrail.version import need
from vitrail.words import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from vitrail.data.item import IndexedSource
    from vitrail.transfer.segmentation import EmbedTokens, ProbedPixels

FILES = ("result.json", "classes.csv", "predictions.png")
SHOWN = 40
"""Maximum number of classes in the table on a terminal; --json and classes.csv have all of them."""


@one_line
@dataclass(frozen=True)
class SegmentationProbe:
    """The result of a segmentation probe, and whose tokens it measured."""

    subject: str
    """The network and its images."""
    layers: list[int]
    """Numbers of the layers whose tokens were used, counted from 0."""
    results: ProbedPixels
    out: str | None
    """The folder of the files that were written."""


@checked
def segment(
    model: str | Path,
    data: str | Path,
    *,
    layers: tuple[int, ...] = (),
    ignore: tuple[Annotated[int, Range(0, 255)], ...] = (255,),
    steps: Count = 1000,
    seed: Seed = 0,
    group: str | None = None,
    out: str | Path | None = None,
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
) -> SegmentationProbe:
    """Fit a linear layer from frozen patch tokens to the class of each pixel, and measure the mean IoU (DINOv2).

    DATA holds images/NAME.jpg and masks/NAME.png, or images/train, images/val, masks/train and masks/val. A mask is a
    PNG of the image's size whose values, grey or indices of a palette, are the numbers of the classes. Names of the
    classes 0, 1, ... may stand in classes.txt, one on each line. Images are resized to the network's square input, and
    scores count the pixels of the masks at their own size.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The folder of images and masks. Measured are the test images, else the validation images, else a tenth
            that is held out.
        layers: Numbers of the layers whose tokens are used together, counted from 0; negative numbers count from the
            end (default: the last layer).
        ignore: Values in the masks whose pixels do not count. Of ADE20K, it is 0.
        steps: Number of training steps of the linear layer, each with 16 images.
        seed: Seed of the held-out images, the first weights and the order of the images.
        group: What says which images belong together, as `--data.group` does in training: 'folder', 'name: PATTERN' or
            'table: FILE ID -> COLUMN'. Whole groups are held out (default: each image is on its own).
        out: Write the scores (result.json, classes.csv) and a picture of predictions to this folder.
        batch_size: Number of images per batch while tokens are computed.
    """
    compute = Compute(image_size, batch_size, workers, device, precision)
    folder = None if out is None else _folder(out, data)
    from vitrail.data.labels.masks import Masks
    from vitrail.data.masks import EXPECTED
    from vitrail.transfer.segmentation import probe_segmentation as measure

    reading = {"ignore": list(ignore)} | ({} if group is None else {"group": group})
    images = open_train_and_test(model, data, None, reading=reading, seed=seed)
    if not isinstance(images.train.labels, Masks):
        raise DataError(f"{data} holds no images with masks. {EXPECTED}")
    embedder = Embedder(model, compute, whole=True)
    numbers = embedder.layers(layers or 1)
    found = measure(
        images.train,
        images.test,
        _tokens(embedder, numbers),
        embedder.size,
        steps=steps,
        seed=seed,
        device=compute.place(),
        progress=ProgressLine("step"),
    )
    result = SegmentationProbe(f"{model} on {images.name}", numbers, found, None if folder is None else str(folder))
    if folder is not None:
        _write(folder, result)
    return result


def _folder(out: str | Path, data: str | Path) -> Path:
    """Return the folder to write to. Raises UsageError and DataError if it cannot be used."""
    from vitrail.data.cache import refuse_within

    folder = refuse_within(out, data)
    refuse_other_files(folder, lambda name: name in FILES, UsageError)
    need("matplotlib")
    check_writable(folder, DataError, folder=True)
    return folder


def _tokens(embedder: Embedder, layers: list[int]) -> EmbedTokens:
    """Return the function that computes the tokens of images, with the features of several layers after each other."""
    import numpy as np

    ask = embedder.tokens(layers)
    grids = {array.shape[1:3] for name, array in ask(embedder.blank()).items() if name.startswith("tokens_")}
    if len(grids) > 1:
        sizes = ", ".join(f"{rows} x {columns}" for rows, columns in sorted(grids))
        raise UsageError(f"the layers {layers} have different grids ({sizes}). Choose --layers of one grid")

    def embed(source: IndexedSource, receive: Callable[[np.ndarray], None]) -> tuple[np.ndarray, list[tuple[str, str]]]:
        def joined(found: dict[str, np.ndarray]) -> None:
            receive(np.concatenate([found[f"tokens_{layer}"] for layer in layers], axis=-1))

        return embedder.each_batch(source, ask, joined)

    return embed


def _write(folder: Path, result: SegmentationProbe) -> None:
    """Write the scores and the picture."""
    from vitrail.inspection.figures.class_maps import draw_segmentation
    from vitrail.inspection.figures.page import Folder

    scores = result.results.scores
    with replacing_text(folder / "result.json", DataError) as stream:
        stream.write(result_json(as_json(result), indent=1) + "\n")
    files = Folder(folder)
    pixels = scores.confusion.sum(axis=1)
    rows = zip(result.results.values, scores.class_names, pixels.tolist(), scores.iou.tolist(), strict=True)
    cells = ((*row[:3], f"{row[3]:.4f}" if row[3] == row[3] else "") for row in rows)
    files.table("classes", ("value", "class", "pixels", "iou"), cells)
    shown = [(one.name, one.image, one.truth, one.predicted) for one in result.results.examples]
    title = f"{result.subject}: mean IoU {scores.miou:.1%}"
    files.figure("predictions", draw_segmentation(title, scores.class_names, shown))


def show(result: SegmentationProbe) -> Any:
    """Return the result as text and a table for a terminal."""
    found, scores = result.results, result.results.scores
    head = (
        f"{result.subject}: {len(scores.class_names)} classes, {found.width} features of "
        f"{found.grid[0]} x {found.grid[1]} tokens, {found.validation_images:,} validation images"
    )
    measured = (
        f"mean IoU {scores.miou:.2%}, pixel accuracy {scores.pixel_accuracy:.2%}; the most frequent class has "
        f"{scores.largest_share:.2%} of the pixels"
    )
    pixels = scores.confusion.sum(axis=1)
    rows = [
        (name, f"{share:.2%}" if share == share else "-", f"{count:,}")
        for name, share, count in zip(scores.class_names, scores.iou.tolist(), pixels.tolist(), strict=True)
    ]
    more = [f"{len(rows) - SHOWN} more classes: --json or --out"] if len(rows) > SHOWN else []
    written = [f"written: {result.out}"] if result.out else []
    return page(
        head,
        measured,
        table(("class", "IoU", "pixels"), rows[:SHOWN]),
        [*more, *written, *unreadable_lines(found.unreadable)],
    )


def as_json(result: SegmentationProbe) -> Any:
    """Return the result as JSON values; IoU is null for a class that is neither in the masks nor predicted."""
    found, scores = result.results, result.results.scores
    iou = {
        name: None if share != share else share
        for name, share in zip(scores.class_names, scores.iou.tolist(), strict=True)
    }
    return {
        "subject": result.subject,
        "layers": result.layers,
        "width": found.width,
        "grid": list(found.grid),
        "train_images": found.train_images,
        "validation_images": found.validation_images,
        "miou": scores.miou,
        "pixel_accuracy": scores.pixel_accuracy,
        "largest_share": scores.largest_share,
        "iou": iou,
        "confusion": scores.confusion.tolist(),
        "unreadable": unreadable_json(found.unreadable),
        "out": result.out,
    }
