"""`vitrail cost`: what a network costs to train, before any of it is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.costs.devices import MEASURED, Device
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.costs.count import Precision
    from vitrail.costs.estimate import Cost
    from vitrail.costs.table6 import Row
    from vitrail.model.variants import ResNetConfig, ViTConfig

TABLE = "table6"
CPU_UTILISATION = 0.7
"""Share of the rate of large matrix products that training reaches. Measured with one thread in bfloat16 on an EPYC
with AVX512-BF16: Ti/16 0.59, S/16 0.75, B/16 0.79."""


@dataclass(frozen=True)
class Report:
    """The cost of a network, and with `--count` its activation memory per image in float32 on an accelerator."""

    cost: Cost
    counted: dict[str, int] | None = None


def cost(
    model: str | Path,
    *,
    images: float | None = None,
    epochs: float | None = None,
    image_size: int | None = None,
    classes: int | None = None,
    device: str = "tpu-v3",
    utilisation: float | None = None,
    usd_per_hour: float | None = None,
    count: bool = False,
) -> Report | tuple[Row, ...]:
    """Estimate what a network costs to train: parameters, MACs, exaFLOPs, days of a device, money, memory.

    FLOPs are 2 x MACs x 3 x images, as in the paper's Table 6. They are counted on a network without values: no number
    is computed and nothing is trained.

    Args:
        model: Model name such as B/16 or R50+L/32, a run folder, a weight file or a model on the hub; table6 compares
            all 18 runs of the paper's Table 6 with the published compute.
        images: Number of images in the training set, such as 303e6 (default: show only the network's own numbers).
        epochs: Number of times that training sees each image (default: 1).
        image_size: Side of the square input image in pixels (default: the model's own).
        classes: Number of outputs of the classifier (default: the model's own, or 1000 for a model name).
        device: Device to estimate for: tpu-v2, tpu-v3, tpu-v4, tpu-v5e (one core), v100, a100, h100, h200, l4, rtx-4090
            or cpu, which is this machine with its peak measured now.
        utilisation: Share of the device's peak that training reaches (default: the known share of the device).
        usd_per_hour: Price of the device in dollars per hour (default: an example price of 2026).
        count: Also show the activation memory in float32 on an accelerator.
    """
    from vitrail.costs.count import activation_bytes
    from vitrail.costs.estimate import estimate

    if str(model) == TABLE:
        return _table(images, epochs, image_size, classes)
    if epochs is not None and images is None:
        raise UsageError(f"{epochs:g} epochs of how many images? Add --images N")
    for name, value in (("images", images), ("epochs", epochs), ("usd_per_hour", usd_per_hour)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{name} is {value:g}; it must be a finite number, zero or more")
    config = _config(model, image_size, classes)
    target, precision = _device(device)
    found = estimate(
        str(model),
        config,
        images=None if images is None else images * (1 if epochs is None else epochs),
        device=target,
        utilisation=utilisation,
        usd_per_hour=usd_per_hour,
        precision=precision,
        place="cpu" if device == MEASURED else "accelerator",
    )
    if not count:
        return Report(found)
    kept = activation_bytes(config, precision="float32")
    return Report(found, {"params": found.params, "macs": found.macs, "activation_bytes_float32": kept})


def _table(*given: object) -> tuple[Row, ...]:
    from vitrail.costs.table6 import ROWS

    if any(value is not None for value in given):
        raise UsageError(f"{TABLE} is about the paper's own runs: leave out images, epochs, image_size and classes")
    return ROWS


def _config(model: str | Path, image_size: int | None, classes: int | None) -> ViTConfig | ResNetConfig:
    """Return the config of a name or of weights. Raises UsageError and WeightsError."""
    from vitrail.model.variants import variant

    changes: dict[str, Any] = {} if classes is None else {"classes": classes}
    if image_size is not None:
        changes["image_size"] = (image_size, image_size)
    if (classes or 0) < 0 or (1 if image_size is None else image_size) < 1:
        raise UsageError("classes must be zero or more, and image_size at least 1")
    if Path(model).exists() or _on_a_hub(str(model)):
        from vitrail.weights.load import read_card

        return replace(read_card(model).config, **changes)
    return variant(str(model), **changes)


def _on_a_hub(model: str) -> bool:
    """Return whether this is a model on a hub; a variant ends in its patch size (B/16)."""
    from vitrail.weights.hub.download import is_name

    return is_name(model) and not model.rpartition("/")[2].isdigit()


def _device(name: str) -> tuple[Device, Precision]:
    """Return a device of the table, or this machine, with the precision of training on it."""
    from vitrail.costs.devices import device

    return _measured() if name == MEASURED else (device(name), "bf16")


def _measured() -> tuple[Device, Precision]:
    """Return this machine's processor with the rate of its matrix products and its free memory, measured now."""
    import torch

    from vitrail.costs.measure import matmul_rate
    from vitrail.device import fast_bf16, fast_float32, free_memory

    place = torch.device("cpu")
    precision: Precision = "bf16" if fast_bf16(place) else "float32"
    with fast_float32():
        peak = matmul_rate(place, precision)
    description = f"this machine, {torch.get_num_threads()} threads, {precision}"
    because = "of the rate of large matrix products, measured just now"
    return Device(MEASURED, description, peak, free_memory(place), CPU_UTILISATION, because), precision


def show(result: Report | tuple[Row, ...]) -> Any:
    """Return the result as lines, or the table, for a terminal."""
    if isinstance(result, tuple):
        return _shown_table(result)
    lines = result.cost.lines()
    if result.counted is not None:
        lines["counted"] = (
            f"{result.counted['params']:,} parameters, {result.counted['macs'] / 1e9:,.3f} GMACs, "
            f"{result.counted['activation_bytes_float32'] / 2**20:,.1f} MiB per image (float32, accelerator)"
        )
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())


def _shown_table(rows: tuple[Row, ...]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from vitrail.costs.estimate import CONVENTION

    table = Table("run", "epochs", "exaFLOPs", "published", "difference")
    for row in rows:
        numbers = (f"{row.epochs}", f"{row.exaflops:,.1f}", f"{row.published:,.0f}", f"{row.difference:+.1%}")
        table.add_row(row.name, *numbers)
    return Group(table, Text(f"{CONVENTION}; 224 px, 303 million images of JFT, no classifier"))


def as_json(result: Report | tuple[Row, ...]) -> Any:
    """Return the result as JSON values."""
    if isinstance(result, tuple):
        from vitrail.costs.estimate import CONVENTION

        rows = [
            {
                "name": row.name,
                "model": row.variant,
                "epochs": row.epochs,
                "exaflops": row.exaflops,
                "published": row.published,
                "difference": row.difference,
            }
            for row in result
        ]
        return {"rows": rows, "convention": CONVENTION}
    values = result.cost.as_json()
    if result.counted is not None:
        values["counted"] = result.counted
    return values
