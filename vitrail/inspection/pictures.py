"""Pictures to show: read one batch at a time, each as it is drawn and as the network sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from vitrail.data.check import OnProgress
from vitrail.data.image_names import bad_kinds
from vitrail.data.images.geometry import Op, resize
from vitrail.data.item import IndexedSource
from vitrail.data.labels.sets import Label
from vitrail.errors import DataError, DecodeError
from vitrail.inspection.overlay import Box, visible_box

SHOWN = 768
"""Maximum length of a drawn picture's longer side, in pixels."""


@dataclass(frozen=True)
class Picture:
    """One picture."""

    name: str
    label: Label
    """See `Item.label`."""
    shown: np.ndarray
    """uint8 [H, W, 3]: the whole picture, upright; large ones are reduced."""
    box: Box
    """The part of `shown` that the network sees."""
    part: tuple[float, float, float, float]
    """The same part in the upright picture of the file: top, left, height and width in its pixels."""
    input: np.ndarray
    """[height, width, channels], as the network sees it."""


class Pictures:
    """Pictures of a source, prepared with a network's evaluation transform. Every iteration reads them again.

    Images that cannot be read are left out. Their names and the reasons go to `bad`, which several readers may share.
    `progress(images done, all images)` is called after each batch.
    """

    def __init__(
        self,
        source: IndexedSource,
        transform: Op,
        batch_size: int = 8,
        bad: dict[str, str] | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        self.source, self.transform, self.batch_size, self._progress = source, transform, batch_size, progress
        self.bad = {} if bad is None else bad

    def __iter__(self) -> Iterator[list[Picture]]:
        """Yield batches of pictures whose inputs have one shape. Raises DataError if none can be read."""
        count = len(self.source)
        pictures = ((i, picture) for i in range(count) if (picture := self.read(i)) is not None)
        nothing = True
        for _, alike in groupby(pictures, lambda pair: pair[1].input.shape):
            while batch := list(islice(alike, self.batch_size)):
                nothing = False
                yield [picture for _, picture in batch]
                if self._progress is not None:
                    self._progress(batch[-1][0] + 1, count)
        if self._progress is not None:
            self._progress(count, count)
        if nothing:
            raise DataError(f"there is no image to look into: {bad_kinds(self.bad.items()) or 'none was given'}")

    def tensors(self, device: torch.device | str = "cpu") -> Iterator[Tensor]:
        """Return the same batches as inputs of the network, [batch, channels, height, width]."""
        return (stack(batch, device) for batch in self)

    def read(self, index: int, longest: int = SHOWN) -> Picture | None:
        """Return one picture, drawn with at most `longest` pixels on its longer side; None if it cannot be read."""
        try:
            item = self.source[index]
            image = self.transform.pixels.read(item.image)
        except DecodeError as error:
            self.bad[self.source.id(index)] = error.reason
            return None
        height, width = image.shape[:2]
        box = visible_box(self.transform, height, width)
        factor = min(1.0, longest / max(height, width))
        size = max(1, round(height * factor)), max(1, round(width * factor))
        return Picture(
            item.id,
            item.label,
            self.transform.pixels.shown(resize(image, *size)),
            box.scaled(size[0] / height, size[1] / width),
            (box.top, box.left, box.height, box.width),
            self.transform(image, np.random.default_rng(0)),  # nothing is random in evaluation
        )


def stack(pictures: Sequence[Picture], device: torch.device | str = "cpu") -> Tensor:
    """Return the inputs of pictures as one batch, [batch, channels, height, width]."""
    return torch.from_numpy(np.stack([picture.input for picture in pictures])).permute(0, 3, 1, 2).to(device)
