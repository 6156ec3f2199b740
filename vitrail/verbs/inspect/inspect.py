"""`vitrail inspect`: what a network has learned, and where it looks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, get_args

from vitrail.errors import UsageError, did_you_mean
from vitrail.files import check_writable
from vitrail.ranges import Count, InputSize, Range, Whole, checked
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.keywords import DataKeywords
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.inspection.figures.page import Folder, Page
    from vitrail.inspection.network_pages import InspectedNetwork
    from vitrail.verbs.inspect.inputs import InspectionInputs

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
    from vitrail.verbs.inspect.inputs import (
        InspectionInputs,
        inspected_network,
        network_labels,
        split_networks_and_images,
    )

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
