"""`vitrail cost`, `vitrail bench` and the cost in a dry run, from the command line and from Python."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail import cli
from vitrail.costs.count import learned_values, macs, training_flops
from vitrail.costs.published import published_table
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, variant
from vitrail.recipes.registry import recipe
from vitrail.training.run import Progressive
from vitrail.verbs.train.dry_run import rehearse
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

Captured = pytest.CaptureFixture[str]


def as_json(argv: list[str], capsys: Captured) -> Any:
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_papers_b16(capsys: Captured) -> None:
    found = as_json(["cost", "B/16", "--images", "303e6", "--epochs", "7"], capsys)
    assert found["params"] == 86_567_656
    assert found["macs"] == pytest.approx(17.563e9, rel=1e-3)
    assert found["exaflops"] == pytest.approx(224, rel=0.01)
    assert found["device"] == "tpu-v3"
    assert found["core_days"] == found["device_days"] == pytest.approx(223.5e18 / (61.5e12 * 0.38) / 86_400, rel=1e-3)
    assert found["usd"] == pytest.approx(found["device_days"] * 24)


@pytest.mark.full_size
def test_flags_change_what_they_say(capsys: Captured) -> None:
    argv = ["cost", "B/16", "--image-size", "384", "--classes", "10", "--images", "1e6", "--device", "h100"]
    found = as_json([*argv, "--utilisation", "0.5", "--usd-per-hour", "2"], capsys)
    config = variant("B/16", image_size=(384, 384), classes=10)
    assert (found["params"], found["macs"]) == (learned_values(config), macs(config))
    assert found["exaflops"] == pytest.approx(training_flops(config) * 1e6 / 1e18)  # one epoch where none is said
    assert found["device_days"] == pytest.approx(found["exaflops"] * 1e18 / (989e12 * 0.5) / 86_400)
    assert found["usd"] == pytest.approx(found["device_days"] * 24 * 2)
    assert found["core_days"] > found["device_days"]


@pytest.mark.full_size
def test_without_images_only_the_network(capsys: Captured) -> None:
    found = as_json(["cost", "R50+L/32"], capsys)
    assert found["params"] == learned_values(variant("R50+L/32"))
    assert (found["exaflops"], found["device_days"], found["core_days"], found["usd"]) == (None,) * 4


@pytest.mark.full_size
def test_counting_agrees(capsys: Captured) -> None:
    found = as_json(["cost", "S/16", "--count"], capsys)
    assert found["counted"]["params"] == found["params"]
    assert found["counted"]["macs"] == found["macs"]
    assert found["counted"]["activation_bytes_float32"] > found["activation_bytes"]
    assert cli.main(["cost", "S/16", "--count"]) == 0
    shown = capsys.readouterr().out
    assert "counted" in shown and shown.count("22,050,664 parameters") == 2


@pytest.mark.full_size
def test_the_convention_is_printed(capsys: Captured) -> None:
    assert cli.main(["cost", "H/14", "--images", "303e6", "--epochs", "14"]) == 0
    shown = capsys.readouterr().out
    assert "2 x MACs x 3 x images" in shown
    assert "4,258 exaFLOPs" in shown
    assert "38% of 61.5 TFLOP/s" in shown


@pytest.mark.full_size
def test_table_6(capsys: Captured) -> None:
    found = as_json(["cost", "table6"], capsys)
    rows = published_table("table6_scaling")["rows"]
    assert [(row["name"], row["published"]) for row in found["rows"]] == [(row[0], row[-1]) for row in rows]
    assert all(abs(row["exaflops"] / row["published"] - 1) < 0.05 for row in found["rows"])
    assert cli.main(["cost", "table6"]) == 0
    assert "R50x1+ViT-L/16" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the paper's own runs"):
        vitrail.cost("table6", epochs=3)


def test_the_sums_of_the_blog_post(capsys: Captured) -> None:
    """ "680 days (16,320 hours)" are "$41K", "2,500 days (60,000 hours)" are "$150K"."""
    post = published_table("cloud_cost_2020")
    price = post["host_usd_per_hour"] + post["preemptible_tpu_v3_usd_per_hour"]
    for network in ("vit_l16", "vit_h14"):
        days = post[f"{network}_core_days"]
        found = as_json(["cost", "--core-days", str(days), "--usd-per-hour", f"{price:g}"], capsys)
        assert round(found["usd"], -3 if network == "vit_l16" else -4) == post[f"{network}_usd"]
        assert cli.main(["cost", "--core-days", str(days), "--usd-per-hour", f"{price:g}"]) == 0
        assert f"{days * 24:,} hours at $2.495 (as asked for)" in capsys.readouterr().out


def test_thirty_days_on_eight_cores(capsys: Captured) -> None:
    """Section 4.2: L/16 on ImageNet-21k takes 0.23k core-days, "approximately 30 days" with 8 cores."""
    days = published_table("table2_state_of_the_art")["rows"]["TPUv3-core-days"][2]
    found = as_json(["cost", "--core-days", str(1000 * float(days.removesuffix("k"))), "--devices", "8"], capsys)
    assert found["days"] == pytest.approx(30, abs=2)
    assert (found["kwh"], found["kg_co2"], found["assumed"]) == (None, None, None)


def test_energy_and_carbon_are_power_times_time(capsys: Captured) -> None:
    argv = ["cost", "--core-days", "10", "--device", "a100", "--energy"]
    found = as_json(argv, capsys)
    assert found["kwh"] == pytest.approx(10 * 24 * 0.4 * 1.1)  # 400 W of the data sheet
    assert found["kg_co2"] == pytest.approx(10 * 24 * 0.4 * 1.1 * 0.429)
    found = as_json([*argv, "--watts", "500", "--overhead", "1.5", "--intensity", "0.02", "--devices", "4"], capsys)
    assert found["kwh"] == pytest.approx(10 * 24 * 0.5 * 1.5)  # however many devices share the work
    assert found["assumed"] == {"watts": 500, "overhead": 1.5, "kg_co2_per_kwh": 0.02}
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert "400 W for each a100, and 10% more for the building" in shown and "0.429 kg per kWh" in shown


def test_the_energy_of_a_network(capsys: Captured) -> None:
    found = as_json(["cost", "B/16", "--images", "303e6", "--epochs", "7", "--energy", "--devices", "16"], capsys)
    assert found["days"] == pytest.approx(found["core_days"] / 16)
    assert found["kwh"] == pytest.approx(found["core_days"] * 24 * 0.1415 * 1.1)


@pytest.mark.full_size
def test_this_machine(capsys: Captured) -> None:
    found = as_json(["cost", "Ti/16", "--images", "1e6", "--device", "cpu"], capsys)
    assert found["peak_flops_per_second"] > 0
    assert found["device_days"] > found["core_days"] > 0
    assert found["usd"] is None
    assert cli.main(["cost", "Ti/16", "--images", "1e6", "--device", "cpu"]) == 0
    assert "no price is known for cpu" in capsys.readouterr().out


def test_a_model_folder(tmp_path: Path) -> None:
    config = ViTConfig(width=32, depth=1, heads=2, mlp_dim=64, patch=4, image_size=(16, 16), classes=3)
    save_model(tmp_path / "model", build(config), Card(config))
    assert vitrail.cost(tmp_path / "model").cost.params == learned_values(config)
    larger = vitrail.cost(str(tmp_path / "model"), image_size=32, classes=7).cost
    assert larger.macs == macs(replace(config, image_size=(32, 32), classes=7))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["cost", "B16"], "Did you mean 'B/16'?"),
        (["cost", "Q/16"], "there is no size 'Q'"),
        (["cost", "B/16", "--epochs", "7"], "Add --images N"),
        (["cost", "B/16", "--images", "-1"], "at least 0"),
        (["cost", "B/16", "--image-size", "100"], "divisible"),
        (["cost", "B/16", "--image-size", "0"], "from 1 to 4,096"),
        (["cost", "B/16", "--device", "h1000"], "Did you mean 'h100'?"),
        (["cost", "B/16", "--utilisation", "40"], "greater than 0 and at most 1"),
        (["cost"], "no network is given"),
        (["cost", "B/16", "--core-days", "7"], "without a model"),
        (["cost", "--core-days", "7", "--classes", "9", "--count"], "whole run. Remove --classes, --count"),
        (["cost", "table6", "--devices", "4", "--energy", "--device", "h100"], "Remove --devices, --energy, --device"),
        (["cost", "B/16", "--energy", "--devices", "8"], "without --images N no training is estimated"),
        (["bench", "runs/a", "--engines", "--mode", "training"], "in inference, in batches of 1 and 8"),
        (["cost", "--core-days", "7", "--device", "tpu-v4", "--energy"], "not published: give it with --watts"),
        (["cost", "--core-days", "7", "--overhead", "0.5"], "from 1 to 10"),
        (["bench"], "no network is given"),
        (["bench", "Bx16"], "there is no model"),
        (["bench", "Ti/16", "--seconds", "0"], "greater than 0"),
    ],
)
def test_wrong_commands_end_with_2(argv: list[str], said: str, capsys: Captured) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err and "Traceback" not in err


@pytest.mark.full_size
def test_bench_measures_and_writes(tmp_path: Path, capsys: Captured) -> None:
    argv = ["bench", "Ti/16", "--image-size", "40", "--image-size", "16", "--batch-size", "2", "--batch-size", "1"]
    out = tmp_path / "a" / "bench"
    assert cli.main([*argv, "--seconds", "0.01", "--device", "cpu", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((out / "bench.json").read_text()) == found
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["image_size"], row["mode"]) for row in found["measured"]] == [
        *((16, "inference"), (16, "training"), (32, "inference"), (32, "training")),
    ]
    for row in found["measured"]:
        assert [point["batch"] for point in row["points"]] == [1, 2]
        assert row["best"] in row["points"]
        config = variant("Ti/16", image_size=row["image_size"])
        flops = training_flops(config) if row["mode"] == "training" else 2 * macs(config)
        assert row["flops_per_second"] == pytest.approx(flops * row["best"]["images_per_second"])
        assert row["peak_bytes"] > 1.9 * learned_values(config)
    training, larger = (row["largest_batch"] for row in found["measured"] if row["mode"] == "training")
    assert training > larger > 0


def test_bench_shows_a_table(capsys: Captured) -> None:
    argv = ["bench", "Ti/16", "--image-size", "16", "--batch-size", "1", "--mode", "inference", "--seconds", "0.01"]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "fits" in out and "inference" in out and "training" not in out
    assert "images/s at batch 1" in err


def test_a_dry_run_tells_the_cost(tmp_path: Path) -> None:
    preview = vitrail.train(recipe="smoke", out=str(tmp_path), dry_run=True)
    cost = preview.cost
    assert cost is not None
    run = recipe("smoke")
    config = variant("Ti/2", width=32, depth=2, heads=2, mlp_dim=64, classes=10, image_size=(8, 8))
    assert cost.params == learned_values(config)
    assert cost.images == 20 * 64 == run.duration.value * run.batch_size
    assert cost.flops == pytest.approx(training_flops(config) * 20 * 64)
    assert cost.device_days and cost.device_days > 0
    assert preview.checked["cost, compute"].endswith("FLOPs for 1,280 images")
    assert preview.checked["cost, network"].endswith("GMACs per image")


def test_a_dry_run_on_the_command_line(tmp_path: Path, capsys: Captured) -> None:
    found = as_json(["train", "--recipe", "smoke", "--out", str(tmp_path), "--dry-run"], capsys)
    assert {"params", "macs", "exaflops", "device_days", "core_days", "usd"} <= found["cost"].keys()
    assert not list(tmp_path.iterdir())


@pytest.mark.full_size
def test_small_first_images_cost_less(tmp_path: Path) -> None:
    run = replace(recipe("digits"), out=str(tmp_path), image_size=16)
    _, full = rehearse(run)
    _, growing = rehearse(replace(run, progressive=Progressive(start=0.25)))
    assert full.flops and growing.flops
    assert full.images == growing.images
    smallest = training_flops(variant("Ti/4", width=96, depth=4, heads=3, mlp_dim=192, classes=10, image_size=(4, 4)))
    assert smallest * full.images < growing.flops < full.flops


def test_a_time_limit_bounds_the_cost(tmp_path: Path) -> None:
    _, cost = rehearse(replace(recipe("digits"), out=str(tmp_path), time_limit=1e-6))
    assert cost.device_days == pytest.approx(1e-6 / 1440)
    assert cost.images and cost.images < 64


@pytest.mark.full_size
def test_the_package_is_the_verb() -> None:
    report = vitrail.cost("Ti/16", images=10)
    assert report.cost.images == 10
    assert report.counted is None
