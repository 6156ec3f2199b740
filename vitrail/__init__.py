"""vitrail: the Vision Transformer as one working system. The verbs of the command line are functions here.

```python
result = vitrail.train("photos/", epochs=50)
vitrail.evaluate(result.folder, "photos/test")
model = vitrail.load(result.folder)
```

A name's module is imported when the name is first used, so that `import vitrail` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.version import __version__ as __version__

if TYPE_CHECKING:  # the table below once more, for type checkers and editors
    from vitrail.config import Duration as Duration
    from vitrail.config import Epochs as Epochs
    from vitrail.config import Examples as Examples
    from vitrail.config import Percent as Percent
    from vitrail.config import Steps as Steps
    from vitrail.config import from_yaml as from_yaml
    from vitrail.config import to_yaml as to_yaml
    from vitrail.data.settings import Augment as Augment
    from vitrail.data.settings import Data as Data
    from vitrail.data.settings import Preprocess as Preprocess
    from vitrail.errors import CheckpointError as CheckpointError
    from vitrail.errors import DataError as DataError
    from vitrail.errors import DecodeError as DecodeError
    from vitrail.errors import ExportError as ExportError
    from vitrail.errors import TrainingError as TrainingError
    from vitrail.errors import UsageError as UsageError
    from vitrail.errors import VitrailError as VitrailError
    from vitrail.errors import WeightsError as WeightsError
    from vitrail.model.build import create as create
    from vitrail.model.regroup import regroup as regroup
    from vitrail.model.variants import ResNetConfig as ResNetConfig
    from vitrail.model.variants import ViTConfig as ViTConfig
    from vitrail.model.variants import variant as variant
    from vitrail.objective.settings import DINO as DINO
    from vitrail.objective.settings import MAE as MAE
    from vitrail.objective.settings import BEiT as BEiT
    from vitrail.objective.settings import MaskedPatch as MaskedPatch
    from vitrail.objective.settings import Supervised as Supervised
    from vitrail.objective.settings import Tokenizer as Tokenizer
    from vitrail.recipes.registry import recipe as recipe
    from vitrail.training.loop import fit as fit
    from vitrail.training.run import Average as Average
    from vitrail.training.run import Model as Model
    from vitrail.training.run import Optim as Optim
    from vitrail.training.run import Run as Run
    from vitrail.training.run import Schedule as Schedule
    from vitrail.verbs.bench import bench as bench
    from vitrail.verbs.cost import cost as cost
    from vitrail.verbs.doctor import doctor as doctor
    from vitrail.verbs.embed import embed as embed
    from vitrail.verbs.evaluate import evaluate as evaluate
    from vitrail.verbs.export import export as export
    from vitrail.verbs.finetune import finetune as finetune
    from vitrail.verbs.inspect.inspect import inspect as inspect
    from vitrail.verbs.plan.plan import plan as plan
    from vitrail.verbs.predict import predict as predict
    from vitrail.verbs.probe import probe as probe
    from vitrail.verbs.report import report as report
    from vitrail.verbs.serve import serve as serve
    from vitrail.verbs.sweep import sweep as sweep
    from vitrail.verbs.train import demo as demo
    from vitrail.verbs.train import train as train
    from vitrail.verbs.vtab import vtab as vtab
    from vitrail.weights.load import load as load
    from vitrail.weights.save import save as save

_MODULES = {
    "vitrail.config": "Duration Epochs Examples Percent Steps from_yaml to_yaml",
    "vitrail.data.settings": "Augment Data Preprocess",
    "vitrail.errors": (
        "CheckpointError DataError DecodeError ExportError TrainingError UsageError VitrailError WeightsError"
    ),
    "vitrail.model.build": "create",
    "vitrail.model.regroup": "regroup",
    "vitrail.model.variants": "ResNetConfig ViTConfig variant",
    "vitrail.objective.settings": "BEiT DINO MAE MaskedPatch Supervised Tokenizer",
    "vitrail.recipes.registry": "recipe",
    "vitrail.training.loop": "fit",
    "vitrail.training.run": "Average Model Optim Run Schedule",
    "vitrail.verbs.bench": "bench",
    "vitrail.verbs.cost": "cost",
    "vitrail.verbs.doctor": "doctor",
    "vitrail.verbs.embed": "embed",
    "vitrail.verbs.evaluate": "evaluate",
    "vitrail.verbs.export": "export",
    "vitrail.verbs.finetune": "finetune",
    "vitrail.verbs.inspect.inspect": "inspect",
    "vitrail.verbs.plan.plan": "plan",
    "vitrail.verbs.predict": "predict",
    "vitrail.verbs.probe": "probe",
    "vitrail.verbs.report": "report",
    "vitrail.verbs.serve": "serve",
    "vitrail.verbs.sweep": "sweep",
    "vitrail.verbs.train": "demo train",
    "vitrail.verbs.vtab": "vtab",
    "vitrail.version": "__version__",
    "vitrail.weights.load": "load",
    "vitrail.weights.save": "save",
}
"""Each module and the public names that come from it. `probe` is a module: `vitrail.probe.fewshot(...)`."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    module = __import__(
        _MODULE_OF[name], fromlist=[name]
    )  # as `from module import name`: a function, or a module in it
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
