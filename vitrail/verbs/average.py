"""`vitrail weights average`: one network whose weights are the mean of those of several (a model soup)."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from vitrail.device import Precision
from vitrail.errors import UsageError
from vitrail.ranges import Count, Threads, checked
from vitrail.terminal import ProgressLine, page, table
from vitrail.training.recorded import held_out, recorded_run
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.network import (
    load_network,
    network_labels,
    other_held_out,
    run_images,
    said_of_held_out,
    settings_of,
)
from vitrail.words import one_line

log = logging.getLogger("vitrail")
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from vitrail.data.item import IndexedSource
    from vitrail.evaluation.results import Results
    from vitrail.transfer.soup import Ingredient
    from vitrail.weights.card import Card
    from vitrail.weights.confidence import Confidence

SoupKind = Literal["greedy", "uniform"]


@one_line
@dataclass(frozen=True)
class Averaged:
    """A model soup: where it was written, what it was made of, and its results on the validation images."""

    path: str
    kind: SoupKind
    ingredients: list[Ingredient]
    """The networks that were given, in the order in which they were tried."""
    data: str | None = None
    """The validation images; None if there are none."""
    results: Results | None = None
    confidence: Confidence | None = None
    """None if the temperature of the probabilities is not known."""


@checked
def average(
    source: str | Path,
    *sources: str | Path,
    out: str | Path | None = None,
    kind: SoupKind = "greedy",
    on: str | Path | None = None,
    overwrite: bool = False,
    batch_size: Count = 64,
    workers: Threads | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    **reading: Unpack[DataKeywords],
) -> Averaged:
    """Write one network whose weights are the mean of those of several (a model soup).

    It costs what one network costs. The networks must be fine-tunings of the same weights on the same classes, with
    other seeds, learning rates or augmentations.

    The temperature of the probabilities, and for several labels the thresholds, are chosen again on the validation
    images. Test images choose nothing: measure the result with `vitrail evaluate`.

    Args:
        source: A run, a model folder, a weight file of any known library, or a name on the hub.
        sources: Further networks.
        out: The new model folder (required).
        kind: Which networks are averaged. greedy: from the best to the worst on the validation images, each that does
            not make the result worse, so that it is at least as good there as the best network; uniform: all.
        on: Validation images, in any form that `vitrail train` takes, on which no network was trained. Of a data set
            with splits, only the validation split is used (default: the images that the first run held out, if all runs
            held out the same ones).
        overwrite: Replace an existing model in the folder.
    """
    from vitrail.data.images.ops import eval_transform
    from vitrail.transfer.soup import (
        greedy,
        measured,
        measured_card,
        require_alike,
        soup_card,
        statistics_differ,
        uniform,
    )
    from vitrail.weights.load import read_card
    from vitrail.weights.save import OURS, check_place, save

    compute = Compute(None, batch_size, workers, device, precision, "torch")
    given = dict(zip(network_labels((source, *sources)), (source, *sources), strict=True))
    if len(given) == 1:
        raise UsageError(f"one network has no mean. Name several: vitrail weights average {source} RUN --out NEW")
    if out is None:
        raise UsageError("the new network needs a folder. Name it: --out NEW")
    check_place(Path(out).expanduser(), OURS, overwrite)
    cards = {name: read_card(place) for name, place in given.items()}
    require_alike(cards)
    card = next(iter(cards.values()))
    validation = _validation_images(list(given.values()), card, on, reading, needed=kind == "greedy")
    network: Any = load_network(source)
    load = {name: partial(_tensors, place) for name, place in given.items()}
    said, results, loader = None, None, None
    with ExitStack() as opened:
        if validation is not None:
            images, said = validation
            shown, size = eval_transform(card.preprocess), card.preprocess.size
            loader = opened.enter_context(closing(compute.loader(images, shown, size, ProgressLine("computed"))))

        def measure(tensors: Mapping[str, Tensor]) -> Results:
            assert loader is not None  # the greedy soup needs images
            network.load_state_dict(tensors)
            return measured(card, compute.predictor(network), loader)

        tensors, tried = uniform(load) if kind == "uniform" else greedy(load, measure)
        if loader is None and statistics_differ(tensors, load[next(iter(load))]()):
            raise UsageError(
                "the networks have trained the running statistics of their BatchNorm. Only validation images say if "
                "their mean fits the mean of the weights. Name images that no network was trained on: --on DATA"
            )
        network.load_state_dict(tensors)
        kept = [one.name for one in tried if one.kept]
        network.card = soup_card(card, kept, [cards[name] for name in kept], kind)
        if loader is not None:
            network.card, results = measured_card(network.card, compute.predictor(network), loader, len(images))
    path = save(network, out, overwrite=overwrite).path
    return Averaged(str(path), kind, tried, said, results, network.card.confidence)


def _tensors(source: str | Path) -> Mapping[str, Tensor]:
    return load_network(source).state_dict()


def _validation_images(
    sources: Sequence[str | Path], card: Card, on: str | Path | None, reading: Mapping[str, Any], *, needed: bool
) -> tuple[IndexedSource, str] | None:
    """Return the validation images of `on`, else of the runs, and their name; None if there are none.

    Raises UsageError if they are `needed`, and DataError for images that do not fit the network.
    """
    from vitrail.data.item import Subset, role_of
    from vitrail.data.roles import of_role
    from vitrail.data.sources.open import open_and_warn
    from vitrail.tasks.catalog import task_of

    first, run = sources[0], recorded_run(sources[0])
    settings = settings_of(run, card, on, reading)
    source: IndexedSource | None = None
    why, said = f"{first} has no validation images that may choose", f"the validation images of {settings.path}"
    if on is not None:
        found = open_and_warn(settings)
        names = of_role(found, "validation") or [name for name in found.splits if role_of(name) is None]
        if len(names) != 1:
            splits = ", ".join(found.splits)
            raise UsageError(
                f"--on {on} has the splits {splits}, and not one validation split. Name the folder or file of the "
                "validation images. Test images must not choose anything"
            )
        source, said = found.splits[names[0]], str(on)
    elif run is None:
        why = f"{first} is no run, so it has no validation images"
    elif (other := other_held_out(sources)) is not None:
        why = f"{other} may have been trained on the validation images of {first}: {said_of_held_out(other)}"
    elif role_of(str(held_out(first).get("validation"))) != "test":
        images = run_images(first, run, settings, ("validation",))
        source, notes = (None, ()) if images is None else images[1:]
        for line in notes:
            log.warning("%s", line)
    if source is not None:
        return Subset(task_of(card).images(source, str(first)), class_names=card.class_names), said
    if needed:
        raise UsageError(
            f"{why}. Name images that no network was trained on: --on DATA; or average all networks: --kind uniform"
        )
    return None


def show(result: Averaged) -> Any:
    """Return the result as a table and lines for a terminal."""

    def words(found: Results | None) -> str:
        return "" if found is None else found.in_words()

    rows = [(one.name, words(one.alone), words(one.soup), "yes" if one.kept else "no") for one in result.ingredients]
    lines = [f"wrote {result.path}: the mean of {sum(one.kept for one in result.ingredients)} networks"]
    if result.results is None:
        lines.append("nothing was measured, so its card has no temperature: name validation images with --on DATA")
    else:
        lines.append(f"{result.results.in_words()} on {result.results.count:,} images: {result.data}")
    if result.confidence is not None:
        lines.append(str(result.confidence))
    return page(table(("network", "alone", "soup with it", "kept"), rows), lines)


def as_json(result: Averaged) -> Any:
    """Return the result as JSON values."""
    from vitrail.config import plain

    numbers: dict[str, dict[str, Any]] = {}
    for one in result.ingredients:
        measured = {"alone": one.alone, "soup": one.soup}
        found = {name: each.metrics() for name, each in measured.items() if each is not None}
        numbers[one.name] = {"kept": one.kept, **found}
    metrics = None if result.results is None else result.results.metrics()
    about = {"path": result.path, "kind": result.kind, "data": result.data, "networks": numbers, "metrics": metrics}
    return {**about, "confidence": plain(result.confidence)}
