"""What the verbs and functions return, as classes for annotations and `isinstance`: `vitrail.results.Predictions`.

`import vitrail` does not import this module, because it needs torch: write `from vitrail.results import Predictions`.
"""

from __future__ import annotations

from vitrail.costs.estimate import Table6Row as Table6Row
from vitrail.data.check import Report as Report
from vitrail.data.check import Stats as Stats
from vitrail.data.images.ops import ModelInput as ModelInput
from vitrail.data.loading.pack import PackResult as PackResult
from vitrail.evaluation.features import Features as Features
from vitrail.exports.write import Exported as Exported
from vitrail.inspection.components import Filters as Filters
from vitrail.inspection.components import PatchComponents as PatchComponents
from vitrail.inspection.distance import Distances as Distances
from vitrail.inspection.embedding_map import EmbeddingMap as EmbeddingMap
from vitrail.inspection.maps import HeadMaps as HeadMaps
from vitrail.inspection.positions import PositionTiles as PositionTiles
from vitrail.inspection.relevance import Relevance as Relevance
from vitrail.model.record import AttentionMap as AttentionMap
from vitrail.objective.base import Prepared as Prepared
from vitrail.studies.catalog import StudySummary as StudySummary
from vitrail.studies.costs import Planned as Planned
from vitrail.transfer.recommend import Recommendation as Recommendation
from vitrail.transfer.sweep import SweepResult as SweepResult
from vitrail.transfer.vtab_runs import VtabTable as VtabTable
from vitrail.verbs.average import Averaged as Averaged
from vitrail.verbs.bench import Bench as Bench
from vitrail.verbs.bench import EngineBench as EngineBench
from vitrail.verbs.bulk import BulkProgress as BulkProgress
from vitrail.verbs.cost import CostReport as CostReport
from vitrail.verbs.data.audit import Audit as Audit
from vitrail.verbs.data.augment import Drawn as Drawn
from vitrail.verbs.data.dedup import Duplicates as Duplicates
from vitrail.verbs.data.next import NextImages as NextImages
from vitrail.verbs.embed import WrittenFeatures as WrittenFeatures
from vitrail.verbs.evaluate import Evaluation as Evaluation
from vitrail.verbs.inspect import Inspection as Inspection
from vitrail.verbs.launch import Script as Script
from vitrail.verbs.predict import Predictions as Predictions
from vitrail.verbs.probe import Probe as Probe
from vitrail.verbs.report import WrittenReport as WrittenReport
from vitrail.verbs.search import Matches as Matches
from vitrail.verbs.segment import SegmentationProbe as SegmentationProbe
from vitrail.verbs.serve import ServedRequests as ServedRequests
from vitrail.verbs.study import Studied as Studied
from vitrail.verbs.sweep import SweepPreview as SweepPreview
from vitrail.verbs.vtab import Listing as Listing
from vitrail.verbs.weights import Converted as Converted
from vitrail.verbs.weights import Info as Info
from vitrail.verbs.weights import Pushed as Pushed
from vitrail.weights.save import Saved as Saved
from vitrail.weights.verify import Verification as Verification

__all__ = sorted(name for name, value in vars().items() if isinstance(value, type))
