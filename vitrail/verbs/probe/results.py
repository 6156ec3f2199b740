"""The results of `vitrail probe`: as a value, as tables and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN
    from vitrail.transfer.linear_probe import LinearProbe, Setting

MAX_COLUMNS = 8
"""Maximum number of regularisation strengths in the table on a terminal; --json has all of them."""


@dataclass(frozen=True)
class Probe:
    """The result of a probe, and whose features it measured."""

    subject: str
    """The network and its images, or the file of features."""
    classes: int
    width: int
    """Number of features per image."""
    found: FewShot | KNN | LinearProbe
    unreadable: list[tuple[str, str]]
    """(image, reason) of each unreadable image; they are not counted in any result."""
    best_l2: dict[int, float] | None = None
    """For few-shot with "paper-2020": shots -> the regularisation with the highest accuracy."""


def show(result: Probe) -> Any:
    """Return the result as text and a table for a terminal."""
    from rich.console import Group
    from rich.table import Table

    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found = result.found
    head = f"{result.subject}: {result.classes} classes, {result.width} features, {found.test_images:,} test images"
    lines = []
    if isinstance(found, FewShot):
        table = _fewshot_table(found, result.best_l2)
        seeds = found.top1.shape[2]
        lines = [f"top-1, protocol {found.protocol}" + (f", mean and deviation of {seeds} seeds" if seeds > 1 else "")]
        if result.best_l2 is not None:
            lines.append("best l2 is chosen on these test images, as the protocol does for a single data set")
    elif isinstance(found, KNN):
        table = Table("k", "top-1", "top-5")
        for count, top1 in found.top1.items():
            table.add_row(str(count), f"{top1:.2%}", f"{found.top5[count]:.2%}")
    else:
        table = Table("lr", "weight decay", "held-out top-1", "held-out loss", "")
        for one in found.settings:
            row = (f"{one.lr:g}", f"{one.weight_decay:g}", f"{one.top1:.2%}", _loss(one))
            table.add_row(*row, "chosen" if one is found.chosen else "")
        lines = [f"top-1 {found.top1:.2%}, top-5 {found.top5:.2%}, loss {found.nll:.4f} on the test images"]
    return Group(head, *lines, table)


def _loss(setting: Setting) -> str:
    return f"{setting.nll:.4f}" if math.isfinite(setting.nll) else "diverged"


def _fewshot_table(found: FewShot, best: dict[int, float] | None) -> Any:
    from rich.table import Table

    strengths = list(found.l2)
    if len(strengths) > MAX_COLUMNS:  # only the best of each row
        strengths = sorted({found.l2[int(row.argmax())] for row in found.mean} | set((best or {}).values()))
    table = Table("shots", *(f"l2 {strength:g}" for strength in strengths), *(["best l2"] if best else []))
    for i, shots in enumerate(found.shots):
        cells = []
        for strength in strengths:
            j = found.l2.index(strength)
            deviation = "" if math.isnan(found.std[i, j]) else f" ± {100 * found.std[i, j]:.2f}"
            cells.append(f"{100 * found.mean[i, j]:.2f} %{deviation}")
        table.add_row(str(shots), *cells, *([f"{best[shots]:g}"] if best else []))
    return table


def as_json(result: Probe) -> Any:
    """Return the result as JSON values; few-shot results include every seed."""
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found = result.found
    about = {"subject": result.subject, "classes": result.classes, "width": result.width}
    about |= {"train_images": found.train_images, "test_images": found.test_images}
    unreadable = [{"image": id_, "reason": reason} for id_, reason in result.unreadable]
    if isinstance(found, FewShot):
        values = _fewshot_json(found, result.best_l2)
    elif isinstance(found, KNN):
        rows = [{"k": count, "top1": top1, "top5": found.top5[count]} for count, top1 in found.top1.items()]
        values = {"temperature": found.temperature, "results": rows}
    else:
        values = _linear_json(found)
    return {**about, **values, "unreadable": unreadable}


def _fewshot_json(found: FewShot, best: dict[int, float] | None) -> dict[str, Any]:
    results = [
        {
            "shots": shots,
            "l2": strength,
            "top1": float(found.mean[i, j]),
            "std": float(found.std[i, j]),
            "seeds": found.top1[i, j].tolist(),
        }
        for i, shots in enumerate(found.shots)
        for j, strength in enumerate(found.l2)
    ]
    chosen = {} if best is None else {"best_l2": {str(shots): strength for shots, strength in best.items()}}
    short = {str(shots): names for shots, names in found.short.items()}
    return {"protocol": found.protocol, "results": results, **chosen, "fewer_images": short}


def _linear_json(found: LinearProbe) -> dict[str, Any]:
    def row(one: Setting) -> dict[str, float]:
        return {"lr": one.lr, "weight_decay": one.weight_decay, "top1": one.top1, "nll": one.nll}

    return {
        "top1": found.top1,
        "top5": found.top5,
        "nll": found.nll,
        "chosen": row(found.chosen),
        "held_out": [row(one) for one in found.settings],
        "held_out_images": found.held_out_images,
        "epochs": found.epochs,
        "minibatch": found.minibatch,
    }
