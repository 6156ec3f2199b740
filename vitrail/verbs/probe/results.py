"""The results of `vitrail probe`: as a value, as tables and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from vitrail.terminal import TextTable, page, table, unreadable_json
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.evaluation.features import Features
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN
    from vitrail.evaluation.linear_probe import LinearProbe

MAX_COLUMNS = 8
"""Maximum number of regularisation strengths in the table on a terminal; --json has all of them."""


@one_line
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

    @classmethod
    def of(cls, subject: str, found: Any, train: Features, test: Features, best_l2: Any = None) -> Self:
        """Return the result `found` for these training and test features."""
        return cls(subject, len(train.class_names), train.width, found, [*train.bad, *test.bad], best_l2)


def show(result: Probe) -> Any:
    """Return the result as text and a table for a terminal."""
    from vitrail.evaluation.classify import has_top5
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found, five = result.found, has_top5(result.classes)
    head = f"{result.subject}: {result.classes} classes, {result.width} features, {found.test_images:,} test images"
    if isinstance(found, FewShot):
        seeds = found.top1.shape[2]
        lines = [f"top-1, protocol {found.protocol}" + (f", mean and deviation of {seeds} seeds" if seeds > 1 else "")]
        if result.best_l2 is not None:
            lines.append("best l2 is chosen on these test images, as the protocol does for a single data set")
        return page(head, lines, _fewshot_table(found, result.best_l2))
    if isinstance(found, KNN):
        counts = [(k, f"{top1:.2%}", *[f"{found.top5[k]:.2%}"] * five) for k, top1 in found.top1.items()]
        return page(head, table(("k", "top-1", *["top-5"] * five), counts))
    best = f"top-5 {found.top5:.2%}, " * five
    measured = f"top-1 {found.top1:.2%}, {best}loss {found.nll:.4f} on the test images"
    return page(head, measured, _linear_warnings(found), _linear_table(found))


def _linear_warnings(found: LinearProbe) -> list[str]:
    """Return what makes the result of a linear probe worse than it could be, and what to do."""
    l2, lines = found.chosen.l2, []
    if found.grid_end is not None:
        more = [l2 * 10, l2 * 100] if found.grid_end == "largest" else [l2 / 10, l2 / 100]
        lines.append(
            f"The chosen l2 {l2:g} is the {found.grid_end} that was tried. Try more: --l2 "
            + " ".join(f"{strength:g}" for strength in [l2, *more])
        )
    if short := [f"{one.l2:g}" for one in found.settings if not one.converged]:
        lines.append(f"The solver did not converge on the images that are not held out, with l2 {', '.join(short)}.")
    if not found.converged:
        lines.append(f"The solver did not converge on all training images with l2 {l2:g}.")
    return [*lines, *(["Allow it more steps with --iterations."] if short or not found.converged else [])]


def _linear_table(found: LinearProbe) -> TextTable:
    rows = [
        (f"{one.l2:g}", f"{one.top1:.2%}", f"{one.nll:.4f}", "chosen" * (one is found.chosen)) for one in found.settings
    ]
    return table(("l2", "held-out top-1", "held-out loss", ""), rows)


def _fewshot_table(found: FewShot, best: dict[int, float] | None) -> TextTable:
    strengths = list(found.l2)
    if len(strengths) > MAX_COLUMNS:  # only the best of each row
        strengths = sorted({found.l2[int(row.argmax())] for row in found.mean} | set((best or {}).values()))
    rows = []
    for i, shots in enumerate(found.shots):
        cells = [str(shots)]
        for strength in strengths:
            j = found.l2.index(strength)
            deviation = "" if math.isnan(found.std[i, j]) else f" ± {100 * found.std[i, j]:.2f}"
            cells.append(f"{100 * found.mean[i, j]:.2f} %{deviation}")
        rows.append([*cells, f"{best[shots]:g}"] if best else cells)
    return table(("shots", *(f"l2 {strength:g}" for strength in strengths), *(["best l2"] if best else [])), rows)


def as_json(result: Probe) -> Any:
    """Return the result as JSON values; few-shot results include every seed."""
    from vitrail.evaluation.fewshot import FewShot
    from vitrail.evaluation.knn import KNN

    found = result.found
    about = {"subject": result.subject, "classes": result.classes, "width": result.width}
    about |= {"train_images": found.train_images, "test_images": found.test_images}
    if isinstance(found, FewShot):
        values = _fewshot_json(found, result.best_l2)
    elif isinstance(found, KNN):
        rows = [{"k": count, "top1": top1, "top5": found.top5[count]} for count, top1 in found.top1.items()]
        values = {"temperature": found.temperature, "results": rows}
    else:
        values = _linear_json(found)
    return {**about, **values, "unreadable": unreadable_json(result.unreadable)}


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
    return {
        "top1": found.top1,
        "top5": found.top5,
        "nll": found.nll,
        "converged": found.converged,
        "chosen": asdict(found.chosen),
        "grid_end": found.grid_end,
        "held_out": [asdict(one) for one in found.settings],
        "held_out_images": found.held_out_images,
    }
