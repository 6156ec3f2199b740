"""What the verbs and functions return, as classes for annotations and `isinstance`: `vitrail.results.Predictions`.

`import vitrail` does not import this module, because it needs torch: write `from vitrail.results import Predictions`.
"""

from __future__ import annotations

from vitrail.costs.estimate import Table6Row
from vitrail.data.check import Report, Stats
from vitrail.data.images.ops import ModelInput
from vitrail.data.loading.pack import PackResult
from vitrail.evaluation.features import Features
from vitrail.exports.write import Exported
from vitrail.inspection.components import Filters, PatchComponents
from vitrail.inspection.distance import Distances
from vitrail.inspection.embedding_map import EmbeddingMap
from vitrail.inspection.maps import HeadMaps
from vitrail.inspection.positions import PositionTiles
from vitrail.inspection.relevance import Relevance
from vitrail.model.record import AttentionMap
from vitrail.objective.base import Prepared
from vitrail.studies.catalog import StudySummary
from vitrail.studies.costs import Planned
from vitrail.transfer.recommend import Recommendation
from vitrail.transfer.sweep import SweepResult
from vitrail.transfer.vtab_runs import VtabTable
from vitrail.verbs.bench import Bench, EngineBench
from vitrail.verbs.bulk import BulkProgress
from vitrail.verbs.cost import CostReport
from vitrail.verbs.data.audit import Audit
from vitrail.verbs.data.dedup import Duplicates
from vitrail.verbs.data.next import NextImages
from vitrail.verbs.embed import WrittenFeatures
from vitrail.verbs.evaluate import Evaluation
from vitrail.verbs.inspect import Inspection
from vitrail.verbs.launch import Script
from vitrail.verbs.predict import Predictions
from vitrail.verbs.probe import Probe
from vitrail.verbs.report import WrittenReport
from vitrail.verbs.search import Matches
from vitrail.verbs.segment import SegmentationProbe
from vitrail.verbs.serve import ServedRequests
from vitrail.verbs.study import Studied
from vitrail.verbs.sweep import SweepPreview
from vitrail.verbs.vtab import Listing
from vitrail.verbs.weights import Converted, Info, Pushed
from vitrail.weights.save import Saved
from vitrail.weights.verify import Verification

__all__ = [
    "AttentionMap",
    "Audit",
    "Bench",
    "BulkProgress",
    "Converted",
    "CostReport",
    "Distances",
    "Duplicates",
    "EmbeddingMap",
    "EngineBench",
    "Evaluation",
    "Exported",
    "Features",
    "Filters",
    "HeadMaps",
    "Info",
    "Inspection",
    "Listing",
    "Matches",
    "ModelInput",
    "NextImages",
    "PackResult",
    "PatchComponents",
    "Planned",
    "PositionTiles",
    "Predictions",
    "Prepared",
    "Probe",
    "Pushed",
    "Recommendation",
    "Relevance",
    "Report",
    "Saved",
    "Script",
    "SegmentationProbe",
    "ServedRequests",
    "Stats",
    "Studied",
    "StudySummary",
    "SweepPreview",
    "SweepResult",
    "Table6Row",
    "Verification",
    "VtabTable",
    "WrittenFeatures",
    "WrittenReport",
]
