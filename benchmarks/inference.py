"""Predicting with ViT-B/16 at 224 px on the CPU: ours against timm, transformers, torchvision; torch alone.

Everybody in inference mode, at the same threads, batch and precision; eager, but for timm as `torch.compile` makes
it. "bf16" is bfloat16 weights; the rows marked autocast keep float32 weights, as most scripts do. vitrail predicts with
the frozen copy that its verbs use, from uint8 images; the others are handed images already normalised. Each side has a
process of its own, ours set as the command line sets it (`keep_freed_memory`). Before the race ours must return timm's
logits for timm's weights.
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
from vitrail.device import keep_freed_memory
from vitrail.model.build import freeze

BATCHES = (1, 8)
PRECISIONS = ("float32", "bf16")
TOLERANCE = {"float32": 1e-5, "bf16": 3e-2}


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


def contender(name: str, architecture: Architecture, batch: int, precision: str) -> Contender:
    """Return one side, ours with this process set as the command line sets it."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pixels = images(batch, architecture.image_size)
    if name == record.OURS:
        keep_freed_memory()
        return Contender(name, predictor(freeze(peers.ours(architecture), dtype), pixels), batch, compare.tuned)
    normalised = [(image.float() / 255 - 0.5) / 0.5 for image in pixels]
    model = PEERS[name](architecture)
    if name == AUTOCAST:
        return Contender(name, predictor(model, normalised), batch, partial(compare.stock, precision))
    ready = [image.to(dtype) for image in normalised]
    return Contender(name, predictor(model.to(dtype), ready), batch, compare.stock)


def compiled_timm(architecture: Architecture) -> nn.Module:
    """Return timm's network under `torch.compile`, which compiles it when it is first called."""
    return torch.compile(peers.timm(architecture))  # type: ignore[return-value]


COMPILED, AUTOCAST = "timm, compiled", "timm, autocast"
PEERS: dict[str, Callable[[Architecture], nn.Module]] = {
    "timm": peers.timm,
    "timm, explicit attention": partial(peers.timm, fused=False),
    "transformers": peers.transformers,
    "torchvision": peers.torchvision,
    COMPILED: compiled_timm,
    AUTOCAST: peers.timm,
}


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
    left_out = {COMPILED: options.quick, AUTOCAST: precision != "bf16"}
    names = [name for name in (record.OURS, *PEERS) if not left_out.get(name)]
    sides = {name: partial(contender, name, architecture, batch, precision) for name in names}
    measured = compare.race_apart(sides, rounds=options.rounds, seconds=seconds)
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
