"""Objects that `fit` got from Python in place of settings: a network, a loss, data, and functions to call.

They are not in config.yaml, which says so. Such a run is resumed by the same call of `fit`, not by the command line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.data.roles import Splits, split_data_set
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.indexed import data_set
from vitrail.data.sources.open import open_data, with_labels_of_one_kind
from vitrail.errors import UsageError
from vitrail.files import replacing
from vitrail.model.resnet import ResNet
from vitrail.model.stem import Normalise
from vitrail.model.variants import ForeignConfig
from vitrail.model.vit import ViT
from vitrail.objective.settings import ObjectiveSettings
from vitrail.ranges import Settings
from vitrail.training.classes import known_classes
from vitrail.training.folder import RunFolder
from vitrail.training.run import Run
from vitrail.weights.assemble import skeleton
from vitrail.weights.load import read_card
from vitrail.weights.store import WEIGHTS
from vitrail.words import shown

Losses = Callable[[Tensor, Tensor], Tensor]
"""(logits [batch, classes], targets int64 [batch] or float [batch, classes]) -> the loss of each image [batch]."""


@dataclass(frozen=True)
class PythonObjects:
    """The objects that `fit` got."""

    objective: ObjectiveSettings | Losses | None = None
    model: nn.Module | None = None
    data: Any = None
    on_log: Callable[[dict[str, Any]], None] | None = None
    on_evaluate: Callable[[int, dict[str, float]], None] | None = None
    asked: Mapping[str, str] = field(default_factory=dict)
    """Settings that no decision may change, by their dotted names -> where they are given: "--batch-size"."""

    def refuse_changed(self, asked: Run, decided: Run, reasons: Mapping[str, str]) -> None:
        """Raise UsageError if a setting that was asked for has another value in the run with every decision made."""
        for name, where in self.asked.items():
            section, _, setting = name.rpartition(".")
            try:
                before = attrgetter(name)(asked)
            except AttributeError:  # the name of a class
                continue
            if isinstance(before, Settings):  # a section of a file: its settings have lines of their own
                continue
            try:
                after = attrgetter(name)(decided)
            except AttributeError:  # the section has another class here
                after = getattr(type(attrgetter(section)(asked)), setting, None)  # the default, as if not asked
            if before not in (None, "auto", after):
                named = (name, name.partition(".")[0], f"{section}.kind")
                why = next((reasons[one] for one in named if one in reasons), f"only {after} is possible here")
                raise UsageError(f"{where} asks for {shown(before)}, which is not possible here ({why})")

    @property
    def losses(self) -> Losses | None:
        """The loss, if it is a function."""
        return None if isinstance(self.objective, ObjectiveSettings) else self.objective

    @property
    def names(self) -> dict[str, str]:
        """What only Python can give again, for run.json: {"model": "my_nets.Small"}."""
        data = None if isinstance(self.data, Data) else self.data
        found = {"objective": self.losses, "model": self.model, "data": data}
        return {name: _name(value) for name, value in found.items() if value is not None}

    @property
    def comment(self) -> str:
        """The first lines of config.yaml: what the file does not hold; "" if it holds everything."""
        what = ", ".join(f"{name} ({value})" for name, value in self.names.items())
        return what and f"# Given in Python, and so not in this file: {what}.\n# Resume the run with fit(...).\n"

    def applied_to(self, run: Run) -> Run:
        """Return `run` with what was given as settings. Raises UsageError for objects that do not go together."""
        if not isinstance(run, Run):
            raise UsageError(f"run is {shown(run)}; it must be a Run, such as vitrail.recipe('scratch-small')")
        if isinstance(self.objective, ObjectiveSettings):
            run = replace(run, objective=self.objective)
        elif self.objective is not None and (not callable(self.objective) or not run.supervised):
            raise UsageError(
                f"objective is {shown(self.objective)}; it must be settings, such as Supervised(), or, for a run that "
                "learns from labels, a function (logits, targets) -> losses"
            )
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise UsageError(f"model is {shown(self.model)}; it must be a network of torch's, an nn.Module")
        if self.model is not None and run.weights is not None:
            raise UsageError("model is a network of torch's, with its weights: do not set `weights`, too")
        if isinstance(self.data, Data):
            return replace(run, data=self.data)
        return run if self.data is None else replace(run, data=replace(run.data, path=f"<{_name(self.data)}>"))

    def splits(self, run: Run) -> Splits:
        """Return the data of `run`, split for training. Raises DataError."""
        if isinstance(self.data, Splits):
            return self.data
        if self.data is None or isinstance(self.data, Data):
            return open_data(run.data, seed=run.seed, labels=run.supervised, known_classes=known_classes(run))
        preprocess = read_card(run.weights).preprocess if run.preprocess is None and run.weights else run.preprocess
        banded = run.data.banded or (preprocess is not None and preprocess.bands is not None)
        found = data_set(self.data, run.data.columns, bands=banded)
        found = with_labels_of_one_kind(run.data.path, found, run.data.columns)
        return split_data_set(found, run.data, run.seed, labels=run.supervised, known_classes=known_classes(run))

    def check_resume(self, folder: RunFolder) -> None:
        """Raise UsageError if the run in `folder` needs objects that were not given."""
        recorded = folder.facts().get("given") or {}
        if lacking := sorted(recorded.keys() - self.names.keys()):
            what = ", ".join(f"{name}={recorded[name]}" for name in lacking)
            again = ", ".join(f"{name}=..." for name in lacking)
            raise UsageError(
                f"{folder.path} was trained with objects that only Python can give: {what}. Resume it with "
                f"vitrail.fit(run, resume={str(folder.path)!r}, {again})"
            )


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


class ForeignNetwork(nn.Module):
    """A network of the user's own: images -> logits. It gets float images [batch, 3, height, width] in -1..1, or
    normalised bands [batch, bands, height, width].

    Its tensors are saved without a card, so that only Python, which has its code, can load them. A ViT or ResNet of
    vitrail whose modules were replaced is one, too; it gets uint8 images, as usual.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.normalise = None if isinstance(module, ViT | ResNet) else Normalise(ForeignConfig.mean, ForeignConfig.std)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        if self.normalise is not None and images.dtype == torch.uint8:
            images = self.normalise(images).to(next(self.module.parameters()).dtype)
        logits: Tensor = self.module(images)
        return logits

    def save(self, place: Path) -> None:
        """Write the tensors of the network into model.safetensors in a folder."""
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}
        place.mkdir(parents=True, exist_ok=True)
        with replacing(place / WEIGHTS) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})

    def with_saved(self, place: Path) -> ForeignNetwork:
        """Return a copy with the tensors that `save` wrote."""
        found = copy.deepcopy(self)
        found.module.load_state_dict(load_file(place / WEIGHTS))
        return found.eval()


def trained_network(model: nn.Module, classes: int, preprocess: Preprocess) -> nn.Module:
    """Return a network that `fit` got, as the loop uses it. Raises UsageError if it does not return logits."""
    if isinstance(model, ViT | ResNet) and skeleton(model.config).state_dict().keys() == model.state_dict().keys():
        return model
    network, training = ForeignNetwork(model), model.training
    first = next(model.parameters(), None)
    if first is None:
        raise UsageError(f"nothing to train: the model, a {type(model).__name__}, has no parameters")
    channels, dtype = (3, torch.uint8) if preprocess.bands is None else (preprocess.bands.channels, torch.float32)
    with torch.no_grad():
        logits = network.eval()(torch.zeros(2, channels, *preprocess.size, dtype=dtype, device=first.device))
    network.train(training)
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else shown(logits)
        raise UsageError(f"model returned {found} for 2 images; it must return logits [batch, classes], {(2, classes)}")
    return network
