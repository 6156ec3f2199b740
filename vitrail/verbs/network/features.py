"""The features that `probe` measures and `embed` writes: which images they are of, and the network that gives them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.config import from_yaml
from vitrail.data.settings import Data
from vitrail.errors import UsageError
from vitrail.training.run import Run
from vitrail.verbs.network.classifier import load_network

if TYPE_CHECKING:
    from vitrail.data.item import Listed
    from vitrail.evaluation.features import Features

log = logging.getLogger("vitrail")
Prepare = Literal["model", "protocol"]


@dataclass(frozen=True)
class Splits:
    """The two sides of a probe."""

    train: Listed
    test: Listed
    name: str
    """What the images are, for the user."""


def open_splits(model: str | Path, data: str | Path | None, split: str | None) -> Splits:
    """Open training images and the images to measure on; without `data`, those of the run `model`.

    These are the test split where it has labels, else the validation split, else a tenth held out. Raises UsageError
    and DataError.
    """
    from vitrail.data.item import View
    from vitrail.data.sources.open import open_data
    from vitrail.data.split import hold_out

    if data is None:
        written = Path(model) / "config.yaml"
        if not written.is_file():
            raise UsageError(f"on which images? {model} is no run that knows: name them after it")
        run = from_yaml(written, Run())
        asked, seed = run.data, run.seed
    else:
        asked, seed = Data(path=str(data), holdout=0.0), 0
    opened = open_data(asked if split is None else replace(asked, test=split), seed=seed)
    chosen = opened.test
    if chosen is None or not (chosen.labels >= 0).any():
        chosen = opened.validation
    if chosen is not None:
        return Splits(opened.train, chosen, asked.path)
    if data is None:
        raise UsageError(f"{model} was trained without test or validation images: name others after it")
    kept, out = hold_out(opened.train, Data().holdout, seed)
    return Splits(View(opened.train, kept), View(opened.train, out), f"{asked.path}, a tenth held out")


class Embedder:
    """Source -> features of its images by one network, prepared as its card or as the few-shot protocol says."""

    def __init__(
        self,
        model: str | Path,
        *,
        prepare: Prepare = "model",
        image_size: int | None = None,
        batch_size: int = 64,
        workers: int | None = None,
        device: str | None = None,
        precision: Literal["auto", "bf16", "float32"] = "auto",
    ) -> None:
        if precision not in ("auto", "bf16", "float32"):
            raise UsageError(f"no precision is called {precision!r}: auto, bf16 or float32")
        if prepare not in ("model", "protocol"):
            raise UsageError(f"images are not prepared as {prepare!r}: model or protocol")
        import torch

        from vitrail.data.images.ops import eval_transform
        from vitrail.device import available_cores, choose_device
        from vitrail.evaluation.classify import predictor
        from vitrail.evaluation.fewshot_images import FewShotImages

        network = load_network(model, image_size)
        preprocess = network.card.preprocess
        self.embed = predictor(network, choose_device(device), precision, features=True)
        size = preprocess.image_size
        self.width = int(self.embed(torch.zeros(1, 3, *size, dtype=torch.uint8)).shape[1])
        """Features of an image."""
        transform = FewShotImages(size) if prepare == "protocol" else eval_transform(preprocess)
        self.loading: dict[str, Any] = dict(
            transform=transform,
            image_size=size,
            batch_size=batch_size,
            workers=available_cores() // 2 if workers is None else workers,
        )

    def __call__(self, source: Listed) -> Features:
        """Return the features of all images that can be read; the others are logged. Raises DataError."""
        from vitrail.data.loading.loader import Loader
        from vitrail.evaluation.features import collect

        loader = Loader(source, shuffle=False, drop_last=False, **self.loading)
        try:
            found = collect(self.embed, loader, source.class_names)
        finally:
            loader.close()
        for id_, reason in found.bad:
            log.warning("left out, unreadable: %s (%s)", id_, reason)
        return found
