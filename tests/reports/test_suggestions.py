"""What the report suggests, from made-up results: each rule where it holds, and where it does not."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import refused
from run_folders import answers

from vitrail.data.images.whole import parts_shown
from vitrail.data.settings import Data, Preprocess
from vitrail.durations import Epochs
from vitrail.evaluation.answers import AnswerResults
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.pixel_scores import PixelResults
from vitrail.objective.settings import MAE, DINOv2, Segmentation, SeveralAnswers, Supervised, Tokenizer
from vitrail.reports.run_record import RunRecord
from vitrail.reports.suggestions import MOST, suggestions
from vitrail.training.run import Optim, Run

FINISHED = {"ended": "all steps done", "steps": 60}
FLAT = [0.6, 0.73, 0.72, 0.72, 0.72]


def record(
    evaluation: Classification | None = None,
    accuracy: list[float] = FLAT,
    losses: list[float] | None = None,
    **more: Any,
) -> RunRecord:
    run = more.pop("run", Run(data=Data("my photos/"), duration=Epochs(20)))
    losses = losses or [1.0] * len(accuracy)
    facts = {"result": FINISHED, "data": {"images": {"train": 50_000}}, **more}
    lines = [
        {"step": 10 * n, "top1": top1, "nll": nll} for n, (top1, nll) in enumerate(zip(accuracy, losses, strict=True))
    ]
    found = evaluation or answers(["a", "b", "c", "d"], 300)
    return RunRecord(Path("runs/train 1"), run, facts, found.class_names, lines, found, None)


def said(found: RunRecord, image_size: int | None = 32) -> str:
    return " | ".join(f"{one.reason} {one.command}" for one in suggestions(found, image_size))


def test_a_good_run_is_used_and_looked_into() -> None:
    text = said(record())
    assert (
        "vitrail predict 'runs/train 1' new-photos/ --out classes.csv" in text
        and "vitrail inspect 'runs/train 1'" in text
    )
    assert len(suggestions(record(), 32)) == 2


def test_a_run_that_has_not_ended_is_resumed_first() -> None:
    first = suggestions(record(result=None), 32)[0]
    assert first.command == "vitrail train --resume 'runs/train 1'"


@pytest.mark.parametrize(
    ("images", "side", "weights", "expected"),
    [(500, 64, None, True), (50_000, 64, None, False), (500, 8, None, False), (500, 64, "vit.npz", False)],
)
def test_pretrained_weights_for_few_photographs(images: int, side: int, weights: str | None, expected: bool) -> None:
    found = record(data={"images": {"train": images}}, run=Run(data=Data("photos"), weights=weights))
    assert ("on 500 images. Weights that" in said(found, side)) == expected
    assert ("vitrail finetune photos |" in said(found, side)) == expected


def test_commands_open_the_data_as_the_run_did() -> None:
    data = Data("my photos", label_from="prefix", exclude=("*bad*", "x.csv"))
    found = record(data={"images": {"train": 500}}, run=Run(data=data, duration=Epochs(20)))
    command = "vitrail finetune 'my photos' --data.label-from prefix --data.exclude '*bad*' --data.exclude x.csv"
    assert f"{command} |" in said(found, 64) and refused(shlex.split(command)) == ""


def test_much_that_is_cut_off_is_shown() -> None:
    way, warning = parts_shown([(100, 300)] * 3, Preprocess((224, 224)))
    assert way and "cut off" in warning
    found = record(data={"images": {"train": 50_000}, "notes": ["3 images", f"warning: {warning}"]})
    assert "config.yaml --preprocess.resize pad" in said(found) and "of an image's pixels are cut off. Show" in said(
        found
    )
    assert "resize pad" not in said(record(data={"images": {"train": 50_000}, "notes": ["3 images"]}))


FLOORS = {"a linear classifier": {"top1": 0.73}}


@pytest.mark.parametrize(("weights", "command"), [(None, "finetune photos"), ("vit.npz", "train --config")])
def test_a_network_below_its_floor_has_not_learned_enough(weights: str | None, command: str) -> None:
    run = Run(data=Data("photos"), weights=weights, duration=Epochs(40))
    bad = record(run=run, result={**FINISHED, "best": {"top1": 0.72}, "floors": FLOORS})
    first = suggestions(bad, 64)[0]
    assert first.reason.startswith("The network ")
    assert bad.shortfall in first.reason and "new-photos" not in said(bad, 64)
    assert (first.command or "").startswith(f"vitrail {command}")
    good = record(run=run, result={**FINISHED, "best": {"top1": 0.72}, "test": {"top1": 0.74}, "floors": FLOORS})
    assert "not learned enough" not in said(good, 64)


def test_a_network_without_mistakes_is_used() -> None:
    rising = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    perfect = said(record(accuracy=rising, result={**FINISHED, "test": {"top1": 1.0}}))
    assert perfect.startswith("Name the classes") and "twice" not in perfect


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            "/usr/bin/python -m vitrail train my/ --time-limit 3min --seed 1",
            "vitrail train my/ --seed 1 --time-limit 6",
        ),
        ("vitrail finetune 'my photos' --time-limit=3", "vitrail finetune 'my photos' --time-limit 6"),
        ("vitrail train --resume runs/a", "vitrail train --config 'runs/train 1'/config.yaml --time-limit 6"),
        ("python train.py", "vitrail train --config 'runs/train 1'/config.yaml --time-limit 6"),
        ("vitrail 'train", "vitrail train --config 'runs/train 1'/config.yaml --time-limit 6"),
    ],
)
def test_what_the_time_decided_is_decided_again(typed: str, expected: str) -> None:
    limited = Run(data=Data("photos"), duration=None, time_limit=3, image_size=32)
    found = record(accuracy=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9], run=limited, command=typed)
    assert expected in [one.command for one in suggestions(found, 8)]


def test_rising_accuracy_asks_for_twice_the_time() -> None:
    rising = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert "--duration '40 epochs'" in said(record(accuracy=rising))
    limited = Run(data=Data("photos"), time_limit=7.5)
    assert "--time-limit 15" in said(record(accuracy=rising, run=limited))
    assert "twice as long" not in said(record(accuracy=[*rising, 0.85]))  # the best is not at the end
    assert "twice as long" not in said(record(accuracy=rising, result={"ended": "early stop"}))
    assert "twice as long" not in said(record(accuracy=[0.5, 0.7, 0.71, 0.715, 0.718, 0.72]))  # within the error


@pytest.mark.parametrize(("passes", "weights", "expected"), [(8, None, True), (30, None, False), (8, "vit.npz", False)])
def test_few_passes_from_scratch(passes: float, weights: str | None, expected: bool) -> None:
    run = Run(data=Data("photos"), weights=weights, duration=Epochs(passes))
    text = said(record(run=run, result={**FINISHED, "epochs": passes}))
    assert ("saw each image only 8 times" in text and "--duration '16 epochs'" in text) == expected


def test_a_loss_that_rises_asks_for_no_longer_training() -> None:
    run = Run(data=Data("photos"), duration=Epochs(8))
    text = said(record(losses=[2.0, 1.0, 1.05, 1.3, 1.5], run=run, result={**FINISHED, "epochs": 8}))
    assert "a longer training does not" in text and "Train twice as long" not in text


def test_a_loss_that_rises_asks_for_more_images() -> None:
    assert "More images help" in said(record(losses=[2.0, 1.0, 1.05, 1.3, 1.5]))
    assert "More images help" not in said(record(losses=[2.0, 1.5, 1.2, 1.0, 1.05]))
    better = record(accuracy=[0.5, 0.6, 0.7, 0.75, 0.8], losses=[2.0, 1.0, 1.05, 1.3, 1.5])
    assert "More images help" not in said(better)  # more confident, but right more often


def imbalanced(rare_right: bool) -> Classification:
    """Class a has 200 images, class b 10; all of a are right."""
    label = np.array([0] * 200 + [1] * 10)
    guess = label if rare_right else np.zeros_like(label)
    top = np.stack([guess, 1 - guess], 1)
    share = np.tile(np.float32([0.7, 0.3]), (210, 1))
    loss = np.where(guess == label, 0.36, 1.2)
    return Classification(["a", "b"], np.arange(210), label, top, share, loss, np.full(210, 0.2))


def test_rare_classes_that_fail() -> None:
    long = dict(result={**FINISHED, "steps": 2000})
    assert "--objective.logit-adjustment 1" in said(record(imbalanced(False), **long))
    assert "--objective.logit-adjustment 1" not in said(record(imbalanced(True), **long))
    sigmoid = Run(data=Data("photos"), objective=Supervised(loss="sigmoid"))
    few, short = dict(**long, data={"images": {"train": 1_210}}), {}
    for where in (dict(**long, run=sigmoid), few, short):  # where it was not measured to help
        text = said(record(imbalanced(False), **where))
        assert "--metric.name balanced_accuracy" in text and "logit-adjustment" not in text
    chosen = Run(data=Data("photos"), metric=Metric("balanced_accuracy"))
    assert "Rare classes" not in said(record(imbalanced(False), run=chosen))


def test_nothing_better_is_proposed_at_100_percent() -> None:
    found = answers(["a", "b", "c", "d"], 300)
    top = np.stack([found.label, (found.label + 1) % 4, (found.label + 2) % 4, (found.label + 3) % 4], 1)
    rising = [0.4, 0.5, 0.6, 0.7, 0.8, 1.0]
    text = said(
        record(replace(found, top=top[:, : found.top.shape[1]]), accuracy=rising, data={"images": {"train": 500}}), 224
    )
    assert "twice as long" not in text and "finetune" not in text and "vitrail predict" in text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/env/bin/vitrail train 'my photos/' --time-limit 3min --seed 2", "vitrail train 'my photos/' --seed 2"),
        ("/env/bin/python -m vitrail finetune photos --time_limit=3 --from x", "vitrail finetune photos --from x"),
        ("vitrail train photos --config short.yaml", "vitrail train photos --config short.yaml"),
        ("train.py photos", "vitrail train --config 'runs/train 1'/config.yaml"),
        ("vitrail train --resume runs/train-1", "vitrail train --config 'runs/train 1'/config.yaml"),
        ("vitrail train photos --resume=auto", "vitrail train --config 'runs/train 1'/config.yaml"),
    ],
)
def test_twice_the_time_does_not_repeat_what_a_short_time_decided(command: str, expected: str) -> None:
    limited = Run(data=Data("my photos/"), duration=None, time_limit=3, image_size=32, batch_size=16)
    rising = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert f"{expected} --time-limit 6" in said(record(accuracy=rising, run=limited, command=command))


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ("time limit", "vitrail train photos --time-limit 6"),
        ("all steps done", "vitrail train --config 'runs/train 1'/config.yaml --duration '40 epochs' --time-limit 6"),
    ],
)
def test_twice_as_long_is_twice_what_ended_the_run(ended: str, expected: str) -> None:
    both = Run(data=Data("photos"), duration=Epochs(20), time_limit=3)
    rising, typed = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "vitrail train photos"
    found = record(accuracy=rising, run=both, command=typed, result={**FINISHED, "ended": ended})
    assert expected in [one.command for one in suggestions(found, 8)]


def test_commands_for_others_name_what_they_hide() -> None:
    run = Run(data=Data("/data/my photos"), duration=Epochs(20))
    found = replace(record(run=run, directory="/home/me/work"), folder=Path("/data/runs/t-1"))
    for command, expected in (
        ("evaluate /data/runs/t-1 '/data/my photos' --out predictions/", "evaluate RUN DATA --out predictions/"),
        ("train --config /data/runs/t-1/config.yaml", "train --config RUN/config.yaml"),
        ("evaluate /data/runs/t-12 --out /x/y", "evaluate FOLDER/t-12 --out FOLDER/y"),
    ):
        assert found.runnable(f"(vitrail {command})") == f"(vitrail {expected})"
    inside = replace(found, folder=Path("/home/me/work/runs/t 1"))
    assert inside.runnable("vitrail inspect '/home/me/work/runs/t 1'") == "vitrail inspect 'runs/t 1'"
    assert (found.shareable().folder, inside.shareable().folder) == (Path("RUN"), Path("runs/t 1"))


def test_a_fine_tuned_network_gets_company() -> None:
    fine_tuned = Run(data=Data("photos"), weights="vit.npz", optim=Optim(lr=3e-4))
    found = record(run=fine_tuned)
    assert "vitrail train --config 'runs/train 1'/config.yaml --optim.lr 0.00015" in said(found)
    assert "vitrail weights average 'runs/train 1' OTHER-RUN --out soup/" in said(found)
    assert len(suggestions(found, 32)) == MOST
    bad = record(run=fine_tuned, result={**FINISHED, "best": {"top1": 0.72}, "floors": FLOORS})
    assert "weights average" not in said(bad)


def test_certain_mistakes_are_looked_at() -> None:
    found = answers(["a", "b", "c", "d"], 300)
    probability = found.probability.copy()
    probability[~found.correct, 0] = 0.95
    assert "wrong predictions were made with a probability of at least 90%" in said(
        record(replace(found, probability=probability))
    )
    probability[~found.correct, 0] = 0.5
    assert "at least 90%" not in said(record(replace(found, probability=probability)))


def test_one_pair_of_classes() -> None:
    found = answers(["a", "b", "c", "d"], 300)
    label, top = found.label.copy(), found.top.copy()
    for row in np.flatnonzero(~found.correct):
        label[row], top[row] = 2, [3, 2, 1, 0]
    wrong = int((~found.correct).sum())
    text = said(record(replace(found, label=label, top=top)))
    assert f"{wrong} of the {wrong} mistakes are images of 'c' that are taken for 'd'" in text
    command = "vitrail finetune 'my photos/' --from 'runs/train 1' --classes merge c=d"
    assert command in text and refused(shlex.split(command)) == ""
    assert "taken for" not in said(record(found))


def test_old_classes_that_were_forgotten_need_images() -> None:
    run = Run(data=Data("new"), weights="runs/old 1", classes=("add",))
    for now, expected in ((0.5, True), (0.59, False)):
        result = {**FINISHED, "before": {"old_top1": 0.6}, "best": {"old_top1": now}}
        text = said(record(run=run, result=result))
        assert ("right less often than then: 50.0%, before 60.0%" in text) == expected
        assert ("vitrail finetune BOTH/ --from 'runs/old 1' --classes add" in text) == expected


def test_what_has_no_suggestions() -> None:
    nothing = replace(record(), results=None)
    assert suggestions(nothing, 32) == [] and suggestions(replace(record(), run=None), 32) == []
    assert suggestions(replace(record(), run=Run(objective=Tokenizer())), 32) == []
    assert suggestions(record(run=Run(objective=MAE()), result={}), 32) == []


@pytest.mark.parametrize(("image_size", "recipe"), [(32, " --recipe finetune-small"), (224, ""), (None, "")])
def test_a_network_without_classes_is_fine_tuned_next(image_size: int | None, recipe: str) -> None:
    (only,) = suggestions(record(run=Run(objective=MAE())), image_size)
    assert only.command == f"vitrail finetune labelled/ --from 'runs/train 1'{recipe}"
    assert refused(shlex.split(only.command)) == ""


def test_features_that_learning_on_made_worse_are_told() -> None:
    run = Run(objective=DINOv2(gram_weight=2.0), weights="vitrail/tiny", optim=Optim(lr=1e-3))
    for last, command in (
        (0.6, "vitrail train --config 'runs/train 1'/config.yaml --lr 0.00025"),
        (0.79, "vitrail finetune labelled/ --from 'runs/train 1'"),
    ):
        measured = [{"step": 0, "knn": 0.8}, {"step": 5, "knn": 0.9}, {"step": 9, "knn": last}]
        (only,) = suggestions(replace(record(run=run), metrics=measured), 128)
        assert only.command == command
        assert refused(shlex.split(command)) == ""
        assert ("80.0% of the validation images were right at the start, and 60.0% are now" in only.reason) == (
            last == 0.6
        )


@pytest.mark.full_size
def test_there_are_at_most_three_and_every_command_is_one() -> None:
    records = [
        record(result=None, data={"images": {"train": 500}}, accuracy=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9]),
        record(imbalanced(False), losses=[2.0, 1.0, 1.05, 1.3, 1.5]),
        record(),
    ]
    found = [suggestions(one, 224) for one in records]
    assert max(map(len, found)) == MOST
    commands = [one.command for some in found for one in some if one.command]
    assert len(commands) > 6 and [refused(shlex.split(command)) for command in commands] == [""] * len(commands)


def test_an_answer_that_is_far_behind_gets_more_weight() -> None:
    names = ["a", "b", "c", "d"]
    good, other = answers(names, 300), answers(names, 300, seed=1)
    poor = replace(good, label=(good.label + 1) % 4)
    for second, behind in ((other, False), (poor, True)):
        outputs = [f"{answer}: {name}" for answer in ("kind", "its age") for name in names]
        found = AnswerResults(outputs, {"kind": good, "its age": second}, {"kind": 1.0, "its age": 1.0})
        text = suggestions(replace(record(), results=found), 32)
        assert len(text) == behind
        if behind:
            assert "'its age' is far behind the others" in text[0].reason
            words = shlex.split(text[0].command)
            assert words[-2:] == ["--objective.answer-weights", "its age=3"] and not refused(words)
    weighted = record(run=Run(objective=SeveralAnswers(answer_weights=("kind=0.5", "its age=4"))))
    words = shlex.split(suggestions(replace(weighted, results=found), 32)[0].command)
    assert words[-2:] == ["kind=0.5", "its age=12"] and not refused(words)  # the others stay


def of_masks(right: float, scores: list[float], **settings: Any) -> list[str]:
    """Suggestions for 100 pixels of two classes, 60 of the first, of which a share is right, and the curve of mIoU."""
    good = [round(60 * right), round(40 * right)]
    pixels = np.array([[good, [60, 40], [good[0] + 40 - good[1], good[1] + 60 - good[0]]]])
    results = PixelResults(["road", "sky"], np.arange(1), pixels, np.ones(1))
    run = Run(data=Data("scenes/"), objective=Segmentation(), duration=Epochs(20), **settings)
    lines = [{"step": 10 * n, "miou": score, "loss": 1.0} for n, score in enumerate(scores)]
    found = replace(record(run=run), results=results, metrics=lines)
    return [f"{one.reason} {one.command}" for one in suggestions(found, 48)]


@pytest.mark.parametrize(("size", "finer"), [(64, "128"), ((48, 64), "96 128")])
def test_masks_are_learned_again_with_more_pixels_and_the_same_settings(size: Any, finer: str) -> None:
    larger, use = of_masks(0.8, [0.5, 0.7, 0.7, 0.7], image_size=size)
    assert f"vitrail train --config 'runs/train 1'/config.yaml --image-size {finer}" in larger
    assert "vitrail predict 'runs/train 1' photos/ --out masks/" in use


def test_masks_that_were_not_learned_or_still_get_better_are_learned_for_longer() -> None:
    failed = of_masks(0.5, [0.3, 0.3, 0.3, 0.3])
    assert "not better than one that always says the most frequent class" in failed[0] and len(failed) == 2
    rising = of_masks(0.8, [0.1, 0.3, 0.5, 0.6])
    assert "from 50.0% to 60.0% in the last quarter" in rising[0] and len(rising) == 3
    assert all(
        "vitrail train --config 'runs/train 1'/config.yaml --duration '40 " in one[0] for one in (failed, rising)
    )
