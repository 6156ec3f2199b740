"""Which answers are right, where that is more than "output number = label". Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.item import UNKNOWN


@dataclass(frozen=True)
class AnswerKey:
    """For each label of a source, the outputs of the network that are right for it.

    An image may have several right answers (ImageNet ReaL), a class several outputs, and an output no class
    (ObjectNet). What is right is decided by `right` alone; `label` and `output` say under which class an image
    and an answer are listed.
    """

    right: np.ndarray
    """bool [labels, outputs]: is this output a right answer? At least one is, for each label."""
    label: np.ndarray
    """int64 [labels]: the class that images with this label count for."""
    output: np.ndarray
    """int64 [outputs]: the class that this output stands for; UNKNOWN where it is none of the classes."""

    def marks(self, labels: np.ndarray) -> np.ndarray:
        """Return bool [B, outputs]: the right answers for these labels [B]; none for UNKNOWN."""
        return self.right[labels] & (labels >= 0)[:, None]

    def as_classes(self, labels: np.ndarray, top: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels [N], answers [N, k]) as classes; a right answer is the class of its image.

        labels are those of the source, `top` [N, k] outputs (-1: no answer), `hit` bool [N, k] whether they are right.
        """
        classes = np.where(labels >= 0, self.label[labels], UNKNOWN)
        others = np.where(top >= 0, self.output[top], UNKNOWN)
        return classes, np.where(hit, classes[:, None], others)
