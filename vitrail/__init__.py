"""vitrail: the Vision Transformer as one working system. `vitrail --help`, and the same verbs here.

```python
result = vitrail.train("photos/", epochs=50)
vitrail.evaluate(result.folder, "photos/test")
model = vitrail.load(result.folder)
```

Names are imported when they are used, so that importing vitrail takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.config import Duration, Epochs, Examples, Percent, Steps
    from vitrail.config_yaml import from_yaml, to_yaml
    from vitrail.data.settings import Augment, Data, Preprocess
    from vitrail.errors import (
        CheckpointError,
        DataError,
        DecodeError,
        ExportError,
        TrainingError,
        UsageError,
        VitrailError,
        WeightsError,
    )
    from vitrail.model.build import create
    from vitrail.model.regroup import regroup
    from vitrail.model.variants import ResNetConfig, ViTConfig, variant
    from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer
    from vitrail.recipes.registry import recipe
    from vitrail.training.loop import fit
    from vitrail.training.run import Average, Model, Optim, Run, Schedule
    from vitrail.verbs.bench import bench
    from vitrail.verbs.cost import cost
    from vitrail.verbs.demo import demo
    from vitrail.verbs.doctor import doctor
    from vitrail.verbs.embed import embed
    from vitrail.verbs.evaluate import evaluate
    from vitrail.verbs.export import export
    from vitrail.verbs.finetune import finetune
    from vitrail.verbs.inspect.inspect import inspect
    from vitrail.verbs.plan.plan import plan
    from vitrail.verbs.predict import predict
    from vitrail.verbs.probe import probe
    from vitrail.verbs.report import report
    from vitrail.verbs.serve import serve
    from vitrail.verbs.sweep import sweep
    from vitrail.verbs.train import train
    from vitrail.verbs.vtab import vtab
    from vitrail.weights.load import load
    from vitrail.weights.save import save

_HOMES = {
    "vitrail.config": ("Duration", "Epochs", "Examples", "Percent", "Steps"),
    "vitrail.config_yaml": ("from_yaml", "to_yaml"),
    "vitrail.data.settings": ("Augment", "Data", "Preprocess"),
    "vitrail.errors": (
        *("CheckpointError", "DataError", "DecodeError", "ExportError", "TrainingError", "UsageError", "VitrailError"),
        "WeightsError",
    ),
    "vitrail.model.build": ("create",),
    "vitrail.model.variants": ("ResNetConfig", "ViTConfig", "variant"),
    "vitrail.model.regroup": ("regroup",),
    "vitrail.objective.settings": ("BEiT", "DINO", "MAE", "MaskedPatch", "Supervised", "Tokenizer"),
    "vitrail.recipes.registry": ("recipe",),
    "vitrail.training.loop": ("fit",),
    "vitrail.training.run": ("Average", "Model", "Optim", "Run", "Schedule"),
    "vitrail.verbs.bench": ("bench",),
    "vitrail.verbs.cost": ("cost",),
    "vitrail.verbs.demo": ("demo",),
    "vitrail.verbs.doctor": ("doctor",),
    "vitrail.verbs.embed": ("embed",),
    "vitrail.verbs.evaluate": ("evaluate",),
    "vitrail.verbs.export": ("export",),
    "vitrail.verbs.finetune": ("finetune",),
    "vitrail.verbs.inspect.inspect": ("inspect",),
    "vitrail.verbs.plan.plan": ("plan",),
    "vitrail.verbs.predict": ("predict",),
    "vitrail.verbs.report": ("report",),
    "vitrail.verbs.serve": ("serve",),
    "vitrail.verbs.sweep": ("sweep",),
    "vitrail.verbs.train": ("train",),
    "vitrail.verbs.vtab": ("vtab",),
    "vitrail.weights.load": ("load",),
    "vitrail.weights.save": ("save",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_GROUPS = {"probe": "vitrail.verbs.probe.probe"}
"""Verbs of two words: `vitrail.probe.fewshot(...)`."""

__all__ = [
    "DINO",
    "MAE",
    "Augment",
    "Average",
    "BEiT",
    "CheckpointError",
    "Data",
    "DataError",
    "DecodeError",
    "Duration",
    "Epochs",
    "Examples",
    "ExportError",
    "MaskedPatch",
    "Model",
    "Optim",
    "Percent",
    "Preprocess",
    "ResNetConfig",
    "Run",
    "Schedule",
    "Steps",
    "Supervised",
    "Tokenizer",
    "TrainingError",
    "UsageError",
    "ViTConfig",
    "VitrailError",
    "WeightsError",
    "__version__",
    "bench",
    "cost",
    "create",
    "demo",
    "doctor",
    "embed",
    "evaluate",
    "export",
    "finetune",
    "fit",
    "from_yaml",
    "inspect",
    "load",
    "plan",
    "predict",
    "probe",
    "recipe",
    "regroup",
    "report",
    "save",
    "serve",
    "sweep",
    "to_yaml",
    "train",
    "variant",
    "vtab",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _GROUPS:
        return importlib.import_module(_GROUPS[name])
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
