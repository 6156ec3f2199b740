"""A run that ends in seconds, to see that everything works together."""

from __future__ import annotations

from vitrail.config import Steps
from vitrail.data.settings import Augment, Data
from vitrail.training.run import Model, Optim, Run


def smoke() -> Run:
    """Twenty steps of a tiny ViT on the embedded digits: is this installation sound?

    Command: `vitrail train --recipe smoke`
    Cost: seconds on one core.
    """
    return Run(
        name="smoke",
        data=Data(path="digits"),
        model="Ti/2",
        vit=Model(width=32, depth=2, heads=2, mlp_dim=64),
        augment=Augment(crop="center", flip=False),
        optim=Optim(lr=2e-3),
        duration=Steps(20),
        batch_size=64,
        evaluate_every=Steps(10),
        checkpoint_every=Steps(10),
    )
