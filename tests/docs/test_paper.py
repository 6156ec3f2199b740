"""PAPER.md keeps its promise: every part of both papers has a row, and what a row calls built is there."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, code, refused, resolve, tables
from PIL import Image

from vitrail import cli
from vitrail.config import from_yaml
from vitrail.costs.published import published_table
from vitrail.model.variants import variant
from vitrail.recipes.registry import recipe
from vitrail.training.run import Run
from vitrail.weights.assemble import skeleton

VIT, THREE, QUESTIONS = tables(ROOT / "PAPER.md")
ROWS = [*VIT, *THREE, *QUESTIONS]
BUILT = [row for row in ROWS if row["status"] == "built"]

# the papers' own tables of contents: sections, then how many equations, tables and figures
VIT_PARTS = [
    *("§1", "§2", "§3", "§3.1", "§3.2", "§4", "§4.1", "§4.2", "§4.3", "§4.4", "§4.5", "§4.6", "§5"),
    *("§A", "§B", "§B.1", "§B.1.1", "§B.1.2", "§C", *(f"§D.{n}" for n in range(1, 11))),
    *(f"Eq. {n}" for n in range(1, 9)),
    *(f"Table {n}" for n in range(1, 10)),
    *(f"Figure {n}" for n in range(1, 15)),
]
THREE_PARTS = [
    *("§1", "§2", "§2.1", "§2.2", "§2.3", "§3", "§3.1", "§3.2", "§3.3", "§4", "§5", "§6", "§A", "§B", "§C"),
    *(f"Table {n}" for n in range(1, 10)),
    *(f"Figure {n}" for n in range(1, 7)),
]


@pytest.mark.parametrize(("rows", "parts"), [(VIT, VIT_PARTS), (THREE, THREE_PARTS)], ids=["vit", "three"])
def test_every_part_of_the_paper_has_exactly_one_row(rows: list[dict[str, str]], parts: list[str]) -> None:
    listed = [row["where"] for row in rows]
    assert len(set(listed)) == len(listed)
    assert [part for part in parts if part not in listed] == []
    # what is finer than a part ("§4.1, metrics") belongs to one
    assert [where for where in listed if where.partition(",")[0] not in parts] == []


@pytest.mark.parametrize(("rows", "parts"), [(VIT, VIT_PARTS), (THREE, THREE_PARTS)], ids=["vit", "three"])
def test_sections_stand_in_the_papers_order(rows: list[dict[str, str]], parts: list[str]) -> None:
    sections = [parts.index(row["where"].partition(",")[0]) for row in rows if row["where"].startswith("§")]
    assert sections == sorted(sections)


def test_nothing_is_planned() -> None:
    assert {row["status"] for row in ROWS} == {"built", "text"}


def test_what_is_built_is_there() -> None:
    wrong = {}
    for row in BUILT:
        assert code(row["code"]) and code(row["command"]), f"{row['where']} names no code or no command"
        for reference in code(row["code"]):
            assert ":" in reference
            resolve(reference)
        wrong |= {command: why for command in code(row["command"]) if (why := refused(command.split()))}
    assert wrong == {}


def test_a_command_is_one_that_an_installed_program_understands() -> None:
    commands = [command for row in ROWS for command in code(row["command"])]
    assert {command.split()[0] for command in commands} == {"vitrail", "pytest"}


# rows whose command changes the network -> what the paper says of it
NETWORKS: dict[str, dict[str, Any]] = {
    "§D.2": dict(depth=8, width=1024, mlp_dim=2048, patch=32, stem="linear", pool="cls"),  # the base of Figure 8
    "§D.3": dict(depth=12, width=768, patch=16, stem="linear", pool="gap", prefix=0),
    "§D.4": dict(depth=12, width=768, positions="2d", place="shared", stem="linear", pool="cls"),
    "§5, stems compared": dict(depth=12, width=768, patch=16, stem="hmlp", stem_norm="layer", pool="cls"),
}


TRAINING = {row["where"]: row["command"] for row in BUILT if row["command"].startswith("`vitrail train photos/")}


def trained(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command that trains on photos/ would do, on twelve photographs of three classes."""
    for number in range(12):
        path = folder / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (256, 256), "red").save(path)
    words = [{"photos/": str(folder), "1000": "6"}.get(word, word) for word in command.split()[1:]]
    assert cli.main([*words, "--print-config"]) == 0
    return from_yaml(capsys.readouterr().out, Run())


@pytest.mark.parametrize("where", [where for where, command in TRAINING.items() if "--vit." in command])
def test_a_command_that_changes_the_network_makes_the_papers(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = code(TRAINING[where])
    run = trained(command, tmp_path, capsys)
    network = variant(run.model, **run.vit.changes())
    assert {name: getattr(network, name) for name in NETWORKS[where]} == NETWORKS[where]
    assert run.image_size == 224


@pytest.mark.parametrize("where", TRAINING)
def test_a_command_does_what_it_says(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every value on its line, and otherwise its recipe's network, optimiser and length, stand in the run's config."""
    for command in code(TRAINING[where]):
        run, words = trained(command, tmp_path, capsys), command.split()
        asked = dict(zip(words[3::2], words[4::2], strict=True))
        base = recipe(asked.pop("--recipe")) if "--recipe" in asked else None
        for flag, value in asked.items():
            name = {"--lr": "optim.lr"}.get(flag, flag.removeprefix("--"))
            found = reduce(getattr, name.split("."), run)
            assert str(found) == {"1000": "6"}.get(value, value) or float(found) == float(value), flag
        if base is not None:
            assert (run.model, run.optim.name, run.duration) == (base.model, base.optim.name, base.duration)
            assert type(run.objective) is type(base.objective)


def test_what_is_only_text_has_no_code() -> None:
    assert [row["where"] for row in ROWS if row["status"] == "text" and (row["code"] or row["command"])] == []


def test_a_missing_symbol_is_noticed() -> None:
    resolve("vitrail/model/vit.py:ViT.embed")
    with pytest.raises(AttributeError):
        resolve("vitrail/model/vit.py:ViT.no_such_method")
    with pytest.raises(ImportError):
        resolve("vitrail/model/no_such_file.py:ViT")


def test_expected_numbers_are_the_published_ones() -> None:
    expected = {row["where"]: row["expected"] for row in VIT}
    top = [cell.partition("±")[0] for cell in published_table("table2_state_of_the_art")["rows"]["ImageNet"][:3]]
    vtab = [
        cell.partition("±")[0] for cell in published_table("table2_state_of_the_art")["rows"]["VTAB (19 tasks)"][:3]
    ]
    assert expected["Table 2"] == f"ImageNet {', '.join(top)}; VTAB {', '.join(vtab)}"
    means = [row[-1] for row in published_table("table9_vtab")["rows"].values()]
    assert expected["Table 9"] == f"means {', '.join(map(str, means))}"
    assert expected["Table 7"].startswith(
        "averages " + ", ".join(map(str, published_table("table7_adam_vs_sgd")["rows"][-1][1:]))
    )
    millions = [f"{row['params_millions']} M" for row in published_table("table1_variants")["rows"]]
    assert expected["Table 1"].startswith(f"{', '.join(millions)} parameters")
    counts = {name: sum(p.numel() for p in skeleton(variant(name)).parameters()) / 1e6 for name in ("L/16", "L/32")}
    assert f"L/16 has {counts['L/16']:.1f} M and L/32 {counts['L/32']:.1f} M" in expected["Table 1"]
    objectnet = published_table("objectnet")
    assert f"{objectnet['top5']}" in expected["§D.9"] and f"{objectnet['top1']}" in expected["§D.9"]
    assert f"{published_table('self_supervision')['imagenet_top1']} %" in expected["§4.6"]
