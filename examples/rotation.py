"""An objective of one's own, without labels: `vitrail train digits --objective rotation:Rotation`.

`python rotation.py digits` does the same, and says what the features are worth. A folder of class folders works, too.
"""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import vitrail


class TellRotations(vitrail.SelfSupervised):
    """Tell by how many quarter turns an image was rotated (Gidaris, Singh and Komodakis 2018)."""

    def __init__(self, model):
        super().__init__(model)
        self.head = nn.Linear(model.config.width, 4)

    def draw(self, prepared, step):
        """Rotate each image. The turns follow from image and step alone, so a resumed run repeats them."""
        turns = (prepared.index.to(prepared.images.device) + step) % 4
        images = [image.rot90(int(turn), (1, 2)) for image, turn in zip(prepared.images, turns, strict=True)]
        return replace(prepared, images=torch.stack(images), targets=turns)

    def loss(self, prepared):
        """Return the sum of the losses, the number of images, and sums to report."""
        logits = self.head(self.model.features(prepared.images)).float()
        right = (logits.argmax(-1) == prepared.targets).sum()
        return F.cross_entropy(logits, prepared.targets, reduction="sum"), len(prepared), {"top1": right}

    def show(self, prepared):
        """Return pictures for the report."""
        return {"input": prepared.images}


@dataclass(frozen=True)
class Rotation(vitrail.ObjectiveSettings):
    """Predicting rotations."""

    labels: ClassVar[bool] = False

    def build(self, model, task):
        """Return the objective that trains `model`."""
        return TellRotations(model)


if __name__ == "__main__":
    from rotation import Rotation  # the run's config.yaml names this module, so that the run can be resumed

    (data,) = sys.argv[1:]
    run = vitrail.train(data, name="rotation", objective=Rotation(), epochs=20)
    accuracy = vitrail.probe.knn(run.folder, data, k=(20,)).results.top1[20]
    print(f"{run.folder}: {accuracy:.1%} of the test images have the class of most of their neighbours")
