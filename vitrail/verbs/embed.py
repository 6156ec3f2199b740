"""`vitrail embed`: the features of images, in a file."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import DataError, UsageError
from vitrail.verbs.network import bulk
from vitrail.verbs.network.bulk import Answered, features_of, is_bulk, open_job, run
from vitrail.verbs.network.features import Embedder, Prepare, open_splits

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.item import Listed


@dataclass(frozen=True)
class Embedded:
    """What was written where."""

    out: str
    images: dict[str, int]
    """Images by split; by "" where there are no splits."""
    width: int
    """Features of each."""
    unreadable: list[tuple[str, str]]
    """(image, reason)."""


def embed(
    model: str | Path,
    *paths: str | Path,
    out: str | Path | None = None,
    merge: str | Path | None = None,
    split: str | None = None,
    prepare: Prepare = "model",
    image_size: int | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
) -> Embedded | Answered:
    """Write the features of images, which the network's classifier reads, to an .npz file: one vector per image.

    For a data set with splits, the file holds train_features, train_labels, train_ids, test_features, test_labels,
    test_ids and class_names, as `vitrail probe --features` reads them. For files, folders and patterns it holds
    features and ids, which are the paths. Unreadable files are skipped and listed.

    With a folder as --out, one Parquet file is written for each shard of the data set, which may have any size. The
    command may be killed and repeated, and several processes (torchrun, a Slurm array) share the shards.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        paths: Image files, folders and patterns such as 'photos/**/*.jpg', any number of them; or one data set.
        out: The .npz file to write, or a folder.
        merge: With a folder as --out: write all features to this .parquet file, too, once they are complete.
        split: Split of the data set that becomes test (default: test, else validation).
        prepare: How images are prepared: 'model' resizes and crops as in evaluation, 'protocol' as `vitrail probe
            fewshot` does.
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        batch_size: Number of images per batch.
        workers: Number of threads that decode images (default: from the machine).
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
        precision: Number format of the computation. 'auto' chooses bf16 if the device is fast at it.
    """
    if not paths or out is None:
        raise UsageError(f"vitrail embed {model} FILE|FOLDER|PATTERN|DATA ... --out FEATURES.npz")
    if not is_bulk(out) and Path(out).suffix.lower() != ".npz":
        raise UsageError(f"{out}: features are written to a file that ends in .npz, or to a folder")
    from vitrail.evaluation.feature_file import save_features

    how = dict(
        prepare=prepare,
        image_size=image_size,
        batch_size=batch_size,
        workers=workers,
        device=device,
        precision=precision,
    )
    if is_bulk(out):
        if split is not None:
            raise UsageError(f"split is {split!r}: a folder takes the answers for all splits")
        asked = {"prepare": prepare, "image_size": image_size, "precision": precision}
        job = open_job("embed", model, paths, out, **asked)
        return run(job, features_of(Embedder(model, **how)), merge)  # type: ignore[arg-type]
    if merge is not None:
        raise UsageError(f"merge is for a folder of answers, and {out} is one file already")
    sources = _sources(model, paths, split)
    embedder = Embedder(model, **how)  # type: ignore[arg-type]
    arrays: dict[str, np.ndarray] = {}
    images: dict[str, int] = {}
    bad: list[tuple[str, str]] = []
    for name, source in sources.items():
        added = _arrays(embedder, source, f"{name}_" if name else "", bad)
        arrays |= added
        images[name] = len(added[f"{name}_ids" if name else "ids"])
    save_features(out, arrays)
    width = next(array.shape[1] for name, array in arrays.items() if name.endswith("features"))
    return Embedded(str(out), images, width, bad)


def _arrays(embedder: Embedder, source: Listed, prefix: str, bad: list[tuple[str, str]]) -> dict[str, np.ndarray]:
    """What the file holds of one split; `bad` is added to."""
    import numpy as np

    found = embedder(source)
    bad += found.bad
    arrays = {f"{prefix}features": found.features}
    if source.class_names:
        arrays |= {f"{prefix}labels": found.labels, "class_names": np.array(source.class_names, dtype=np.str_)}
    arrays[f"{prefix}ids"] = np.array([source.id(int(i)) for i in found.index], dtype=np.str_)
    return arrays


def _sources(model: str | Path, paths: tuple[str | Path, ...], split: str | None) -> dict[str, Listed]:
    """The images: of a data set with splits "train" and "test", else one source, called ""."""
    from vitrail.data.sources.folder import Files
    from vitrail.evaluation.predict import find_images

    found = _data_set(paths[0]) if len(paths) == 1 else None
    if found is not None and len(found) > 1:
        splits = open_splits(model, paths[0], split)
        return {"train": splits.train, "test": splits.test}
    if split is not None:
        raise UsageError(f"split is {split!r}, and {paths[0]} has no splits: leave it out")
    return {"": Files(find_images(paths))} if found is None else found


def _data_set(path: str | Path) -> dict[str, Listed] | None:
    """The splits of a data set; None for image files, and for folders of them without splits."""
    from vitrail.data.sources.folder import is_image_name
    from vitrail.data.sources.open import find
    from vitrail.evaluation.predict import find_images

    place = Path(path).expanduser()
    if is_image_name(place.name) or (glob.has_magic(str(path)) and not place.exists()):
        return None
    try:
        found = find(str(path))
    except DataError:
        if place.is_dir() and next(find_images([place]), None) is not None:
            return None
        raise
    if len(found.splits) > 1:
        return found.splits
    if found.findings.kind == "folder" and "" in found.splits:
        return None
    return {"": next(iter(found.splits.values()))}


def show(result: Embedded | Answered) -> str:
    """Return the result as text for a terminal."""
    if isinstance(result, Answered):
        return bulk.show(result)
    counts = ", ".join(f"{count:,} {name} images".replace("  ", " ") for name, count in result.images.items())
    lines = [f"{counts} of {result.width} features each: {result.out}"]
    return "\n".join(lines + [f"unreadable image, skipped: {id_} ({reason})" for id_, reason in result.unreadable])


def as_json(result: Embedded | Answered) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, Answered):
        return bulk.as_json(result)
    images = {name or "all": count for name, count in result.images.items()}
    unreadable = [{"image": id_, "reason": reason} for id_, reason in result.unreadable]
    return {"out": result.out, "images": images, "width": result.width, "unreadable": unreadable}
