"""Compute how many images of a training step fit into memory, and measure how far that is from a real peak on a CPU.

    python -m benchmarks.memory

The computed part needs no device (`vitrail.costs.memory`): the state of training and the activations that autograd
keeps, in bfloat16. The
measured part runs steps on this machine and counts the bytes of all tensors that are alive (`vitrail bench` does the
same). Neither depends on how busy the machine is.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import record
from vitrail.costs.count import activation_bytes, learned_values, sized
from vitrail.costs.measure import TimedNetwork, peak_bytes
from vitrail.costs.memory import USABLE, step_memory
from vitrail.model.variants import variant

SIZES = (4, 8, 16, 24, 80)
"""Memory of devices in GiB."""
NETWORKS = (
    *(("Ti/16", 224), ("S/16", 224), ("B/32", 224), ("B/16", 224), ("B/16", 384)),
    *(("L/16", 224), ("L/16", 384), ("H/14", 224)),
)
MEASURED = (("Ti/16", 224, 16), ("S/16", 224, 8), ("B/16", 224, 4))
"""(network, pixels, images per step)."""


def fits(name: str, side: int) -> dict[str, Any]:
    """Return parameters, bytes, and the largest batch for each size of memory."""
    config = sized(variant(name), side)
    count, activations = learned_values(config), activation_bytes(config)
    held = step_memory(count, activations, blocks=config.depth, precision="bf16")
    batches = [held.largest(USABLE * size * 2**30) for size in SIZES]
    return {"network": name, "side": side, "parameters": count, "activations": activations, "batches": batches}


def measured(name: str, side: int, batch: int) -> dict[str, Any]:
    """Return the computed bytes of a step on a CPU, and the largest number of bytes that were alive in one."""
    config = sized(variant(name), side)
    image = activation_bytes(config, place="cpu")
    computed = step_memory(learned_values(config), image, blocks=config.depth, precision="bf16").bytes(batch)
    timed = TimedNetwork(config, "training", torch.device("cpu"), "bf16")
    timed(timed.images(1))  # the optimiser's state exists from here on
    return {"network": name, "side": side, "batch": batch, "computed": computed, "peak": peak_bytes(timed, batch)}


def table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of computed batches: how many images of a training step fit into each size of memory."""
    header = ("network", "M parameters", "MB per image", *(f"{size} GB" for size in document["sizes"]))
    lines: list[tuple[str, ...]] = [header]
    for row in document["rows"]:
        batches = (f"{batch:,}" if batch else "-" for batch in row["batches"])
        sizes = (f"{row['parameters'] / 1e6:.1f}", f"{row['activations'] / 1e6:.0f}")
        lines.append((f"{row['network']}, {row['side']} px", *sizes, *batches))
    return lines


def measured_table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of peaks that were measured on a CPU, beside what was computed."""
    lines: list[tuple[str, ...]] = [("a training step on a CPU, bf16", "computed, MB", "measured peak, MB")]
    for row in document["measured"]:
        label = f"{row['network']}, {row['side']} px, batch {row['batch']}"
        lines.append((label, f"{row['computed'] / 1e6:,.0f}", f"{row['peak'] / 1e6:,.0f}"))
    return lines


def main() -> None:
    """Compute, measure, and write results/memory.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    rows = [fits(name, side) for name, side in NETWORKS]
    peaks = [measured(*case) for case in MEASURED[: 1 if options.quick else None]]
    record.save("memory", options, sizes=SIZES, usable=USABLE, rows=rows, measured=peaks)


if __name__ == "__main__":
    main()
