"""Every number of Tables 3 and 4 against the published tables, and every recipe of the paper against a row of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from vitrail.costs.published import published_table
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.images.geometry import InceptionCrop, RandomCrop, ResizeSmall, Squash
from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.settings import Augment, Preprocess
from vitrail.durations import Epochs, Steps
from vitrail.model.variants import SIZES, variant
from vitrail.recipes.paper import PAPER
from vitrail.recipes.paper_finetune import PAPER_FINETUNE, TABLE_4
from vitrail.recipes.preprocessing import big_vision, vit_jax
from vitrail.recipes.registry import find_recipe, recipe
from vitrail.training.run import learning_rate

DATA = {"JFT-300M": "jft", "ImageNet-21k": "imagenet21k", "ImageNet": "imagenet"}


@dataclass(frozen=True)
class Published:
    """One network for one length in Table 3."""

    recipe: str
    model: str
    row: dict[str, Any]
    epochs: int

    @property
    def name_in_table_6(self) -> str:
        return self.model.replace("R50+", "R50x1+") if "+" in self.model else self.model.replace("R", "ResNet")


def rows_of_table_3() -> list[Published]:
    """Table 3 spelled out: one entry for each length; "ViT-*" on ImageNet are the networks of Table 5."""
    found = []
    for row in published_table("table3_pretraining")["rows"]:
        networks = [row["model"]]
        if row["model"] == "ViT-*":
            table_5 = published_table("table5_pretraining_size")
            reached = table_5["rows"]["ImageNet"]["ImageNet"]
            networks = [name for name, top1 in zip(table_5["models"], reached, strict=True) if top1 is not None]
        for network in networks:
            short = network.lower().replace("+vit-", "-").replace("/", "")
            for epochs in row["epochs"]:
                shorter = f"-{epochs}ep" if epochs != max(row["epochs"]) else ""
                name = f"paper/{short}-{DATA[row['dataset']]}{shorter}"
                found.append(Published(name, network, row, epochs))
    return found


TABLE_3 = rows_of_table_3()


def test_the_recipes_of_pre_training_are_the_rows_of_table_3() -> None:
    assert sorted(PAPER) == sorted([*(theirs.recipe for theirs in TABLE_3), *BEYOND])
    assert len(TABLE_3) == 26


BEYOND = {
    # recipe: model, length and numbers of Tables 5 and 6; Table 3 has the settings of the other recipe
    "paper/vit-h14-imagenet21k": ("H/14", 90, "85.13 % top-1 on ImageNet", "paper/vit-l16-imagenet21k"),
    "paper/r152x2-jft-14ep": ("R152x2", 14, "1,126 exaFLOPs", "paper/r152x2-jft"),
    "paper/r200x3-jft-14ep": ("R200x3", 14, "3,306 exaFLOPs", "paper/r152x2-jft"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_networks_of_tables_5_and_6_that_table_3_lacks(name: str) -> None:
    model, epochs, number, other = BEYOND[name]
    run, theirs, text = recipe(name), recipe(other), " ".join(find_recipe(name).description.split())
    assert replace(run, name="a", model="B/16", duration=Epochs(1)) == replace(
        theirs, name="a", model="B/16", duration=Epochs(1)
    )
    assert (run.model, run.duration) == (model, Epochs(epochs))
    assert number in text
    assert f"Table 3 lacks this run; its learning rate is that of {other}." in text


def test_every_row_of_tables_5_and_6_has_a_recipe() -> None:
    trained = {(recipe(name).model, recipe(name).duration) for name in PAPER}
    for network, epochs, *_ in published_table("table6_scaling")["rows"]:
        model = network.replace("ViT-", "").replace("R50x1+", "R50+").replace("ResNet", "R")
        assert (model, Epochs(epochs)) in trained
    table_5 = published_table("table5_pretraining_size")
    for data, row in table_5["rows"].items():
        for network, top1 in zip(table_5["models"], row["ImageNet"], strict=True):
            names = [name for name in PAPER if recipe(name).model == network.replace("ViT-", "") and DATA[data] in name]
            assert names or top1 is None, (network, data)


@pytest.mark.parametrize("theirs", TABLE_3, ids=lambda theirs: theirs.recipe)
def test_every_number_of_table_3(theirs: Published) -> None:
    run, row = recipe(theirs.recipe), theirs.row
    common = published_table("table3_pretraining")["common"]
    assert run.model == theirs.model.replace("ViT-", "")
    assert run.duration == Epochs(theirs.epochs)
    assert run.optim.lr == row["base_lr"]
    assert run.schedule.shape == row["lr_decay"]
    assert run.optim.weight_decay == row["weight_decay"]
    assert (run.vit.dropout or 0.0) == row["dropout"]
    assert run.batch_size == common["batch_size"]
    assert run.schedule.warmup == Steps(common["warmup_steps"])
    assert (run.optim.name, run.optim.betas) == ("adamw", (common["beta1"], common["beta2"]))
    assert run.image_size == common["resolution"]
    if row["dataset"] == "ImageNet":
        assert common["grad_clip"] == "global norm 1 for ImageNet" and run.optim.clip == 1.0
    elif row["dataset"] == "JFT-300M":
        assert run.optim.clip is None


@pytest.mark.parametrize("theirs", TABLE_3, ids=lambda theirs: theirs.recipe)
def test_a_recipe_quotes_the_number_it_reached(theirs: Published) -> None:
    text, row = find_recipe(theirs.recipe).description, theirs.row
    if row["dataset"] == "JFT-300M":
        table = {(name, epochs): rest for name, epochs, *rest in published_table("table6_scaling")["rows"]}
        imagenet, *_, exaflops = table[theirs.name_in_table_6, theirs.epochs]
        assert f"{exaflops:,} exaFLOPs" in text
    else:
        table_5 = published_table("table5_pretraining_size")
        imagenet = table_5["rows"][row["dataset"]]["ImageNet"][table_5["models"].index(theirs.model)]
    if theirs.epochs == max(row["epochs"]) or row["dataset"] == "JFT-300M":
        assert f"{imagenet:.2f} % top-1 on ImageNet" in text
    else:
        assert "no number is published" in text


@pytest.mark.parametrize("theirs", TABLE_3, ids=lambda theirs: theirs.recipe)
def test_the_classifier_is_one_of_pre_training(theirs: Published) -> None:
    # section 3.1: a hidden layer; issue 124 of the authors' repository: as wide as the network
    run = recipe(theirs.recipe)
    config = variant(run.model, **run.vit.changes())
    assert getattr(config, "pre_logits", None) == (
        SIZES[theirs.model.partition("ViT-")[2][0]][0] if "ViT" in theirs.model else None
    )
    assert run.objective.loss == "sigmoid"
    assert run.objective.head_bias == (-6.9 if theirs.row["dataset"] == "ImageNet" else -10)


def test_the_released_networks_were_trained_like_this() -> None:
    # issue 2 of google-research/vision_transformer, for B/16 on ImageNet-21k
    run = recipe("paper/vit-b16-imagenet21k")
    assert (run.batch_size, run.optim.lr, run.optim.weight_decay) == (4096, 1e-3, 0.03)
    assert (run.schedule.shape, run.schedule.end, run.schedule.warmup) == ("linear", 1e-5, Steps(10_000))
    assert (run.vit.dropout, run.vit.pre_logits, run.duration) == (0.1, "width", Epochs(90))
    assert (run.objective.loss, run.objective.head_bias) == ("sigmoid", -10.0)


def test_the_cost_of_a_run_that_is_not_in_table_6() -> None:
    # protocols: 17.563 GMACs for B/16, 2 x 3 x MACs a training image
    exaflops = 2 * 3 * 17.563e9 * 90 * CATALOG["imagenet21k"].splits["train"] / 1e18
    assert f"about {exaflops:.0f} exaFLOPs" in find_recipe("paper/vit-b16-imagenet21k").description


PUBLISHED_4 = {row["dataset"]: row for row in published_table("table4_finetuning")["rows"]}


def test_the_recipes_of_fine_tuning_are_the_rows_of_table_4() -> None:
    assert [row.title for row in TABLE_4] == list(PUBLISHED_4)
    assert set(PAPER_FINETUNE) == {
        *(row.recipe for row in TABLE_4),
        *(f"{row.recipe}-{way}" for row in TABLE_4 if "VTAB" not in row.title for way in ("big-vision", "bit")),
        "paper/finetune-imagenet-512",
        "paper/finetune-imagenet-518",
    }


@pytest.mark.parametrize("name", PAPER_FINETUNE)
def test_every_number_of_table_4(name: str) -> None:
    run, common = recipe(name), published_table("table4_finetuning")["common"]
    row = next(row for row in TABLE_4 if name.startswith(row.recipe) and not name[len(row.recipe) :].isdigit())
    theirs = PUBLISHED_4[row.title]
    assert run.duration == Steps(theirs["steps"])
    assert list(row.grid) == theirs["base_lr"] and run.optim.lr in row.grid
    assert all(f"{lr:g}" in find_recipe(name).description for lr in theirs["base_lr"])
    dev = theirs["dev_split"]
    assert run.data.holdout == (dev if isinstance(dev, float) else 200 / 1000)
    assert (run.optim.name, run.optim.momentum) == ("sgd", 0.9)
    assert run.schedule.shape == common["lr_decay"]
    assert run.batch_size == common["batch_size"]
    assert run.optim.weight_decay == common["weight_decay"]
    assert run.optim.clip == common["grad_clip_global_norm"]
    assert not run.keep_head  # a zero layer replaces the whole head
    if not name.endswith(("-512", "-518")):
        assert run.image_size == common["resolution"]


@pytest.mark.parametrize("row", TABLE_4, ids=lambda row: row.recipe)
def test_a_recipe_of_fine_tuning_quotes_table_2_or_5(row: Any) -> None:
    if row.title == "ImageNet":  # Table 2's are those of the higher resolution
        table = published_table("table5_pretraining_size")["rows"]
        numbers = [table["JFT-300M"]["ImageNet"][4], table["JFT-300M"]["ImageNet"][2]]
        numbers += [table["ImageNet-21k"]["ImageNet"][2]]
    else:
        cells = published_table("table2_state_of_the_art")["rows"][row.title][:3]
        numbers = [float(cell.partition("±")[0]) for cell in cells]
    assert [f"{number:.2f} %" in find_recipe(row.recipe).description for number in numbers] == [True] * 3


@pytest.mark.parametrize(("side", "column"), [(512, [1, 2]), (518, [0])])
def test_the_higher_resolutions_average(side: int, column: list[int]) -> None:
    name = f"paper/finetune-imagenet-{side}"
    run, table_2 = recipe(name), published_table("table2_state_of_the_art")
    assert (run.average.kind, run.average.decay) == ("ema", 0.9999) and "0.9999" in table_2["note"]
    assert f"{side} px" in table_2["note"] and run.image_size == side
    for cell in (table_2["rows"]["ImageNet"][i] for i in column):
        assert f"{cell.partition('±')[0]} %" in find_recipe(name).description


def test_the_warmups_are_those_of_the_authors_code() -> None:
    # protocols 3.4: 500 steps, and 100 of 500 for Pets and Flowers
    warmups = [recipe(row.recipe).schedule.warmup for row in TABLE_4]
    assert warmups == [Steps(500), Steps(500), Steps(500), Steps(100), Steps(100), Steps(500)]


def test_the_two_presets_prepare_images_as_their_authors_do() -> None:
    jax, vision = vit_jax(384), big_vision(384)
    assert train_transform(jax.augment, jax.preprocess).ops[0] == InceptionCrop(
        (384, 384), (0.05, 1.0), (3 / 4, 4 / 3), whole=True
    )
    assert train_transform(vision.augment, vision.preprocess).ops[0] == InceptionCrop((384, 384), (0.05, 1.0))
    assert eval_transform(jax.preprocess) == Squash((384, 384))
    assert eval_transform(vision.preprocess).ops[0] == ResizeSmall((448, 448))
    assert vision.augment == Augment()
    assert jax.augment == Augment(ratio=(3 / 4, 4 / 3))  # of the image, although evaluation squashes it


@pytest.mark.parametrize(
    ("dataset", "random"), [("imagenet", False), ("pets", False), ("flowers", False), ("cifar10", True)]
)
def test_big_vision_crops_cifar_at_random(dataset: str, random: bool) -> None:
    run = recipe(f"paper/finetune-{dataset}-big-vision")
    assert run.preprocess is not None
    first, second, *_ = train_transform(run.augment, run.preprocess).ops
    assert ((first, second) == (ResizeSmall((448, 448)), RandomCrop((384, 384)))) == random


@pytest.mark.parametrize("name", ["paper/finetune-vtab", "paper/finetune-pets-bit", "paper/finetune-imagenet-bit"])
def test_images_prepared_as_bits_at_384(name: str) -> None:
    run = recipe(name)
    assert run.preprocess == Preprocess((384, 384), resize="squash", crop=384 / 448)
    assert train_transform(run.augment, run.preprocess).ops[:2] == (Squash((448, 448)), RandomCrop((384, 384)))


@pytest.mark.parametrize("step", [0, 100, 250, 500, 4999, 9999])
def test_a_fine_tuning_rate_is_vit_jaxs(step: int) -> None:
    run = recipe("paper/finetune-cifar100")
    progress = max(step - 500, 0) / 9500
    expected = 0.03 * (1 + math.cos(math.pi * progress)) / 2 * min(1, step / 500)
    ours = learning_rate(step, 10_000, run.optim.lr, shape="cosine", warmup=500, end=run.schedule.end)
    assert ours == pytest.approx(expected, rel=1e-12)
