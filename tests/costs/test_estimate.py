"""Days, money and the whole estimate, against Table 2's core-days and the blog post's own figures."""

from __future__ import annotations

import json

import pytest

from vitrail.costs.count import training_flops
from vitrail.costs.devices import DEVICES, Device, check_utilisation, device, device_days, dollars, implied_utilisation
from vitrail.costs.estimate import amount, estimate
from vitrail.costs.published import published_table
from vitrail.errors import UsageError
from vitrail.model.variants import variant
from vitrail.words import duration, four_digits

TPU = DEVICES["tpu-v3"]
# the runs of Table 2: column, model, images, epochs (Table 3)
RUNS = {
    "ViT-H/14 (JFT)": ("H/14", 303e6, 14),
    "ViT-L/16 (JFT)": ("L/16", 303e6, 14),
    "ViT-L/16 (I21k)": ("L/16", 14_197_122, 90),
}


def core_days(column: str) -> float:
    """What Table 2 says, such as "0.68k"."""
    table = published_table("table2_state_of_the_art")
    text = table["rows"]["TPUv3-core-days"][table["columns"].index(column)]
    return 1000 * float(text.removesuffix("k"))


def test_days_in_closed_form() -> None:
    one = Device("one", "core of one", 2e12, 0, 0.5, "")
    assert device_days(1e12 * 86_400, one) == 1
    assert device_days(1e12 * 86_400, one, utilisation=1.0) == 0.5
    assert implied_utilisation(1e12 * 86_400, 1, one) == 0.5


@pytest.mark.full_size
@pytest.mark.parametrize("column", RUNS)
def test_core_days_of_table_2(column: str) -> None:
    name, images, epochs = RUNS[column]
    cost = estimate(name, variant(name), images=images * epochs)
    assert cost.core_days == cost.device_days == pytest.approx(core_days(column), rel=0.2)


def test_the_utilisation_of_a_tpu_v3_is_what_table_2_implies() -> None:
    implied = [
        implied_utilisation(training_flops(variant(name)) * images * epochs, core_days(column), TPU)
        for column, (name, images, epochs) in RUNS.items()
    ]
    assert [round(share, 2) for share in implied] == [0.32, 0.43, 0.39]
    assert min(implied) < TPU.utilisation < max(implied)


def test_the_blog_posts_dollars() -> None:
    assert dollars(2, 3) == 2 * 24 * 3
    post = published_table("cloud_cost_2020")
    price = post["host_usd_per_hour"] + post["preemptible_tpu_v3_usd_per_hour"]
    for model in ("vit_l16", "vit_h14"):
        assert round(dollars(post[f"{model}_core_days"], price), -3) == post[f"{model}_usd"]


def test_the_posts_dollars_are_ours_at_its_price() -> None:
    post = published_table("cloud_cost_2020")
    price = post["host_usd_per_hour"] + post["preemptible_tpu_v3_usd_per_hour"]
    flops = training_flops(variant("L/16")) * 14 * 303e6
    share = implied_utilisation(flops, 680, TPU)
    cost = estimate("L/16", variant("L/16"), images=14 * 303e6, utilisation=share, usd_per_hour=price)
    assert cost.core_days == pytest.approx(680)
    assert cost.usd == pytest.approx(dollars(680, price))


def test_an_estimate_in_closed_form() -> None:
    config = variant("B/16")
    cost = estimate("B/16", config, images=7 * 303e6, device=DEVICES["a100"], utilisation=0.44)
    assert cost.exaflops == pytest.approx(224, rel=0.01)
    assert cost.device_days == pytest.approx(cost.exaflops * 1e18 / (312e12 * 0.44) / 86_400)
    assert cost.usd == pytest.approx(cost.device_days * 24 * 1.50)
    assert cost.core_days == pytest.approx(cost.exaflops * 1e18 / (61.5e12 * 0.38) / 86_400)
    assert cost.state_bytes == 16 * 86_567_656
    values = json.loads(json.dumps(cost.as_json()))
    assert {"params", "macs", "exaflops", "device_days", "core_days", "usd"} <= values.keys()
    assert "2 x MACs x 3" in values["convention"]


def test_without_images_the_run_is_unknown() -> None:
    cost = estimate("B/16", variant("B/16"))
    assert (cost.exaflops, cost.device_days, cost.core_days, cost.usd) == (None, None, None, None)
    assert set(cost.lines()) == {"network", "convention", "memory"}


def test_every_device_can_train_every_size() -> None:
    for found in DEVICES.values():
        cost = estimate("L/16", variant("L/16"), images=1.0, device=found)
        assert cost.usd and cost.usd > 0
        assert 0 < cost.utilisation <= 1 and (found.bandwidth or cost.utilisation == found.utilisation)
        assert f"{cost.utilisation:.0%}" in cost.lines()["time"]
    assert estimate("H/14", variant("H/14"), device=DEVICES["tpu-v2"]).largest_batch == 0  # its state alone is 9.4 GiB


def test_what_is_asked_for_wins() -> None:
    cost = estimate("B/16", variant("B/16"), images=1e9, utilisation=0.5, usd_per_hour=3.0)
    told = cost.lines()
    assert "50% of 61.5 TFLOP/s (as asked for)" in told["time"]
    assert "at $3.00 (as asked for" in told["money"]


def test_a_device_without_a_price_costs_nothing_known() -> None:
    own = Device("own", "mine", 1e12, 1e9, 1.0, "measured")
    cost = estimate("B/16", variant("B/16"), images=1e3, device=own)
    assert cost.usd is None
    assert cost.lines()["money"] == "no price is known for own"


def test_unknown_devices_and_utilisations() -> None:
    with pytest.raises(UsageError, match=r"'tpuv3'\. Did you mean 'tpu-v3'\?"):
        device("tpuv3")
    for share in (0, -0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="share of the peak"):
            check_utilisation(share)


def test_amounts_and_durations_are_short() -> None:
    assert [amount(x) for x in (2.235e20, 4.262e21, 5e15, 5e12, 5e9)] == [
        *("223.5 exaFLOPs", "4,262 exaFLOPs", "5 petaFLOPs", "5 teraFLOPs", "5 gigaFLOPs"),
    ]
    assert [duration(x) for x in (2500.4, 2.5, 0.25, 1 / 96, 1 / 86_400)] == [
        *("2,500 days", "2.5 days", "6 hours", "15 minutes", "1 seconds"),
    ]
    assert four_digits(0.00012346) == "0.0001235"
