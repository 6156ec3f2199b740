"""Table 7 and Figure 6 of the follow-up: stems with labels, and after masked pre-training (section 5).

A column has labels only; the other has masked pre-training without labels, then labels. Stems that mix patches are
masked behind the stem. At laptop scale masked patch prediction takes the place of BeiT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitrail.durations import Epochs, Percent
from vitrail.objective.settings import BEiT, MaskedPatch
from vitrail.recipes.registry import recipe
from vitrail.studies.grids.three_things.depth import baseline
from vitrail.studies.laptop import SIDE, pre_training
from vitrail.studies.study import UNITS, Cell, Claim, LaptopData, Scores, Stage, Study, minus
from vitrail.training.run import Run

EPOCHS, MASKED_EPOCHS, TUNED_EPOCHS = 4, 4, 2
LABELS, MASKED = "labels", "masked pre-training"
LINEAR, DEEPER, EARLY = "linear", "linear, a block more", "early convolutions"
HMLP, HMLP_LN, LEVIT = "hMLP, BN", "hMLP, LN", "LeViT"
STEMS: dict[str, dict[str, Any]] = {
    LINEAR: {"stem": "linear"},
    HMLP: {"stem": "hmlp", "stem_norm": "batch"},
    HMLP_LN: {"stem": "hmlp", "stem_norm": "layer"},
    LEVIT: {"stem": "levit"},
    EARLY: {"stem": "early"},
    DEEPER: {"stem": "linear"},
    "linear + norm": {"stem": "linear+norm"},
    "linear + GELU": {"stem": "linear+gelu"},
    "linear + norm + GELU": {"stem": "linear+norm+gelu"},
}
"""Row -> the changes of the network. A block more costs about as much as a convolutional stem."""
MIXING = ("levit", "early")


def _with_stem(run: Run, row: str, depth: int) -> Run:
    return replace(run, vit=replace(run.vit, depth=depth + (row == DEEPER), **STEMS[row]))


def _maskable(run: Run, row: str) -> Run:
    after = STEMS[row]["stem"] in MIXING
    assert isinstance(run.objective, MaskedPatch | BEiT)
    return replace(run, objective=replace(run.objective, mask_after_stem=after))


def laptop(given: LaptopData) -> Sequence[Cell]:
    """Return a network with nine stems in both columns, its parameters and its compute."""
    cells = []
    for row in STEMS:
        labels = Stage(_with_stem(pre_training("ViT-64/8", EPOCHS, tested=True), row, 6))
        cells.append(Cell(row, LABELS, labels, metric="top-1"))
        cells.append(Cell(row, MASKED, _tuned(_masked(row)), metric="top-1"))
        cells += [Cell(row, LABELS, labels, metric="parameters"), Cell(row, LABELS, labels, metric="MACs")]
    return cells


def _masked(row: str) -> Stage:
    run, like = recipe("masked-patch-small"), pre_training("ViT-64/8", MASKED_EPOCHS)
    run = replace(run, model=like.model, vit=like.vit, duration=like.duration, data=like.data, image_size=SIDE)
    run = replace(run, preprocess=like.preprocess, evaluate_every=Percent(100), checkpoint_every=Percent(25))
    return Stage(_maskable(_with_stem(run, row, 6), row))


def _tuned(start: Stage) -> Stage:
    """Return the training with labels after masked pre-training, with layer-wise rates as for MAE."""
    like = pre_training("ViT-64/8", TUNED_EPOCHS, tested=True)
    run = recipe("finetune-small")
    return Stage(
        replace(run, data=like.data, image_size=SIDE, preprocess=like.preprocess, duration=like.duration,
                evaluate_every=Percent(100), checkpoint_every=Percent(25)),
        start,
    )  # fmt: skip


def paper() -> Sequence[Cell]:
    """Return B/16 with nine stems on ImageNet: 300 epochs with labels; BeiT for 300 epochs, then 100 with labels."""
    cells = []
    tokenizer = _on_imagenet(recipe("tokenizer"))
    for row in STEMS:
        labels = Stage(_with_stem(baseline("b16").run, row, 12))
        beit = Stage(_maskable(_with_stem(_on_imagenet(recipe("beit")), row, 12), row), tokenizer=Stage(tokenizer))
        tuned = Stage(_on_imagenet(replace(recipe("beit-finetune"), duration=Epochs(100))), beit)
        cells += [Cell(row, LABELS, labels, metric="top-1"), Cell(row, MASKED, tuned, metric="top-1")]
        cells += [Cell(row, LABELS, labels, metric="parameters"), Cell(row, LABELS, labels, metric="MACs")]
    return cells


def _on_imagenet(run: Run) -> Run:
    return replace(run, data=replace(run.data, path="imagenet"))


def _over_linear(row: str, at: str) -> Any:
    def difference(scores: Scores) -> list[float]:
        return minus(scores, (row, at), (LINEAR, at))

    return difference


def _lost(scores: Scores) -> list[float]:
    """Return how much more the early convolutions lead with labels than after masked pre-training."""
    with_labels, masked = (_over_linear(EARLY, at)(scores) for at in (LABELS, MASKED))
    return [a - b for a, b in zip(with_labels, masked, strict=True)]


STUDY = Study(
    name="three-table7",
    where="Follow-up, Table 7 and Figure 6",
    title="stems with labels and after masked pre-training",
    axis="training",
    laptop=laptop,
    paper=paper,
    scatter=(LABELS, MASKED),
    claims=(
        Claim("With labels, hMLP is better than the linear stem.", _over_linear(HMLP, LABELS), UNITS["top-1"]),
        Claim("After masked pre-training, hMLP is better than the linear stem.", _over_linear(HMLP, MASKED),
              UNITS["top-1"]),
        Claim("Early convolutions lose their lead after masked pre-training.", _lost, UNITS["top-1"]),
    ),
)  # fmt: skip
