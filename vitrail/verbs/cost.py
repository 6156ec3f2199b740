"""`vitrail cost`: what a network costs to train, before any of it is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.costs.devices import MEASURED, Device
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.costs.count import Counted
    from vitrail.costs.estimate import Cost
    from vitrail.costs.kept import Arithmetic
    from vitrail.costs.table6 import Row
    from vitrail.model.variants import ResNetConfig, ViTConfig

TABLE = "table6"
CPU_UTILISATION = 0.7
"""Of the rate of large matrix products, in training. Measured with one thread in bfloat16 on an EPYC with AVX512-BF16:
Ti/16 0.59, S/16 0.75, B/16 0.79."""


@dataclass(frozen=True)
class Report:
    """The cost by formula, and what was counted on the running network, where that was asked for."""

    cost: Cost
    counted: Counted | None = None


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
    """Tell what a network costs to train: parameters, MACs, exaFLOPs, days of a device, money, memory.

    FLOPs are 2 x MACs x 3 x images, as in the paper's Table 6. Nothing is built and nothing is trained.

    Args:
        model: A name such as B/16 or R50+L/32, a run folder, a weight file, a name on the hub, or table6: the compute
            of all 18 runs of the paper's Table 6 beside what is published.
        images: Images in the training set, such as 303e6; left out: only what does not depend on the run.
        epochs: Passes over them; left out: 1.
        image_size: Side of the square input in pixels; left out: the model's own.
        classes: Outputs of the classifier; left out: the model's own, 1000 for a name.
        device: tpu-v2, tpu-v3, tpu-v4, tpu-v5e (cores), v100, a100, h100, h200, l4, rtx-4090, or cpu: this machine's,
            its peak measured now.
        utilisation: Share of the device's peak that training reaches; left out: what is known of the device.
        usd_per_hour: Price of the device; left out: an example of 2026.
        count: Also count the operations of the network as it runs, and compare.
    """
    from vitrail.costs.estimate import estimate

    if str(model) == TABLE:
        return _table(images, epochs, image_size, classes)
    if epochs is not None and images is None:
        raise UsageError(f"{epochs:g} epochs of how many images? Add --images N")
    for name, value in (("images", images), ("epochs", epochs), ("usd_per_hour", usd_per_hour)):
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"{name} is {value:g}; it must be a finite number, zero or more")
    config = _config(model, image_size, classes)
    target, arithmetic = _device(device)
    found = estimate(
        str(model),
        config,
        images=None if images is None else images * (1 if epochs is None else epochs),
        device=target,
        utilisation=utilisation,
        usd_per_hour=usd_per_hour,
        arithmetic=arithmetic,
    )
    if not count:
        return Report(found)
    from vitrail.costs import count as counting

    return Report(found, counting.count(config))


def _table(*given: object) -> tuple[Row, ...]:
    from vitrail.costs.table6 import ROWS

    if any(value is not None for value in given):
        raise UsageError(f"{TABLE} is of the paper's own runs: leave images, epochs, image_size and classes out")
    return ROWS


def _config(model: str | Path, image_size: int | None, classes: int | None) -> ViTConfig | ResNetConfig:
    """The config of a name, or of weights; raises UsageError and WeightsError."""
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
    """Is it a hub's name rather than a variant's, which ends in a patch size (B/16)?"""
    from vitrail.weights.hub.download import is_name

    return is_name(model) and not model.rpartition("/")[2].isdigit()


def _device(name: str) -> tuple[Device, Arithmetic]:
    from vitrail.costs.devices import device
    from vitrail.costs.kept import Arithmetic

    return _measured() if name == MEASURED else (device(name), Arithmetic())


def _measured() -> tuple[Device, Arithmetic]:
    """This machine's processor: the rate of its matrix products now, and its free memory."""
    import torch

    from vitrail.costs.kept import Arithmetic
    from vitrail.costs.measure import matmul_rate
    from vitrail.evaluation.classify import fast_bf16
    from vitrail.model.process import prepare_process
    from vitrail.training.batch_size import free_memory

    place = torch.device("cpu")
    arithmetic = Arithmetic("bf16" if fast_bf16(place) else "float32", cpu=True)
    prepare_process()
    peak = matmul_rate(place, arithmetic.precision)
    what = f"this machine, {torch.get_num_threads()} threads, {arithmetic.precision}"
    because = "of the rate that large matrix products were just measured at"
    return Device(MEASURED, what, peak, free_memory(place), CPU_UTILISATION, because), arithmetic


def show(result: Report | tuple[Row, ...]) -> Any:
    """Return the result as lines, or the table, for a terminal."""
    if isinstance(result, tuple):
        return _shown_table(result)
    lines = dict(result.cost.lines())
    if result.counted is not None:
        counted = result.counted
        lines["counted"] = (
            f"{counted.parameters:,} parameters, {counted.macs / 1e9:,.3f} GMACs, "
            f"{counted.activation_bytes / 2**20:,.1f} MiB per image (float32, accelerator) by running the network"
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
        values["counted"] = {
            "params": result.counted.parameters,
            "macs": result.counted.macs,
            "activation_bytes_float32": result.counted.activation_bytes,
        }
    return values
