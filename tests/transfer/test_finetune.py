from __future__ import annotations

import pytest

from vitrail.costs.published import published_table
from vitrail.durations import Percent
from vitrail.recipes.paper_finetune import finetune
from vitrail.transfer.protocol import budget, finetune_run

# training images of the data sets in Table 4, and the steps that the paper fine-tunes for
TABLE_4 = {"ImageNet": (1_281_167, 20_000), "CIFAR-100": (50_000, 10_000), "CIFAR-10": (50_000, 10_000)}
TABLE_4 |= {"Oxford-IIIT Pets": (3_680, 500), "Oxford Flowers-102": (2_040, 500)}


@pytest.mark.parametrize("name", TABLE_4)
def test_steps_are_those_of_table_4(name: str) -> None:
    images, steps = TABLE_4[name]
    assert budget(images)[0].steps(per_epoch=1, batch_size=1) == steps


@pytest.mark.parametrize(("images", "warmup"), [(1_281_167, 500), (50_000, 500), (2_040, 100)])
def test_warmup_is_as_published(images: int, warmup: int) -> None:
    duration, share = budget(images)
    total = duration.steps(per_epoch=1, batch_size=1)
    assert share.steps(per_epoch=1, batch_size=1, total=total) == warmup


def test_table_4_here_is_the_papers() -> None:
    steps_of = {row["dataset"]: row["steps"] for row in published_table("table4_finetuning")["rows"]}
    for name, (_, steps) in TABLE_4.items():
        assert steps_of[name] == steps


def test_only_length_batch_and_weights_change() -> None:
    run = finetune_run(finetune(), "runs/x", 300)
    assert run.weights == "runs/x"
    assert run.batch_size == 300  # a step never sees an image twice
    assert run.schedule.warmup == Percent(20)
    assert (run.optim, run.augment, run.schedule.shape) == (finetune().optim, finetune().augment, "cosine")
    assert finetune_run(finetune(), "runs/x", 10**6).batch_size == 512
