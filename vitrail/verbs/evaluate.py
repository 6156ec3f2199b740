"""`vitrail evaluate`: how good is this network on these images?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config_yaml import from_yaml
from vitrail.errors import UsageError
from vitrail.train.run import Run
from vitrail.verbs.classifier import load_classifier, output_names

if TYPE_CHECKING:
    from vitrail.data.item import Listed
    from vitrail.evaluate.classify import Classification

WORST = 15
"""Classes and confusions shown on a terminal; --json has them all."""


@dataclass(frozen=True)
class Evaluation:
    """A network's answers on a data set, and which they were."""

    model: str
    data: str
    found: Classification


def evaluate(
    model: str | Path,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str | None = None,
    precision: Literal["auto", "bf16", "float32"] = "auto",
    out: str | Path | None = None,
) -> Evaluation:
    """Measure a trained network: top-1, top-5, every class, and what is taken for what.

    Every image counts exactly once; classes are matched by name. Images that cannot be read are listed and are
    in no number.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        data: The images, as for `vitrail train`; left out: the run's own test images, else its validation images.
        split: Which split of the images; left out: test, else validation, else all there is.
        batch_size: Images at once; it does not change the numbers.
        workers: Threads that decode; left out: from the machine.
        device: cpu, cuda, cuda:1 or mps; left out: the best there is.
        precision: auto, bf16 or float32.
        out: Also write the answer to every image to this .npz file.
    """
    from vitrail.data.loader import Loader
    from vitrail.data.ops import eval_transform
    from vitrail.evaluate.classify import classify, predictor, save_classification
    from vitrail.model.attention import fast_math
    from vitrail.train.resolve import available_cores, choose_device

    if precision not in ("auto", "bf16", "float32"):
        raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
    network = load_classifier(model)
    card = network.card
    source, name = _source(model, data, split, card.class_names or None)
    names = output_names(network, source, model)
    fast_math()
    loader = Loader(
        source,
        transform=eval_transform(card.preprocess),
        image_size=card.preprocess.image_size,
        batch_size=batch_size,
        shuffle=False,
        drop_last=False,
        workers=available_cores() // 2 if workers is None else workers,
    )
    try:
        predict = predictor(network, choose_device(device), precision)
        found = classify(predict, loader, names)
    finally:
        loader.close()
    if out is not None:
        save_classification(Path(out), found)
    return Evaluation(str(model), name, found)


def _source(
    model: str | Path, data: str | Path | None, split: str | None, class_names: list[str] | None
) -> tuple[Listed, str]:
    """Open the images to evaluate, and name them."""
    from vitrail.data.source import open_data, open_split

    if data is not None:
        return open_split(data, split, class_names), str(data)
    written = Path(model) / "config.yaml"
    if not written.is_file():
        raise UsageError(f"evaluate on which images? {model} is no run that knows: vitrail evaluate {model} DIR")
    run = from_yaml(written, Run())
    if split is not None:
        return open_split(run.data.path, split, class_names), f"{run.data.path}, split {split}"
    splits = open_data(run.data, seed=run.seed)
    if splits.test is not None:
        return splits.test, f"the test images of {run.data.path}"
    if splits.validation is not None:
        return splits.validation, f"the validation images of {run.data.path}"
    raise UsageError(f"{model} was trained without test or validation images: vitrail evaluate {model} DIR")


def show(result: Evaluation) -> Any:
    """Return the result as tables for a terminal."""
    from rich.console import Group
    from rich.table import Table

    found = result.found
    head = (
        f"{result.model} on {result.data}: top-1 {found.top1:.2%}, top-5 {found.top5:.2%}, "
        f"loss {found.nll:.4f}, {found.count:,} images"
    )
    classes = Table("class", "images", "right", title="worst classes", title_justify="left")
    rows = sorted(zip(found.class_names, found.class_count, found.class_accuracy, strict=True), key=_by_accuracy)
    for name, count, accuracy in [row for row in rows if row[1]][:WORST]:
        classes.add_row(name, str(count), f"{accuracy:.1%}")
    confused = Table("class", "taken for", "images", title="most confused", title_justify="left")
    for label, answer, count in confusions(found)[:WORST]:
        confused.add_row(label, answer, str(count))
    parts: list[Any] = [head, classes]
    parts += [confused] if confused.row_count else []
    parts += [f"left out, unreadable: {id_} ({reason})" for id_, reason in found.bad]
    return Group(*parts)


def _by_accuracy(row: tuple[str, int, float]) -> tuple[float, str]:
    return float(row[2]), row[0]


def confusions(found: Classification) -> list[tuple[str, str, int]]:
    """Return (class, taken for, images) for every mistake that was made, the most frequent first."""
    counts = found.confusion.copy()
    counts[range(len(counts)), range(len(counts))] = 0
    pairs = [(int(counts[i, j]), int(i), int(j)) for i, j in zip(*counts.nonzero(), strict=True)]
    pairs.sort(key=lambda pair: (-pair[0], pair[1:]))
    return [(found.class_names[i], found.class_names[j], count) for count, i, j in pairs]


def as_json(result: Evaluation) -> Any:
    """Return the result as JSON values: numbers, every class, the confusion matrix (rows are true classes)."""
    found = result.found
    classes = zip(found.class_names, found.class_count, found.class_correct, strict=True)
    return {
        "model": result.model,
        "data": result.data,
        **found.metrics(),
        "classes": [{"name": name, "count": int(count), "correct": int(right)} for name, count, right in classes],
        "confusion": found.confusion.tolist(),
        "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
    }
