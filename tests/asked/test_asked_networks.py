"""A named network is exactly the network of that name, whatever recipe trains it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from vitrail.config import from_yaml, to_yaml
from vitrail.data.settings import Preparation, Preprocess
from vitrail.errors import CheckpointError, UsageError, WeightsError
from vitrail.model.build import build, create
from vitrail.model.variants import OWN, variant
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide as choose_run
from vitrail.recipes.known import Known
from vitrail.recipes.registry import recipe
from vitrail.reports.page import write_report
from vitrail.training.assemble import set_up
from vitrail.training.checkpoints.state import resumed_run
from vitrail.training.decide import Decision, decide
from vitrail.training.facts import Facts
from vitrail.training.folder import RunFolder
from vitrail.training.python_objects import PythonObjects
from vitrail.training.result import Result
from vitrail.training.run import OWN_RATES, Model, Optim, Run
from vitrail.verbs.cost import cost
from vitrail.verbs.flags.parse import parse
from vitrail.verbs.search import search
from vitrail.verbs.train.resume import resumed
from vitrail.verbs.train.train import show, train


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 images of 2 classes and of different sizes above 96 pixels, as files."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    for number in range(20):
        place = folder / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        Image.new("RGB", (100 + number, 110), (number, 100 * (number % 2), 0)).save(place)
    return folder


@pytest.fixture(scope="module")
def trained(arrays: Path, tmp_path_factory: pytest.TempPathFactory, no_page: None) -> Path:
    """The folder of a run of two steps."""
    out = str(tmp_path_factory.mktemp("runs"))
    small = dict(vit={"depth": 1}, duration="2 steps", batch_size=8, device="cpu", workers=0)
    return vitrail.train(arrays, recipe="smoke", out=out, **small).folder


def decided(
    path: Path, recipe_name: str | None = None, files: tuple[Path, ...] = (), **settings: Any
) -> tuple[Run, str]:
    choice = choose_run(Asked(path, recipe_name, files, settings=settings), Known())
    return choice.run, str(choice)


def resolved(path: Path, run: Run, asked: dict[str, str] | None = None) -> Decision:
    splits = Known().splits_of(run)
    return decide(run, Facts.of(run, splits.train, splits.class_names))


def parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in build(config).parameters())


@pytest.mark.full_size
@pytest.mark.parametrize("recipe_name", [None, "scratch-small", "mae", "deit3/vit-s16-imagenet", "smoke"])
@pytest.mark.parametrize("model", ["B/16", "R50x1", "H/14", "R50+B/16", "small/8", "S18x2/16"])
def test_a_named_network_has_the_parameters_that_cost_says(model: str, recipe_name: str | None, photos: Path) -> None:
    run, why = decided(photos, recipe_name, model=model, objective={"kind": "supervised"})
    config = resolved(photos, run).config
    assert run.vit.changes() == {}
    assert parameters(config) == parameters(variant(model, image_size=config.image_size, classes=2))
    if recipe_name is None:
        assert parameters(config) == cost(model, image_size=config.image_size[0], classes=2).cost.params  # type: ignore[union-attr]
    assert model == "small/8" or f"model: exactly {model}, as asked" in why


@pytest.mark.train
def test_from_the_command_line_to_the_weights(photos: Path, tmp_path: Path) -> None:
    result = vitrail.train(
        photos, model="S/32", vit={"depth": 1}, batch_size=4, duration="1 step", device="cpu", out=str(tmp_path)
    )
    config = vitrail.load(result.folder).config
    assert (config.width, config.depth, config.patch, config.stem, config.pool) == (384, 1, 32, "linear", "cls")
    assert from_yaml(result.folder / "config.yaml", Run()).model == "S/32"
    page = write_report(result.folder).read_text()
    assert "A Vision Transformer (S/32 with depth 1) trained from scratch" in page


def test_what_a_recipe_changes_falls_away_and_what_the_user_changes_does_not(photos: Path, tmp_path: Path) -> None:
    run, why = decided(photos, "beit", model="S/16", vit={"registers": 2})
    assert run.vit.changes() == {"registers": 2}
    assert "the recipe's vit settings are not used: positions relative_bias, place shared, drop_path 0.1" in why
    assert recipe("beit").vit.changes().keys() >= {"positions", "place", "layer_scale"}
    (tmp_path / "own.yaml").write_text("vit: {depth: 3}")
    assert decided(photos, files=(tmp_path / "own.yaml",), model="B/16")[0].vit == Model(depth=3)
    assert decided(photos, "beit", vit={"depth": 3})[0].vit == replace(recipe("beit").vit, depth=3)


@pytest.mark.train
@pytest.mark.parametrize(
    ("kind", "lost"),
    [("mae", "positions sincos"), ("beit", "positions relative_bias, place shared, layer_scale 0.1")],
)
def test_weights_keep_what_a_recipe_without_labels_changes_in_its_own_network(
    trained: Path, photos: Path, kind: str, lost: str
) -> None:
    asked = Asked(photos, weights=trained, settings={"objective": {"kind": kind}})
    choice = choose_run(asked, Known())
    assert f"vit: that of {trained}; the recipe's {lost} are not used" in str(choice)
    assert resolved(photos, choice.run).config.positions == vitrail.load(trained).config.positions
    given = replace(asked, settings={**asked.settings, "vit": {"positions": "sincos"}})
    with pytest.raises(UsageError, match=r"vit\.positions is fixed by the weights"):
        resolved(photos, choose_run(given, Known()).run)


def test_a_file_that_changes_another_network_than_the_named_one_is_refused(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("model: Ti/4\nvit:\n  width: 128")
    with pytest.raises(UsageError, match=r"old.yaml:3 sets vit.width 128 .* than B/16, which --model names"):
        decided(photos, files=(file,), model="B/16")
    assert decided(photos, files=(file,), model="B/16", vit={"width": 96, "heads": 3})[0].vit.width == 96


def test_a_config_of_before_means_the_same_network(photos: Path, tmp_path: Path) -> None:
    old = Model(width=128, depth=4, heads=4, mlp_dim=256, layer_scale=0.1, pool="gap", stem="early")
    (tmp_path / "config.yaml").write_text(to_yaml(replace(recipe("scratch-small"), model="Ti/4", vit=old)))
    run, _ = decided(photos, files=(tmp_path / "config.yaml",), image_size=32)
    now, _ = decided(photos, "scratch-small", image_size=32)
    assert resolved(photos, run).config == resolved(photos, now).config


# sizes


def test_a_size_that_nobody_asked_for_becomes_whole_patches(photos: Path) -> None:
    run, why = decided(photos, model="H/14")
    assert run.image_size == 98 and "image_size: 98 px, not 96: whole patches of H/14" in why
    run, _ = decided(photos, model="H/14", image_size=96)
    with pytest.raises(UsageError, match="96x96 is not divisible by the patch, 14"):
        resolved(photos, run)
    assert decided(photos, model="B/16")[0].image_size == 96
    assert decided(photos, "paper/vit-b16-imagenet", vit={"patch": 15})[0].preprocess.image_size == (225, 225)  # type: ignore[union-attr]


@pytest.mark.train
def test_a_size_of_the_weights_network_is_rounded_for_a_recipe_and_refused_if_asked(
    trained: Path, arrays: Path
) -> None:
    for settings, refused in (({}, False), ({"image_size": 383}, True)):
        given = Asked(arrays, "paper/finetune-cifar100", weights=trained, settings={**settings, "batch_size": 8})
        run = choose_run(given, Known(), tunes=True).run
        if not refused:
            assert resolved(arrays, run).config.image_size == (384, 384)
            continue
        with pytest.raises(UsageError, match=r"--image-size asks for 383.*384 px, not 383: the next multiple"):
            set_up(run, Known().splits_of(run), objects=PythonObjects(asked=given.origins))


def test_an_input_may_be_a_rectangle(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "tall.yaml").write_text("image_size: [32, 64]\n")
    for given in ({"image_size": (32, 64)}, {"files": (tmp_path / "tall.yaml",), "model": "Ti/8"}):
        run, _ = decided(photos, **given)
        found = resolved(photos, run)
        assert run.image_size == found.run.image_size == (32, 64)
        assert found.config.image_size == found.preprocess.image_size == (32, 64)
    assert from_yaml(to_yaml(found.run), Run()) == found.run
    run, _ = decided(photos, preprocess={"image_size": (32, 64)}, model="Ti/8")
    assert run.image_size == (32, 64)
    square, side = (decided(photos, image_size=size)[0] for size in ((64, 64), 64))
    assert square == side and square.image_size == 64
    with pytest.raises(UsageError, match="it must be a whole number, or height and width"):
        Run(image_size=(32, 64, 3))  # type: ignore[arg-type]


def test_height_and_width_are_two_words_on_the_command_line() -> None:
    for words in (["--image-size", "32", "64", "photos"], ["photos", "--image-size=32x64"]):
        _, given = parse(train, words, "vitrail train")
        assert given["image_size"] == (32, 64) and str(given["path"]) == "photos"
    assert parse(train, ["--image-size", "64", "photos"], "vitrail train")[1]["image_size"] == 64
    for sides in (["64", "-1"], ["-1", "64"]):  # a side below 0 is none, and no folder either
        with pytest.raises(UsageError, match=rf"--image-size is \({', '.join(sides)}\); it must be from 1 to 4,096"):
            parse(search, ["network", "--image-size", *sides], "vitrail search")


def test_a_number_that_is_also_a_folder_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "10").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"For a width write --image-size 64x10; for the file or folder write \./10"):
        parse(train, ["--image-size", "64", "10"], "vitrail train")
    _, given = parse(train, ["--image-size", "64", "./10"], "vitrail train")
    assert given["image_size"] == 64 and str(given["path"]) in ("10", "./10")


def test_both_settings_of_the_size_follow_the_one_that_is_given(photos: Path, tmp_path: Path) -> None:
    run, _ = decided(photos, "deit/vit-s16", preprocess={"image_size": (64, 64)})
    assert run.image_size == 64
    run, _ = decided(photos, "deit/vit-s16", image_size=64)
    assert run.preprocess is not None and run.preprocess.image_size == (64, 64)
    (tmp_path / "all.yaml").write_text(to_yaml(recipe("deit/vit-s16")))
    run, _ = decided(photos, files=(tmp_path / "all.yaml",), image_size=64)
    assert run.preprocess is not None and run.preprocess.image_size == (64, 64)
    run, _ = decided(photos, "deit/vit-s16", image_size=64, preprocess={"image_size": (32, 32)})
    with pytest.raises(UsageError, match=r"preprocess.image_size is \(32, 32\) but the model takes \(64, 64\)"):
        resolved(photos, run)


def test_one_field_of_the_preparation_leaves_the_others_to_the_data(photos: Path, arrays: Path) -> None:
    run, _ = decided(arrays, preprocess={"interpolation": "bicubic"})
    assert run.preprocess == Preparation(interpolation="bicubic")
    found = resolved(arrays, run).preprocess
    assert (found.resize, found.image_size, found.interpolation) == ("squash", (16, 16), "bicubic")
    found = resolved(photos, decided(photos, preprocess={"resize": "squash"})[0]).preprocess
    assert (found.resize, found.image_size, found.crop) == ("squash", (96, 96), 0.875)


# optimisers


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_a_rate_belongs_to_its_optimiser(name: str, photos: Path) -> None:
    run, why = decided(photos, optim={"name": name})
    assert (run.optim.lr, run.optim.weight_decay) == OWN_RATES[name]
    assert f"optim: {name} with learning rate {run.optim.lr:g}" in why and "for muon" in why
    run, _ = decided(photos, optim={"name": name, "lr": 0.5})
    assert (run.optim.lr, run.optim.weight_decay) == (0.5, OWN_RATES[name][1])
    assert decided(photos, optim=Optim(name=name, lr=0.7))[0].optim == Optim(name=name, lr=0.7)  # type: ignore[arg-type]


def test_two_rates_are_refused(photos: Path) -> None:
    with pytest.raises(UsageError, match=r"--lr is 0.1 and --optim.lr is 0.2: give one of them"):
        choose_run(Asked(photos, lr=0.1, settings={"optim": {"lr": 0.2}}), Known())


def test_the_recipes_own_optimiser_keeps_its_rate(photos: Path) -> None:
    assert decided(photos, optim={"name": "muon"})[0].optim == recipe("scratch-photos").optim
    run, why = decided(photos, model="R50x1")
    assert run.optim.name == "adamw" and "optim: adamw" in why  # Muon trains the blocks of a ViT


# weights, and runs to resume


@pytest.mark.parametrize("where", ["keyword", "file", "file with the weights"])
def test_weights_fix_the_network(where: str, trained: Path, arrays: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("model: B/16\n" + f"weights: {trained}\n" * (where == "file with the weights"))
    settings = {"model": "B/16"} if where == "keyword" else {}
    files = () if where == "keyword" else (file,)
    named = None if where == "file with the weights" else trained
    with pytest.raises(UsageError, match=f"(--model|m.yaml:1) names the network B/16, but .*{trained}"):
        choose_run(Asked(arrays, None, files, weights=named, settings=settings), Known(), tunes=True)


def test_a_fine_tuning_records_no_other_network_and_can_be_repeated(
    trained: Path, arrays: Path, tmp_path: Path
) -> None:
    run = choose_run(Asked(arrays, weights=trained), Known(), tunes=True).run
    assert run.model is None
    before = replace(run, model="S/16")  # as runs recorded it before
    (tmp_path / "config.yaml").write_text(to_yaml(before))
    assert choose_run(Asked(arrays, None, (tmp_path / "config.yaml",)), Known(), tunes=True).run.model is None
    (tmp_path / "scratch.yaml").write_text(to_yaml(recipe("scratch-small")))
    with pytest.raises(UsageError, match=r"scratch.yaml:\d+ names the network small/4, but"):
        choose_run(Asked(arrays, None, (tmp_path / "scratch.yaml",), weights=trained), Known(), tunes=True)


@pytest.mark.parametrize("name", ["name", "out"])
def test_a_resumed_run_stays_in_its_folder(name: str, trained: Path, arrays: Path) -> None:
    with pytest.raises(UsageError, match=f"--{name} is another, but the run to resume is {trained}"):
        resumed(Asked(settings={name: "another"}), trained, Known())
    found = resumed(Asked(settings={"keep": 5}), trained, Known())
    assert found is not None and found[0].keep == 5 and found[0].vit.depth == 1


def test_a_resumed_run_keeps_its_network_and_its_preparation(trained: Path, tmp_path: Path) -> None:
    before = Run(weights=str(trained), preprocess=Preprocess((16, 16), resize="pad"))
    (tmp_path / "config.yaml").write_text(to_yaml(before))
    folder = RunFolder(tmp_path)
    assert resumed_run(before, folder, PythonObjects())[0] == before
    assert resumed_run(replace(before, preprocess=None), folder, PythonObjects())[0].preprocess == before.preprocess
    with pytest.raises(CheckpointError, match=r"other settings.*\n  model: None there, 'B/16' here"):
        resumed_run(replace(before, model="B/16"), folder, PythonObjects())
    with pytest.raises(CheckpointError, match=r"preprocess.resize: 'pad' there, 'squash' here"):
        resumed_run(replace(before, preprocess=Preprocess((16, 16), resize="squash")), folder, PythonObjects())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"probe_head": True}, "probe_head: False there, True here"),
        ({"keep_head": True}, "keep_head: False there, True here"),
        ({"classes": ("add",)}, "classes.*'replace' there, 'add' here"),
        ({"weights": "vitrail/tiny"}, "weights: '.*' there, 'vitrail/tiny' here"),
        ({"weights": None}, "weights: '.*' there, None here"),
    ],
)
def test_a_resumed_run_keeps_how_it_began(changes: dict[str, Any], said: str, trained: Path, tmp_path: Path) -> None:
    before, moved = Run(weights=str(trained)), shutil.copytree(trained, tmp_path / "moved")
    (tmp_path / "config.yaml").write_text(to_yaml(before))
    folder = RunFolder(tmp_path)
    assert resumed_run(replace(before, weights=str(moved)), folder, PythonObjects())[1] == str(moved)
    with pytest.raises(CheckpointError, match=rf"other settings.*\n  {said}"):
        resumed_run(replace(before, **changes), folder, PythonObjects())


@pytest.mark.parametrize("recipe_name", ["paper/vit-b16-imagenet", "digits"])
def test_a_batch_that_is_too_large_is_refused_if_asked(recipe_name: str, arrays: Path) -> None:
    small = {"vit": {"depth": 1, "width": 32, "heads": 2}, "image_size": 16, "device": "cpu"}
    given = Asked(arrays, recipe_name, settings={**small, "batch_size": 500})
    run = choose_run(given, Known()).run
    with pytest.raises(UsageError, match=r"--batch-size asks for 500.*there are only 36 training images"):
        set_up(run, Known().splits_of(run), objects=PythonObjects(asked=given.origins))
    given = Asked(arrays, recipe_name, settings=small)
    run = choose_run(given, Known()).run
    with set_up(run, Known().splits_of(run), objects=PythonObjects(asked=given.origins)) as setup:
        assert setup.run.batch_size == 36


@pytest.mark.parametrize("section", ["preprocess:\n  resize: pad\n", "preprocess: {}\naugment:\n  flip: false\n"])
def test_a_part_of_a_section_in_a_file_is_no_wish_for_the_rest(section: str, arrays: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(section)
    small = {"vit": {"depth": 1, "width": 32, "heads": 2}, "image_size": 16, "device": "cpu"}
    given = Asked(arrays, "digits", (tmp_path / "own.yaml",), settings=small)
    run = choose_run(given, Known()).run
    with set_up(run, Known().splits_of(run), objects=PythonObjects(asked=given.origins)) as setup:
        assert setup.run.preprocess is not None
        assert setup.run.preprocess.resize == ("pad" if "pad" in section else "squash")


def test_a_warmup_that_was_asked_for_stays_even_if_it_is_the_recipes(arrays: Path) -> None:
    theirs = recipe("paper/vit-b16-imagenet").schedule.warmup
    assert decided(arrays, "paper/vit-b16-imagenet", schedule={"warmup": str(theirs)})[0].schedule.warmup == theirs
    assert decided(arrays, "paper/vit-b16-imagenet")[0].schedule.warmup != theirs


# the recipes' own names


def encoder(width: int, depth: int, mlp_dim: int, layer_scale: bool) -> int:
    """Parameters of the blocks and the last norm, counted by hand (Eq. 2 to 4)."""
    attention = 4 * width * width + 4 * width
    mlp = 2 * width * mlp_dim + mlp_dim + width
    return depth * (attention + mlp + 4 * width + 2 * width * layer_scale) + 2 * width


def early_stem(width: int, steps: int) -> int:
    """Parameters of 3x3 convolutions of stride 2 with a BatchNorm each, and of the 1x1 convolution behind them."""
    widths = [3, *(width // 2**power for power in reversed(range(steps)))]
    return sum(9 * old * new + 2 * new for old, new in pairwise(widths)) + width * width + width


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smoke/2", 3 * 4 * 32 + 32 + 32 + 65 * 32 + encoder(32, 2, 64, False) + 33 * 10),
        ("digits/4", 3 * 16 * 96 + 96 + 96 + 17 * 96 + encoder(96, 4, 192, False) + 97 * 10),
        ("small/4", early_stem(128, 2) + 16 * 128 + encoder(128, 4, 256, True) + 129 * 10),
        ("small/8", early_stem(128, 3) + 4 * 128 + encoder(128, 4, 256, True) + 129 * 10),
        ("narrow/4", 3 * 16 * 128 + 128 + 16 * 128 + encoder(128, 6, 512, False) + 129 * 10),
        ("narrow/8", 3 * 64 * 128 + 128 + 4 * 128 + encoder(128, 6, 512, False) + 129 * 10),
    ],
)
def test_the_recipes_own_networks_have_these_parameters(name: str, expected: int) -> None:
    assert name.partition("/")[0] in OWN
    assert parameters(variant(name, image_size=16, classes=10)) == expected
    assert create(name, image_size=16, classes=10).config == variant(name, image_size=16, classes=10)


@pytest.mark.parametrize("stem", ["linear", "linear+norm", "hmlp", "early", "resnet"])
def test_a_stem_that_no_other_library_has_is_told_at_the_end(tmp_path: Path, stem: str) -> None:
    units = dict(stem_units=(1,), stem_width=64, patch=16) if stem == "resnet" else {}
    network = create("Ti/16", width=24, depth=1, heads=2, mlp_dim=24, image_size=32, classes=2, stem=stem, **units)
    try:
        vitrail.save(network, tmp_path / "timm", "timm")
        expected = False
    except WeightsError:
        expected = stem != "resnet"  # a hybrid has names of timm's for some sizes
    vit = Model(stem=stem)  # type: ignore[arg-type]
    for weights, said in ((None, expected), ("B/16", False)):
        (tmp_path / "config.yaml").write_text(to_yaml(Run(model="Ti/16" if weights is None else None, vit=vit,
                                                          weights=weights)))  # fmt: skip
        lines = show(Result(tmp_path, 1, 1.0, 1.0, "all steps done", {}))
        assert ("--vit.stem linear" in lines) == said
