"""Compare parallel branches with the same blocks in sequence, at equal parameters and FLOPs (follow-up, section 3.3).

    python -m benchmarks.parallel                       Ti24, S36, B24, on the GPU if there is one
    python -m benchmarks.parallel --families S60 L24 --device cpu

24 blocks are 24x1 (sequential) or 12x2: 12 layers of two branches (Table 4). Latency is the time of one image;
throughput is measured with a batch. vitrail predicts with the frozen copy of its verbs, where `vitrail.model.frozen`
decides whether the branches are computed as one wide branch. timm's networks are `Block` and `ParallelThingsBlock`,
which computes the branches one by one. A training step (forward and backward pass, no optimiser) is measured
sequentially, with two branches one by one, and with two branches together (`Run.wide_branches`). The parallel networks
of both libraries must give the same logits before they are timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import compare, inference, record
from benchmarks.compare import Contender, Measurement
from vitrail.device import fast_bf16
from vitrail.model.build import create
from vitrail.model.frozen import freeze
from vitrail.model.variants import SIZES
from vitrail.model.wide import compute_together

Shape = tuple[int, int]
"""Layers and branches of each family."""
CLASSES = 1000
THROUGHPUT = {"cpu": 4, "cuda": 64}
TRAINING = {"cpu": 8, "cuda": 64}
"""Images per step on each device type."""
RENAMES = ((".attns.", ".attentions."), (".ffns.", ".mlps."), (".attn.qkv.", ".attention.qkv."),
           (".attn.proj.", ".attention.out."), ("cls_token", "cls"), ("pos_embed", "positions.embedding"),
           ("patch_embed.proj", "stem"))  # fmt: skip
"""Parts of the parameter names of timm's parallel network, with our names."""


@dataclass(frozen=True)
class Family:
    """Networks of one width and one number of blocks; the first shape is the sequential one."""

    size: str
    shapes: tuple[Shape, ...]


FAMILIES = {
    "Ti24": Family("Ti", ((24, 1), (12, 2))),
    "S36": Family("S", ((36, 1), (18, 2), (12, 3), (9, 4))),
    "S60": Family("S", ((60, 1), (30, 2), (20, 3))),
    "B24": Family("B", ((24, 1), (12, 2))),
    "L24": Family("L", ((24, 1), (12, 2))),
}
DEFAULT = ("Ti24", "S36", "B24")
TIMM_BRANCHES = 2
"""Largest number of branches with which timm is measured."""


def name(size: str, shape: Shape) -> str:
    """Return the follow-up's notation: S18x2."""
    return f"{size}{shape[0]}x{shape[1]}"


def theirs(size: str, shape: Shape) -> nn.Module:
    """Return timm's network."""
    from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer

    width, _, heads, _ = SIZES[size]
    depth, branches = shape
    block: Any = Block if branches == 1 else partial(ParallelThingsBlock, num_parallel=branches)
    return VisionTransformer(embed_dim=width, depth=depth, num_heads=heads, num_classes=CLASSES, block_fn=block)


def same_logits(size: str, device: torch.device) -> float:
    """Return the relative difference (L2) of our logits from timm's with timm's parallel weights. Raises SystemExit if
    it exceeds rounding.
    """
    peer = theirs(size, (1, 2)).eval()
    peer.get_submodule("head").reset_parameters()  # type: ignore[operator]
    state = {}
    for key, value in peer.state_dict().items():
        for old, new in RENAMES:
            key = key.replace(old, new)
        state[key] = value
    model = create(f"{size}1x2/16")
    model.load_state_dict(state)
    (pixels,) = inference.images(2, 224, count=1)
    with compare.tuned():
        logits = inference.predictor(freeze(model.to(device)), [pixels.to(device)])().cpu()
    with compare.stock():
        expected = inference.predictor(peer, [(pixels.float() / 255 - 0.5) / 0.5])()
    difference = ((logits - expected).norm() / expected.norm()).item()
    if difference > (1e-5 if device.type == "cpu" else 1e-3):
        raise SystemExit(f"{size}: the logits differ by {difference:.1e}")
    return difference


def synchronised(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a step that ends when the device has finished it."""
    if device.type == "cpu":
        return step

    def waited() -> None:
        step()
        torch.cuda.synchronize(device)

    return waited


def predicting(family: Family, batch: int, precision: str, device: torch.device) -> list[Contender]:
    """Return every shape of ours, and timm's networks of one and two branches."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pixels = [images.to(device) for images in inference.images(batch, 224)]
    ready = [((images.float() / 255 - 0.5) / 0.5).to(dtype) for images in pixels]
    field = []
    for shape in family.shapes:
        network = name(family.size, shape)
        model = freeze(create(f"{network}/16").to(device), dtype)
        step = synchronised(inference.predictor(model, pixels), device)
        field.append(Contender(f"{record.OURS} {network}", step, batch, compare.tuned))
        if shape[1] <= TIMM_BRANCHES:
            step = synchronised(inference.predictor(theirs(family.size, shape).to(device, dtype), ready), device)
            field.append(Contender(f"timm {network}", step, batch, compare.stock))
    return field


def training(family: Family, batch: int, precision: str, device: torch.device) -> list[Contender]:
    """Return the forward and backward passes of ours: sequential, two branches one by one, two branches together."""
    row, parallel = (name(family.size, shape) for shape in family.shapes[:2])
    (pixels,) = inference.images(batch, 224, count=1)
    images, labels = pixels.to(device), torch.zeros(batch, dtype=torch.int64, device=device)

    def stepper(model: nn.Module) -> Callable[[], float]:
        model.train().to(device)

        def step() -> float:
            with torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext():
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return loss.item()  # waits for the device

        return step

    together = create(f"{parallel}/16")
    compute_together(together)
    networks = {row: create(f"{row}/16"), parallel: create(f"{parallel}/16"), f"{parallel}, together": together}
    return [Contender(key, stepper(model), batch, compare.tuned) for key, model in networks.items()]


def summary(family: Family, measured: list[Measurement]) -> list[dict[str, Any]]:
    """Return rows with the speed relative to the same library's sequential network, and of ours relative to timm's."""
    by_name = {m.name: m for m in measured}
    rows = record.rows(measured)
    for row in rows:
        library, _, network = row["name"].partition(" ")
        one = by_name[row["name"]]
        row["over_sequential"] = one.ratio(by_name[f"{library} {name(family.size, family.shapes[0])}"]).summary()
        if library == record.OURS and f"timm {network}" in by_name:
            row["over_timm"] = one.ratio(by_name[f"timm {network}"]).summary()
    return rows


def show(title: str, batch: int, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title=title, title_justify="left")
    columns = ("", "ms", "images/s", "over sequential", "spread", "over timm", "disturbed")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        ratio, timm = row["over_sequential"], row.get("over_timm")
        table.add_row(
            row["name"],
            f"{1000 * batch / row['images_per_second']:.1f}",
            f"{row['images_per_second']:.2f}",
            f"{ratio['median']:.2f}x",
            f"{ratio['low']:.2f} - {ratio['high']:.2f}",
            f"{timm['median']:.2f}x" if timm else "",
            str(row["disturbed_rounds"] or ""),
        )
    Console(width=110).print(table)


def measure(key: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure one family: latency in both precisions; throughput and training in the precision chosen here."""
    family, seconds = FAMILIES[key], 0.05 if options.quick else options.seconds
    if options.quick:
        family = Family(family.size, ((2, 1), (1, 2)))
    best = "bf16" if fast_bf16(device) else "float32"
    results = []
    cases = [(1, precision) for precision in ("float32", "bf16")] + [(THROUGHPUT[device.type], best)]
    for batch, precision in cases:
        rows = summary(
            family, compare.race(predicting(family, batch, precision, device), rounds=options.rounds, seconds=seconds)
        )
        show(f"{key}, predicting, batch {batch}, {precision}", batch, rows)
        results.append({"family": key, "work": "predicting", "batch": batch, "precision": precision, "rows": rows})
    if key in options.training:
        batch = TRAINING[device.type]
        field = training(family, batch, best, device)
        measured = compare.race(field, rounds=options.rounds, seconds=seconds)
        rows = record.rows(measured)
        for row, one in zip(rows, measured, strict=True):
            row["over_sequential"] = one.ratio(measured[0]).summary()
        show(f"{key}, forward and backward pass, batch {batch}, {best}", batch, rows)
        results.append({"family": key, "work": "training", "batch": batch, "precision": best, "rows": rows})
    return results


def main() -> None:
    """Measure the families and write results/parallel.json."""
    parser = record.arguments(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(DEFAULT))
    parser.add_argument("--training", nargs="*", choices=FAMILIES, default=["Ti24"], help="families to train, too")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each sample, of two steps at least")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    record.prepare(options)
    device = torch.device(options.device)
    sizes = dict.fromkeys(FAMILIES[key].size for key in options.families)
    differences = {size: same_logits(size, device) for size in sizes}
    print("relative difference from timm's logits:", differences)
    results = list(itertools.chain.from_iterable(measure(key, options, device) for key in options.families))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    record.save("parallel", options, device=where, logit_difference=differences, results=results)


if __name__ == "__main__":
    main()
