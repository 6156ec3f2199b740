"""The results of `vitrail evaluate` for a network that predicts several labels: tables, JSON and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.spreadsheet import SafeWriter
from vitrail.files import replacing_text
from vitrail.terminal import page, table, unreadable_lines

if TYPE_CHECKING:
    from vitrail.evaluation.label_scores import LabelScores

WORST = 15
"""Maximum number of labels shown on a terminal; --json shows all."""
SHOWN = ("label", "images", "AP", "precision", "recall", "F1", "threshold")
COLUMNS = (
    "class",
    "images",
    "predicted",
    "right",
    "average precision",
    "precision",
    "recall",
    "F1",
    "threshold",
    "ECE",
)


def show(subject: str, found: LabelScores, notes: list[str]) -> Any:
    """Return the results as tables for a terminal; `subject` says of what on which images."""
    from vitrail.evaluation.label_calibration import before_scaling, label_calibration

    calibrated = label_calibration(found)
    ranked = sorted(_rows(found), key=lambda row: (row[2][0], row[0]))
    worst = [(name, counts[0], *map(_percent, shares[:5])) for name, counts, shares in ranked if counts[0]][:WORST]
    return page(
        f"{subject}: mAP {found.map:.2%} (a random ranking has {found.chance:.2%}), F1 {found.micro_f1:.2%} (micro), "
        f"{found.macro_f1:.2%} (macro), exact match {found.exact:.2%}, loss {found.nll:.4f}, {found.count:,} images",
        f"calibration of each label: ECE {calibrated.mean_ece:.2%}{before(before_scaling(found), found.temperature)} "
        f"(mean over labels), Brier score {calibrated.mean_brier:.4f}",
        notes,
        table(SHOWN, worst, "labels with the lowest average precision (AP)"),
        unreadable_lines(found.bad),
    )


def _rows(found: LabelScores) -> list[tuple[str, tuple[int, int, int], tuple[float, ...]]]:
    """Return (name, counts, shares) of each label, in the order of `COLUMNS`."""
    from vitrail.evaluation.label_calibration import label_calibration

    counts = zip(found.class_count.tolist(), found.class_predicted.tolist(), found.class_correct.tolist(), strict=True)
    columns = (found.average_precision, found.precision, found.recall, found.class_f1, found.thresholds)
    shares = zip(*(column.tolist() for column in (*columns, label_calibration(found).ece)), strict=True)
    return list(zip(found.class_names, counts, shares, strict=True))


def before(ece: float, temperature: float) -> str:
    """Return the calibration error before temperature scaling in words; "" without scaling."""
    return "" if temperature == 1 else f" ({ece:.2%} before its temperature of {temperature:.3g})"


def _percent(share: float) -> str:
    return "" if share != share else f"{share:.1%}"


def as_json(found: LabelScores) -> dict[str, Any]:
    """Return the results as JSON values: numbers, every label, and how many images have each pair of labels.

    Of very many labels, pairs are those of the labels that most images have ("paired").
    """
    from vitrail.evaluation.label_calibration import before_scaling, label_calibration

    calibrated = label_calibration(found)
    names = [name.replace(" ", "_").lower() for name in COLUMNS[1:]]
    return {
        **found.metrics(),
        "chance_map": found.chance,
        "ece": calibrated.mean_ece,
        "ece_before": before_scaling(found),
        "temperature": found.temperature,
        "brier": calibrated.mean_brier,
        "calibration": list(calibrated.together.rows()),
        "classes": [
            {"name": name, **dict(zip(names, (*counts, *shares), strict=True))} for name, counts, shares in _rows(found)
        ],
        "paired": _paired(found),
        "cooccurrence": found.cooccurrence.tolist(),
        "predicted_together": found.predicted_together.tolist(),
        "bad": [{"id": id_, "reason": reason} for id_, reason in found.bad],
    }


def write(found: LabelScores, out: Path, *, raw: bool = False) -> None:
    """Write reliability.png, calibration.csv, classes.csv and cooccurrence.csv into a folder; `raw` is SafeWriter's."""
    from vitrail.evaluation.calibration import draw, write_bins
    from vitrail.evaluation.label_calibration import label_calibration

    together = label_calibration(found).together
    write_bins(out / "calibration.csv", together)
    draw(together, out / "reliability.png", labels=True)
    with replacing_text(out / "classes.csv") as file:
        writer = SafeWriter(file, raw=raw)
        writer.writerow(COLUMNS)
        for name, counts, shares in _rows(found):
            writer.writerow((name, *counts, *("" if share != share else f"{share:.6f}" for share in shares)))
    with replacing_text(out / "cooccurrence.csv") as file:
        writer = SafeWriter(file, raw=raw)
        writer.writerow(("class", *_paired(found)))
        writer.writerows((name, *row) for name, row in zip(_paired(found), found.cooccurrence.tolist(), strict=True))


def _paired(found: LabelScores) -> list[str]:
    return [found.class_names[label] for label in found.paired.tolist()]
