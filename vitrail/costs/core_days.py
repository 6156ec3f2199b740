"""From floating-point operations to days of a device, and from published days back to utilisation. Torch-free."""

from __future__ import annotations

from vitrail.costs.devices import Device, checked

DAY = 86_400
"""Seconds."""


def device_days(flops: float, device: Device, utilisation: float | None = None) -> float:
    """Return how many days one `device` takes for so many FLOPs; of n devices each takes the n-th part.

    `utilisation` is the share of the peak that is reached; None: the device's. Raises UsageError where it is
    no share.
    """
    share = checked(device.utilisation if utilisation is None else utilisation)
    return flops / (device.peak * share) / DAY


def implied_utilisation(flops: float, days: float, device: Device) -> float:
    """Return the share of a device's peak that was reached by who did so many FLOPs in so many device-days."""
    return flops / (device.peak * days * DAY)
