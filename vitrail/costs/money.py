"""What device-days cost, and what a blog post of 2020 made of the paper's. Torch-free.

The post ("16x16 Words is all you Need?", seed 003) multiplies TPUv3-core-days by 24 hours and by the price of an
hour of "a TPU-v3", preemptible, and of its host. It does not say how many cores that price is for; the paper's
"standard cloud TPUv3" has eight (section 4.2), so if it is the price of one of those, the runs cost an eighth of what
the post says. `post_dollars` repeats the post, `dollars` takes a price per device.
"""

from __future__ import annotations

HOST_USD_PER_HOUR = 0.095
"""An n1-standard-2 machine in front of the TPU."""
PREEMPTIBLE_TPU_V3_USD_PER_HOUR = 2.40
GPUS = 4
"""V100s in the server that the post compares with."""
KEPT = 0.95
"""Of their speed, after what they lose to communication."""
MIXED_PRECISION = 1.6
"""Speed-up; the post says 1.5 to 1.6 and goes on with 1.6."""


def dollars(device_days: float, usd_per_hour: float) -> float:
    """Return what so many days of one device cost."""
    return device_days * 24 * usd_per_hour


def post_dollars(core_days: float) -> float:
    """Return what the post says a run of so many TPUv3-core-days costs."""
    return dollars(core_days, HOST_USD_PER_HOUR + PREEMPTIBLE_TPU_V3_USD_PER_HOUR)


def post_v100_days(core_days: float) -> float:
    """Return the days that, by the post, a server of four V100s takes for what takes a TPU v3 `core_days`."""
    return core_days / (KEPT * GPUS * MIXED_PRECISION)
