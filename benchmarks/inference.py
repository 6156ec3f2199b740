"""Predicting with ViT-B/16 at 224 px on the CPU: ours against timm, transformers, torchvision; torch alone.

Everybody in inference mode, at the same threads, batch and precision; eager, but for timm as `torch.compile` makes
it. "bf16" is bfloat16 weights; the rows marked autocast keep float32 weights, as most scripts do. vitrail predicts with
the frozen copy that its verbs use, from uint8 images; the others are handed images already normalised. Before the race
ours must return timm's logits for timm's weights.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import compare, peers, record
from benchmarks.compare import Contender
from benchmarks.peers import Architecture
from vitrail.model.frozen import freeze

BATCHES = (1, 8)
PRECISIONS = ("float32", "bf16")
TOLERANCE = {"float32": 1e-5, "bf16": 3e-2}
PEERS: dict[str, Callable[[Architecture], nn.Module]] = {
    "timm": peers.timm,
    "timm, explicit attention": partial(peers.timm, fused=False),
    "transformers": peers.transformers,
    "torchvision": peers.torchvision,
}


def images(batch: int, size: int, count: int = 4) -> list[Tensor]:
    """Different random uint8 images, so that none stays in the cache."""
    generator, shape = torch.Generator().manual_seed(1), (batch, 3, size, size)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(count)]


def predictor(model: nn.Module, inputs: list[Tensor]) -> Callable[[], Tensor]:
    """A step that predicts the next batch."""
    model.eval()
    feed = itertools.cycle(inputs)

    @torch.inference_mode()
    def step() -> Tensor:
        return model(next(feed))

    return step


def contenders(architecture: Architecture, batch: int, precision: str, *, compiled: bool = True) -> list[Contender]:
    """Ours, every peer at its own best way to this precision, and timm compiled and under autocast."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pixels = images(batch, architecture.image_size)
    normalised = [(image.float() / 255 - 0.5) / 0.5 for image in pixels]
    ready = [image.to(dtype) for image in normalised]
    field = [
        Contender(record.OURS, predictor(freeze(peers.ours(architecture), dtype), pixels), batch, compare.tuned),
        *(
            Contender(name, predictor(make(architecture).to(dtype), ready), batch, compare.stock)
            for name, make in PEERS.items()
        ),
    ]
    if compiled:
        step = predictor(torch.compile(peers.timm(architecture).to(dtype)), ready)  # type: ignore[arg-type]
        field.append(Contender("timm, compiled", step, batch, compare.stock))
    if precision == "bf16":
        step = predictor(peers.timm(architecture), normalised)
        field.append(Contender("timm, autocast", step, batch, partial(compare.stock, "bf16")))
    return field


def same_logits(architecture: Architecture, precision: str) -> float:
    """Relative difference (L2) between our logits and timm's in float32, from the same weights.

    Raises SystemExit where it is more than rounding.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    theirs, model = peers.timm(architecture), peers.ours(architecture)
    theirs.get_submodule("head").reset_parameters()  # type: ignore[operator]
    peers.load_timm(model, theirs)
    (pixels,) = images(2, architecture.image_size, count=1)
    with compare.tuned():
        logits = predictor(freeze(model, dtype), [pixels])().float()
    with compare.stock():
        expected = predictor(theirs, [(pixels.float() / 255 - 0.5) / 0.5])()
    difference = ((logits - expected).norm() / expected.norm()).item()
    if difference > TOLERANCE[precision]:
        raise SystemExit(f"{precision}: the logits differ by {difference:.1e}")
    return difference


def measure(
    architecture: Architecture, batch: int, precision: str, options: argparse.Namespace, peak: float
) -> dict[str, Any]:
    """One table: everybody at one batch size and precision."""
    seconds = 0.1 if options.quick else 3.0
    field = contenders(architecture, batch, precision, compiled=not options.quick)
    measured = compare.race(field, rounds=options.rounds, seconds=seconds)
    rows = record.rows(measured, flops=architecture.flops, peak=peak)
    record.show(f"B/16, 224 px, batch {batch}, {precision}, images/s", rows)
    ours, *others = measured
    best = max(others, key=lambda m: m.median)
    return {
        "batch": batch,
        "precision": precision,
        "rows": rows,
        "over_timm": ours.ratio(next(m for m in others if m.name == "timm")).summary(),
        "best_peer": best.name,
        "over_best_peer": ours.ratio(best).summary(),
    }


def main() -> None:
    """Run all batches and precisions and write results/inference.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    architecture = replace(peers.B16, depth=1) if options.quick else peers.B16
    peak = compare.ceiling(512 if options.quick else 2048)
    print("ceiling, GFLOP/s:", peak)
    differences = {precision: same_logits(architecture, precision) for precision in PRECISIONS}
    print("relative difference from timm's logits:", differences)
    results = [
        measure(architecture, batch, precision, options, peak[precision])
        for precision, batch in itertools.product(PRECISIONS, BATCHES)
    ]
    record.save("inference", options, logit_difference=differences, results=results)


if __name__ == "__main__":
    main()
