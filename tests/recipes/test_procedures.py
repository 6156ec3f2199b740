"""The other procedures against what their authors print: the follow-up's against the published tables, the others
against the numbers of their papers and commands, written down here once more from those."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitrail.costs.published import published_table
from vitrail.data.images.geometry import CentralCrop, RandomCrop, ResizeSmall, Squash
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Steps
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.recipes.augreg import AUGREG, STRENGTHS, TABLE
from vitrail.recipes.bit import BIT, hyperrule
from vitrail.recipes.deit3 import DEIT3
from vitrail.recipes.registry import find_recipe, recipe
from vitrail.recipes.three_things import THREE_THINGS
from vitrail.training.run import Model, Run, learning_rate

FOLLOW_UP = published_table("three_things")


# the follow-up


@pytest.mark.parametrize("layer_scale", [False, True])
@pytest.mark.parametrize("size", ["Ti", "S", "B", "L"])
def test_every_number_of_the_follow_ups_procedure(size: str, layer_scale: bool) -> None:
    of = FOLLOW_UP["recipe_A2"]
    run = recipe(f"three-things/vit-{size.lower()}16-{'400-ls' if layer_scale else '300'}")
    assert run.model == f"{size}/16"
    assert run.optim.lr == of["lr"][size]
    assert run.vit.drop_path == of["stochastic_depth"][size]
    assert run.duration == Epochs(of["epochs_with_layerscale" if layer_scale else "epochs"])
    assert (run.vit.layer_scale is not None) == layer_scale
    assert (of["loss"], run.objective.loss) == ("binary cross-entropy", "bce")


@pytest.mark.parametrize(("layer_scale", "table"), [(False, "parallel"), (True, "parallel_with_layerscale")])
def test_the_follow_ups_networks_side_by_side_train_as_those_of_their_width(layer_scale: bool, table: str) -> None:
    suffix = "-300-ls" if layer_scale else "-300"
    networks = {recipe(name).model: name for name in THREE_THINGS if "x" in name and name.endswith(suffix)}
    assert sorted(networks) == sorted(f"{network}/16" for network in FOLLOW_UP[table])
    for model, name in networks.items():
        run, size = recipe(name), model.rstrip("x/0123456789")
        assert name == f"three-things/vit-{model.removesuffix('/16').lower()}{suffix}"
        assert run.optim.lr == FOLLOW_UP["recipe_A2"]["lr"][size]
        assert run.vit.drop_path == FOLLOW_UP["recipe_A2"]["stochastic_depth"][size]
        assert run.duration == Epochs(300)
        assert run.vit.layer_scale == (1e-4 if layer_scale else None)


def test_the_follow_ups_fine_tuning_says_what_is_not_printed() -> None:
    run, text = recipe("three-things/finetune"), find_recipe("three-things/finetune").description
    assert (run.tune, run.image_size) == ("attention", 384)
    assert "does not print learning rate, weight decay, length, batch and augmentation" in " ".join(text.split())
    assert replace(run, name="a", tune="all", keep_head=True) == replace(
        recipe("deit3/finetune-vit-s16-384"), name="a", vit=Model(init="deit")
    )


def test_what_the_follow_up_takes_over_from_a2() -> None:
    # protocols 3.7: ResNet strikes back, A2
    assert len(THREE_THINGS) == 8 + 19 + 8 + 1
    for name in THREE_THINGS:
        run = recipe(name)
        if name == "three-things/finetune":
            continue
        assert (run.optim.name, run.optim.weight_decay, run.batch_size) == ("lamb", 0.02, 2048)
        assert (run.schedule.shape, run.schedule.warmup, run.schedule.end) == ("cosine", Epochs(5), 1e-6)
        assert (run.augment.mixup, run.augment.cutmix, run.augment.randaugment) == (0.1, 1.0, (2, 7.0))
        assert (run.augment.erasing, run.augment.color_jitter, run.objective.smoothing) == (0.0, 0.0, 0.0)
        assert run.augment.repeats == 3
        assert run.preprocess is not None
        resized = ResizeSmall((235, 235), "bicubic")  # int(224 / 0.95), as timm computes it; mmpretrain says 236
        assert eval_transform(run.preprocess).ops == (resized, CentralCrop((224, 224)))


@pytest.mark.parametrize(
    ("name", "top1"), [("ti16-300", 72.7), ("s16-400-ls", 80.7), ("b16-300", 82.2), ("l16-400-ls", 84.0)]
)
def test_the_follow_ups_baselines_are_quoted(name: str, top1: float) -> None:
    assert f"Expected: {top1} % on ImageNet" in find_recipe(f"three-things/vit-{name}").description


def test_the_follow_ups_networks_are_those_of_the_authors_code() -> None:
    run = recipe("three-things/vit-s16-400-ls")
    config = variant(run.model, **{key: value for key, value in vars(run.vit).items() if value is not None})
    assert isinstance(config, ViTConfig)
    assert (config.layer_scale, config.drop_path_shape, config.cls_position) == (1e-4, "constant", False)
    assert config.pool == "cls"


# DeiT and DeiT-III


def test_deit_is_its_programs_defaults() -> None:
    # protocols 3.7: 5e-4 per 512 images; README: 4 x 256 images
    run = recipe("deit/vit-s16")
    assert (run.optim.name, run.optim.lr, run.optim.weight_decay) == ("adamw", 1e-3, 0.05)
    assert (run.batch_size, run.duration, run.schedule.warmup) == (1024, Epochs(300), Epochs(5))
    assert (run.objective.loss, run.objective.smoothing, run.vit.drop_path) == ("softmax", 0.1, 0.1)
    assert run.augment == Augment(
        scale=(0.08, 1.0), randaugment=(2, 9.0), erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3
    )
    assert "79.9 %" in find_recipe("deit/vit-s16").description


def test_deit_at_384() -> None:
    run = recipe("deit/finetune-384")
    assert (run.optim.lr, run.schedule.end, run.optim.weight_decay) == (5e-6, 5e-6, 1e-8)
    assert (run.duration, run.image_size, run.keep_head) == (Epochs(30), 384, True)


# name: model, pixels, learning rate, weight decay, stochastic depth, epochs, batch
# (README_revenge.md; a patch of 14 covers 154 of 160 pixels, and 126 of 128)
REVENGE = {
    "vit-s16-imagenet": ("S/16", 224, 4e-3, 0.05, 0.05, 800, 256 * 8),
    "vit-b16-imagenet": ("B/16", 192, 3e-3, 0.05, 0.2, 800, 256 * 8),
    "vit-l16-imagenet": ("L/16", 192, 3e-3, 0.05, 0.45, 800, 64 * 4 * 8),
    "vit-h14-imagenet": ("H/14", 160 // 14 * 14, 3e-3, 0.05, 0.6, 800, 64 * 4 * 8),
    "finetune-vit-s16-384": ("S/16", 384, 1e-5, 0.1, 0.0, 20, 64 * 8),
    "finetune-vit-b16-224": ("B/16", 224, 1e-5, 0.1, 0.2, 20, 64 * 8),
    "finetune-vit-l16-224": ("L/16", 224, 1e-5, 0.1, 0.45, 20, 64 * 8),
    "finetune-vit-h14-224": ("H/14", 224, 1e-5, 0.1, 0.55, 20, 32 * 2 * 8),
    "vit-s16-imagenet21k": ("S/16", 224, 1e-3, 0.02, 0.05, 240, 128 * 2 * 8),
    "vit-b16-imagenet21k": ("B/16", 224, 1e-3, 0.02, 0.1, 240, 64 * 4 * 8),
    "vit-l16-imagenet21k": ("L/16", 224, 1e-3, 0.02, 0.3, 240, 64 * 4 * 8),
    "vit-h14-imagenet21k": ("H/14", 128 // 14 * 14, 1e-3, 0.02, 0.5, 90, 64 * 4 * 8),
    "finetune-vit-s16-from-21k": ("S/16", 224, 3e-4, 0.02, 0.05, 50, 128 * 2 * 8),
    "finetune-vit-b16-from-21k": ("B/16", 224, 3e-4, 0.02, 0.15, 50, 64 * 4 * 8),
    "finetune-vit-l16-from-21k": ("L/16", 224, 3e-4, 0.02, 0.4, 50, 64 * 4 * 8),
    "finetune-vit-h14-from-21k": ("H/14", 224, 3e-4, 0.02, 0.45, 50, 64 * 4 * 8),
}


@pytest.mark.parametrize("name", REVENGE)
def test_deit3_is_its_commands(name: str) -> None:
    run = recipe(f"deit3/{name}")
    assert isinstance(run.duration, Epochs)
    found = (run.model, run.image_size, run.optim.lr, run.optim.weight_decay, run.vit.drop_path)
    assert (*found, run.duration.value, run.batch_size) == REVENGE[name]
    assert run.schedule.warmup == Epochs(5) and run.vit.drop_path_shape == "constant"
    assert run.preprocess is not None and (run.preprocess.crop, run.preprocess.interpolation) == (1.0, "bicubic")


def test_all_of_deit3_is_there() -> None:
    assert sorted(DEIT3) == sorted(f"deit3/{name}" for name in REVENGE)


def test_the_stages_of_deit3_augment_as_they_say() -> None:
    scratch, tuned = recipe("deit3/vit-b16-imagenet"), recipe("deit3/finetune-vit-b16-224")
    assert (scratch.objective.loss, scratch.objective.bce_threshold, scratch.objective.smoothing) == ("bce", 0.0, 0.0)
    expected = dict(scale=(0.08, 1.0), mixup=0.8, cutmix=1.0)
    assert scratch.augment == Augment(**expected, three_augment=True, color_jitter=0.3, repeats=3)
    assert (scratch.optim.name, scratch.vit.layer_scale, scratch.vit.cls_position) == ("lamb", 1e-4, False)
    assert tuned.augment == Augment(**expected, randaugment=(2, 9.0))
    assert (tuned.optim.name, tuned.objective.smoothing, tuned.keep_head) == ("adamw", 0.1, True)
    large, after = recipe("deit3/vit-b16-imagenet21k"), recipe("deit3/finetune-vit-b16-from-21k")
    simple = Augment(crop="random", three_augment=True, color_jitter=0.3, cutmix=1.0)
    assert large.augment == after.augment == simple
    assert (large.objective.loss, large.objective.smoothing, after.keep_head) == ("softmax", 0.1, False)
    assert large.preprocess is not None
    cropped = (ResizeSmall((224, 224), "bicubic"), RandomCrop((224, 224)))
    assert train_transform(large.augment, large.preprocess).ops[:2] == cropped


# BiT


@pytest.mark.parametrize("name", [name for name in BIT if name != "bit/hyperrule"])
def test_bit_is_section_3_3_of_its_paper(name: str) -> None:
    run = recipe(name)
    assert isinstance(variant(run.model), ResNetConfig)
    assert (run.optim.name, run.optim.momentum, run.batch_size) == ("sgd", 0.9, 4096)
    assert run.optim.lr == pytest.approx(0.03 * 4096 / 256)
    # big_vision's bit_i21k.py: decoupled weight decay 3e-5 x 4096 / 256, beside that learning rate
    assert run.optim.weight_decay * run.optim.lr == pytest.approx(3e-5 * 4096 / 256)
    assert (run.schedule.shape, run.schedule.warmup, run.image_size) == ("step", Steps(5000), 224)
    epochs, at = (40, (10, 23, 30, 37)) if "jft" in name else (90, (30, 60, 80))
    assert run.schedule.drops == pytest.approx(tuple(100 * epoch / epochs for epoch in at))
    assert run.duration == Epochs(7 if "7ep" in name else epochs)


def test_sgd_for_resnets_quotes_table_7() -> None:
    table_7 = published_table("table7_adam_vs_sgd")
    imagenet = dict(zip(table_7["columns"], table_7["rows"][0], strict=True))
    assert imagenet["dataset"] == "ImageNet"
    for name, column in (("r50x1", "ResNet50 SGD"), ("r152x2", "ResNet152x2 SGD")):
        assert f"{imagenet[column]:.2f} %" in find_recipe(f"bit/{name}-jft-7ep").description


def bit_hyperrule(step: int, images: int) -> float:
    """The rate of BiT's `bit_hyperrule.py`, as protocols 3.4 writes it down."""
    if images < 20_000:
        warm, *drops, end = 100, 200, 300, 400, 500
    elif images < 500_000:
        warm, *drops, end = 500, 3000, 6000, 9000, 10_000
    else:
        warm, *drops, end = 500, 6000, 12_000, 18_000, 20_000
    assert step < end
    return 0.003 * step / warm if step < warm else 0.003 / 10 ** sum(drop < step for drop in drops)


@pytest.mark.parametrize("images", [1_020, 19_999, 20_000, 499_999, 500_000, 10_000_000])
def test_the_hyperrule_is_bits(images: int) -> None:
    run = hyperrule(images, side=224)
    total = run.duration.steps(per_epoch=1, batch_size=1)
    units = {"per_epoch": 1, "batch_size": 1, "total": total}
    drops = [share * total / 100 for share in run.schedule.drops]
    warmup = run.schedule.warmup.steps(**units)
    for step in range(0, total, max(total // 100, 1)):
        for near in (step - 1, step, step + 1):
            if 0 <= near < total:
                ours = learning_rate(near, total, run.optim.lr, shape="step", warmup=warmup, drops=drops)
                assert ours == pytest.approx(bit_hyperrule(near, images)), near
    assert run.augment.mixup == (0.1 if images >= 20_000 else 0.0)
    assert (run.batch_size, run.optim.weight_decay, run.optim.momentum) == (512, 0.0, 0.9)


@pytest.mark.parametrize(("side", "resized", "cropped"), [(32, 160, 128), (95, 160, 128), (96, 512, 480)])
def test_the_hyperrule_looks_at_the_size_of_the_images(side: int, resized: int, cropped: int) -> None:
    run = hyperrule(3_680, side)
    assert run.preprocess is not None
    crop = (Squash((resized, resized)), RandomCrop((cropped, cropped)))
    assert train_transform(run.augment, run.preprocess).ops[:2] == crop
    assert eval_transform(run.preprocess) == Squash((cropped, cropped))
    assert run.image_size == cropped


# AugReg


def test_the_strengths_of_augreg() -> None:
    # big_vision's vit_i21k.py: RandAugment of two operations, and mixup
    magnitude = {"light1": 0, "light2": 10, "medium1": 15, "medium2": 15, "strong1": 20, "strong2": 20}
    mixup = {"none": 0.0, "light1": 0.0, "light2": 0.2, "medium1": 0.2, "medium2": 0.5, "strong1": 0.5, "strong2": 0.8}
    assert list(STRENGTHS) == list(mixup)
    for name in STRENGTHS:
        run = recipe(f"augreg/{name}")
        assert run.augment.randaugment == ((2, magnitude[name]) if name in magnitude else None)
        assert (run.augment.randaugment_form == "big_vision") == (name in magnitude)
        assert run.augment.mixup == mixup[name]


def weights_name(run: Run, strength: str, data: str) -> str:
    """The name under which the authors published weights, which holds their settings."""
    model = run.model.replace("+", "_").replace("/", "_")
    numbers = f"wd_{run.optim.weight_decay:g}-do_{run.vit.dropout:.1f}-sd_{run.vit.drop_path:.1f}"
    return f"{model}-{data}-300ep-lr_{run.optim.lr:g}-aug_{strength}-{numbers}"


PUBLISHED_WEIGHTS = """
L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0
B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0
S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0
R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1
R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0
Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0
B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0
S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0
R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0
S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0
B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1
B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1
"""


def test_the_settings_of_augreg_are_in_the_names_of_its_weights() -> None:
    data = {"imagenet21k": "i21k", "imagenet": "i1k"}
    names = [weights_name(recipe(row.recipe), row.strength, data[row.data]) for row in TABLE]
    assert sorted(names) == sorted(PUBLISHED_WEIGHTS.split())
    assert len(AUGREG) == len(TABLE) + len(STRENGTHS)


def test_the_rest_of_augreg_is_the_same_for_all() -> None:
    for name in AUGREG:
        run = recipe(name)
        assert (run.batch_size, run.optim.lr, run.optim.clip, run.duration) == (4096, 1e-3, 1.0, Epochs(300))
        assert (run.schedule.shape, run.schedule.warmup) == ("cosine", Steps(10_000))
        assert run.vit.pre_logits is None
