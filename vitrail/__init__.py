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
    from vitrail.config import from_yaml as from_yaml
    from vitrail.config import to_yaml as to_yaml
    from vitrail.data.settings import Augment as Augment
    from vitrail.data.settings import Data as Data
    from vitrail.data.settings import Preprocess as Preprocess
    from vitrail.durations import Duration as Duration
    from vitrail.durations import Epochs as Epochs
    from vitrail.durations import Examples as Examples
    from vitrail.durations import Percent as Percent
    from vitrail.durations import Steps as Steps
    from vitrail.errors import CheckpointError as CheckpointError
    from vitrail.errors import DataError as DataError
    from vitrail.errors import DecodeError as DecodeError
    from vitrail.errors import ExportError as ExportError
    from vitrail.errors import TrainingError as TrainingError
    from vitrail.errors import UsageError as UsageError
    from vitrail.errors import VitrailError as VitrailError
    from vitrail.errors import WeightsError as WeightsError
    from vitrail.evaluation.metric import Metric as Metric
    from vitrail.exports.engine import Engine as Engine
    from vitrail.exports.engine import load as load
    from vitrail.inspection.components import component_maps as component_maps
    from vitrail.inspection.components import patch_components as patch_components
    from vitrail.inspection.components import principal_filters as principal_filters
    from vitrail.inspection.distance import attention_distance as attention_distance
    from vitrail.inspection.embedding_map import embedding_map as embedding_map
    from vitrail.inspection.embedding_map import neighbours as neighbours
    from vitrail.inspection.maps import head_maps as head_maps
    from vitrail.inspection.maps import patch_attention as patch_attention
    from vitrail.inspection.positions import position_tiles as position_tiles
    from vitrail.inspection.relevance import relevance as relevance
    from vitrail.inspection.rollout import rollout as rollout
    from vitrail.model.build import create as create
    from vitrail.model.build import freeze as freeze
    from vitrail.model.build import reset_head as reset_head
    from vitrail.model.own_part import OwnPart as OwnPart
    from vitrail.model.posemb import AtLayer as AtLayer
    from vitrail.model.posemb import Positions as Positions
    from vitrail.model.record import attention_maps as attention_maps
    from vitrail.model.record import tap_attention as tap_attention
    from vitrail.model.regroup import regroup as regroup
    from vitrail.model.resnet import ResNet as ResNet
    from vitrail.model.variants import ResNetConfig as ResNetConfig
    from vitrail.model.variants import ViTConfig as ViTConfig
    from vitrail.model.variants import variant as variant
    from vitrail.model.vit import ViT as ViT
    from vitrail.objective.base import Objective as Objective
    from vitrail.objective.self_supervised import SelfSupervised as SelfSupervised
    from vitrail.objective.settings import DINO as DINO
    from vitrail.objective.settings import MAE as MAE
    from vitrail.objective.settings import BEiT as BEiT
    from vitrail.objective.settings import DINOv2 as DINOv2
    from vitrail.objective.settings import MaskedPatch as MaskedPatch
    from vitrail.objective.settings import ObjectiveSettings as ObjectiveSettings
    from vitrail.objective.settings import Regression as Regression
    from vitrail.objective.settings import Segmentation as Segmentation
    from vitrail.objective.settings import SeveralAnswers as SeveralAnswers
    from vitrail.objective.settings import Supervised as Supervised
    from vitrail.objective.settings import Tokenizer as Tokenizer
    from vitrail.recipes.registry import recipe as recipe
    from vitrail.training.loop import fit as fit
    from vitrail.training.result import Result as Result
    from vitrail.training.run import Average as Average
    from vitrail.training.run import Model as Model
    from vitrail.training.run import Optim as Optim
    from vitrail.training.run import Run as Run
    from vitrail.training.run import Schedule as Schedule
    from vitrail.verbs import probe as probe
    from vitrail.verbs.bench import bench as bench
    from vitrail.verbs.cost import cost as cost
    from vitrail.verbs.doctor import doctor as doctor
    from vitrail.verbs.embed import embed as embed
    from vitrail.verbs.evaluate import evaluate as evaluate
    from vitrail.verbs.export import export as export
    from vitrail.verbs.inspect import inspect as inspect
    from vitrail.verbs.plan.plan import plan as plan
    from vitrail.verbs.predict import predict as predict
    from vitrail.verbs.report import report as report
    from vitrail.verbs.search import search as search
    from vitrail.verbs.serve import serve as serve
    from vitrail.verbs.study import study as study
    from vitrail.verbs.sweep import sweep as sweep
    from vitrail.verbs.train.train import Preview as Preview
    from vitrail.verbs.train.train import demo as demo
    from vitrail.verbs.train.train import finetune as finetune
    from vitrail.verbs.train.train import train as train
    from vitrail.verbs.vtab import vtab as vtab
    from vitrail.weights.card import Card as Card
    from vitrail.weights.save import save as save

_MODULES = {
    "vitrail.config": "from_yaml to_yaml",
    "vitrail.data.settings": "Augment Data Preprocess",
    "vitrail.durations": "Duration Epochs Examples Percent Steps",
    "vitrail.errors": (
        "CheckpointError DataError DecodeError ExportError TrainingError UsageError VitrailError WeightsError"
    ),
    "vitrail.evaluation.metric": "Metric",
    "vitrail.exports.engine": "Engine load",
    "vitrail.inspection.components": "component_maps patch_components principal_filters",
    "vitrail.inspection.distance": "attention_distance",
    "vitrail.inspection.embedding_map": "embedding_map neighbours",
    "vitrail.inspection.maps": "head_maps patch_attention",
    "vitrail.inspection.positions": "position_tiles",
    "vitrail.inspection.relevance": "relevance",
    "vitrail.inspection.rollout": "rollout",
    "vitrail.model.build": "create freeze reset_head",
    "vitrail.model.own_part": "OwnPart",
    "vitrail.model.posemb": "AtLayer Positions",
    "vitrail.model.record": "attention_maps tap_attention",
    "vitrail.model.regroup": "regroup",
    "vitrail.model.resnet": "ResNet",
    "vitrail.model.variants": "ResNetConfig ViTConfig variant",
    "vitrail.model.vit": "ViT",
    "vitrail.objective.base": "Objective",
    "vitrail.objective.self_supervised": "SelfSupervised",
    "vitrail.objective.settings": "BEiT DINO DINOv2 MAE MaskedPatch ObjectiveSettings Regression Segmentation "
    "SeveralAnswers Supervised Tokenizer",
    "vitrail.recipes.registry": "recipe",
    "vitrail.training.loop": "fit",
    "vitrail.training.result": "Result",
    "vitrail.training.run": "Average Model Optim Run Schedule",
    "vitrail.verbs": "probe",
    "vitrail.verbs.bench": "bench",
    "vitrail.verbs.cost": "cost",
    "vitrail.verbs.doctor": "doctor",
    "vitrail.verbs.embed": "embed",
    "vitrail.verbs.evaluate": "evaluate",
    "vitrail.verbs.export": "export",
    "vitrail.verbs.inspect": "inspect",
    "vitrail.verbs.plan.plan": "plan",
    "vitrail.verbs.predict": "predict",
    "vitrail.verbs.report": "report",
    "vitrail.verbs.search": "search",
    "vitrail.verbs.serve": "serve",
    "vitrail.verbs.study": "study",
    "vitrail.verbs.sweep": "sweep",
    "vitrail.verbs.train.train": "Preview demo finetune train",
    "vitrail.verbs.vtab": "vtab",
    "vitrail.version": "__version__",
    "vitrail.weights.card": "Card",
    "vitrail.weights.save": "save",
}
"""Modules and their public names. `probe` is a module: `vitrail.probe.fewshot(...)`."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    from vitrail.version import extras_named

    with extras_named():
        # like `from module import name`: the name may be that of a module in a package
        return getattr(__import__(_MODULE_OF[name], fromlist=[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
