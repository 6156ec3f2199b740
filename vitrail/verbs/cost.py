"""`vitrail cost`: estimate the cost of training a network without training it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.costs.devices import MEASURED, Device
from vitrail.errors import UsageError
from vitrail.ranges import Amount, Count, InputSize, Part, Range, Whole, checked, height_width
from vitrail.terminal import page, table
from vitrail.words import listing, one_line

if TYPE_CHECKING:
    from vitrail.costs.devices import Bill
    from vitrail.costs.estimate import Cost, Table6Row
    from vitrail.device import ComputePrecision
    from vitrail.model.variants import ResNetConfig, ViTConfig

TABLE = "table6"
CPU_UTILISATION = 0.7
"""Share of the rate of large matrix products that training reaches. Measured with one thread in bfloat16 on an EPYC
with AVX512-BF16: Ti/16 0.59, S/16 0.75, B/16 0.79."""


@one_line
@dataclass(frozen=True)
class CostReport:
    """The cost of a network, and with `--count` its activation memory per image in float32 on an accelerator."""

    cost: Cost | Bill
    """A `Bill` alone if the days were given instead of a network."""
    counted: dict[str, int] | None = None


@checked
def cost(
    model: str | Path | None = None,
    *,
    images: Amount | None = None,
    epochs: Amount | None = None,
    image_size: InputSize | None = None,
    classes: Whole | None = None,
    device: str = "tpu-v3",
    batch_size: Count | None = None,
    utilisation: Part | None = None,
    usd_per_hour: Amount | None = None,
    core_days: Amount | None = None,
    devices: Count = 1,
    energy: bool = False,
    watts: Amount | None = None,
    overhead: Annotated[float, Range(1, 10)] | None = None,
    intensity: Amount | None = None,
    count: bool = False,
) -> CostReport | tuple[Table6Row, ...]:
    """Estimate what a network costs to train: parameters, MACs, exaFLOPs, days of a device, money, memory.

    FLOPs are 2 x MACs x 3 x images, as in the paper's Table 6. They are counted on a network without values: no number
    is computed and nothing is trained.

    Args:
        model: Model name such as B/16 or R50+L/32, a run folder, a weight file or a model on the hub; table6 compares
            all 18 runs of the paper's Table 6 with the published compute.
        images: Number of images in the training set, such as 303e6 (default: show only the network's own numbers).
        epochs: Number of times that training sees each image (default: 1).
        image_size: Size of the input in pixels: the side of a square, or height and width, such as 32 64 (default: the
            model's own).
        classes: Number of outputs of the classifier (default: the model's own, or 1000 for a model name).
        device: Device to estimate for: tpu-v2, tpu-v3, tpu-v4, tpu-v5e (one core), v100, a100, h100, h200, l4, rtx-4090
            or cpu, which is this machine with its peak measured now.
        batch_size: Number of images per step of one GPU, on which its utilisation depends (default: 256, or as many as
            fit).
        utilisation: Share of the device's peak that training reaches (default: for a GPU from the network and the
            batch, for other devices a published share).
        usd_per_hour: Price of the device in dollars per hour (default: an example price of 2026).
        core_days: Published TPUv3-core-days of a run, or days of one --device, in place of a model: their price.
        devices: Number of devices that share the work.
        energy: Also estimate the energy in kWh and the carbon dioxide in kg.
        watts: Power of one device with its share of the host (default: a published value of the device).
        overhead: Energy of the data centre over that of its machines (default: 1.1, a published average).
        intensity: Kilograms of CO2 per kWh (default: 0.429, the average of the United States in 2020).
        count: Also show the activation memory in float32 on an accelerator.
    """
    from vitrail.costs.count import activation_bytes
    from vitrail.costs.devices import Bill, power_of
    from vitrail.costs.estimate import ROWS, estimate

    bill = {"usd_per_hour": usd_per_hour, "devices": devices > 1, "energy": energy, "watts": watts}
    bill |= {"overhead": overhead, "intensity": intensity}
    of_network = {"images": images, "epochs": epochs, "image_size": image_size, "classes": classes, "count": count}
    of_network |= {"batch_size": batch_size, "utilisation": utilisation}
    if str(model) == TABLE:
        others = {"device": device != "tpu-v3", "core_days": core_days}
        _refuse({**of_network, **bill, **others}, f"{TABLE} shows the paper's own runs")
        return ROWS
    if epochs is not None and images is None:
        raise UsageError(f"--epochs {epochs:g} needs the number of images. Add --images N")
    target, precision = _device(device)
    asks_for_energy = energy or any(value is not None for value in (watts, overhead, intensity))
    power = power_of(target, watts, overhead, intensity) if asks_for_energy else None
    if core_days is not None:
        if model is not None:
            raise UsageError("--core-days are the days of a whole run: give them without a model")
        _refuse(of_network, "--core-days are the days of a whole run")
        price = target.usd_per_hour if usd_per_hour is None else usd_per_hour
        return CostReport(Bill(core_days, target, devices, price, power))
    if model is None:
        raise UsageError("no network is given: vitrail cost B/16, or vitrail cost --core-days 680")
    if images is None:
        _refuse(bill, "without --images N no training is estimated, so there is nothing to share or to pay")
    config = _config(model, image_size, classes)
    found = estimate(
        str(model),
        config,
        images=None if images is None else images * (1 if epochs is None else epochs),
        device=target,
        utilisation=utilisation,
        batch=batch_size,
        usd_per_hour=usd_per_hour,
        devices=devices,
        power=power,
        precision=precision,
        place="cpu" if device == MEASURED else "accelerator",
    )
    if not count:
        return CostReport(found)
    kept = activation_bytes(config, precision="float32")
    return CostReport(found, {"params": found.params, "macs": found.macs, "activation_bytes_float32": kept})


def _refuse(settings: Mapping[str, Any], why: str) -> None:
    """Raise UsageError if one of the settings is given, which has no effect: `why`."""
    if given := [f"--{name.replace('_', '-')}" for name, value in settings.items() if value not in (None, False)]:
        raise UsageError(f"{why}. Remove {listing(given, quoted=False)}")


def _config(model: str | Path, image_size: InputSize | None, classes: int | None) -> ViTConfig | ResNetConfig:
    """Return the config of a name or of weights. Raises UsageError and WeightsError."""
    from vitrail.model.variants import variant
    from vitrail.weights.download import is_hub_name

    changes: dict[str, Any] = {} if classes is None else {"classes": classes}
    if image_size is not None:
        changes["image_size"] = height_width(image_size)
    on_a_hub = (
        is_hub_name(model) and not str(model).rpartition("/")[2].isdigit()
    )  # a variant ends in its patch size: B/16
    if Path(model).exists() or on_a_hub:
        from vitrail.weights.load import read_card

        return replace(read_card(model).config, **changes)
    return variant(str(model), **changes)


def _device(name: str) -> tuple[Device, ComputePrecision]:
    """Return a device of the table with the precision of training on it.

    Of this machine's processor, the rate of matrix products and the free memory are measured now.
    """
    from vitrail.costs.devices import device

    if name != MEASURED:
        return device(name), "bf16"
    import torch

    from vitrail.costs.measure import matmul_rate
    from vitrail.device import compute_precision, fast_float32, free_memory

    place = torch.device("cpu")
    precision = compute_precision(place)
    with fast_float32():
        peak = matmul_rate(place, precision)
    threads = torch.get_num_threads()
    description = f"this machine, {threads} thread{'s' * (threads != 1)}, {precision}"
    because = "of the rate of large matrix products, measured just now"
    return Device(MEASURED, description, peak, free_memory(place), CPU_UTILISATION, because), precision


def show(result: CostReport | tuple[Table6Row, ...]) -> Any:
    """Return the result as lines, or the table, for a terminal."""
    if isinstance(result, tuple):
        from vitrail.costs.estimate import CONVENTION

        cells = [
            (row.name, row.epochs, f"{row.exaflops:,.1f}", f"{row.published:,.0f}", f"{row.difference:+.1%}")
            for row in result
        ]
        columns = ("run", "epochs", "exaFLOPs", "published", "difference")
        return page(table(columns, cells), f"{CONVENTION}; 224 px, 303 million images of JFT, no classifier")
    lines = result.cost.lines()
    if result.counted is not None:
        lines["counted"] = (
            f"{result.counted['params']:,} parameters, {result.counted['macs'] / 1e9:,.3f} GMACs, "
            f"{result.counted['activation_bytes_float32'] / 2**20:,.1f} MiB per image (float32, accelerator)"
        )
    return page(table(("", ""), lines.items()))


def as_json(result: CostReport | tuple[Table6Row, ...]) -> Any:
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
