"""Published peak rates of devices for training, and days, money, energy and carbon of FLOPs. Torch-free.

A peak is that of dense 16-bit matrix products summed in float32, from the makers' data sheets. TPUs are counted in
cores, as in the paper ("TPU v3 cores, 2 per chip", section 4.2). Utilisation is the share of the peak that training
reaches: model FLOPs over time. That of GPUs whose bandwidth is here depends on network and batch. Each value names its
source, and the user can replace it. Prices are examples of hourly rents in 2026; providers differ by a factor of 2 to
4.

Power of TPUs v2 and v3 and of the V100 is the measured average of a chip with its share of the host, for a TPU half of
it, in "Carbon Emissions and Large Neural Network Training" (Patterson et al. 2021), table 4: 208 W, 245 to 310 W and
330 W. Power of other devices is the highest that the data sheet allows, without the host. Power, overhead and carbon
differ between machines, places and hours. The defaults are published averages, and each result prints what was assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitrail.errors import UsageError, did_you_mean
from vitrail.words import duration, four_digits

GIB = 2**30
DAY = 86_400
"""Seconds."""
ASSUMED = "assumed"


@dataclass(frozen=True)
class Device:
    """One device, or one core of a TPU."""

    name: str
    description: str
    peak: float
    """FLOP/s."""
    memory: float
    """Bytes."""
    utilisation: float
    """Share of the peak that training reaches."""
    because: str
    """Source of the utilisation."""
    usd_per_hour: float | None = None
    """Price; None if the device cannot be rented."""
    watts: float | None = None
    """Power; None if it is not published."""
    bandwidth: float | None = None
    """Bytes per second of its memory, for a device whose utilisation depends on network and batch
    (`vitrail.costs.roofline`); None: `utilisation` holds for all."""


_TABLE_2 = "between the 0.32 and 0.43 that Table 2's core-days imply"
_NEMO = "a ViT-g/14 in NVIDIA's NeMo"

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("tpu-v2", "core of a TPU v2", 22.5e12, 8 * GIB, 0.38, f"{ASSUMED} to be that of tpu-v3", 0.56, 104),
        Device("tpu-v3", "core of a TPU v3", 61.5e12, 16 * GIB, 0.38, _TABLE_2, 1.00, 141.5),
        Device("tpu-v4", "core of a TPU v4", 137.5e12, 16 * GIB, 0.38, f"{ASSUMED} to be that of tpu-v3", 1.61),
        Device("tpu-v5e", "core of a TPU v5e", 197e12, 16e9, 0.38, f"{ASSUMED} to be that of tpu-v3", 1.20),
        Device("v100", "NVIDIA V100 SXM2", 125e12, 32 * GIB, 0.21, "DeiT-B: 53 hours on 8 of them", 2.48, 330),
        Device("a100", "NVIDIA A100 SXM, 80 GB", 312e12, 80 * GIB, 0.44, _NEMO, 1.50, 400, 2.039e12),
        Device("h100", "NVIDIA H100 SXM", 989e12, 80 * GIB, 0.29, _NEMO, 2.70, 700, 3.35e12),
        Device("h200", "NVIDIA H200 SXM", 989e12, 141e9, 0.29, f"{ASSUMED} to be that of h100", 3.50, 700, 4.8e12),
        Device("l4", "NVIDIA L4", 121e12, 24e9, 0.35, ASSUMED, 0.71, 72, 0.3e12),
        Device("rtx-4090", "NVIDIA GeForce RTX 4090", 165e12, 24 * GIB, 0.45, ASSUMED, 0.35, 450, 1.008e12),
    )
}
MEASURED = "cpu"
"""Name of the machine that runs the command. It is not in the table, because its peak is measured."""


def device(name: str) -> Device:
    """Return the device of the table called `name`. Raises UsageError with the nearest name."""
    if name not in DEVICES:
        hint = did_you_mean(name, [*DEVICES, MEASURED])
        raise UsageError(f"there is no device {name!r}.{hint} Valid: {', '.join(DEVICES)}, {MEASURED} (measured here)")
    return DEVICES[name]


def check_utilisation(utilisation: float) -> float:
    """Return a utilisation unchanged. Raises UsageError unless it is a share of the peak."""
    if not 0 < utilisation <= 1:
        raise UsageError(f"utilisation is {utilisation:g}; valid: a share of the peak, above 0 and at most 1")
    return utilisation


def device_days(flops: float, device: Device, utilisation: float | None = None) -> float:
    """Return the number of days that one `device` needs for `flops`.

    `utilisation` is the share of the peak that training reaches; None: the device's. Raises UsageError for a value that
    is not a share.
    """
    share = check_utilisation(device.utilisation if utilisation is None else utilisation)
    return flops / (device.peak * share) / DAY


def implied_utilisation(flops: float, days: float, device: Device) -> float:
    """Return the share of a device's peak that a run reached if it needed `days` of one device for `flops`."""
    return flops / (device.peak * days * DAY)


def dollars(device_days: float, usd_per_hour: float) -> float:
    """Return the price of days of one device."""
    return device_days * 24 * usd_per_hour


OVERHEAD = 1.1
"""Energy of the data centre over that of its machines (PUE): 1.09 to 1.12 in Google's, "Carbon Emissions and Large
Neural Network Training" (Patterson et al. 2021), table 4."""
INTENSITY = 0.429
"""Kilograms of CO2 per kWh, the average of the United States in that paper (section 2.5)."""


@dataclass(frozen=True)
class Power:
    """How much energy and carbon a device takes."""

    watts: float
    """Watts of one device with its share of the host."""
    overhead: float = OVERHEAD
    """Energy of the building over that of its machines."""
    intensity: float = INTENSITY
    """Kilograms of CO2 per kWh."""


@dataclass(frozen=True)
class Bill:
    """The price of `days` of one `device`, spread over a number of them."""

    days: float
    device: Device
    devices: int = 1
    usd_per_hour: float | None = None
    """Price of one device; None: no price is known."""
    power: Power | None = None

    @property
    def hours(self) -> float:
        """Hours of one device."""
        return 24 * self.days

    @property
    def usd(self) -> float | None:
        """Price of all of it."""
        return None if self.usd_per_hour is None else dollars(self.days, self.usd_per_hour)

    @property
    def kwh(self) -> float | None:
        """Energy, with the building's."""
        return None if self.power is None else self.hours * self.power.watts * self.power.overhead / 1000

    @property
    def kg_co2(self) -> float | None:
        """Carbon dioxide of this energy."""
        return None if self.kwh is None or self.power is None else self.kwh * self.power.intensity

    def lines(self) -> dict[str, str]:
        """Return the lines to print, by subject, each with what it assumes."""
        lines = {}
        if self.devices > 1:
            name = f"{self.devices:,} x {self.device.name}"
            lines["devices"] = f"{duration(self.days / self.devices)} on {name}, if they share the work without loss"
        lines["money"] = self._money()
        if self.power is not None and self.kwh is not None and self.kg_co2 is not None:
            lines["energy"] = (
                f"{four_digits(self.kwh)} kWh: {self.power.watts:g} W for each {self.device.name}, and "
                f"{self.power.overhead - 1:.0%} more for the building"
            )
            lines["carbon"] = f"{four_digits(self.kg_co2)} kg CO2, at {self.power.intensity:g} kg per kWh"
        return lines

    def _money(self) -> str:
        if self.usd is None or self.usd_per_hour is None:
            return f"no price is known for {self.device.name}"
        example = self.usd_per_hour == self.device.usd_per_hour
        what = "an example of 2026; the host is extra" if example else "as asked for"
        price = f"{self.usd_per_hour:,.2f}" if round(self.usd_per_hour, 2) == self.usd_per_hour else self.usd_per_hour
        return f"${self.usd:,.2f}: {four_digits(self.hours)} hours at ${price} ({what})"

    def as_json(self) -> dict[str, Any]:
        """Return the bill as JSON values."""
        power = self.power
        return {
            "device": self.device.name,
            "device_days": self.days,
            "devices": self.devices,
            "days": self.days / self.devices,
            "usd_per_hour": self.usd_per_hour,
            "usd": self.usd,
            "kwh": self.kwh,
            "kg_co2": self.kg_co2,
            "assumed": None
            if power is None
            else {"watts": power.watts, "overhead": power.overhead, "kg_co2_per_kwh": power.intensity},
        }


def power_of(device: Device, watts: float | None, overhead: float | None, intensity: float | None) -> Power:
    """Return the power of a device, with these values in place of the known ones.

    Raises UsageError if no power is known and none is given.
    """
    known = device.watts if watts is None else watts
    if known is None:
        raise UsageError(f"the power of {device.name} is not published: give it with --watts")
    return Power(known, OVERHEAD if overhead is None else overhead, INTENSITY if intensity is None else intensity)
