"""From networks and pictures to pages: each function looks at one thing, writes its figure and its numbers.

Numbers of all images are kept, as they are one small map for each; a figure shows the first few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.data.images.geometry import Op
from vitrail.errors import UsageError
from vitrail.inspection.distance import attention_distance
from vitrail.inspection.figures.attention import draw_distances, draw_heads, draw_overlays
from vitrail.inspection.figures.embedding import draw_components
from vitrail.inspection.figures.page import Folder, Page
from vitrail.inspection.figures.weights import draw_filters, draw_positions
from vitrail.inspection.filters import principal_filters
from vitrail.inspection.maps import HeadMaps, head_maps
from vitrail.inspection.patches import component_maps, patch_components
from vitrail.inspection.pictures import Picture, Pictures, stack
from vitrail.inspection.positions import COSINE, position_tiles
from vitrail.inspection.relevance import relevance
from vitrail.inspection.rollout import rollout

log = logging.getLogger("vitrail")
ON_A_PAGE = 12
"""Pictures in a figure of overlays; more make more figures."""
AS_ROWS = 6
"""Pictures in a figure that gives each a row."""


@dataclass(frozen=True)
class Subject:
    """A network that is looked into."""

    label: str
    """How figures call it."""
    model: Any
    """A ViT or ResNet in eval mode."""
    transform: Op
    """How pictures become its input."""
    class_names: list[str]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    def class_name(self, number: int) -> str:
        """Return the name of an output, or its number."""
        return self.class_names[number] if self.class_names else f"class {number}"


def filters_page(subjects: Sequence[Subject], folder: Folder) -> Page:
    """Principal components of the first layer's filters (Figure 7, left)."""
    found = {subject.label: principal_filters(subject.model) for subject in subjects}
    arrays: dict[str, Any] = {}
    for number, one in enumerate(found.values()):
        mark = f"_{number}" if len(found) > 1 else ""
        arrays |= {f"components{mark}": one.components, f"explained{mark}": one.explained}
    files = [*folder.figure("filters", draw_filters(found)), folder.arrays("filters", networks=list(found), **arrays)]
    what = "; ".join(dict.fromkeys(one.about for one in found.values()))
    see = (
        f"What the filters are mostly made of, the commonest pattern first: {what}.",
        "Waves, edges and colours are a plausible basis for patches; noise says that little was learned here.",
    )
    return Page("filters", files, see)


def positions_page(subjects: Sequence[Subject], folder: Folder, layer: int | None) -> Page:
    """Similarity of positions (Figure 7, centre), of several networks side by side (Figure 10)."""
    found = _of_each(subjects, lambda subject: position_tiles(subject.model, layer or 0))
    arrays = {}
    for number, one in enumerate(found.values()):
        arrays["similarity" + (f"_{number}" if len(found) > 1 else "")] = one.values
    files = [*folder.figure("positions", draw_positions(found))]
    files.append(folder.arrays("positions", networks=list(found), **arrays))
    quantities = " and ".join(dict.fromkeys(one.quantity for one in found.values()))
    see = (
        f"Each tile stands for one position and shows its {quantities} with every position, itself included.",
        "Where they were learned, bright near the tile's own place, or along its row and column, means that the "
        "network has found out how patches lie."
        if COSINE in quantities
        else "Bright near the tile's own place: patches attend to their neighbours before they look at any content.",
    )
    return Page("positions", files, see)


def distance_page(subjects: Sequence[Subject], pictures: Sequence[Pictures], folder: Folder) -> Page:
    """Mean attention distance (Figures 7, right, and 11), of several networks side by side."""
    of = {subject.label: one for subject, one in zip(subjects, pictures, strict=True)}
    found = _of_each(
        subjects, lambda subject: attention_distance(subject.model, of[subject.label].tensors(subject.device))
    )
    rows = [
        (label, layer, branch, axis or "", head, f"{one.mean[row, head]:.6g}", f"{one.spread[row, head]:.6g}")
        for label, one in found.items()
        for row, (layer, branch, axis) in enumerate(one.places)
        for head in range(one.mean.shape[1])
    ]
    header = ("network", "layer", "branch", "axis", "head", "mean_px", "deviation_over_images_px")
    files = [*folder.figure("distance", draw_distances(found)), folder.table("distance", header, rows)]
    one = next(iter(found.values()))
    first, last = one.mean[0], one.mean[-1]
    see = (
        f"How far each head looks, in pixels of the input, over {one.images} images: "
        f"{first.min():.1f} to {first.max():.1f} in the first layer, {last.min():.1f} to {last.max():.1f} in the last.",
        f"Near 0 is local, as a small convolution is; {one.uniform.max():.1f} (dashed) is attention to all alike. "
        "Well-trained networks have both in their first layers.",
    )
    return Page("distance", files, see)


def _of_each(subjects: Sequence[Subject], look: Callable[[Subject], Any]) -> dict[str, Any]:
    """What is found in each network, by its name; the reason why one has nothing to show is told."""
    found, reason = {}, None
    for subject in subjects:
        try:
            found[subject.label] = look(subject)
        except UsageError as error:
            reason = error
            if len(subjects) > 1:
                log.warning("%s: %s", subject.label, error)
    if not found:
        assert reason is not None
        raise reason
    return found


def rollout_page(subject: Subject, pictures: Pictures, folder: Folder) -> Page:
    """Attention rollout over pictures (Figures 6 and 14)."""

    def look(batch: list[Picture]) -> tuple[np.ndarray, list[str]]:
        shares = rollout(subject.model, stack(batch, subject.device)).cpu().numpy()
        return shares, ["under rollout"] * len(batch)

    title = f"{subject.label}: attention from what the classifier reads to the picture (rollout)"
    files, _ = _overlays("rollout", title, "share in what the classifier reads", pictures, folder, look)
    see = (
        "Where information can reach the output through attention, all layers together; yellow is most.",
        "A trained network attends to what the picture is of. It is the same for every class: see relevance.",
    )
    return Page("rollout", files, see)


def relevance_page(subject: Subject, pictures: Pictures, folder: Folder, target: int | None) -> Page:
    """Gradient-weighted relevance over pictures."""
    classes: list[int] = []

    def look(batch: list[Picture]) -> tuple[np.ndarray, list[str]]:
        found = relevance(subject.model, stack(batch, subject.device), target)
        classes.extend(found.classes.tolist())
        return found.shares.cpu().numpy(), [f"for {subject.class_name(k)}" for k in found.classes.tolist()]

    title = f"{subject.label}: what speaks for a class (gradient-weighted relevance)"
    files, names = _overlays("relevance", title, "relevance", pictures, folder, look)
    rows = [(name, subject.class_name(k)) for name, k in zip(names, classes, strict=True)]
    files.append(folder.table("relevance-classes", ("image", "class"), rows))
    of = "the class it is taken for" if target is None else repr(subject.class_name(target))
    see = (
        f"Which parts of each picture speak for {of}, by attention times its gradient.",
        "Off the object, or on a mark or border all pictures of a class share, it warns of a shortcut.",
    )
    return Page("relevance", files, see)


Look = Callable[[list[Picture]], tuple[np.ndarray, list[str]]]
"""Pictures -> maps [pictures, rows, columns] and a note for each."""


def _overlays(
    name: str, title: str, quantity: str, pictures: Pictures, folder: Folder, look: Look
) -> tuple[list[Any], list[str]]:
    """Write figures of ON_A_PAGE pictures as they come and the maps of all; return files and the pictures' names."""
    files: list[Any] = []
    waiting: list[tuple[Picture, np.ndarray, str]] = []
    kept: list[np.ndarray] = []
    names: list[str] = []
    parts: list[tuple[float, ...]] = []

    def flush() -> None:
        number = f"-{(len(names) - 1) // ON_A_PAGE + 1}" if len(pictures.source) > ON_A_PAGE else ""
        shown, maps, notes = zip(*waiting, strict=True)
        files.extend(folder.figure(f"{name}{number}", draw_overlays(title, quantity, shown, maps, notes)))
        waiting.clear()

    for batch in pictures:
        maps, notes = look(batch)
        for picture, one, note in zip(batch, maps, notes, strict=True):
            waiting.append((picture, one, note))
            names.append(picture.name)
            parts.append(picture.part)
            kept.append(one)
            if len(waiting) == ON_A_PAGE:
                flush()
    if waiting:
        flush()
    return [*files, folder.arrays(name, image=names, map=np.stack(kept), seen=np.array(parts))], names


def maps_page(subject: Subject, pictures: Pictures, folder: Folder, layer: int | None, head: int | None) -> Page:
    """The maps of one layer, of every head or of one."""
    layer = -1 if layer is None else layer
    shown: list[Picture] = []
    first: list[list[HeadMaps]] = []
    arrays: list[np.ndarray] = []
    names: list[str] = []
    for batch in pictures:
        found = head_maps(subject.model, stack(batch, subject.device), layer, head)
        arrays.append(np.stack([one.shares.cpu().numpy() for one in found], axis=1))
        names += [picture.name for picture in batch]
        if len(shown) < AS_ROWS:
            shown += batch
            first.append(found)
    joined = [
        HeadMaps(one.layer, one.branch, one.axis, torch.cat([batch[place].shares for batch in first]))
        for place, one in enumerate(first[0])
    ]
    heads = list(range(subject.model.config.heads))
    heads = heads if head is None else [heads[head]]
    title = f"{subject.label}: attention of layer {joined[0].layer} from what the classifier reads, head by head"
    files = folder.figure("maps", draw_heads(title, shown[:AS_ROWS], joined, heads))
    files.append(folder.arrays("maps", image=names, map=np.concatenate(arrays), layer=joined[0].layer, head=heads))
    see = (
        f"Where each head of layer {joined[0].layer} looks, on its own; every map has its own scale.",
        "Heads that look at different things share the work; alike ones could be spared.",
    )
    return Page("maps", files, see)


def patches_page(subject: Subject, pictures: Pictures, folder: Folder, layer: int | None) -> Page:
    """Principal components of patch tokens over pictures."""
    found = patch_components(subject.model, pictures.tensors(subject.device), layer=layer)
    shown: list[Picture] = []
    maps: list[np.ndarray] = []
    names: list[str] = []
    for batch in pictures:
        maps.append(component_maps(subject.model, stack(batch, subject.device), found))
        names += [picture.name for picture in batch]
        shown += batch if len(shown) < AS_ROWS else []
    kept = np.concatenate(maps)
    where = "the last layer" if layer is None else f"layer {layer % subject.model.config.depth}"
    title = f"{subject.label}: principal components of the patch tokens of {where}"
    shown = shown[:AS_ROWS]
    files = folder.figure("patches", draw_components(title, shown, list(kept[: len(shown)]), found))
    numbers = {"mean": found.mean, "directions": found.directions, "explained": found.explained}
    files.append(folder.arrays("patches", image=names, map=kept, **numbers))
    see = (
        f"Along which directions patch tokens of {where} differ most, the same ones for all pictures.",
        "Parts that get one colour in different pictures are one thing to the network.",
    )
    return Page("patches", files, see)
