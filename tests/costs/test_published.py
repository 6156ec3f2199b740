"""The published numbers: transcribed once more from the papers' text here and there, and consistent with each other."""

from __future__ import annotations

from statistics import fmean
from typing import get_args

import pytest

from vitrail.costs.published import PublishedTable, published_table


@pytest.mark.parametrize("entry", get_args(PublishedTable))
def test_every_entry_names_its_source(entry: PublishedTable) -> None:
    assert published_table(entry)["source"]


def test_numbers_from_the_papers_text() -> None:
    huge = {"name": "ViT-Huge", "layers": 32, "hidden_size": 1280, "mlp_size": 5120, "heads": 16}
    assert published_table("table1_variants")["rows"][-1] == huge | {"params_millions": 632}
    table_2 = published_table("table2_state_of_the_art")["rows"]
    assert table_2["ImageNet"] == ["88.55±0.04", "87.76±0.03", "85.30±0.02", "87.54±0.02", "88.4/88.5"]
    assert table_2["TPUv3-core-days"] == ["2.5k", "0.68k", "0.23k", "9.9k", "12.3k"]
    on_imagenet = published_table("table3_pretraining")["rows"][-1]
    assert (on_imagenet["epochs"], on_imagenet["base_lr"], on_imagenet["weight_decay"]) == ([300], 3e-3, 0.3)
    table_4 = {row["dataset"]: (row["steps"], row["base_lr"]) for row in published_table("table4_finetuning")["rows"]}
    assert table_4["ImageNet"] == (20_000, [0.003, 0.01, 0.03, 0.06])
    assert table_4["VTAB (19 tasks)"] == (2_500, [0.01])
    assert published_table("table5_pretraining_size")["rows"]["JFT-300M"]["ImageNet"] == [
        84.15,
        80.73,
        87.12,
        84.37,
        88.04,
    ]
    assert published_table("table6_scaling")["rows"][5] == [
        "ViT-H/14",
        14,
        88.08,
        90.36,
        99.5,
        94.71,
        97.11,
        99.71,
        4262,
    ]
    assert published_table("table7_adam_vs_sgd")["rows"][-1] == ["Average", 89.33, 88.79, 94.01, 93.72]
    assert published_table("table8_position_embeddings")["rows"][1] == ["1-D", 0.64206, 0.63964, 0.64292]
    assert published_table("objectnet")["top5"] == 82.1 and published_table("objectnet")["top1"] == 61.7
    follow_up = published_table("three_things")
    assert follow_up["hmlp"]["vit_b_gflops"] == 17.73
    assert follow_up["recipe_A2"]["stochastic_depth"] == {"Ti": 0.0, "S": 0.05, "B": 0.1, "L": 0.4}


def test_the_averages_of_table_7_are_those_of_its_rows() -> None:
    *rows, (_, *averages) = published_table("table7_adam_vs_sgd")["rows"]
    means = [fmean(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    assert averages == pytest.approx(means, abs=0.01)


def test_table_2_is_consistent_with_tables_5_and_9() -> None:
    table_2 = published_table("table2_state_of_the_art")
    vtab = [float(cell.partition("±")[0]) for cell in table_2["rows"]["VTAB (19 tasks)"][:3]]
    table_9 = published_table("table9_vtab")["rows"]
    assert list(table_9) == table_2["columns"][:3]
    assert [row[-1] for row in table_9.values()] == pytest.approx(vtab, abs=0.051)
    assert [fmean(row[:-1]) for row in table_9.values()] == pytest.approx(vtab, abs=0.051)


def test_table_6_repeats_adam_of_table_7() -> None:
    table_6 = {(name, epochs): rest for name, epochs, *rest in published_table("table6_scaling")["rows"]}
    imagenet, *_ = published_table("table7_adam_vs_sgd")["rows"]
    assert (imagenet[1], imagenet[3]) == (table_6["ResNet50x1", 7][0], table_6["ResNet152x2", 7][0])
