"""`vitrail inspect`: what has this network learned, and where does it look?"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from vitrail.inspection.album import Subject
    from vitrail.inspection.figures.page import Folder, Page
    from vitrail.verbs.inspect.material import Material

log = logging.getLogger("vitrail")

What = Literal["filters", "positions", "distance", "rollout", "relevance", "maps", "patches", "neighbours", "map"]
Format = Literal["png", "svg", "pdf"]

OF_WEIGHTS = ("filters", "positions")
OF_PICTURES = ("distance", "rollout", "relevance", "maps", "patches")
OF_DATA = ("neighbours", "map")
COMPARED = (*OF_WEIGHTS, "distance")
"""What is drawn of several networks side by side."""
SAMPLE = 12
"""Pictures taken from a data set where none are given."""


@dataclass
class Inspection:
    """What was written, and what could not be."""

    networks: list[str]
    folder: Path
    pages: list[Page] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """What was not asked for by name and cannot be had of this network, and why."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out, and why."""


def inspect(
    model: str | Path,
    *images: str | Path,
    out: str | Path = "inspect",
    what: tuple[What, ...] = (),
    layer: int | None = None,
    head: int | None = None,
    class_name: str | Literal["none"] | None = None,
    data: str | Path | None = None,
    split: str | None = None,
    count: int = 128,
    pictures: int = 48,
    image_size: int | None = None,
    format: tuple[Format, ...] = (),
    batch_size: int = 8,
    device: str | None = None,
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
        image_size: Side of the square input in pixels. Position embeddings are resampled (default: the network's
            own size).
        format: File formats of the figures (default: png).
        batch_size: Number of images per batch. Memory grows with it.
        device: Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available).
    """
    chosen, formats = _listed(what, What, "cannot inspect"), _listed(format, Format, "no figure is written as")
    if min(count, pictures, batch_size) < 1:
        raise UsageError("count, pictures and batch_size must be above 0")
    from vitrail.inspection.figures.page import Folder
    from vitrail.model.process import prepare_process
    from vitrail.training.resolve import choose_device
    from vitrail.verbs.inspect.material import Material, labelled, load_subject, told_apart

    networks, paths = told_apart([model, *images])
    comparing = len(networks) > 1
    if comparing and (wrong := [name for name in chosen if name not in COMPARED]):
        raise UsageError(f"{wrong[0]} is about one network; of several are drawn {', '.join(COMPARED)}")
    prepare_process()
    place = choose_device(device)
    labels = labelled(networks)
    subjects = [load_subject(*pair, image_size, place) for pair in zip(networks, labels, strict=True)]
    material = Material(networks, subjects, paths, data, split, batch_size)
    folder = Folder(Path(out), formats or ("png",))  # type: ignore[arg-type]
    result = Inspection(labels, Path(out), unreadable=material.unreadable)
    for name in chosen or _default(comparing, material):
        try:
            result.pages.append(_page(name, material, folder, _Chosen(layer, head, class_name, count, pictures)))
        except UsageError as error:
            if chosen:
                raise
            result.skipped[name] = str(error)
    if paths and (given := len(material.source())) > pictures:
        log.warning("%d of the %d images are drawn, evenly spaced; --pictures draws more", pictures, given)
    for path, reason in result.unreadable.items():
        log.warning("left out %s: %s", path, reason)
    return result


@dataclass(frozen=True)
class _Chosen:
    """The part of a network to look at, how many images to average over, and how many to draw."""

    layer: int | None
    head: int | None
    class_name: str | None
    count: int
    pictures: int


def _listed(words: tuple[str, ...], choice: Any, complaint: str) -> tuple[str, ...]:
    """The words, each once. Raises UsageError for one that is not of the `Literal` `choice`."""
    valid = get_args(choice)
    for name in words:
        if name not in valid:
            raise UsageError(f"{complaint} {name!r}.{did_you_mean(name, valid)} Valid: {', '.join(valid)}")
    return tuple(dict.fromkeys(words))


def _default(comparing: bool, material: Material) -> tuple[str, ...]:
    if comparing:
        return COMPARED
    if material.data is not None:
        return get_args(What)
    return (*OF_WEIGHTS, *OF_PICTURES) if material.paths else OF_WEIGHTS


def _page(name: str, material: Material, folder: Folder, chosen: _Chosen) -> Page:
    from vitrail.inspection import album

    subjects = material.subjects
    subject = subjects[0]
    if name == "filters":
        return album.filters_page(subjects, folder)
    if name == "positions":
        return album.positions_page(subjects, folder, chosen.layer)
    if name in OF_DATA:
        return _data_page(name, material, folder, chosen.pictures)
    if name == "distance":
        return album.distance_page(subjects, material.pictures(chosen.count), folder)
    pictures = material.pictures(chosen.pictures if material.paths else min(SAMPLE, chosen.pictures))[0]
    if name == "rollout":
        return album.rollout_page(subject, pictures, folder)
    if name == "relevance":
        return album.relevance_page(subject, pictures, folder, _class(subject, chosen.class_name))
    if name == "maps":
        return album.maps_page(subject, pictures, folder, chosen.layer, chosen.head)
    return album.patches_page(subject, pictures, folder, chosen.layer)


def _class(subject: Subject, wanted: str | None) -> int | None:
    """The number of a class given by name, or by number where no class has that name."""
    if wanted is None:
        return None
    if wanted in subject.class_names:
        return subject.class_names.index(wanted)
    if wanted.isdecimal():
        return int(wanted)
    hint = did_you_mean(wanted, subject.class_names)
    known = "" if subject.class_names else " Its outputs have no names: give a number."
    raise UsageError(f"{subject.label} knows no class {wanted!r}.{hint}{known}")


def _data_page(name: str, material: Material, folder: Folder, most: int) -> Page:
    from vitrail.inspection.album_data import MOST_POINTS, evenly, map_page, neighbours_page, rows_of
    from vitrail.inspection.pictures import Pictures

    subject, of_data = material.subjects[0], Pictures(material.data_set(), material.subjects[0].transform)
    if name == "map":
        return map_page(subject.label, folder, material.embedded(MOST_POINTS), of_data)
    among = material.embedded()
    if material.paths:
        (queries,) = material.pictures(most)
        features, index = material.features(queries.source)
        return neighbours_page(subject.label, folder, among, queries, features, index, None)
    index = among.index[evenly(len(among.index), SAMPLE)]
    themselves = rows_of(index, among.index)
    return neighbours_page(subject.label, folder, among, of_data, among.features[themselves], index, themselves)


def show(result: Inspection) -> str:
    """Return what was written and what to see in it, as text."""
    lines = [f"{' and '.join(result.networks)}: written to {result.folder}/"]
    for page in result.pages:
        lines += ["", f"{page.what}: {', '.join(path.name for path in page.files)}", *(f"  {see}" for see in page.see)]
    lines += [""] if result.skipped else []
    lines += [f"no {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join(lines)


def as_json(result: Inspection) -> Any:
    """Return the result as JSON values."""
    value = asdict(result)
    value["folder"] = str(result.folder)
    for page in value["pages"]:
        page["files"] = [str(path) for path in page["files"]]
    return value
