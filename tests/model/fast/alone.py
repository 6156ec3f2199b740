"""What networks compute, as a program: `python alone.py FOLDER OUT` writes it to OUT with the vitrail of this process.

FOLDER/weights holds files and folders of weights. The folder OUT gets `tensors.pt` and a training run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_runs import SHORT, tensors, tiny_run
from torch import Tensor

import vitrail
from vitrail.data.settings import Augment
from vitrail.training.run import Model, Optim


def results(path: Path) -> dict[str, Tensor]:
    """Outputs and gradients of the network in a file, and what its frozen copies compute."""
    model = vitrail.load(path).eval()
    model.requires_grad_()
    config = model.config
    images = torch.randn(2, config.channels, *config.image_size, generator=torch.Generator().manual_seed(0))
    features = model.features(images)
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(1))
    (features * weights).sum().backward()
    found = {"features": features.detach()}
    found |= {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    with torch.no_grad():
        found["bfloat16 frozen"] = vitrail.freeze(model, torch.bfloat16).features(images.bfloat16()).float()  # type: ignore[operator]
        found["frozen"] = vitrail.freeze(model).features(images)  # type: ignore[operator]
        with torch.autocast("cpu", torch.bfloat16):
            found["bfloat16"] = model.features(images).float()
    return found


def trained(out: Path) -> dict[str, Tensor]:
    """The tensors of a run of four steps without noise in the network.

    It is by SGD: Adam turns the gradient of the keys' bias, which is rounding alone, into steps of the learning rate.
    """
    still = Model(width=16, depth=2, heads=2, mlp_dim=32)
    vitrail.fit(tiny_run(out, **SHORT, vit=still, augment=Augment(crop="pad", pad=1), optim=Optim(name="sgd", lr=0.1)))
    return {name: value for name, value in tensors(next(out.glob("train-*"))).items() if value.is_floating_point()}


def every_network(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Name of each network in a folder -> its `results`."""
    return {path.name: results(path) for path in sorted(folder.iterdir())}


if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    found = {**every_network(folder / "weights"), "run": trained(out)}
    used = sorted(name for name in sys.modules if name.startswith("vitrail.model.fast"))
    torch.save(dict(found=found, file=vitrail.__file__, fast=used), out / "tensors.pt")
