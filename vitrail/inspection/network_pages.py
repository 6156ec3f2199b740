"""Pages about networks. Each function computes one quantity and writes its figure and its numbers.

Files of numbers cover all images; some figures show only the first few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.images.geometry import Op
from vitrail.errors import UsageError, finite
from vitrail.inspection.components import component_maps, patch_components, principal_filters
from vitrail.inspection.distance import attention_distance
from vitrail.inspection.figures.attention import draw_distances, draw_heads, draw_overlays
from vitrail.inspection.figures.embedding import draw_components
from vitrail.inspection.figures.page import Folder, Page
from vitrail.inspection.figures.weights import draw_filters, draw_positions
from vitrail.inspection.maps import HeadMaps, head_maps
from vitrail.inspection.pictures import Picture, Pictures, stack
from vitrail.inspection.positions import COSINE, position_tiles
from vitrail.inspection.relevance import relevance
from vitrail.inspection.rollout import rollout

log = logging.getLogger("vitrail")
ON_A_PAGE = 12
"""Maximum number of pictures in a figure of overlays. More pictures need more figures."""
AS_ROWS = 6
"""Maximum number of pictures in a figure with one picture per row."""


@dataclass(frozen=True)
class InspectedNetwork:
    """A network with its name in figures, its transform and its classes."""

    label: str
    model: Any
    """A ViT or ResNet in eval mode."""
    transform: Op
    """The transform that turns images into its input."""
    class_names: list[str]

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def require_result(self) -> None:
        """Raise WeightsError, which names the network, if its features of a grey image are not finite."""
        shape = (1, self.model.config.channels, *self.model.card.preprocess.image_size)
        grey = torch.full(shape, 127, dtype=torch.uint8, device=self.device)
        finite(self.model.features(grey), f"output for a grey image ({self.label})")

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number if the classes have no names."""
        return self.class_names[number] if self.class_names else f"class {number}"


def filters_page(networks: Sequence[InspectedNetwork], folder: Folder) -> Page:
    """Write the principal components of the first layer's filters (Figure 7, left)."""
    filters = {network.label: principal_filters(network.model) for network in networks}
    arrays = _arrays(filters, components="components", explained="explained")
    files = [*folder.figure("filters", draw_filters(filters)), folder.arrays("filters", **arrays)]
    what = "; ".join(dict.fromkeys(one.about for one in filters.values()))
    see = (
        f"The patterns that make up most of the filters, the most frequent first: {what}.",
        "Waves, edges and colours are a plausible basis for patches. Noise means that the layer learned little.",
    )
    return Page("filters", files, see)


def positions_page(networks: Sequence[InspectedNetwork], folder: Folder, layer: int | None) -> Page:
    """Write the similarity of positions (Figure 7, centre), for one or more networks (Figure 10)."""
    tiles = _of_each(networks, lambda network: position_tiles(network.model, layer or 0))
    arrays = _arrays(tiles, similarity="values")
    files = [*folder.figure("positions", draw_positions(tiles)), folder.arrays("positions", **arrays)]
    quantities = " and ".join(dict.fromkeys(one.quantity for one in tiles.values()))
    see = (
        f"Each tile stands for one position and shows its {quantities} with all positions, including itself.",
        "If learned positions are similar near the tile's own place, or along its row and column, the network has "
        "learned how patches are arranged."
        if COSINE in quantities
        else "High values near the tile's own place: patches attend to their neighbours, whatever these contain.",
    )
    return Page("positions", files, see)


def distance_page(networks: Sequence[InspectedNetwork], pictures: Sequence[Pictures], folder: Folder) -> Page:
    """Write the mean attention distances (Figures 7, right, and 11), for one or more networks."""
    of = {network.label: one for network, one in zip(networks, pictures, strict=True)}
    distances = _of_each(
        networks, lambda network: attention_distance(network.model, of[network.label].tensors(network.device))
    )
    rows = [
        (label, layer, branch, axis or "", head, f"{one.mean[row, head]:.6g}", f"{one.spread[row, head]:.6g}")
        for label, one in distances.items()
        for row, (layer, branch, axis) in enumerate(one.places)
        for head in range(one.mean.shape[1])
    ]
    header = ("network", "layer", "branch", "axis", "head", "mean_px", "deviation_over_images_px")
    files = [*folder.figure("distance", draw_distances(distances)), folder.table("distance", header, rows)]
    one = next(iter(distances.values()))
    first, last = one.mean[0], one.mean[-1]
    see = (
        f"How far each head looks, in pixels of the input, over {one.images} images: "
        f"{first.min():.1f} to {first.max():.1f} in the first layer, {last.min():.1f} to {last.max():.1f} in the last.",
        f"Near 0 is local, like a small convolution; {one.uniform.max():.1f} (dashed) is equal attention to all. "
        "Well-trained networks have both kinds of heads in their first layers.",
    )
    return Page("distance", files, see)


def _of_each(networks: Sequence[InspectedNetwork], look: Callable[[InspectedNetwork], Any]) -> dict[str, Any]:
    """Return the result of `look` by network label. A network without a result is logged and left out."""
    results = {}
    for network in networks:
        try:
            results[network.label] = look(network)
        except UsageError as error:
            if len(networks) > 1:
                log.warning("%s: %s", network.label, error)
            if not results and network is networks[-1]:
                raise
    return results


def _arrays(results: Mapping[str, Any], **fields: str) -> dict[str, Any]:
    """Return the labels of the networks, and fields of each result by name: name, or name_N with several networks."""
    arrays: dict[str, Any] = {"networks": list(results)}
    for number, one in enumerate(results.values()):
        mark = f"_{number}" if len(results) > 1 else ""
        arrays |= {f"{name}{mark}": getattr(one, field) for name, field in fields.items()}
    return arrays


def rollout_page(network: InspectedNetwork, pictures: Pictures, folder: Folder) -> Page:
    """Write the attention rollout over pictures (Figures 6 and 14)."""

    def look(batch: list[Picture]) -> tuple[np.ndarray, list[str]]:
        shares = rollout(network.model, stack(batch, network.device)).cpu().numpy()
        return shares, ["under rollout"] * len(batch)

    title = f"{network.label}: attention of the classifier's input to the picture (rollout)"
    files, _ = _overlays("rollout", title, "share in the classifier's input", pictures, folder, look)
    see = (
        "Where information can come from through attention, over all layers. Yellow is the most.",
        "A trained network attends to the main object. The map is the same for every class; relevance is not.",
    )
    return Page("rollout", files, see)


def relevance_page(network: InspectedNetwork, pictures: Pictures, folder: Folder, target: int | None) -> Page:
    """Write the gradient-weighted relevance over pictures, for class `target` or the predicted classes."""
    classes: list[int] = []

    def look(batch: list[Picture]) -> tuple[np.ndarray, list[str]]:
        result = relevance(network.model, stack(batch, network.device), target)
        classes.extend(result.classes.tolist())
        return result.shares.cpu().numpy(), [f"for {network.class_name(k)}" for k in result.classes.tolist()]

    title = f"{network.label}: which parts support a class (gradient-weighted relevance)"
    files, names = _overlays("relevance", title, "relevance", pictures, folder, look)
    rows = [(name, network.class_name(k)) for name, k in zip(names, classes, strict=True)]
    files.append(folder.table("relevance-classes", ("image", "class"), rows))
    of = "the predicted class" if target is None else repr(network.class_name(target))
    see = (
        f"Which parts of each picture support {of}: attention times its gradient.",
        "Relevance outside the object, or on a mark that all pictures of a class share, is a sign of a shortcut.",
    )
    return Page("relevance", files, see)


Look = Callable[[list[Picture]], tuple[np.ndarray, list[str]]]
"""Pictures -> maps [pictures, rows, columns] and one note per picture."""


def _overlays(
    name: str, title: str, quantity: str, pictures: Pictures, folder: Folder, look: Look
) -> tuple[list[Path], list[str]]:
    """Write figures of ON_A_PAGE pictures each and the maps of all; return files and the names of the pictures."""

    def each() -> Iterator[tuple[Picture, np.ndarray, str]]:
        for batch in pictures:
            yield from zip(batch, *look(batch), strict=True)

    files: list[Path] = []
    names: list[str] = []
    all_maps: list[np.ndarray] = []
    parts: list[tuple[float, ...]] = []
    looked_at = each()
    while page := list(islice(looked_at, ON_A_PAGE)):
        shown, maps, notes = zip(*page, strict=True)
        names += [picture.name for picture in shown]
        parts += [picture.part for picture in shown]
        all_maps += maps
        number = f"-{(len(names) - 1) // ON_A_PAGE + 1}" if len(pictures.source) > ON_A_PAGE else ""
        files += folder.figure(f"{name}{number}", draw_overlays(title, quantity, shown, maps, notes))
    return [*files, folder.arrays(name, image=names, **_padded(all_maps), seen=np.array(parts))], names


def maps_page(
    network: InspectedNetwork, pictures: Pictures, folder: Folder, layer: int | None, head: int | None
) -> Page:
    """Write the attention maps of one layer, of all heads or of one."""
    attentions: list[HeadMaps] = []  # of the last batch: for their layer, branches and axes

    def look(images: Tensor) -> np.ndarray:
        attentions[:] = head_maps(network.model, images, -1 if layer is None else layer, head)
        return np.stack([one.shares.cpu().numpy() for one in attentions], axis=1)

    names, maps, shown = _mapped(network, pictures, look)
    number = attentions[0].layer
    heads = list(range(network.model.config.heads))
    heads = heads if head is None else [heads[head]]
    title = f"{network.label}: attention of layer {number} from the classifier's input, by head"
    files = folder.figure("maps", draw_heads(title, shown, maps[: len(shown)], attentions, heads))
    files.append(folder.arrays("maps", image=names, **_padded(maps), layer=number, head=heads))
    who = "each head" if head is None else f"head {heads[0]}"
    see = (
        f"Where {who} of layer {number} looks. Every map has its own scale. Layers and heads are counted from 0.",
        "Heads that look at different things complement each other; heads that look alike may be redundant.",
    )
    return Page("maps", files, see)


def patches_page(network: InspectedNetwork, pictures: Pictures, folder: Folder, layer: int | None) -> Page:
    """Write the principal components of the patch tokens, as maps over pictures."""
    components = patch_components(network.model, pictures.tensors(network.device), layer=layer)
    names, maps, shown = _mapped(network, pictures, lambda images: component_maps(network.model, images, components))
    where = "the last layer" if layer is None else f"layer {layer % network.model.config.depth}"
    title = f"{network.label}: principal components of the patch tokens of {where}"
    files = folder.figure("patches", draw_components(title, shown, maps[: len(shown)], components))
    numbers = {"mean": components.mean, "directions": components.directions, "explained": components.explained}
    files.append(folder.arrays("patches", image=names, **_padded(maps), **numbers))
    see = (
        f"The directions in which patch tokens of {where} differ most, the same for all pictures.",
        "The network treats parts with the same colour in different pictures as similar.",
    )
    return Page("patches", files, see)


def _mapped(
    network: InspectedNetwork, pictures: Pictures, look: Callable[[Tensor], np.ndarray]
) -> tuple[list[str], list[np.ndarray], list[Picture]]:
    """Return the name of each picture, the result of `look` for it, and the first AS_ROWS pictures."""
    names: list[str] = []
    maps: list[np.ndarray] = []
    shown: list[Picture] = []
    for batch in pictures:
        maps += list(look(stack(batch, network.device)))
        names += [picture.name for picture in batch]
        shown += batch[: AS_ROWS - len(shown)]
    return names, maps, shown


def _padded(maps: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return maps [..., rows, columns] of pictures as one array `map`, and the rows and columns of each as `grid`.

    In a network for images of any shape pictures have grids of their own: below and beside a smaller one is NaN.
    """
    grid = np.array([one.shape[-2:] for one in maps])
    whole = np.full((len(maps), *maps[0].shape[:-2], *grid.max(axis=0)), np.nan, maps[0].dtype)
    for place, one, (rows, columns) in zip(whole, maps, grid, strict=True):
        place[..., :rows, :columns] = one
    return {"map": whole, "grid": grid}
