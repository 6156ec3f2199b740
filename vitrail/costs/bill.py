"""What days of devices cost: days on several of them, money, energy and carbon. Torch-free.

Power, overhead and carbon differ between machines, places and hours. The defaults are published averages, each result
prints what was assumed, and the user can replace all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitrail.costs.devices import Device, dollars
from vitrail.errors import UsageError
from vitrail.words import digits, duration

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
                f"{digits(self.kwh)} kWh: {self.power.watts:g} W for each {self.device.name}, and "
                f"{self.power.overhead - 1:.0%} more for the building"
            )
            lines["carbon"] = f"{digits(self.kg_co2)} kg CO2, at {self.power.intensity:g} kg per kWh"
        return lines

    def _money(self) -> str:
        if self.usd is None or self.usd_per_hour is None:
            return f"no price is known for {self.device.name}"
        example = self.usd_per_hour == self.device.usd_per_hour
        what = "an example of 2026; the host is extra" if example else "as asked for"
        price = f"{self.usd_per_hour:,.2f}" if round(self.usd_per_hour, 2) == self.usd_per_hour else self.usd_per_hour
        return f"${self.usd:,.2f}: {digits(self.hours)} hours at ${price} ({what})"

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
