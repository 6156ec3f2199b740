"""The studies by name. Torch-free."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vitrail.errors import UsageError, did_you_mean
from vitrail.import_path import find as imported
from vitrail.studies.study import Study


class StudySummary(NamedTuple):
    """A study in short."""

    shows: str
    minutes: int
    """Approximate minutes for two seeds at laptop scale, with --parallel 2 on two cores of 2024 with bfloat16."""
    exaflops: int
    """Compute of the published grid, with one seed."""
    public: Literal["yes", "partly", "no"]
    """Whether its data are public. JFT-300M is not."""


REPORT = "report"
"""The name that stands for the page of all studies."""
StudyName = Literal[
    "table2", "table5", "figure4", "table6", "table7", "table8", "figure8", "figure9", "figure10", "figure13",
    "self-supervision", "protocols", "three-table1", "three-table2", "three-table3", "three-table4", "three-table5",
    "three-table6", "three-table7", "three-table8", "three-figure1", "three-figure2", "three-figure3", "figure3",
    "figure5", "three-figure6", "report",
]  # fmt: skip
NAMES: dict[StudyName, StudySummary] = {
    "table2": StudySummary(
        "pre-training on more and less data, and BiT, transferred to several data sets (Table 2)", 30, 20690, "partly"),
    "table5": StudySummary(
        "accuracy after fine-tuning by network and pre-training set (Table 5, Figure 3)", 35, 10777, "partly"),
    "figure4": StudySummary("few-shot accuracy by the number of images to pre-train on (Figure 4)", 30, 2402, "no"),
    "table6": StudySummary(
        "accuracy after fine-tuning by the compute of pre-training, three families (Table 6, Figure 5)",
        40, 17103, "no"),
    "table7": StudySummary("ResNets pre-trained with Adam and with SGD (Table 7)", 25, 1449, "no"),
    "table8": StudySummary("kinds of position embeddings, and where they are added (Table 8)", 25, 1797, "no"),
    "figure8": StudySummary("depth, width, MLP width and patch size scaled one at a time (Figure 8)", 25, 2927, "no"),
    "figure9": StudySummary("class token against pooling, at several learning rates (Figure 9)", 18, 668, "no"),
    "figure10": StudySummary(
        "similarity of position embeddings that were learned with different settings (Figure 10)", 16, 3133, "no"),
    "figure13": StudySummary(
        "axial attention against ViT and ResNet, by compute and by measured speed (Figure 13)", 30, 917, "no"),
    "self-supervision": StudySummary(
        "masked patches, MAE, BEiT and DINO beside labels and random weights (section 4.6, B.1.2)", 50, 2298, "partly"),
    "protocols": StudySummary("one network measured from 5-shot accuracy to fine-tuning (section 4.1)", 15, 155, "yes"),
    "three-table1": StudySummary(
        "baselines of several widths, with and without LayerScale (follow-up, Table 1)", 20, 457, "yes"),
    "three-table2": StudySummary(
        "LayerScale in deep sequential and parallel networks (follow-up, Table 2)", 25, 610, "yes"),
    "three-table3": StudySummary(
        "more blocks against more width, at equal parameters (follow-up, Table 3)", 15, 508, "yes"),
    "three-table4": StudySummary("speed of parallel and sequential blocks (follow-up, Table 4)", 3, 0, "yes"),
    "three-table5": StudySummary(
        "fine-tuning a part of the network at a higher resolution (follow-up, Table 5)", 15, 425, "yes"),
    "three-table6": StudySummary(
        "fine-tuning a part of the network on other data sets (follow-up, Table 6)", 20, 365, "yes"),
    "three-table7": StudySummary(
        "stems with labels and after masked pre-training (follow-up, Table 7, Figure 6)", 15, 1505, "yes"),
    "three-table8": StudySummary("training procedures compared (follow-up, Table 8)", 30, 867, "yes"),
    "three-figure1": StudySummary("accuracy by number of branches (follow-up, Figure 1)", 25, 284, "yes"),
    "three-figure2": StudySummary("parallel against sequential blocks, by width (follow-up, Figure 2)", 40, 499, "yes"),
    "three-figure3": StudySummary(
        "parallel against sequential blocks, by number of blocks (follow-up, Figure 3)", 45, 698, "yes"),
}  # fmt: skip
"""Name -> the study in short."""
SAME: dict[str, StudyName] = {"figure3": "table5", "figure5": "table6", "three-figure6": "three-table7"}
"""Figures that show the numbers of a table -> the table."""
APPENDIX = ("table7", "table8", "figure8", "figure9", "figure10", "figure13")
"""The studies of the paper's appendix D."""


def study_named(name: str) -> Study:
    """Return a study. Raises UsageError with the nearest name."""
    name = SAME.get(name, name)
    if name not in NAMES:
        raise UsageError(f"no study is called {name!r}.{did_you_mean(name, NAMES)} Valid: {', '.join(NAMES)}")
    short = name.removeprefix("three-")
    file = "three_things" if name != short else "appendix" if name in APPENDIX else "paper"
    study: Study = imported(f"vitrail.studies.grids.{file}:{short.replace('-', '_')}")()
    return study
