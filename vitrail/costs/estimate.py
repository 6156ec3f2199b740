"""What a training run costs, before it starts: parameters, MACs, exaFLOPs, days of a device, money, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitrail.costs.core_days import device_days
from vitrail.costs.devices import DEVICES, GIB, Device, checked
from vitrail.costs.flops import macs, parameters, training_flops
from vitrail.costs.kept import Arithmetic, Precision
from vitrail.costs.memory import activation_bytes, largest_batch, state_bytes
from vitrail.costs.money import dollars
from vitrail.model.variants import ResNetConfig, ViTConfig

CONVENTION = (
    "FLOPs = 2 x MACs x 3 x images: a multiply-accumulate is 2 FLOPs, and forward and backward pass are 3 forward "
    "passes (paper, Table 6); counted are linear layers, convolutions and attention"
)
CORE = DEVICES["tpu-v3"]


@dataclass(frozen=True)
class Cost:
    """The cost of training `model`; what depends on the length of the run is None where that is not known."""

    model: str
    image_size: tuple[int, int]
    classes: int
    params: int
    macs: int
    """Of the forward pass of one image."""
    images: float | None
    """Seen in training, epochs included."""
    flops: float | None
    device: Device
    utilisation: float
    usd_per_hour: float | None
    precision: Precision
    activation_bytes: int
    """Kept of each image for the backward pass."""
    learning: int | None = None
    """Parameters that are not frozen; None: all."""

    @property
    def exaflops(self) -> float | None:
        """Of the whole run."""
        return None if self.flops is None else self.flops / 1e18

    @property
    def device_days(self) -> float | None:
        """Days of `device`."""
        return None if self.flops is None else device_days(self.flops, self.device, self.utilisation)

    @property
    def core_days(self) -> float | None:
        """TPUv3-core-days, the paper's unit."""
        if self.device is CORE:
            return self.device_days
        return None if self.flops is None else device_days(self.flops, CORE)

    @property
    def usd(self) -> float | None:
        """What the device-days cost; None where the device has no price."""
        if self.device_days is None or self.usd_per_hour is None:
            return None
        return dollars(self.device_days, self.usd_per_hour)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and the optimiser's moments."""
        return state_bytes(self.params, self.learning)

    @property
    def largest_batch(self) -> int:
        """Images that fit into the device's memory, at most."""
        return largest_batch(self.params, self.activation_bytes, self.device.memory, self.learning)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "model": self.model,
            "image_size": list(self.image_size),
            "classes": self.classes,
            "params": self.params,
            "learning": self.params if self.learning is None else self.learning,
            "macs": self.macs,
            "images": self.images,
            "exaflops": self.exaflops,
            "device": self.device.name,
            "peak_flops_per_second": self.device.peak,
            "utilisation": self.utilisation,
            "device_days": self.device_days,
            "core_days": self.core_days,
            "usd_per_hour": self.usd_per_hour,
            "usd": self.usd,
            "precision": self.precision,
            "activation_bytes": self.activation_bytes,
            "state_bytes": self.state_bytes,
            "largest_batch": self.largest_batch,
            "convention": CONVENTION,
        }

    def lines(self) -> dict[str, str]:
        """Return what to tell, by subject."""
        height, width = self.image_size
        told = {
            "network": f"{self.model}, {height} x {width} px, {self.classes:,} classes: {self.params:,} parameters, "
            f"{self.macs / 1e9:,.3f} GMACs per image"
        }
        if self.flops is not None and self.images is not None:
            told["compute"] = f"{amount(self.flops)} for {self.images:,.0f} images"
            told["time"] = self._time()
            told["money"] = self._money()
        told["convention"] = CONVENTION
        each = f"{self.activation_bytes / 2**20:,.1f} MiB per image ({self.precision})"
        told["memory"] = (
            f"{_gib(self.state_bytes)} for weights, gradients and Adam's moments, and {each}: "
            f"{_gib(self.device.memory)} hold {self.largest_batch:,} images at most"
        )
        return told

    def _time(self) -> str:
        days, cores = self.device_days, self.core_days
        assert days is not None and cores is not None
        why = self.device.because if self.utilisation == self.device.utilisation else "as asked for"
        text = (
            f"{duration(days)} of one {self.device.name} ({self.device.what}): {self.utilisation:.0%} of "
            f"{digits(self.device.peak / 1e12)} TFLOP/s ({why})"
        )
        return text if self.device is CORE else f"{text}; {digits(cores)} TPUv3-core-days at {CORE.utilisation:.0%}"

    def _money(self) -> str:
        if self.usd is None or self.usd_per_hour is None:
            return f"no price is known for {self.device.name}"
        what = "an example" if self.usd_per_hour == self.device.usd_per_hour else "as asked for"
        return f"${self.usd:,.2f} at ${self.usd_per_hour:,.2f} an hour ({what}; the host is extra)"


def estimate(
    name: str,
    config: ViTConfig | ResNetConfig,
    *,
    images: float | None = None,
    flops: float | None = None,
    device: Device = CORE,
    utilisation: float | None = None,
    usd_per_hour: float | None = None,
    arithmetic: Arithmetic | None = None,
) -> Cost:
    """Return the cost of training `config`, called `name`, on `images` images at its own image size.

    images: All that training sees, epochs included; None: only the network's own numbers.
    flops: Of the run, where images change their size on the way; None: `images` at full size.
    utilisation: Share of the device's peak that training reaches; None: the device's.
    usd_per_hour: Price of the device; None: the device's.
    arithmetic: What decides the memory; None: bf16 on an accelerator.

    Raises UsageError for a utilisation that is no share.
    """
    arithmetic = arithmetic or Arithmetic()
    if flops is None and images is not None:
        flops = training_flops(config) * images
    return Cost(
        model=name,
        image_size=config.image_size,
        classes=config.classes,
        params=parameters(config),
        macs=macs(config),
        images=images,
        flops=flops,
        device=device,
        utilisation=checked(device.utilisation if utilisation is None else utilisation),
        usd_per_hour=device.usd_per_hour if usd_per_hour is None else usd_per_hour,
        precision=arithmetic.precision,
        activation_bytes=activation_bytes(config, arithmetic=arithmetic),
    )


def amount(flops: float) -> str:
    """Return so many FLOPs with a prefix that leaves few digits: "223 exaFLOPs"."""
    for prefix, size in (("exa", 1e18), ("peta", 1e15), ("tera", 1e12)):
        if flops >= size:
            return f"{digits(flops / size)} {prefix}FLOPs"
    return f"{digits(flops / 1e9)} gigaFLOPs"


def duration(days: float) -> str:
    """Return a number of days in the unit that suits it: days, hours, minutes or seconds."""
    for unit, size in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * size >= 1:
            return f"{digits(days * size)} {unit}"
    return f"{digits(days * 86_400)} seconds"


def digits(value: float) -> str:
    """Return a number with four digits, or all that it has in front of the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB"
