"""The images and the network from which `probe` and `embed` compute features."""

from __future__ import annotations

import logging
from contextlib import closing
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
    """The training and the test images of a probe."""

    train: Listed
    test: Listed
    name: str
    """Description of the images, for the user."""


def open_splits(model: str | Path, data: str | Path | None, split: str | None) -> Splits:
    """Open training and test images of `data`; without `data`, those of the run `model`.

    The test images are the test split if it has labels, else the validation split, else a tenth of the training images,
    which is held out. Raises UsageError and DataError.
    """
    from vitrail.data.item import View
    from vitrail.data.sources.open import open_data
    from vitrail.data.split import hold_out

    if data is None:
        written = Path(model) / "config.yaml"
        if not written.is_file():
            raise UsageError(f"no images are given, and {model} is not a run folder with images. Give DATA after it")
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
        raise UsageError(f"{model} was trained without test or validation images. Give DATA after it")
    train, test = hold_out(opened.train, Data().holdout, seed)
    return Splits(View(opened.train, train), View(opened.train, test), f"{asked.path}, a tenth held out")


class Embedder:
    """Compute features with one network. Images are prepared as its card or as the few-shot protocol prescribes."""

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
            raise UsageError(f"prepare is {prepare!r}. Valid: model, protocol")
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
        """Number of features of an image."""
        transform = FewShotImages(size) if prepare == "protocol" else eval_transform(preprocess)
        self.loading: dict[str, Any] = dict(
            transform=transform,
            image_size=size,
            batch_size=batch_size,
            workers=available_cores() // 2 if workers is None else workers,
        )

    def __call__(self, source: Listed) -> Features:
        """Return the features of all readable images. The others are logged. Raises DataError."""
        from vitrail.data.loading.loader import Loader
        from vitrail.evaluation.features import collect

        with closing(Loader(source, shuffle=False, drop_last=False, **self.loading)) as loader:
            found = collect(self.embed, loader, source.class_names)
        for id_, reason in found.bad:
            log.warning("unreadable image, skipped: %s (%s)", id_, reason)
        return found
