"""`vitrail inspect`: what a network has learned, and where it looks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, get_args

from vitrail.errors import UsageError, did_you_mean
from vitrail.files import check_writable
from vitrail.ranges import Count, InputSize, Range, Whole, checked
from vitrail.terminal import ProgressLine
from vitrail.training.recorded import recorded_run
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.verbs.network import load_network, network_labels, run_images, run_of, settings_of
from vitrail.words import one_line

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.item import IndexedSource
    from vitrail.inspection.data_pages import DataFeatures
    from vitrail.inspection.figures.page import Folder, Page
    from vitrail.inspection.network_pages import InspectedNetwork
    from vitrail.inspection.pictures import Pictures

log = logging.getLogger("vitrail")

What = Literal["filters", "positions", "distance", "rollout", "relevance", "maps", "patches", "neighbours", "map"]
FigureFormat = Literal["png", "svg", "pdf"]

OF_WEIGHTS = ("filters", "positions")
OF_PICTURES = ("distance", "rollout", "relevance", "maps", "patches")
OF_DATA = ("neighbours", "map")
COMPARED = (*OF_WEIGHTS, "distance")
"""Figures that can show several networks."""
SAMPLE = 12
"""Number of pictures taken from a data set if no images are given."""


@one_line
@dataclass
class Inspection:
    """The files that were written, and what could not be drawn."""

    networks: list[str]
    folder: Path
    pages: list[Page] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Figures that are not possible for this network -> the reason. Figures requested with --what raise instead."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out -> the reason."""


@checked
def inspect(
    model: str | Path,
    *images: str | Path,
    out: str | Path = "inspect",
    what: tuple[What, ...] = (),
    layer: Annotated[int, Range(-1000, 1000)] | None = None,
    head: Whole | None = None,
    class_name: str | Literal["none"] | None = None,
    data: str | Path | None = None,
    split: str | None = None,
    count: Count = 128,
    pictures: Count = 48,
    image_size: InputSize | None = None,
    format: tuple[FigureFormat, ...] = (),
    batch_size: Count = 8,
    device: str | None = None,
    raw: bool = False,
    **reading: Unpack[DataKeywords],
) -> Inspection:
    """Look inside a network: figures of what it has learned and where it looks, with the numbers behind them.

    Without images, filters and positions are drawn. With images, attention distance, rollout, relevance, the attention
    maps of a layer and the components of patch tokens follow; with --data, neighbours and a map of the data set, too.
    If further networks are among the images, their filters, positions and distance are drawn next to those of the
    first.

    Args:
        model: A run folder (its best model), a model folder, a weight file, or a name on the hub.
        images: Files, folders and patterns such as 'photos/*.jpg', any number of them; or further networks.
        out: Folder for figures and numbers. Files of the same names are replaced.
        what: Figures to draw (default: all that are possible).
        layer: Layer for maps, patches, and for positions if each layer has its own. It counts from 0, or from the
            end as -1 (default: the last).
        head: Head for maps, which counts from 0 (default: all).
        class_name: Class whose relevance is drawn, by name or number (default: the predicted class of each image).
        data: A data set, in any form that `vitrail train` takes, for neighbours and map, and for images if none are
            given.
        split: Split of the data set to use (default: test, else validation, else all images).
        count: Maximum number of images over which attention distance is averaged.
        pictures: Maximum number of images to draw. If there are more, an evenly spaced selection is drawn.
        format: File formats of the figures (default: png).
        batch_size: Number of images per batch. Memory grows with it.
    """
    chosen, formats = _checked(what, What, "--what"), _checked(format, FigureFormat, "--format")
    if wrong := [type(image).__name__ for image in images if not isinstance(image, str | Path)]:
        raise UsageError(f"inspect takes paths of images, one after another, and not a {wrong[0]}. Save it to a file")
    compute = Compute(image_size, batch_size, device=device, precision="float32")
    from vitrail.data.cache import refuse_within

    refuse_within(out, *images, *([] if data is None else [data]))
    check_writable(Path(out), UsageError, folder=True)
    from vitrail.device import fast_float32
    from vitrail.inspection.figures.page import Folder

    models, paths = split_networks_and_images([model, *images])
    comparing = len(models) > 1
    if comparing and (wrong := [name for name in chosen if name not in COMPARED]):
        raise UsageError(f"--what {wrong[0]} takes one network. With several networks use {', '.join(COMPARED)}.")
    labels = network_labels(models)
    networks = [inspected_network(*pair, compute) for pair in zip(models, labels, strict=True)]
    inputs = InspectionInputs(networks, model, paths, data, split, compute, reading)
    folder = Folder(Path(out), formats or ("png",), raw=raw)  # type: ignore[arg-type]
    result = Inspection(labels, Path(out), unreadable=inputs.unreadable)
    selection = _Selection(layer, head, class_name, count, pictures)
    names = chosen or _default(comparing, inputs)
    if not set(names) <= set(OF_WEIGHTS):
        for network in networks:
            network.require_result()
    with folder:
        for name in names:
            try:
                with fast_float32():
                    result.pages.append(_page(name, inputs, folder, selection))
            except UsageError as error:
                if chosen:
                    raise
                result.skipped[name] = str(error)
    if paths and (given := len(inputs.source)) > pictures:
        log.warning("%d of the %d images are drawn, evenly spaced; --pictures draws more", pictures, given)
    for path, reason in result.unreadable.items():
        log.warning("left out %s: %s", path, reason)
    return result


def split_networks_and_images(words: Sequence[str | Path]) -> tuple[list[str | Path], list[str | Path]]:
    """Split words into networks and images: the first word is a network, and so is every run or weight file."""
    networks = list(words[:1])
    images: list[str | Path] = []
    for word in words[1:]:
        (networks if _is_network(word) else images).append(word)
    return networks, images


def _is_network(word: str | Path) -> bool:
    from vitrail.data.image_names import is_image_name
    from vitrail.weights.archive import INDEX, SINGLE, SUFFIXES
    from vitrail.weights.download import is_hub_name
    from vitrail.weights.store import is_ours

    path = Path(word).expanduser()
    if path.is_dir():
        return is_ours(path) or any((path / name).is_file() for name in (*SINGLE, *INDEX))
    if path.suffix in SUFFIXES:
        return True
    return not path.exists() and not is_image_name(path.name) and is_hub_name(word)


def inspected_network(source: str | Path, label: str, compute: Compute) -> InspectedNetwork:
    """Load a network, with or without a classifier. Assumptions about a foreign file are logged."""
    from vitrail.data.images.ops import shown_transform
    from vitrail.inspection.network_pages import InspectedNetwork

    model = load_network(source, compute.image_size)
    transform = shown_transform(model.card.preprocess)
    return InspectedNetwork(label, model.to(compute.place()), transform, list(model.card.class_names))


@dataclass
class InspectionInputs:
    """Networks, pictures and a data set. Pictures and data are opened when they are first needed."""

    networks: list[InspectedNetwork]
    first: str | Path
    """Where the first network came from."""
    paths: list[str | Path]
    """Images on the command line, if any."""
    data: str | Path | None
    split: str | None
    compute: Compute
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the data."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out -> the reason."""

    @cached_property
    def data_set(self) -> IndexedSource:
        """The data set. Raises UsageError if none was given."""
        from vitrail.data.sources.open import open_split

        if self.data is None:
            raise UsageError("neighbours and map need a data set: pass it with --data DIR")
        card = self.networks[0].model.card  # the labels are read as its run read them
        return open_split(settings_of(run_of(self.first), card, self.data, self.reading), self.split)

    @cached_property
    def source(self) -> IndexedSource:
        """The given images, else the data set, else the validation images of the first network's run."""
        from vitrail.data.sources.files import find_images
        from vitrail.data.sources.indexed import GivenImages

        if self.paths:
            data = read_settings(self.reading, used=READ if self.data is not None else ("include", "exclude"))
            return GivenImages(list(find_images(self.paths, data.columns.selection._replace(lists=()))))
        if self.data is not None:
            return self.data_set
        model, run = self.first, recorded_run(self.first)
        if run is None:
            raise UsageError(f"no images are given, and {model} is not a run: vitrail inspect {model} IMAGE ...")
        if (found := run_images(model, run, run.data, ("validation", "test"), labels=run.supervised)) is None:
            raise UsageError(f"{model} was trained without validation images: vitrail inspect {model} IMAGE ...")
        for line in found.notes:
            log.warning("%s", line)
        return found.source

    def pictures(self, most: int, what: str) -> list[Pictures]:
        """Return at most `most` evenly spaced pictures, prepared for each network; `what` is the word of progress."""
        from vitrail.data.item import Subset, evenly_spaced
        from vitrail.inspection.pictures import Pictures

        source = self.source
        if len(source) > most:
            source = Subset(source, evenly_spaced(len(source), most))
        # all readers share one record of unreadable images
        each, unreadable, progress = self.compute.batch_size, self.unreadable, ProgressLine(what)
        return [Pictures(source, network.transform, each, unreadable, progress) for network in self.networks]

    @cached_property
    def all_features(self) -> DataFeatures:
        """The first network's features of the whole data set."""
        from vitrail.inspection.data_pages import DataFeatures

        return DataFeatures(self.data_set, *self.features(self.data_set))

    def some_features(self, most: int) -> DataFeatures:
        """Return features of at least `most` evenly spaced images of the data set, or of all."""
        from vitrail.data.item import evenly_spaced
        from vitrail.inspection.data_pages import DataFeatures

        if most >= len(self.data_set) or "all_features" in vars(self):  # computed already
            return self.all_features
        rows = evenly_spaced(len(self.data_set), most)
        features, index = self.features(self.data_set, rows)
        return DataFeatures(self.data_set, features, rows[index])

    def features(self, source: IndexedSource, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first network's features of the images `rows` (default: all) of a source, and their numbers."""
        from vitrail.data.images.ops import eval_transform
        from vitrail.data.item import Subset
        from vitrail.evaluation.features import extract

        network = self.networks[0]
        chosen = source if rows is None else Subset(source, rows)
        preprocess = network.model.card.preprocess
        transform, size = eval_transform(preprocess), preprocess.size
        with closing(self.compute.loader(chosen, transform, size, ProgressLine("features"))) as loader:
            found = extract(network.model, loader, source.class_names, device=network.device, precision="float32")
        self.unreadable.update(found.bad)
        return found.features, found.index


@dataclass(frozen=True)
class _Selection:
    """The layer, head and class to show, the number of images to average over, and the number to draw."""

    layer: int | None
    head: int | None
    class_name: str | None
    count: int
    pictures: int


def _checked(words: tuple[str, ...], choice: Any, flag: str) -> tuple[str, ...]:
    """Return each word once. Raises UsageError for a word that is not in the `Literal` `choice`."""
    valid = get_args(choice)
    for name in words:
        if name not in valid:
            raise UsageError(f"{flag} {name!r} is not known.{did_you_mean(name, valid)} Valid: {', '.join(valid)}")
    return tuple(dict.fromkeys(words))


def _default(comparing: bool, inputs: InspectionInputs) -> tuple[str, ...]:
    if comparing:
        return COMPARED
    if inputs.data is not None:
        return get_args(What)
    return (*OF_WEIGHTS, *OF_PICTURES) if inputs.paths else OF_WEIGHTS


def _page(name: str, inputs: InspectionInputs, folder: Folder, selection: _Selection) -> Page:
    from vitrail.inspection import network_pages

    networks, layer = inputs.networks, selection.layer
    if name == "filters":
        return network_pages.filters_page(networks, folder)
    if name == "positions":
        return network_pages.positions_page(networks, folder, layer)
    if name in OF_DATA:
        return _data_page(name, inputs, folder, selection.pictures)
    if name == "distance":
        return network_pages.distance_page(networks, inputs.pictures(selection.count, name), folder)
    network = networks[0]
    pictures = inputs.pictures(selection.pictures if inputs.paths else min(SAMPLE, selection.pictures), name)[0]
    if name == "rollout":
        return network_pages.rollout_page(network, pictures, folder)
    if name == "relevance":
        target = _class_number(network, selection.class_name)
        return network_pages.relevance_page(network, pictures, folder, target)
    if name == "maps":
        return network_pages.maps_page(network, pictures, folder, layer, selection.head)
    return network_pages.patches_page(network, pictures, folder, layer)


def _class_number(network: InspectedNetwork, wanted: str | None) -> int | None:
    """Return the number of a class given by name, or by number if no class has that name."""
    if wanted is None:
        return None
    if wanted in network.class_names:
        return network.class_names.index(wanted)
    if wanted.isdecimal():
        return int(wanted)
    hint = did_you_mean(wanted, network.class_names)
    unnamed = "" if network.class_names else " Its classes have no names: give a number."
    raise UsageError(f"{network.label} has no class {wanted!r}.{hint}{unnamed}")


def _data_page(name: str, inputs: InspectionInputs, folder: Folder, most: int) -> Page:
    from vitrail.data.item import evenly_spaced
    from vitrail.inspection.data_pages import MOST_POINTS, map_page, neighbours_page
    from vitrail.inspection.pictures import Pictures

    network = inputs.networks[0]
    data = Pictures(inputs.data_set, network.transform)
    if name == "map":
        return map_page(network.label, folder, inputs.some_features(MOST_POINTS), data)
    among = inputs.all_features
    if inputs.paths:
        (queries,) = inputs.pictures(most, name)
        features, index = inputs.features(queries.source)
        return neighbours_page(network.label, folder, among, queries, features, index, None)
    rows = evenly_spaced(len(among.index), SAMPLE)
    return neighbours_page(network.label, folder, among, data, among.features[rows], among.index[rows], rows)


def show(result: Inspection) -> str:
    """Return the written files and what to look for in them, as text."""
    lines = [f"{' and '.join(result.networks)}: written to {result.folder}/"]
    for page in result.pages:
        lines += ["", f"{page.what}: {', '.join(path.name for path in page.files)}", *(f"  {see}" for see in page.see)]
    lines += [""] if result.skipped else []
    lines += [f"no {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join(lines)
