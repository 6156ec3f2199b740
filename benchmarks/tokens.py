"""Training steps over the number of tokens, ours against timm: the small images at the start of progressive sizes.

One network (width 192, 6 blocks, patches of 4 pixels) at 8 to 32 pixels: 5 to 65 tokens. The work of a step shrinks
with the tokens, its costs beside matrix products do not. The table says which share of the ceiling of matrix
products remains. Rules and contenders are those of `benchmarks.train_step`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import compare, peers, record, train_step
from benchmarks.train_step import Case

SIDES = (8, 12, 16, 24, 32)
"""Image sizes in pixels: 5, 10, 17, 37 and 65 tokens."""
BATCH = 128
PEERS = ("timm", "timm, explicit attention", "timm, compiled, explicit attention")
"""timm as it comes, and the settings of which one is its best for small networks (`benchmarks.train_step`)."""


def measure(side: int, precision: str, rounds: int, seconds: float, peak: float, quick: bool) -> dict[str, Any]:
    """Time all contenders at one image size."""
    architecture = replace(peers.SMALL_IMAGES, image_size=side, depth=1 if quick else peers.SMALL_IMAGES.depth)
    case = Case(f"{architecture.tokens} tokens", architecture, 2 if quick else BATCH)
    difference = train_step.same_losses(case, precision)
    names = (record.OURS, *PEERS[: 1 if quick else None])
    sides = {name: partial(train_step.contender, name, case, precision) for name in names}
    measured = compare.race_apart(sides, rounds=rounds, seconds=seconds)
    rows = record.rows(measured, flops=3 * architecture.flops, peak=peak)
    record.show(f"{case.name}, batch {case.batch}, {precision}, images/s of training", rows)
    best = max(measured[1:], key=lambda one: one.median)
    return {
        "case": case.name,
        "tokens": architecture.tokens,
        "batch": case.batch,
        "precision": precision,
        "loss_difference": difference,
        "rows": rows,
        "over_timm": measured[0].ratio(measured[1]).summary(),
        "over_timm_at_its_best": measured[0].ratio(best).summary(),
    }


def main() -> None:
    """Measure all image sizes in the precision that this machine computes fastest, and write results/tokens.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--precision", choices=train_step.PRECISIONS, default="bf16")
    options = parser.parse_args()
    record.prepare(options)
    peak = compare.ceiling(512 if options.quick else 2048)[options.precision]
    seconds, sides = (0.05, SIDES[:1]) if options.quick else (2.0, SIDES)
    results = [measure(side, options.precision, options.rounds, seconds, peak, options.quick) for side in sides]
    record.save("tokens", options, results=results)


if __name__ == "__main__":
    main()
