"""`vitrail embed`: write the features of images to a file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args, overload

from vitrail.device import Precision
from vitrail.errors import DataError, UsageError
from vitrail.exports.kinds import EngineName, find_program
from vitrail.files import check_writable
from vitrail.ranges import Count, InputSize, Side, Threads, Whole, checked
from vitrail.terminal import unreadable_json, unreadable_lines
from vitrail.verbs import bulk
from vitrail.verbs.bulk import BulkProgress, OnWorkers, feature_columns, is_bulk, open_job, run_job, token_columns
from vitrail.verbs.features import Embedder, Prepare, TokenType, open_images, paths_or_images
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords, ImagesLike
from vitrail.verbs.flags.reading import read_settings
from vitrail.verbs.tiles import check_tiles
from vitrail.words import one_line

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.images.tiles import Tiling
    from vitrail.data.item import IndexedSource
    from vitrail.evaluation.feature_files import GrowingArrays
    from vitrail.evaluation.features import Features
    from vitrail.verbs.features import Tokens

ArrayFormat = Literal["parquet", "npy"]


@one_line
@dataclass(frozen=True)
class WrittenFeatures:
    """The file of features that was written."""

    out: str
    images: dict[str, int]
    """Number of images of each split; of the split "" if the images have no splits."""
    width: int
    """Number of features of each image, or with --tokens of each token; the largest if layers differ."""
    unreadable: list[tuple[str, str]]
    """(image, reason) of each image that could not be read."""
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """With --tokens: name of each array of tokens -> its shape."""
    what: str = "images"
    """What was computed: images or tiles."""


@overload
def embed(
    model: str | Path,
    *paths: ImagesLike,
    out: str | Path,
    merge: str | Path | None = None,
    ray: str | None = None,
    split: str | None = None,
    tokens: bool = False,
    layers: tuple[int, ...] = (),
    norm: bool = True,
    dtype: TokenType = "float32",
    format: ArrayFormat = "parquet",
    tiles: Side | None = None,
    overlap: Whole = 0,
    prepare: Prepare = "model",
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[DataKeywords],
) -> WrittenFeatures | BulkProgress: ...
@overload
def embed(
    model: str | Path,
    *paths: ImagesLike,
    out: None = None,
    prepare: Prepare = "model",
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
) -> Features: ...
@checked
def embed(
    model: str | Path,
    *paths: ImagesLike,
    out: str | Path | None = None,
    merge: str | Path | None = None,
    ray: str | None = None,
    split: str | None = None,
    tokens: bool = False,
    layers: tuple[int, ...] = (),
    norm: bool = True,
    dtype: TokenType = "float32",
    format: ArrayFormat = "parquet",
    tiles: Side | None = None,
    overlap: Whole = 0,
    prepare: Prepare = "model",
    image_size: InputSize | None = None,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    engine: EngineName = "auto",
    **reading: Unpack[DataKeywords],
) -> WrittenFeatures | BulkProgress | Features:
    """Write the features of images, which the network's classifier reads, to an .npz file: one vector per image.

    In Python the features of images in memory are returned, `vitrail.results.Features`, and no file is written.

    For a data set with splits, the file holds train_features, train_labels, train_ids, test_features, test_labels,
    test_ids and class_names, as `vitrail probe --features` reads them; further splits are left out. For files, folders
    and patterns it holds features and ids, which are the paths. Unreadable files are skipped and listed.

    With --tokens, tokens_LAYER stands in place of features: [images, rows, columns, width], the tokens of the grid
    after that layer and the final LayerNorm. prefix_LAYER [images, tokens, width] are the class token, distillation
    token and registers, if the network has some. The values are written while they are computed, so a file may be
    larger than memory. With --format npy the folder --out gets one .npy file for each array, with the names that the
    arrays have in an .npz; numpy.load(FILE, mmap_mode="r") opens such a file without reading it into memory.

    With a folder as --out, one Parquet file is written for each shard of the data set, which may have any size, with
    columns of the same names: features, or tokens_LAYER and prefix_LAYER as lists of lists. The command may be killed
    and repeated, and several processes (torchrun, a Slurm array) share the shards.

    With --tiles each image is cut into tiles, which are resized to the network's input without a crop, and each tile
    gets features. TIFF files of any size are read in parts, in bounded memory. The .npz file also holds boxes, int64
    [tiles, 4]: x, y, width and height of each tile in the image; ids are PATH#xywh=x,y,width,height.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub, or a program that
            `vitrail export --output features` wrote for ONNX Runtime or OpenVINO.
        paths: Image files, folders and patterns such as 'photos/**/*.jpg', any number of them; or one data set. In
            Python also pictures of Pillow, uint8 arrays [H, W, 3] and tensors [3, H, W], many in one array, and lists.
        out: The .npz file to write, or a folder.
        merge: With a folder as --out: write all features to this .parquet file, too, once they are complete.
        ray: With a folder as --out: compute with the workers of this Ray cluster: 'auto' or ray://HOST:10001. Without
            a value, a cluster is started on this machine.
        split: Split of the data set that becomes test (default: test, else validation).
        tokens: Write the features of each token instead of one vector per image.
        layers: With --tokens: numbers of the layers, counted from 0; negative numbers count from the end (default: the
            last layer). Layer 0 of a ResNet is its root, and its stages follow.
        norm: With --tokens: apply the final LayerNorm to the tokens of every layer.
        dtype: With --tokens: number type of the tokens. 'float16' takes half the space.
        format: Kind of the files in a folder as --out. 'npy' needs --tokens.
        tiles: Side of a tile in pixels of the image (default: one vector for the whole image).
        overlap: With --tiles: number of pixels by which neighbouring tiles overlap.
        prepare: How images are prepared: 'model' resizes and crops as in evaluation, 'protocol' as `vitrail probe
            fewshot` does.
    """
    arguments = dict(locals())
    check_tiles(tiles, overlap, merge=merge, ray=ray, split=split, prepare=prepare == "protocol")
    compute = Compute(image_size, batch_size, workers, device, precision, engine)
    made = cache(partial(Embedder, model, compute, prepare))  # after the images, whose errors come sooner then
    others: dict[str, Any] = dict(out=out, tiles=tiles, split=split, merge=merge, tokens=tokens or None)
    files, held = paths_or_images(paths, **others, **reading)
    if held:
        return made()(made().source(held))
    if not files or out is None:
        raise UsageError(
            f"embed needs images and a file to write: vitrail embed {model} FILE|FOLDER|PATTERN|DATA ... --out "
            "FEATURES.npz"
        )
    if format not in get_args(ArrayFormat):
        raise UsageError(f"format is {format!r}. Valid: {', '.join(get_args(ArrayFormat))}")
    if tokens:
        if engine not in ("auto", "torch"):
            raise UsageError(f"the engine {engine} computes no tokens: remove --engine")
        if find_program(model) is not None:
            raise UsageError(f"{model} is an exported program, which computes no tokens. Give the model itself")
    elif layers or not norm or dtype != "float32" or format != "parquet":
        raise UsageError("--layers, --no-norm, --dtype and --format choose how --tokens are written: give --tokens too")
    asked: dict[str, Any] = {"layers": layers or 1, "norm": norm, "dtype": dtype} if tokens else {}
    if format != "npy" and tiles is None and is_bulk(out):
        if split is not None:
            raise UsageError(f"--split {split} is not valid with a folder as --out, which gets features of all splits")
        from vitrail.data.cache import refuse_within

        refuse_within(out, *files)  # before a network is loaded
        embedder = made()
        settings = {"prepare": prepare, "image_size": compute.image_size, "precision": compute.precision, **asked}
        if tokens:
            settings["layers"] = embedder.layers(asked["layers"])
        job = open_job("embed", model, files, out, read_settings(reading, files[0]), embedder.network.card, **settings)
        embedder.images = job.images
        columns = token_columns(embedder, embedder.tokens(**asked)) if tokens else feature_columns(embedder)
        return run_job(job, columns, merge, on=OnWorkers(embed, arguments, "paths", ray))
    if ray is not None:
        raise UsageError(f"ray is for a folder of Parquet files as --out, not for {out}")
    target = _target(Path(out), files, format, merge)
    card = None if tokens else lambda: made().network.card
    sources = {} if tiles else open_images(model, files, split, reading, card)
    embedder = made()
    embedder.images = sum(map(len, sources.values()))
    compute_tokens = embedder.tokens(**asked) if tokens else None
    if tiles is not None:
        from vitrail.data.images.tiles import tiling
        from vitrail.data.sources.files import find_images

        if reading:
            data = read_settings(reading, used=("include", "exclude"))
            files = tuple(find_images(files, data.columns.selection))
        cut = tiling(tiles, overlap, embedder.network.card.preprocess.image_size)
        return _write_tiles(embedder, files, cut, target, format, compute_tokens)
    if compute_tokens is None:
        return _write_features(embedder, sources, target)
    return _write_tokens(compute_tokens, embedder, sources, target, format)


def _target(out: Path, paths: tuple[str | Path, ...], format: ArrayFormat, merge: str | Path | None) -> Path:
    """Return the file or the folder that is written as a whole. Raises UsageError and DataError if it cannot be."""
    from vitrail.data.cache import refuse_within
    from vitrail.files import refuse_other_files

    if merge is not None:
        raise UsageError(
            f"--merge joins the Parquet files of a folder as --out. Remove it: {out} is written as a whole"
        )
    if format == "npy":
        if out.suffix and not out.is_dir():
            raise UsageError(f"{out}: --format npy writes a folder of .npy files. Give a folder, a name without suffix")
        refuse_within(out, *paths)
        refuse_other_files(out, lambda _: False, UsageError)
        check_writable(out, DataError, folder=True)
        return out
    if out.suffix.lower() != ".npz":
        raise UsageError(f"{out}: features are written to a file that ends in .npz, or to a folder")
    check_writable(out, DataError)
    return out


def _write_features(embedder: Embedder, sources: dict[str, IndexedSource], out: Path) -> WrittenFeatures:
    """Compute all features, then write them."""
    from vitrail.evaluation.feature_files import save_features

    arrays: dict[str, np.ndarray] = {}
    images: dict[str, int] = {}
    unreadable: list[tuple[str, str]] = []
    for name, source in sources.items():
        prefix = f"{name}_" if name else ""
        found = embedder(source)
        arrays |= {f"{prefix}features": found.features} | _described(source, prefix, found.index, found.labels)
        images[name] = len(found)
        unreadable += found.bad
    save_features(out, arrays | _network(embedder))
    return WrittenFeatures(str(out), images, embedder.width, unreadable)


def _write_tokens(
    compute: Tokens, embedder: Embedder, sources: dict[str, IndexedSource], out: Path, format: ArrayFormat
) -> WrittenFeatures:
    """Write the tokens of images batch by batch, to an .npz file or a folder of .npy files."""
    from vitrail.data.labels.sets import LabelSets, one_label

    described: dict[str, np.ndarray] = {}
    images: dict[str, int] = {}
    unreadable: list[tuple[str, str]] = []
    with _growing(out, format) as arrays:
        for name, source in sources.items():
            prefix = f"{name}_" if name else ""
            index, bad = embedder.each_batch(source, compute, partial(arrays.append, prefix))
            labels = source.labels[index]
            marks = labels.marks() if isinstance(labels, LabelSets) else one_label(labels, "embed --tokens")
            described |= _described(source, prefix, index, marks)
            images[name] = len(index)
            unreadable += bad
        arrays.save(described)
    width = max(shape[-1] for shape in arrays.shapes.values())
    return WrittenFeatures(str(out), images, width, unreadable, arrays.shapes)


def _write_tiles(
    embedder: Embedder,
    paths: tuple[str | Path, ...],
    cut: Tiling,
    out: Path,
    format: ArrayFormat,
    tokens: Tokens | None,
) -> WrittenFeatures:
    """Write the features, or with `tokens` the tokens, of the tiles of images batch by batch."""
    import numpy as np

    with _growing(out, format) as arrays:
        receive = partial(arrays.append, "")
        places, bad = embedder.each_tile(paths, cut, tokens or embedder.features, receive)
        ids = [f"{path}#xywh={','.join(map(str, box))}" for path, box in places]
        about = {"ids": np.array(ids, np.str_), "boxes": np.array([box for _, box in places], np.int64)}
        arrays.save(about if tokens else about | _network(embedder))
    width = max(shape[-1] for shape in arrays.shapes.values())
    return WrittenFeatures(str(out), {"": len(places)}, width, bad, arrays.shapes if tokens else {}, "tiles")


def _network(embedder: Embedder) -> dict[str, np.ndarray]:
    """Return the arrays that say which network the features are from."""
    import numpy as np

    from vitrail.evaluation.feature_files import BLANK, NETWORK

    return {BLANK: embedder.blank_features, NETWORK: np.array(embedder.identity, np.str_)}


def _growing(out: Path, format: ArrayFormat) -> AbstractContextManager[GrowingArrays]:
    """Return the context of arrays that become a folder of .npy files, or an .npz file."""
    from vitrail.evaluation.feature_files import growing_npy, growing_npz

    return growing_npy(out) if format == "npy" else growing_npz(out)


def _described(source: IndexedSource, prefix: str, index: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays that say which images were computed; their names start with `prefix`."""
    import numpy as np

    arrays = {f"{prefix}ids": np.array([source.id(int(i)) for i in index], dtype=np.str_)}
    if source.class_names:
        arrays |= {f"{prefix}labels": labels, "class_names": np.array(source.class_names, dtype=np.str_)}
    return arrays


def show(result: WrittenFeatures | BulkProgress) -> str:
    """Return the result as text for a terminal."""
    if isinstance(result, BulkProgress):
        return bulk.show(result)
    counts = ", ".join(f"{count:,} {name} {result.what}".replace("  ", " ") for name, count in result.images.items())
    each = f"{counts} of {result.width} features each" if not result.tokens else f"tokens of {counts}"
    arrays = [f"  {name} [{', '.join(f'{side:,}' for side in shape)}]" for name, shape in result.tokens.items()]
    lines = [f"{each}: {result.out}", *arrays, *unreadable_lines(result.unreadable)]
    return "\n".join(lines)


def as_json(result: WrittenFeatures | BulkProgress) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, BulkProgress):
        return bulk.as_json(result)
    images = {name or "all": count for name, count in result.images.items()}
    unreadable = unreadable_json(result.unreadable)
    tokens = {"tokens": {name: list(shape) for name, shape in result.tokens.items()}} if result.tokens else {}
    return {"out": result.out, "images": images, "width": result.width, **tokens, "unreadable": unreadable}
