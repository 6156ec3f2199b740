"""Attention only, forward and backward: torch's fused kernel against the explicit path, on the CPU.

`vitrail.model.fast.attention.uses_explicit` decides by these results. They cover the sequence lengths of small images,
224 px and 384 px, in both precisions. Both paths must agree to rounding before they are timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import compare, record
from benchmarks.compare import Contender
from vitrail.device import keep_freed_memory

SHAPES = ((128, 65, 3), (16, 197, 6), (8, 197, 12), (4, 577, 12))
"""Batch size, tokens, heads of 64 features."""
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2}


def path_step(path: Any, qkv: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """Return a step that computes attention on one path and returns the gradient of qkv."""
    from vitrail.model.compute import attention_path
    from vitrail.model.fast.attention import attend

    def step() -> Tensor:
        with attention_path(path):
            out = attend(qkv)
        return torch.autograd.grad(out, qkv, grad)[0]

    return step


def measure(shape: tuple[int, int, int], precision: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Time the two paths at one shape."""
    batch, tokens, heads = shape
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    qkv = torch.randn(batch, tokens, 3, heads, 64).mul(0.5).to(dtype).requires_grad_()
    grad = torch.randn(batch, tokens, heads * 64).to(dtype)
    steps = {path: path_step(path, qkv, grad) for path in ("explicit", "fused")}
    with compare.tuned():
        explicit, fused = (step().float() for step in steps.values())
    difference = ((explicit - fused).norm() / fused.norm()).item()
    if difference > TOLERANCE[precision]:
        raise SystemExit(f"{shape}, {precision}: the gradients differ by {difference:.1e}")
    field = [Contender(path, step, batch, compare.tuned) for path, step in steps.items()]
    measured = compare.race(field, rounds=rounds, seconds=seconds)
    rows = record.rows(measured, ours="explicit")
    record.show(f"attention, batch {batch}, {tokens} tokens, {heads} heads, {precision}", rows)
    ratio = measured[0].ratio(measured[1]).summary()
    return {
        "shape": list(shape),
        "precision": precision,
        "gradient_difference": difference,
        "rows": rows,
        "explicit_over_fused": ratio,
    }


def main() -> None:
    """Measure all shapes and write results/attention.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    keep_freed_memory()  # as the command line sets it: the maps of the explicit path are large, and new in every step
    seconds = 0.05 if options.quick else 1.0
    results = [
        measure(shape, precision, options.rounds, seconds) for shape, precision in itertools.product(SHAPES, TOLERANCE)
    ]
    record.save("attention", options, results=results)


if __name__ == "__main__":
    main()
