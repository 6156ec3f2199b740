"""Measure what a masked autoencoder saves because its encoder sees only the visible patches: time and memory of a step.

B/16 at 224 pixels in bf16, AdamW, random images; all contenders alternate in one process. "all patches" is the same
objective with one of 196 patches masked, so that the encoder sees the others: the cost of a masked autoencoder that
puts a [mask] embedding into the encoder. "supervised" learns from labels and has no decoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import compare, peers, record, train_step
from benchmarks.compare import Contender
from benchmarks.train_step import Case, Step
from vitrail.costs.count import LiveTensors
from vitrail.model.variants import variant
from vitrail.model.vit import ViT
from vitrail.objective.mae import MAEObjective
from vitrail.objective.settings import MAE

CASE = Case("B/16, 224 px", peers.B16, 8)
RATIOS = {"MAE": 0.75, "MAE, all patches": 1 / 196}
LABELS = "supervised"
PRECISION = "bf16"


def learner(name: str, depth: int) -> Any:
    """Contenders by name: an objective, or a network for `LABELS`."""
    config = replace(variant("B/16", classes=CASE.architecture.classes, image_size=224), depth=depth)
    if name == LABELS:
        return ViT(config)
    settings = MAE(ratio=RATIOS[name]) if depth > 1 else MAE(ratio=RATIOS[name], decoder_depth=1)
    return MAEObjective(ViT(replace(config, positions="sincos")), settings, seed=0).train()


def steps(name: str, case: Case, depth: int) -> tuple[Any, Step]:
    """A module that is trained, and its step."""
    subject = learner(name, depth)
    if name == LABELS:
        return subject, train_step.vitrail_step(subject, case, PRECISION)
    return subject, train_step.objective_step(subject, case, PRECISION)


def main() -> None:
    """Time all contenders, print the table and write results/mae.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    case, depth = (replace(CASE, batch=2), 1) if options.quick else (CASE, 12)
    sides = {name: steps(name, case, depth) for name in (*RATIOS, LABELS)}
    peaks = {}
    with compare.tuned():
        for name, (subject, step) in sides.items():
            step()  # the optimiser makes its state
            with LiveTensors([*subject.parameters(), *subject.buffers()]) as live:
                step()
            peaks[name] = live.peak
    field = [Contender(name, step, case.batch, compare.tuned) for name, (_, step) in sides.items()]
    measured = compare.race(field, rounds=options.rounds, seconds=0.1 if options.quick else 4.0)
    first = measured[0]
    table = Table(title=f"{case.name}, batch {case.batch}, {PRECISION}", title_justify="left")
    for column in ("", "images/s", "MAE is faster by", "spread", "peak of a step"):
        table.add_column(column, justify="right" if column else "left")
    rows = []
    for row, one in zip(record.rows(measured), measured, strict=True):
        ratio = first.ratio(one).summary()
        rows.append({**row, "mae_over_this": ratio, "peak_bytes": peaks[one.name]})
        spread, peak = f"{ratio['low']:.2f} - {ratio['high']:.2f}", f"{peaks[one.name] / 2**20:,.0f} MiB"
        table.add_row(one.name, f"{row['images_per_second']:.2f}", f"{ratio['median']:.2f}x", spread, peak)
    Console(width=110).print(table)
    record.save("mae", options, case=case.name, batch=case.batch, precision=PRECISION, rows=rows)


if __name__ == "__main__":
    main()
