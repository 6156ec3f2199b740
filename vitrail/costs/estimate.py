"""The cost of a training run before it starts: parameters, MACs, exaFLOPs, days of a device, money, memory.

`ROWS` are Table 6 of the paper: the pre-training compute of its 18 runs, as vitrail counts it and as published.
exaFLOPs = 2 x MACs of the forward pass at 224 px x 3 (forward and backward) x epochs x 303 million images of JFT. The
classifier is not counted, because the paper does not state its width: JFT's 18,291 classes would add 0.01 % to H/14 and
0.9 % to R50x1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vitrail.costs.count import (
    DeviceKind,
    activation_bytes,
    learned_values,
    macs,
    training_flops,
)
from vitrail.costs.devices import DEVICES, GIB, Bill, Device, Power, check_utilisation, device_days
from vitrail.costs.memory import USABLE, StepMemory, state_bytes, step_memory
from vitrail.costs.published import published_table
from vitrail.device import ComputePrecision
from vitrail.model.variants import Config, ViTConfig, variant
from vitrail.words import duration, four_digits, one_line

CONVENTION = (
    "FLOPs = 2 x MACs x 3 x images: a multiply-accumulate is 2 FLOPs, and forward and backward pass are 3 forward "
    "passes (paper, Table 6); linear layers, convolutions and attention are counted"
)
CORE = DEVICES["tpu-v3"]
BATCH = 256
"""Default number of images per step of one GPU; more hardly use it better."""
SAME_IN_JSON = (
    *("model", "classes", "params", "macs", "images", "exaflops", "utilisation", "device_days", "core_days"),
    *("usd_per_hour", "precision", "activation_bytes", "state_bytes", "largest_batch"),
)
"""Attributes of `Cost` that are JSON values under the same name."""


@dataclass(frozen=True)
class Cost:
    """The cost of training `model`. Values that depend on the length of the run are None if the length is unknown."""

    model: str
    image_size: tuple[int, int]
    classes: int
    params: int
    macs: int
    """Of the forward pass of one image."""
    images: float | None
    """Number of images seen in training, over all epochs."""
    flops: float | None
    device: Device
    utilisation: float
    usd_per_hour: float | None
    precision: ComputePrecision
    activation_bytes: int
    """Bytes per image that the forward pass keeps for the backward pass."""
    trainable: int | None = None
    """Number of parameters that are not frozen; None: all of them."""
    devices: int = 1
    """Number of devices that share the work."""
    power: Power | None = None
    """None: energy and carbon are not estimated."""
    blocks: int = 1
    """Number of equal parts of the network, such as the blocks of a ViT."""
    why: str = "as asked for"
    """Source of the utilisation."""

    @property
    def exaflops(self) -> float | None:
        """Compute of the whole run."""
        return None if self.flops is None else self.flops / 1e18

    @property
    def device_days(self) -> float | None:
        """Days of one `device`."""
        return None if self.flops is None else device_days(self.flops, self.device, self.utilisation)

    @property
    def core_days(self) -> float | None:
        """TPUv3-core-days, the paper's unit."""
        if self.device is CORE:
            return self.device_days
        return None if self.flops is None else device_days(self.flops, CORE)

    @property
    def bill(self) -> Bill | None:
        """What the device-days cost."""
        if self.device_days is None:
            return None
        return Bill(self.device_days, self.device, self.devices, self.usd_per_hour, self.power)

    @property
    def usd(self) -> float | None:
        """Price of the device-days; None if the device has no price."""
        return None if self.bill is None else self.bill.usd

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and the optimiser's moments."""
        return state_bytes(self.params, self.trainable)

    @property
    def memory(self) -> StepMemory:
        """Memory of a step with AdamW, without an average of the weights and without recomputation."""
        return step_memory(
            self.params,
            self.activation_bytes,
            trainable=self.trainable,
            blocks=self.blocks,
            precision=self.precision,
        )

    @property
    def largest_batch(self) -> int:
        """Largest batch that fits into `USABLE` of the device's memory."""
        return self.memory.largest(USABLE * self.device.memory)

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        bill = {"usd": None} if self.bill is None else self.bill.as_json()
        return {
            **{name: getattr(self, name) for name in SAME_IN_JSON},
            **bill,
            "image_size": list(self.image_size),
            "learning": self.params if self.trainable is None else self.trainable,
            "device": self.device.name,
            "peak_flops_per_second": self.device.peak,
            "convention": CONVENTION,
        }

    def lines(self) -> dict[str, str]:
        """Return the lines to print, by subject."""
        height, width = self.image_size
        lines = {
            "network": f"{self.model}, {height} x {width} px, {self.classes:,} classes: {self.params:,} parameters, "
            f"{self.macs / 1e9:,.3f} GMACs per image"
        }
        if self.flops is not None and self.images is not None:
            lines["compute"] = f"{amount(self.flops)} for {self.images:,.0f} images"
            lines["time"] = self._time()
        if self.bill is not None:
            lines |= self.bill.lines()
        lines["convention"] = CONVENTION
        lines["memory"] = (
            f"{_gib(self.state_bytes)} for weights, gradients and Adam's moments, and "
            f"{self.activation_bytes / 2**20:,.1f} MiB per image ({self.precision}): "
            f"{USABLE:.0%} of {_gib(self.device.memory)} hold {self.largest_batch:,} images"
        )
        return lines

    def _time(self) -> str:
        days, cores = self.device_days, self.core_days
        assert days is not None and cores is not None
        text = (
            f"{duration(days)} of one {self.device.name} ({self.device.description}): {self.utilisation:.0%} of "
            f"{four_digits(self.device.peak / 1e12)} TFLOP/s ({self.why})"
        )
        return (
            text if self.device is CORE else f"{text}; {four_digits(cores)} TPUv3-core-days at {CORE.utilisation:.0%}"
        )


def estimate(
    name: str,
    config: Config,
    *,
    images: float | None = None,
    flops: float | None = None,
    device: Device = CORE,
    utilisation: float | None = None,
    batch: int | None = None,
    usd_per_hour: float | None = None,
    devices: int = 1,
    power: Power | None = None,
    precision: ComputePrecision = "bf16",
    place: DeviceKind = "accelerator",
) -> Cost:
    """Return the cost of training `config`, called `name`, on `images` images at the config's image size.

    images: Number of images seen in training, over all epochs; None: only the network's own numbers.
    flops: FLOPs of the run, if images change their size during it; None: `images` at full size.
    utilisation: Share of the device's peak that training reaches; None: that of this network and batch on a GPU
    (`vitrail.costs.roofline`), and the device's else.
    batch: Number of images per step of one device; None: as many as fit, at most `BATCH`.
    usd_per_hour: Price of the device; None: the device's.
    devices: Number of devices that share the work.
    power: Energy and carbon of a device; None: they are not estimated.
    precision, place: Decide the activation memory (`vitrail.costs.count.activation_bytes`).

    Raises UsageError for a utilisation that is not a share.
    """
    if flops is None and images is not None:
        flops = training_flops(config) * images
    cost = Cost(
        model=name,
        image_size=config.image_size,
        classes=config.classes,
        params=learned_values(config),
        macs=macs(config),
        images=images,
        flops=flops,
        device=device,
        utilisation=check_utilisation(device.utilisation if utilisation is None else utilisation),
        usd_per_hour=device.usd_per_hour if usd_per_hour is None else usd_per_hour,
        precision=precision,
        activation_bytes=activation_bytes(config, precision=precision, place=place),
        devices=devices,
        power=power,
        blocks=config.depth if isinstance(config, ViTConfig) else 1,
    )
    if utilisation is not None:
        return cost
    if device.bandwidth is None:
        return replace(cost, why=device.because)
    from vitrail.costs.roofline import utilisation as reached

    batch = batch or max(min(cost.largest_batch, BATCH), 1)
    why = f"counted products, bytes and launches of steps of {batch:,} images"
    return replace(cost, utilisation=reached(config, batch, device), why=why)


def amount(flops: float) -> str:
    """Return FLOPs in words, such as "223 exaFLOPs"."""
    for prefix, size in (("exa", 1e18), ("peta", 1e15), ("tera", 1e12)):
        if flops >= size:
            return f"{four_digits(flops / size)} {prefix}FLOPs"
    return f"{four_digits(flops / 1e9)} gigaFLOPs"


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB"


JFT_IMAGES = 303e6
"""Images of JFT-300M; the paper's compute follows from this number."""


@one_line
@dataclass(frozen=True)
class Table6Row:
    """One run of Table 6."""

    name: str
    """The network's name in the table."""
    variant: str
    """The network's name for `vitrail.model.variants.variant`."""
    epochs: int
    published: float
    """exaFLOPs."""

    @property
    def exaflops(self) -> float:
        """Compute as counted here."""
        return training_flops(variant(self.variant, classes=0)) * self.epochs * JFT_IMAGES / 1e18

    @property
    def difference(self) -> float:
        """Relative difference between the counted and the published compute."""
        return self.exaflops / self.published - 1


ROWS: tuple[Table6Row, ...] = tuple(  # our name of "R50x1+ViT-B/32" is "R50+B/32"
    Table6Row(name, name.replace("R50x1+", "R50+").replace("ViT-", "").replace("ResNet", "R"), epochs, exaflops)
    for name, epochs, *_, exaflops in published_table("table6_scaling")["rows"]
)
