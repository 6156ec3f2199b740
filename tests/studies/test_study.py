"""Studies: their grids against the papers, the rule of claims, the division by classes, and a small one end to end."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run, start
from PIL import Image
from scipy import stats
from torch import nn

import vitrail
from vitrail import cli
from vitrail.costs.count import macs
from vitrail.costs.published import published_table
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.data.benchmarks.vtab_tasks import TASKS
from vitrail.data.sources.open import open_data
from vitrail.durations import Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.model.compute import attention_path
from vitrail.model.vit import ViT
from vitrail.objective.settings import BEiT, MaskedPatch, Tokenizer
from vitrail.studies.catalog import NAMES, study_named
from vitrail.studies.claims import (
    MEAN,
    Answer,
    Claim,
    Parts,
    alike,
    answers,
    column_lead,
    extremes,
    gain,
    lead,
    minus,
)
from vitrail.studies.costs import Planned
from vitrail.studies.laptop import NETWORKS, at_rates, fine_tuning, pre_training
from vitrail.studies.measure import Probes, config_of
from vitrail.studies.page import write_gallery
from vitrail.studies.results import as_json, markdown, write
from vitrail.studies.rule import evidence, holm, power
from vitrail.studies.run import StudyRequest, place, planned, repeated, run_study, settled
from vitrail.studies.sets import Sets, divide, published_sets
from vitrail.studies.study import COUNTED, Cell, LaptopData, Scale, Stage, Study, best_of
from vitrail.studies.table import CellResult, Tables
from vitrail.studies.training import Training
from vitrail.training.run import Model, Run
from vitrail.transfer.trial import Outcome, Trial, here
from vitrail.weights.assemble import skeleton

# grids


@pytest.mark.parametrize("scale", ["laptop", pytest.param("paper", marks=pytest.mark.full_size)])
def test_every_cell_builds(scale: Scale) -> None:
    known = {"up", "down", "all"} if scale == "laptop" else {*CATALOG, *(f"vtab/{task}" for task in TASKS)}
    configs = set()
    for name in NAMES:
        study = study_named(name)
        assert study.name == name
        cells = study.cells(scale)
        assert cells and len({(cell.table, cell.row, cell.at) for cell in cells}) == len(cells), name
        for metric, stage in {
            (cell.metric, stage) for cell in cells for tried in cell.tried for stage in tried.chain()
        }:
            assert stage.run.data.path in known or metric in COUNTED, name
            from_scratch = stage.start is None
            assert from_scratch or stage.run.weights is None, name  # the stage before it decides
            if from_scratch and not isinstance(stage.run.objective, Tokenizer):
                configs.add(config_of(stage))
    for config in configs:
        assert all(parameter.is_meta for parameter in skeleton(config).parameters())


@pytest.mark.parametrize("name", NAMES)
def test_claims_need_only_cells_of_the_laptop(name: str) -> None:
    """With any numbers in all cells, every claim can be decided; with one number less, it is not finished."""
    study = study_named(name)
    cells = study.cells("laptop")
    results = [
        CellResult(cell, seed, 10.0 + number + seed * (1 + number % 2))
        for seed in (0, 1)
        for number, cell in enumerate(cells)
    ]
    answers = Tables(study, results).answers()
    assert len(answers) == len(study.claims)
    assert {answer.verdict for answer in answers} <= {"holds", "does not hold", "too noisy to tell"}
    if answers:
        nothing = Tables(study, [replace(result, score=None) for result in results]).answers()
        assert {answer.verdict for answer in nothing} == {"not finished"}


@pytest.mark.parametrize("name", NAMES)
def test_a_complete_grid_of_the_paper_and_a_part_of_a_grid_are_written(name: str) -> None:
    """Claims about networks of the laptop are not decided by the paper's; without all rows, no claim is decided."""
    study = study_named(name)
    cells = study.cells("laptop")
    part = [cell for cell in cells if cell.row == cells[0].row]
    scale: Scale
    for scale, kept, whole in (("paper", study.cells("paper"), True), ("laptop", part, False)):
        tables = Tables(study, [CellResult(cell, seed, 10.0 + seed) for seed in (0, 1) for cell in kept], scale, whole)
        written = as_json(tables, {"scale": scale})
        assert len(written["claims"]) == len(study.claims) and markdown(tables)
        verdicts = {claim["verdict"] for claim in written["claims"]}
        assert whole or verdicts <= {"not decided"}
        assert not whole or name == "three-table6" or verdicts != {"not decided"}


DECIDED = {"table2": 3, "table5": 2, "table6": 2, "table7": 1, "table8": 2, "self-supervision": 2, "three-table1": 2}
"""Study -> number of its claims that the paper's printed numbers decide."""


@pytest.mark.parametrize("name", DECIDED)
def test_claims_hold_for_the_numbers_that_the_papers_print(name: str) -> None:
    """So a claim compares what its paper compares, in the right direction."""
    study = study_named(name)
    tables: dict[str, dict[tuple[str, float | str], list[float]]] = {}
    for (table, row, at), value in study.published.items():
        tables.setdefault(table, {})[row, at] = [value]
    if study.mean and MEAN not in tables:
        first, *others = tables.values()
        tables[MEAN] = {place: [np.mean([first[place], *(other[place] for other in others)])] for place in first}
    found = []
    for claim in study.claims:
        with contextlib.suppress(KeyError, IndexError):  # the paper does not print these numbers
            table = claim.table or next(iter(tables))
            found.append(claim.difference(claim.of_paper(tables[str(claim.paper.get(table, table))])))
    assert len(found) == DECIDED[name] and min(map(np.min, found)) > 0


@pytest.mark.parametrize("name", [name for name in NAMES if study_named(name).published])
def test_published_numbers_stand_in_the_cells_of_the_papers_grid(name: str) -> None:
    study = study_named(name)
    places = {(cell.row, cell.at) for cell in study.cells("paper")}
    own = {(row, at) for _, row, at in study.published if row not in study.quoted}
    others = {"VTAB (19 tasks)", "TPUv3-core-days"}  # columns that are not a fine-tuning of their own
    assert {place for place in own if place[1] not in others} <= places


@pytest.mark.parametrize("name", NAMES)
def test_the_list_says_whether_the_papers_data_are_public(name: str) -> None:
    study = study_named(name)
    private = {
        any(stage.run.data.path == "jft300m" for stage in cell.stage.chain())
        for cell in study.cells("paper")
        if cell.metric not in COUNTED
    }
    public = "partly" if len(private) == 2 else "no" if True in private else "yes"
    assert NAMES[study.name].public == public  # type: ignore[index]


@pytest.mark.full_size
def test_the_list_says_what_the_smallest_of_the_papers_grids_cost() -> None:
    """Table 6 prints exaFLOPs. The list of studies has them rounded."""
    plan = of_paper("table8")
    assert NAMES["table8"].exaflops == round(plan.flops / 1e18)
    table_8_trains_eight_of_table_6s(plan)


@pytest.mark.nightly(
    "test_study.py::test_the_list_says_what_the_smallest_of_the_papers_grids_cost, and tests/costs/test_table6.py"
)
@pytest.mark.full_size
def test_the_list_says_what_the_papers_grids_cost_and_table_6_agrees() -> None:
    plans = {name: of_paper(name) for name in NAMES}
    for name, plan in plans.items():
        assert NAMES[name].exaflops == round(plan.flops / 1e18), name  # type: ignore[index]
    compute_is_table_6s(plans)


def table_8_trains_eight_of_table_6s(plan: Planned) -> None:
    table = {row[0]: row[-1] for row in published_table("table6_scaling")["rows"] if row[1] == 7}
    assert plan.flops / 1e18 == pytest.approx(8 * table["ViT-B/16"], rel=0.01)


def compute_is_table_6s(plans: dict[str, Planned]) -> None:
    """exaFLOPs of 7 epochs in Table 6; Figure 4 takes 9, 30, 90 and 303 million images of each network."""
    table = {row[0]: row[-1] for row in published_table("table6_scaling")["rows"] if row[1] == 7}
    figure4 = plans["figure4"]
    found = {one.cell.row: one.flops / 1e18 for one in figure4.stages if one.cell.at == 303_000_000}
    names = {"ViT-B/32": "ViT-B/32", "ViT-L/32": "ViT-L/32", "ViT-L/16": "ViT-L/16"}
    names |= {"ResNet50x1 (BiT)": "ResNet50x1", "ResNet152x2 (BiT)": "ResNet152x2"}
    for ours, theirs in names.items():
        assert found[ours] == pytest.approx(table[theirs], rel=0.05)
    assert figure4.flops / 1e18 == pytest.approx(sum(found.values()) * (9 + 30 + 90 + 303) / 303, rel=1e-6)
    table_8_trains_eight_of_table_6s(plans["table8"])
    rows = [row[-1] for row in published_table("table6_scaling")["rows"]]
    pre_trained = [one.flops / 1e18 for one in plans["table6"].stages if one.stage.start is None]
    assert len(pre_trained) == len(rows) == 18 and sum(pre_trained) == pytest.approx(sum(rows), rel=0.02)


def of_paper(name: str) -> Planned:
    """The plan of a study at the paper's scale."""
    return planned(study_named(name), StudyRequest(None, "paper"))


def test_the_laptops_networks_are_as_dear_as_they_say() -> None:
    """83.6 million multiply-adds for ViT-128/4, counted by hand; the ResNets and ViTs that are compared cost the same
    within a tenth."""
    tokens, width, depth, hidden = 65, 128, 6, 512
    block = tokens * width * (4 * width + 2 * hidden) + 2 * tokens**2 * width
    stem = 64 * (4 * 4 * 3) * width
    assert round((depth * block + stem) / 1e6, 1) == 83.6
    assert pre_training("ViT-128/4").vit == NETWORKS["ViT-128/4"][1] == Model(
        width=128, depth=6, heads=4, mlp_dim=512, patch=4, stem="linear", pool="cls"
    )  # fmt: skip
    cost = {name: macs(config_of(Stage(pre_training(name)))) for name in NETWORKS}
    for one, other in (("ViT-128/4", "R50x1"), ("ViT-64/4", "R50x1/2"), ("ViT-128/8", "R50x1/2")):
        assert cost[one] == pytest.approx(cost[other], rel=0.1)


def test_the_numbers_of_table_8_are_the_published_ones() -> None:
    study = study_named("table8")
    assert {f"{value:.3f}" for value in study.published.values()} == {
        f"{100 * value:.3f}"
        for row in published_table("table8_position_embeddings")["rows"]
        for value in row[1:]
        if value
    }
    assert {(row, at) for _, row, at in study.published} == {(cell.row, cell.at) for cell in study.cells("paper")}


def test_resnets_are_fine_tuned_by_bits_hyperrule_too() -> None:
    """Appendix B.1.1: 0.06 on ImageNet for ResNets and hybrids, and the setup of Kolesnikov et al. for ResNets."""
    cells = [cell for cell in study_named("table6").cells("paper") if cell.metric == "top-1"]
    assert len(cells) == 18 * 5
    for cell in cells:
        assert cell.stage.start is not None
        model, on = cell.stage.start.run.model, cell.stage.run.data.path
        rates = [stage.run.optim.lr for stage in cell.tried if stage.run.schedule.shape == "cosine"]
        assert (0.06 in rates) == (on == "imagenet" and "R" in model)
        rules = [stage.run for stage in cell.tried if stage.run.schedule.shape == "step"]
        sides = {"cifar10": 128, "cifar100": 128}
        expected = [(sides.get(on, 480), 0.003, on)] * (model.startswith("R") and "+" not in model)
        assert [(run.image_size, run.optim.lr, run.data.path) for run in rules] == expected


def test_patches_are_hidden_behind_stems_that_mix_them() -> None:
    """Section 5 of the follow-up: convolutional stems are masked after the stem, the others before it."""
    study = study_named("three-table7")
    for cells, stems in ((study.cells("laptop"), 3), (study.cells("paper"), 9)):
        tuned = [cell for cell in cells if cell.stage.start is not None]
        assert len(tuned) == stems
        for cell in tuned:
            assert cell.stage.start is not None
            objective, stem = cell.stage.start.run.objective, cell.stage.start.run.vit.stem
            assert isinstance(objective, MaskedPatch | BEiT)
            assert objective.mask_after_stem == (stem in ("levit", "early"))


@pytest.mark.full_size
def test_stems_cost_what_the_follow_up_says() -> None:
    """Section 5: 17.73 GFLOPs for B/16 with hMLP, under 1 % more than with the linear stem."""
    costs = {
        cell.row: gflops(cell.stage) for cell in study_named("three-table7").cells("paper") if cell.metric == "MACs"
    }
    assert round(costs["hMLP, BN"], 2) == 17.73
    assert round(costs["linear"], 2) == 17.58
    assert all(0 < costs[name] / costs["linear"] - 1 < 0.01 for name in ("hMLP, BN", "hMLP, LN"))
    block = (197 * 12 * 768**2 + 2 * 197**2 * 768 + 2 * 5 * 197 * 768) / 1e9
    assert costs["linear, a block more"] - costs["linear"] == pytest.approx(block, rel=1e-9)


def gflops(stage: Stage) -> float:
    """The follow-up's count: multiply-adds, and 5 for each value of a LayerNorm, 2 of a BatchNorm, as in fvcore."""
    each, counted, config = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}, [], config_of(stage)

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        counted.append(output.numel() * next(number for kind, number in each.items() if isinstance(module, kind)))

    with torch.no_grad(), attention_path("explicit"), torch.device("meta"):
        model = ViT(config).eval()  # type: ignore[arg-type]
        for module in model.modules():
            if isinstance(module, tuple(each)):
                module.register_forward_hook(count)
        model.encode(model.embed(torch.empty(1, 3, *config.image_size)))
    return (macs(config) + sum(counted)) / 1e9


# claims


def answer(one: Sequence[float], other: Sequence[float], **claim: Any) -> Answer:
    """The answer to "a is larger than b" for the numbers of paired seeds."""
    asked = Claim("a is larger", lambda scores: minus(scores, ("a", 1), ("b", 1)), **claim)
    found = asked.evidence({"table": {("a", 1): one, ("b", 1): other}}, (), paper=False)
    return answers([(asked, found)])[0]


def test_the_p_value_of_a_claim_is_that_of_a_paired_t_test() -> None:
    one, other = [3.1, 2.2, 4.0, 3.3], [1.0, 0.4, 1.1, 2.0]
    found = answer(one, other)
    assert found.verdict == "holds" and found.p == pytest.approx(stats.ttest_rel(one, other).pvalue)
    assert found.error == pytest.approx(stats.sem(np.subtract(one, other)))
    assert str(found) == f"holds (+{found.difference:.2f} ± {found.error:.2f}, p {found.p:.2g}): a is larger"
    below = answer(other, one, matters=0.25)
    assert below.verdict == "does not hold"
    assert below.p == pytest.approx(stats.ttest_rel(np.add(other, -0.25), one).pvalue)


def test_what_cannot_be_decided_says_how_many_seeds_would_decide() -> None:
    assert answer([10.0], [5.0]).verdict == answer([10.0, 11.0], [5.0, 6.0]).verdict == "too noisy to tell"
    assert answer([10.0], [5.0]).advice == ""  # the deviation of one seed is not known
    found = answer([10.0, 12.0], [9.0, 9.6])
    assert found.needed is not None and f"{found.needed} seeds would decide" in str(found)
    assert "more than 100 seeds would decide" in str(answer([10.0, 12.0], [10.0, 11.05]))
    assert answer([10.0, 10.0], [5.0, 5.0], exact=True).verdict == "holds"


def test_a_claim_of_several_parts_is_as_strong_as_its_weakest() -> None:
    strong, weak = [5.0, 5.1, 4.9, 5.0], [0.4, -0.6, 0.5, 0.1]
    parts = evidence(Parts((strong, weak)), 0)
    assert parts.p == pytest.approx(2 * stats.ttest_1samp(weak, 0, alternative="greater").pvalue)
    lost = evidence(Parts((strong, [-x for x in strong])), 0)
    assert not lost.holds and lost.p == pytest.approx(4 * stats.ttest_1samp(strong, 0, alternative="greater").pvalue)
    for differences, holds in (([0.1, -0.2, 0.0, 0.1], True), ([1.9, 2.1, 2.0, 2.0], False)):  # two one-sided tests
        found = evidence(alike(differences, 1), 0)
        assert found.holds == holds and found.p < 0.05


def test_p_values_are_corrected_step_by_step() -> None:
    """Holm's procedure: 4, 3, 2 and 1 times the sorted p-values, never below an earlier one."""
    assert holm([0.01, 0.04, math.nan, 0.03, 0.005]) == pytest.approx([0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True)


def decided(effect: float, seeds: int, matters: float = 0.5, claims: int = 1, studies: int = 500) -> float:
    """Share of simulated studies that decide any claim; the seeds deviate by 1."""
    random, found = np.random.default_rng(0), 0
    for _ in range(studies):
        values = [[x] for x in random.normal(effect, 1, (claims, seeds)).tolist()]
        found += any(p <= 0.05 for p in holm([evidence(one, matters).p for one in values]))
    return found / studies


@pytest.mark.full_size
def test_more_seeds_make_a_decision_likelier_and_noise_decides_nothing() -> None:
    """The rule of twice the deviation decided an effect of 1.5 in 52 % of cases with 2 seeds, in 22 % with 10."""
    shares = [decided(1.5, seeds) for seeds in (2, 3, 5, 10)]
    assert shares == sorted(shares) and shares[-1] > 0.95
    assert shares[2:] == pytest.approx([power(1.5, 5, 0.05), power(1.5, 10, 0.05)], abs=0.05)
    assert decided(0.0, 40) > decided(0.0, 10)  # no difference is decided, too
    for seeds in (2, 5):  # the difference at which neither verdict is right
        assert decided(0.0, seeds, matters=0.0, claims=5) <= 0.08


SCORES: dict[tuple[str, float | str], list[float]] = {
    ("a", 1): [10.0, 20.0], ("a", 5): [30.0, 60.0], ("a", "x"): [5.0, 6.0],
    ("b", 1): [9.0, 18.0], ("b", 5): [27.0, 52.0], ("b", "x"): [6.0, 4.0],
}  # fmt: skip
"""(row, column) -> the numbers of two seeds."""


def test_leads_and_gains_are_taken_seed_by_seed() -> None:
    assert lead(SCORES, "a", "b", 5) == [3.0, 8.0]
    assert lead(SCORES, "a", "b", 1, 5) == [2.0, 5.0]
    assert lead(SCORES, "a", "b") == [1.0, 4.0]
    assert column_lead(SCORES, 5, 1, "b") == [18.0, 34.0]
    assert column_lead(SCORES, 5, 1) == [19.0, 37.0]
    assert extremes(SCORES, "a") == (1, 5)
    assert gain(SCORES, "a", "b", *extremes(SCORES, "a")) == [2.0, 6.0]


# the division by classes


def probe_names(sets: Sets) -> list[str]:
    """The classes that are transferred to."""
    return list(sets.probe[0].class_names)


def test_no_image_of_a_class_that_is_kept_away_is_trained_on(tmp_path: Path) -> None:
    sets = divide("digits", tmp_path, seed=3)
    names = set(probe_names(sets))
    assert len(names) == 2 and sets.probe[1].class_names == sets.probe[0].class_names
    up, down = (open_data(sets.path(name), seed=0) for name in ("up", "down"))
    trained, moved = ({part.class_names[label] for label in np.unique(part.labels)} for part in (up.train, down.train))
    assert trained == set(up.train.class_names) - names and len(trained) == 8 and moved == names
    digits = open_data("digits").train
    everything = {digits.class_names[label] for label in digits.labels}
    assert trained | names == everything
    parts = [up.train, up.test, down.train, down.test]
    ids = [{part.id(i) for i in range(len(part))} for part in parts if part is not None]
    assert len(ids) == 4 and all(ids) and len(set.union(*ids)) == sum(map(len, ids))
    again = divide("digits", tmp_path, seed=3)
    assert Path(again.path("up")).read_bytes() == Path(sets.path("up")).read_bytes()
    both = place(StudyRequest("digits", seeds=(3, 4)), tmp_path / "b")  # each seed draws classes of its own
    assert probe_names(both[3]) == probe_names(sets) != probe_names(both[4])


def test_features_are_measured_on_the_data_set_that_a_cell_names(tmp_path: Path) -> None:
    sets = divide("digits", tmp_path, more=["digits"])
    assert sets.given.sets == ("down", "digits")
    own, given = (Probes(sets, on).images[0] for on in ("down", "digits"))
    assert own is sets.probe[0] and len(own.class_names) == 2 and len(given.class_names) == 10


def test_few_classes_are_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / "d" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / "d" / name / f"{i}.png")
    with pytest.raises(DataError, match=r"has 3 classes\. A study needs at least 4"):
        divide(str(tmp_path / "d"), tmp_path / "x")


# a study end to end


def short(run: Run) -> Run:
    """A run of two steps of 16 images, measured at the end."""
    run = replace(run, duration=Steps(2), batch_size=16, precision="float32", workers=0, device="cpu")
    return replace(run, evaluate_every=Percent(100))


def tiny(broken: bool = False) -> Study:
    """Two networks of a few thousand parameters; with `broken` a third that cannot be trained."""

    def cells(given: LaptopData) -> Sequence[Cell]:
        found = []
        for row, depth in (("shallow", 1), ("deep", 2)):
            run = short(pre_training("ViT-64/8", width=16, heads=2, mlp_dim=16, depth=depth))
            found.append(Cell(row, depth, Stage(run)))
            found.append(Cell(row, depth, Stage(run), metric="parameters"))
            tuned = fine_tuning(Stage(run), "down", side=16)
            rates = [replace(short(tuned.run), optim=replace(tuned.run.optim, lr=lr)) for lr in (1e-3, 1e-4)]
            first, second = (replace(tuned, run=run) for run in rates)
            found.append(Cell(row, depth, first, [second], metric="top-1", what="fine-tuned"))
        if broken:
            run = found[0].stage.run
            stage = Stage(replace(run, optim=replace(run.optim, lr=1e30, clip=None)))
            tuned = replace(fine_tuning(stage, "down"), run=short(fine_tuning(stage, "down").run))
            found += [Cell("broken", 3, stage), Cell("broken", 3, tuned, metric="top-1", what="fine-tuned")]
        return found

    claim = Claim("Deep is better.", lambda scores: minus(scores, ("deep", 2), ("shallow", 1)))
    return Study("figure4", "Figure 0", "a test", "blocks", cells, lambda: [], (claim,))


@pytest.mark.parametrize(
    ("peak", "tried"),
    [
        (2e-3, [1e-3, 2e-3, 4e-3]),  # inside
        (1e-2, [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]),  # beyond the end, until accuracy falls again
        (1e-4, [1e-3, 2e-3, 4e-3, 5e-4, 2.5e-4, 1.25e-4]),  # at most three more
    ],
)
def test_a_best_rate_at_the_end_of_the_rates_extends_them(
    peak: float, tried: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    class Curve:
        """Trains nothing: the loss grows with the distance to the best rate."""

        def __init__(self) -> None:
            self.outcomes: dict[Any, Outcome] = {}

        def late(self) -> bool:
            return False

        def train(self, wanted: Any) -> None:
            for _, stage, seed in wanted:
                nll = abs(math.log10(stage.run.optim.lr / peak))
                self.outcomes[stage, seed] = Outcome("done", dev={"nll": nll})

    run = pre_training("ViT-64/8")
    stages = [Stage(replace(run, optim=replace(run.optim, lr=lr))) for lr in (1e-3, 2e-3, 4e-3)]
    training = Curve()
    ((best, *_),) = settled([Cell("a", 1, stages[0], stages[1:])], training, 0, further=3).values()  # type: ignore[arg-type]
    rates = [stage.run.optim.lr for stage, _ in training.outcomes]
    assert rates == pytest.approx(tried)
    assert best.run.optim.lr == pytest.approx(min(tried, key=lambda rate: abs(math.log10(rate / peak))))
    assert ("first or the last" in caplog.text) == (peak == 1e-4)


def test_a_training_that_diverges_with_a_further_seed_gives_way_to_the_next_best() -> None:
    class Fragile(Training):
        """Trains nothing: the second seed diverges at the highest rate."""

        def train(self, wanted: Any) -> None:
            for _, stage, seed in wanted:
                lost = seed == 1 and stage.run.optim.lr == 4e-3
                nll = 1 / stage.run.optim.lr
                self.outcomes[stage, seed] = Outcome("diverged" if lost else "done", dev={"nll": nll})

    stages = at_rates(Stage(pre_training("ViT-64/8")), 1e-3, 2e-3, 4e-3)
    cell, training = best_of("a", 1, stages), Fragile({}, Path(), here)
    ranks = settled([cell], training, 0, further=0)
    assert ranks == {id(cell): stages[::-1]}
    counts = repeated([(cell, seed) for seed in (0, 1, 2)], ranks, training)
    assert [stage.run.optim.lr for stage in counts.values()] == [4e-3, 2e-3, 4e-3]
    assert (stages[1], 2) not in training.outcomes


def test_methods_that_are_compared_train_networks_of_one_size() -> None:
    """All methods of self-supervision; a tokenizer is no network of this kind."""
    stages = {cell.row: cell.stage for cell in study_named("self-supervision").cells("laptop")}
    configs = [config_of(stage.start or stage) for stage in stages.values()]
    assert len(stages) == 9
    assert {(one.width, one.heads, one.mlp_dim, one.depth) for one in configs} == {(64, 2, 256, 6)}  # type: ignore[union-attr]


class Counting:
    """Trains in this process and remembers what it trained."""

    def __init__(self) -> None:
        self.trained: list[Trial] = []

    def __call__(self, trials: Sequence[Trial]) -> Generator[tuple[Trial, Outcome], None, None]:
        for each in here(trials):
            self.trained.append(each[0])
            yield each


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counting, Tables, dict[str, Any]]:
    """A study of two networks and two seeds, trained on digits."""
    folder, first = tmp_path_factory.mktemp("study"), Counting()
    return folder, first, *run_study(tiny(), StudyRequest("digits"), folder, first)


@pytest.mark.train
def test_a_small_study_end_to_end_and_again(
    finished: tuple[Path, Counting, Tables, dict[str, Any]], tmp_path: Path
) -> None:
    folder, first, tables, about = finished
    tuned = [trial for trial in first.trained if trial.run.weights is not None]
    rates = [trial.run.optim.lr for trial in tuned if trial.run.seed == 0]
    assert len(rates) >= 4 and sum(trial.run.seed for trial in tuned) == 2  # the first seed chooses the rate for all
    assert len(first.trained) == len(tuned) + 4 and not tables.missing
    second = Counting()
    again, _ = run_study(tiny(), StudyRequest("digits"), folder, second)
    assert second.trained == []  # nothing finished is trained again
    assert [table.means for table in again.tables] == [table.means for table in tables.tables]
    files = write(tables, about, tmp_path)
    assert [file.suffix for file in files] == [".json", ".csv", ".md", ".png", ".pdf"]
    written = json.loads(files[0].read_text())
    for name, rows in written["tables"].items():
        for row in rows:
            cells = [cell for cell in written["cells"] if (cell["table"], cell["row"]) == (name, row["row"])]
            values = [cell["score"] for cell in cells]
            assert row["mean"] == pytest.approx(np.mean(values))
            assert row["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert written["claims"][0]["claim"] == "Deep is better."
    assert "| shallow |" in files[2].read_text() and files[3].read_bytes().startswith(b"\x89PNG")
    page = write_gallery(tmp_path).read_text()
    assert "Deep is better." in page and "data:image/png;base64" in page and page.count("<table>") == 3


@pytest.mark.train
def test_known_numbers_are_not_measured_again(
    finished: tuple[Path, Counting, Tables, dict[str, Any]], tmp_path: Path
) -> None:
    _, _, tables, about = finished
    earlier = [str(write(tables, about, tmp_path)[0])]
    more, longer = Counting(), Counting()
    asked = StudyRequest("digits", seeds=(0, 1, 2), known=earlier)
    found, _ = run_study(tiny(), asked, tmp_path / "more", more)
    assert [trial.run.seed for trial in more.trained] == [2] * 4  # a network of each kind, fine-tuned at the known rate
    assert not found.missing
    before = {(result.cell.table, result.cell.row, result.seed): result.score for result in tables.results}
    after = {(result.cell.table, result.cell.row, result.seed): result for result in found.results}
    assert before == {place: after[place].score for place in before} and len(after) == len(before) * 3 / 2
    rates = {(place[:2], one.rate) for place, one in after.items()}
    assert len(rates) == len(after) / 3  # every cell has the same rate with all seeds
    others = replace(asked, seeds=(0,), limit_images=128)
    changed, _ = run_study(tiny(), others, tmp_path / "longer", longer)
    assert len(longer.trained) >= 4 and not {one.key for one in changed.results if one.run} & {
        one.key for one in tables.results
    }


@pytest.mark.train
def test_a_score_is_that_of_the_verb_on_the_same_images(
    finished: tuple[Path, Counting, Tables, dict[str, Any]], tmp_path: Path
) -> None:
    """Against `vitrail probe fewshot --features`, with features of `vitrail.load` and a card's own preprocessing."""
    train, test = divide("digits", tmp_path / "again", 0).probe
    result = finished[2].results[0]
    model = vitrail.load(finished[0] / result.run / "model" / "last")
    prepare = model.card.transform()
    arrays: dict[str, np.ndarray] = {"class_names": np.array(train.class_names)}
    for name, part in (("train", train), ("test", test)):
        images = torch.stack([prepare(Image.fromarray(part[i].image)) for i in range(len(part))])
        with torch.no_grad():
            arrays[f"{name}_features"] = model.features(images).numpy()
        arrays[f"{name}_labels"] = part.labels
        arrays[f"{name}_ids"] = np.array([part.id(i) for i in range(len(part))])
    np.savez(tmp_path / "f.npz", **arrays)
    argv = ["probe", "fewshot", "--features", str(tmp_path / "f.npz"), "--shots", "5", "--seeds", "10", "--json"]
    assert result.score == pytest.approx(100 * shown(argv)["results"][0]["top1"], abs=0.5)


@pytest.mark.train
def test_a_fine_tuned_score_is_that_of_evaluate(
    finished: tuple[Path, Counting, Tables, dict[str, Any]], tmp_path: Path
) -> None:
    sets = divide("digits", tmp_path, 0)
    result = next(one for one in finished[2].results if one.cell.table == "fine-tuned")
    argv = [
        "evaluate",
        str(finished[0] / result.run / "model" / "last"),
        sets.path("down"),
        "--split",
        "test",
        "--json",
    ]
    one_image = 100 / 72  # a near tie may fall to the other class, because evaluate's batches round differently in bf16
    assert result.score == pytest.approx(100 * shown(argv)["top1"], abs=1.01 * one_image)


@pytest.mark.train
def test_accuracy_by_the_labels_of_real_is_that_of_evaluate(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "imagenet-val20"
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "imagenet").symlink_to(folder)
    torch.manual_seed(0)
    network = vitrail.create("Ti/16", classes=1000, image_size=32, width=16, depth=1, heads=2, mlp_dim=16)
    vitrail.save(network, tmp_path / "run" / "model" / "last")
    sets = published_sets(str(tmp_path / "sets"))
    number = Probes(sets).real(tmp_path / "run" / "model" / "last")
    argv = ["evaluate", str(tmp_path / "run" / "model" / "last"), str(folder), "--protocol", "real", "--json"]
    assert number == pytest.approx(shown(argv)["top1"], abs=1e-9)


def shown(argv: list[str]) -> Any:
    """The JSON that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(argv) == 0
    return json.loads(out.getvalue())


@pytest.mark.train
def test_a_cell_that_fails_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    tables, about = run_study(tiny(broken=True), StudyRequest("digits", seeds=(0,)), tmp_path, here)
    assert {result.cell.row for result in tables.missing} == {"broken"}
    assert [len(table.scores) for table in tables.tables] == [2, 2, 2]
    text = write(tables, about, tmp_path)[2].read_text()
    assert "Changed" not in text and "seed 0: diverged" in text and "what it starts from is missing: diverged" in text


@pytest.mark.train
def test_when_the_minutes_are_over_what_is_finished_is_shown(tmp_path: Path) -> None:
    counting = Counting()
    tables, _ = run_study(tiny(), StudyRequest("digits", seeds=(0,), minutes=1e-3), tmp_path, counting)
    assert len(counting.trained) < 6 and tables.missing and tables.missing[0].reason == "not trained yet"
    tables, _ = run_study(tiny(), StudyRequest("digits", seeds=(0,)), tmp_path, counting)
    assert not tables.missing and len({trial.key for trial in counting.trained}) == len(counting.trained) >= 6


@pytest.mark.kill
def test_a_study_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    """It is killed in its first training and after it; no cell that was finished is trained a second time."""
    words = ["study", "three-table3", "--rows", "width 128, 6x1", "--data", "digits", "--limit-steps", "2"]
    words += ["--limit-images", "64", "--seeds", "1", "--parallel", "0", "--out", "s"]

    def finished() -> dict[Path, float]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*/outcome.json")}

    def begun() -> bool:
        return any((tmp_path / "s").glob("*/run.yaml"))

    for reached in (begun, finished):
        before, command = finished(), start(*words, cwd=tmp_path)
        while not reached():
            assert command.process.exitcode is None, command.err
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        command.process.kill()
        command.process.join()
        now = finished()
        assert command.process.exitcode == -signal.SIGKILL and before.items() <= now.items()
    last = run(*words, cwd=tmp_path)
    assert last.process.exitcode == 0 and now.items() <= finished().items(), last.err
    cells = study_named("three-table3").cells("laptop")
    trained = {cell.at for cell in cells if cell.row == "width 128, 6x1" and cell.metric not in COUNTED}
    assert len(finished()) == len(trained) == 2
    assert json.loads((tmp_path / "s" / "three-table3.json").read_text())["cells"]


# the paper's scale


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets of the papers' names, each of two classes of small images."""
    root = tmp_path_factory.mktemp("sets")
    generator = np.random.default_rng(0)
    for name in ("imagenet", "flowers102"):
        for split, count in (("train", 12), ("val", 4)):
            for label in ("cat", "dog"):
                folder = root / name / split / label
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.mark.full_size
def test_a_cell_of_the_papers_grid_runs_shrunk(imagenet: Path, tmp_path: Path) -> None:
    """Pre-training, transfer, and the table. Data sets that are absent are named, the others run."""
    argv = ["study", "three-table6", "--scale", "paper", "--rows", "ti16, attention", "--data", str(imagenet)]
    argv += ["--parallel", "0", "--limit-images", "8", "--limit-steps", "1", "--seeds", "1", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*argv, "--out", str(tmp_path / "s")]) == 1  # some data are absent
    cells = json.loads(out.getvalue())["cells"]
    assert {cell["at"] for cell in cells if cell["score"] is not None} == {"flowers102"}
    assert "Changed: at most 8 images; 1 step each." in (tmp_path / "s" / "three-table6.md").read_text()
    reasons = {cell["at"]: cell["reason"] for cell in cells if cell["score"] is None}
    assert "the data set cars is absent" in reasons["cars"] and len(reasons) == 5


# the verb


def test_the_list_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert cli.main(["study", "figure9", "--scale", "paper", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        "class token, 0.0008: training on jft300m" in shown
        and "668.2 exaFLOPs" in shown
        and "jft300m: never published" in shown
    )
    assert cli.main(["study", "figure9", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 9
    assert cli.main(["study", "figure3", "--dry-run", "--rows", "ViT-128/8"]) == 0
    assert "fine-tuning on down" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "figur4", "data": "digits"}, "Did you mean 'figure4'"),
        ({"name": "figure4"}, "no images are given"),
        ({"name": "figure4", "scale": "paper"}, "no folder of data sets is given"),
        ({"name": "figure4", "data": "digits", "scale": "paper"}, "no folder with the name of a data set"),
        ({"name": "figure4", "data": "digits", "rows": ("B/16",)}, "has no row 'B/16'. Valid: "),
        ({"name": "report", "out": "nowhere"}, "no finished study"),
        ({"name": "figure4", "data": "digits", "known": ("nowhere.json",)}, "nowhere.json"),
        ({"name": "figure4", "data": "digits", "seeds": 0}, "seeds is 0"),
    ],
)
def test_what_is_wrong_is_said(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vitrail.study(**asked)  # type: ignore[arg-type]
