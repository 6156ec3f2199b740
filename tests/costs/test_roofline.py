"""The model of a GPU's speed: its limits by hand, and published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitrail.costs.count import learned_values, training_flops
from vitrail.costs.devices import DEVICES
from vitrail.costs.estimate import estimate
from vitrail.costs.roofline import LAUNCH, UPDATED, step_seconds, traffic, utilisation
from vitrail.model.variants import variant

S16, H100 = variant("S/16"), DEVICES["h100"]


def test_what_a_step_waits_for_by_hand() -> None:
    """Each of three parts alone, on a device on which the others take no time."""
    assert H100.bandwidth is not None
    tiny = variant("Ti/16", depth=2)
    counted = traffic(tiny)
    fast = replace(H100, peak=1e30, bandwidth=1e30)
    assert step_seconds(tiny, 64, fast) == pytest.approx(3 * counted.launches * LAUNCH)
    products = replace(H100, bandwidth=1e30)
    assert step_seconds(tiny, 4096, products) == pytest.approx(4096 * training_flops(tiny) / 650e12, rel=1e-6)
    copies = replace(H100, peak=1e30)
    moved = 3 * (4096 * counted.image + counted.fixed) + UPDATED * learned_values(tiny)
    assert step_seconds(tiny, 4096, copies) == pytest.approx(moved / 2.7e12, rel=1e-6)


def test_a_norm_and_a_residual_by_hand() -> None:
    """One more block reads and writes: two norms (float32 out of autocast), their casts, a GELU, two residuals."""
    more = traffic(variant("S/16", depth=7)).image - traffic(variant("S/16", depth=6)).image
    values, hidden = 197 * 384, 197 * 1536
    least = values * (2 * (2 + 2) + 2 * (2 + 2 + 2)) + hidden * (2 + 2)  # all in bfloat16
    assert least < more < 3 * least


def test_deep_networks_are_counted_on_few_layers() -> None:
    by_layer = [traffic(variant("S/16", depth=depth)).launches for depth in (6, 7, 24)]
    assert by_layer[2] == by_layer[0] + 18 * (by_layer[1] - by_layer[0])


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("name", "batch", "device", "published"),
    [
        ("g/14", 32, "a100", 0.44),  # NVIDIA's NeMo
        ("g/14", 32, "h100", 0.29),
        ("S/16", 1024, "h100", 0.22),  # ViT-5-Small, compiled: 7,716 images/s
    ],
)
def test_published_runs(name: str, batch: int, device: str, published: float) -> None:
    assert utilisation(variant(name), batch, DEVICES[device]) == pytest.approx(published, rel=0.15)


@pytest.mark.full_size
@pytest.mark.parametrize(("name", "batch", "milliseconds"), [("S/16", 1024, (116, 90)), ("B/16", 256, (78, 63))])
def test_the_model_of_one_h100(name: str, batch: int, milliseconds: tuple[int, int]) -> None:
    """Counted by hand before, from the same rates: eager, when every parameter was cast on its own, and compiled."""
    eager, compiled = (1000 * step_seconds(variant(name), batch, H100, compiled=compiled) for compiled in (False, True))
    assert compiled == pytest.approx(milliseconds[1], rel=0.1) and compiled < eager < milliseconds[0]


def test_small_batches_wait_for_launches_and_a_cost_says_what_it_assumes() -> None:
    few, many = (estimate("S/16", S16, images=1e6, device=H100, batch=batch) for batch in (16, 512))
    assert few.utilisation < many.utilisation / 3
    assert few.device_days is not None and many.device_days is not None and few.device_days > 3 * many.device_days
    assert "steps of 16 images" in few.lines()["time"] and "steps of 512 images" in many.lines()["time"]
    assert estimate("S/16", S16, images=1e6, device=H100, utilisation=0.5).utilisation == 0.5
