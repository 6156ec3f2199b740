"""Several answers for an image: the sum of the losses, missing answers, and a run from a table to its predictions."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from references import write_answers
from tiny_runs import lines, tiny_run
from torch import Tensor, nn

from vitrail.cli import main
from vitrail.data.labels.numbers import Numbers, TargetScale
from vitrail.data.labels.sets import Answers, LabelSets, Named
from vitrail.data.loading.loader import Batch
from vitrail.data.settings import Augment, Data
from vitrail.errors import DataError, UsageError, WeightsError
from vitrail.evaluation.metric import Metric
from vitrail.evaluation.results import Results
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.answers import SeveralAnswersObjective, weights_of
from vitrail.objective.base import Head, Objective, RunFacts
from vitrail.objective.settings import Regression, SeveralAnswers, Supervised
from vitrail.reports.page import write_report
from vitrail.tasks.catalog import load_results, save_results, task_for, task_of
from vitrail.training.loop import fit
from vitrail.training.run import Run
from vitrail.verbs.network import temperature_of
from vitrail.weights.answer import CardAnswer, Confidences
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.save import save

SCALE = TargetScale((100.0,), (20.0,))
OUTPUTS = {"kind": slice(0, 3), "tags": slice(3, 5), "grams": slice(5, 6)}
COLUMNS = {"kind": slice(0, 1), "tags": slice(1, 3), "grams": slice(3, 4)}
LABELS = torch.tensor(
    [[0, 1, 0, 110], [2, 0, 0, 60], [1, 1, 1, 95], [2, 0, 1, 130], [0, 1, 0, 101], [1, 0, 1, 80]], dtype=torch.float64
)
"""A class of three, two labels, and a number."""


def network(classes: int = 6) -> nn.Module:
    torch.manual_seed(0)
    model = build(ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, patch=4, image_size=(8, 8), classes=classes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def heads(shares: dict[str, float] | None = None) -> list[Head]:
    share = shares or dict.fromkeys(OUTPUTS, 1.0)
    return [
        Head("kind", "classes", 3, share["kind"]),
        Head("tags", "labels", 2, share["tags"]),
        Head("grams", "numbers", 1, share["grams"], SCALE),
    ]


def batch(labels: Tensor = LABELS, rows: list[int] | None = None) -> Batch:
    images = torch.randint(0, 256, (len(LABELS), 3, 8, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    chosen = torch.arange(len(LABELS)) if rows is None else torch.tensor(rows)
    return Batch(images[chosen], labels[chosen], chosen)


class Part(nn.Module):
    """Some outputs of a network, as a network of its own."""

    def __init__(self, model: nn.Module, outputs: slice) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.model(images)[:, self.outputs]
        return found


def alone(model: nn.Module, name: str) -> Objective:
    """The objective of today for one of the answers, with the same rows of the classifier."""
    part = Part(model, OUTPUTS[name])
    if name == "grams":
        return Regression().build(part, RunFacts(scale=SCALE))
    return Supervised(loss="sigmoid" if name == "tags" else "softmax", smoothing=0.1).build(part, RunFacts(classes=3))


def alone_batch(name: str, whole: Batch) -> Batch:
    labels = whole.labels[:, COLUMNS[name]]
    labels = {"kind": labels[:, 0].long(), "tags": labels.to(torch.int8), "grams": labels}[name]
    return Batch(whole.images, labels, whole.index)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    each = zip(found, model.parameters(), strict=True)
    return torch.cat([torch.zeros(own.numel()) if one is None else one.reshape(-1) for one, own in each])


def mean_gradient(model: nn.Module, objective: Objective, *batches: Batch) -> Tensor:
    """As the loop computes it: sums over micro-batches, divided by their common count."""
    parts = [objective(one, step=0) for one in batches]
    return sum(gradient(model, loss) for loss, _, _ in parts) / sum(count for _, count, _ in parts)  # type: ignore[return-value]


def test_the_gradient_is_the_weighted_sum_of_those_of_single_answers() -> None:
    model, weights = network(), {"kind": 2.0, "tags": 1.0, "grams": 0.25}
    settings = SeveralAnswers(answer_weights=("grams=0.25", "kind=2"), smoothing=0.1)
    ours = mean_gradient(model, SeveralAnswersObjective(model, settings, heads()), batch())
    theirs = {name: mean_gradient(model, alone(model, name), alone_batch(name, batch())) for name in OUTPUTS}
    torch.testing.assert_close(ours, sum(weights[name] * theirs[name] for name in OUTPUTS), rtol=1e-5, atol=1e-6)
    assert all(one.norm() > 1e-3 for one in theirs.values())


@pytest.mark.parametrize("name", OUTPUTS)
def test_images_without_an_answer_are_as_if_they_were_not_there(name: str) -> None:
    model, there, labels = network(), [0, 2, 3, 5], LABELS.clone()
    missing = float("nan") if name == "grams" else -1
    labels[[1, 4], COLUMNS[name]] = missing
    for other in OUTPUTS:  # the others are known of no image, and teach nothing
        if other != name:
            labels[:, COLUMNS[other]] = float("nan") if other == "grams" else -1
    shares = {**dict.fromkeys(OUTPUTS, 0.5), name: len(there) / len(LABELS)}
    ours = mean_gradient(
        model, SeveralAnswersObjective(model, SeveralAnswers(smoothing=0.1), heads(shares)), batch(labels)
    )
    theirs = mean_gradient(model, alone(model, name), alone_batch(name, batch(LABELS, there)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_parts_with_different_numbers_of_answers_give_the_gradient_of_the_whole() -> None:
    """Micro-batches, and processes: the first part has no number at all, the last one nothing else."""
    model, labels = network(), LABELS.clone()
    labels[:2, 3], labels[4:, :3], labels[2, 0] = float("nan"), -1, -1
    shares = {"kind": 0.5, "tags": 4 / 6, "grams": 4 / 6}
    objective = SeveralAnswersObjective(model, SeveralAnswers(answer_weights=("tags=3",)), heads(shares))
    whole = mean_gradient(model, objective, batch(labels))
    parts = mean_gradient(model, objective, batch(labels, [0, 1]), batch(labels, [2]), batch(labels, [3, 4, 5]))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    # and the loss is the sum of the means of each answer over the images that have it
    loss, count, metrics = objective(batch(labels), step=0)
    known = {"kind": [0, 1, 3], "tags": [0, 1, 2, 3], "grams": [2, 3, 4, 5]}
    means = {}
    for name, rows in known.items():
        single = Supervised(loss="sigmoid" if name == "tags" else "softmax")
        one = alone(model, name) if name == "grams" else single.build(Part(model, OUTPUTS[name]), RunFacts(classes=3))
        means[name] = one(alone_batch(name, batch(LABELS, rows)), step=0)[0].item() / len(rows)
    assert loss.item() / count == pytest.approx(means["kind"] + 3 * means["tags"] + means["grams"], rel=1e-5)
    assert metrics["tags.loss"].item() / count == pytest.approx(means["tags"], rel=1e-5)


def test_one_class_alone_has_the_very_loss_of_today() -> None:
    model = network(3)
    ours = SeveralAnswersObjective(model, SeveralAnswers(smoothing=0.1), heads()[:1])
    theirs = Supervised(smoothing=0.1).build(model, RunFacts(classes=3))
    loss = ours(Batch(batch().images, LABELS[:, :1], batch().index), step=0)[0]
    assert torch.equal(loss, theirs(alone_batch("kind", batch()), step=0)[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kinds=2", "'kinds=2' is not the weight of an answer. Did you mean 'kind'?"),
        ("kind", "is not the weight of an answer"),
        ("kind=0", "must be a finite number above 0"),
        ("kind=inf", "must be a finite number above 0"),
        ("kind=much", "must be a finite number above 0"),
    ],
)
def test_a_weight_that_is_none(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"objective\.answer_weights") as raised:
        weights_of(SeveralAnswers(answer_weights=(text,)), ["kind", "grams"])
    assert said in str(raised.value)


ONE = Answers(
    {
        "kind": Named(np.array([0, 1, -1]), ["a", "b"]),
        "tags": Named(LabelSets.of([[0], None, []], 2), ["x", "y"]),
        "grams": Named(Numbers(np.array([[1.5], [np.nan], [3.0]])), ["grams"]),
    }
)


def test_a_run_gets_the_objective_and_the_metric() -> None:
    task = task_for(ONE)
    run, why = task.adapt(Run(objective=Supervised(smoothing=0.1)), ONE)
    assert run.objective == SeveralAnswers(answer_weights=("kind=1", "tags=1", "grams=1"), smoothing=0.1)
    assert run.metric.key == "score" and "grams: a number, weight 1, 1 training image without it" in why["answers"]
    assert task.adapt(run, ONE)[0] == run  # a decided run stays
    for answer, name in (("kind", "top1"), ("tags", "map"), ("grams", "r2")):
        assert task.adapt(Run(metric=Metric(answer=answer)), ONE)[0].metric.key == f"{answer}.{name}"
    assert task.adapt(Run(metric=Known(answer="tags")), ONE)[0].metric == Known(answer="tags")
    assert [(head.kind, head.outputs, head.share) for head in task.heads(ONE)] == [
        ("classes", 2, pytest.approx(2 / 3)),
        ("labels", 2, pytest.approx(2 / 3)),
        ("numbers", 1, pytest.approx(2 / 3)),
    ]


class Known(Metric):
    """A metric of one's own."""

    def value(self, found: Results) -> float:
        return float(found.known.sum())


class OfClasses(Known):
    """One that needs a class of each image."""

    def value(self, found: Results) -> float:
        return float(found.class_accuracy.min())  # type: ignore[attr-defined]


REFUSED = {
    "sampler": (Run(data=Data(sampler="balanced")), r"data\.sampler: not possible with several answers"),
    "fold": (Run(data=Data(fold="1/2")), r"data\.fold"),
    "mixup": (Run(augment=Augment(mixup=0.2)), r"augment\.mixup"),
    "teacher": (Run(teacher="other"), "teacher"),
    "probe": (Run(probe_head=True), "probe_head"),
    "knn": (Run(knn=3), "knn"),
    "loss": (Run(objective=Supervised(loss="bce")), r"objective supervised with these settings cannot learn"),
    "regression": (Run(objective=Regression()), "objective regression with these settings cannot learn"),
    "metric": (Run(metric=Metric(name="mae")), r"Name the answer in metric\.answer: 'kind', 'tags', 'grams'"),
    "answer": (Run(metric=Metric(answer="size")), r"metric\.answer is 'size', which is no answer"),
    "own metric": (Run(metric=Known()), r"the metric is .*:Known, a number of one answer. Name the answer in metric"),
    "own metric of none": (Run(metric=Known(answer="size")), r"metric\.answer is 'size', which is no answer"),
    "kind of metric": (Run(metric=Metric(name="map", answer="grams")), "of 'grams' there are 'r2', 'mae', 'rmse'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_several_answers(name: str) -> None:
    run, said = REFUSED[name]
    with pytest.raises(UsageError, match=said):
        task_for(ONE).adapt(run, ONE)


def test_the_objective_without_several_answers() -> None:
    with pytest.raises(UsageError, match="objective answers needs several answers for an image"):
        task_for(np.zeros(3, dtype=np.int64)).adapt(Run(objective=SeveralAnswers()), np.zeros(3, dtype=np.int64))


def test_an_answer_of_which_nothing_can_be_learned() -> None:
    nobody = Answers({**ONE.parts, "size": Named(np.full(3, -1), ["a", "b"])})
    with pytest.raises(DataError, match="nothing to learn of the answer 'size': no training image has it"):
        task_for(nobody).heads(nobody)
    same = Answers({**ONE.parts, "size": Named(np.zeros(3, dtype=np.int64), ["a"])})
    with pytest.raises(DataError, match="the only class is 'a'"):
        task_for(same).heads(same)


def card() -> Card:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=16, patch=4, image_size=(8, 8), classes=6)
    names = ["kind: a", "kind: b", "kind: c", "tags: x", "tags: y", "grams"]
    kind, tags = CardAnswer("kind", "classes", 3), CardAnswer("tags", "labels", 2, (0.4, 0.6))
    answers = [kind, tags, CardAnswer("grams", "numbers", 1, scale=SCALE)]
    return Card(config, names, answers=answers)


def test_a_card_holds_the_answers() -> None:
    ours = card().with_confidence(Confidences(kind=Confidence(2.0)))
    assert Card.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    assert "answers" not in Card(ours.config).to_dict()  # earlier versions read the card
    (_, kind), (outputs, tags), (_, grams) = ours.of_answers().values()
    assert (kind.task, kind.class_names, kind.temperature) == ("classes", ["a", "b", "c"], 2.0)
    assert (tags.task, tags.thresholds, outputs) == ("labels", [0.4, 0.6], slice(3, 5))
    assert (grams.task, grams.scale, grams.class_names) == ("numbers", SCALE, ["grams"])
    assert [one.confidence for one in ours.with_confidence(None).answers] == [None] * 3
    with pytest.raises(WeightsError, match=r"\[3, 2\] outputs for a model with 6 outputs"):
        replace(ours, answers=ours.answers[:2])


def test_the_temperatures_of_all_answers_tell_predictions_apart() -> None:
    ours = card().with_confidence(Confidences(kind=Confidence(2.0), tags=Confidence(0.5)))
    assert temperature_of(SimpleNamespace(card=ours)) == [2.0, 0.5, 1.0]  # type: ignore[arg-type]
    assert temperature_of(SimpleNamespace(card=ours.with_confidence(None))) == [1.0, 1.0, 1.0]  # type: ignore[arg-type]


def test_outputs_that_are_activated_and_back() -> None:
    ours = card().with_confidence(Confidences(kind=Confidence(2.0), tags=Confidence(0.5)))
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = task_of(ours).activated(logits, ours)
    assert torch.equal(found[:, :3], (logits[:, :3] / 2).softmax(1))
    assert torch.equal(found[:, 3:5], (logits[:, 3:5] / 0.5).sigmoid())
    torch.testing.assert_close(found[:, 5], 100 + 20 * logits[:, 5])
    torch.testing.assert_close(task_of(ours).activated(task_of(ours).outputs(found, ours), ours), found)


class Rows:
    """An evaluation of rows: outputs in the place of images."""

    bad: list[object] = []  # noqa: RUF012

    def __init__(self, outputs: Tensor, labels: Tensor) -> None:
        self.batches = [
            Batch(outputs[:4], labels[:4], torch.arange(4)),
            Batch(outputs[4:], labels[4:], torch.arange(4, 6)),
        ]

    def epoch(self, epoch: int) -> object:
        return iter(self.batches)


def test_each_answer_is_measured_on_the_images_that_have_it(tmp_path: Path) -> None:
    labels = LABELS.clone()
    labels[1, 0], labels[4, 1:3], labels[[0, 5], 3] = -1, -1, float("nan")
    outputs = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    names, task = card().class_names, task_of(card())
    found = task.measure(lambda images: images, Rows(outputs, labels), names, card(), temperature=1.0)
    right = [int(outputs[row, :3].argmax()) == int(LABELS[row, 0]) for row in (0, 2, 3, 4, 5)]
    error = [abs(100 + 20 * outputs[row, 5].item() - LABELS[row, 3].item()) for row in (1, 2, 3, 4)]
    numbers = found.metrics()
    assert numbers["kind.top1"] == pytest.approx(np.mean(right)) and numbers["kind.count"] == 5
    assert numbers["grams.mae"] == pytest.approx(np.mean(error)) and numbers["grams.count"] == 4
    assert numbers["tags.count"] == 5 and numbers["count"] == 6
    score = np.mean([numbers["kind.top1"], numbers["tags.map"], max(numbers["grams.r2"], 0)])
    assert numbers["score"] == pytest.approx(score)
    assert Metric(name="mae", answer="grams").measured(found) == numbers["grams.mae"]
    assert Known(answer="tags").measured(found) == 5
    with pytest.raises(UsageError, match=r"OfClasses is not for numbers: .*'class_accuracy'.*for r2, .*prediction"):
        OfClasses(answer="grams").measured(found)

    save_results(tmp_path / "a.npz", found)
    again = load_results(tmp_path / "a.npz", names)
    assert again.metrics() == numbers and again.temperatures == found.temperatures  # type: ignore[attr-defined]

    labels[:, 0] = -1  # an answer that no image has is left out
    found = task.measure(lambda images: images, Rows(outputs, labels), names, card(), temperature=1.0)
    assert [*found.parts] == ["tags", "grams"]
    with pytest.raises(UsageError, match=r"metric\.answer is 'kind', which no image has"):
        Metric(answer="kind").measured(found)


TINY = "--model Ti/8 --vit.width 32 --vit.depth 1 --vit.heads 2 --vit.mlp-dim 32 --augment.crop center"


@pytest.mark.train
def test_a_run_from_a_table_to_its_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_answers(tmp_path)
    flags = f"{TINY} --epochs 25 --evaluate-every 25ep --checkpoint-every 25ep --batch-size 24 --lr 0.01 --name r"
    flags += " --data.answers colour tags level lit --objective.kind answers --objective.answer-weights level=0.5"
    flags += " --precision float32 --augment.no-flip"
    assert main(["train", str(table), *flags.split()]) == 0
    said = capsys.readouterr().err
    assert "left out images/3.png: row 5: no cell of 'colour', 'tags', 'level', 'lit' is filled" in said
    assert "level: a number, weight 0.5" in said and "mean score" in said

    assert main(["evaluate", "runs/r-1", str(table), "--split", "test", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["path"]: row for row in csv.DictReader(table.open()) if row["split"] == "test"}
    for name, one in found["answers"].items():
        assert one["count"] == sum(row[name] != "" for row in rows.values())
    assert found["answers"]["colour"]["top1"] > 0.6 and found["answers"]["level"]["r2"] > 0.3

    assert main(["predict", "runs/r-1", *rows, "--out", "p.csv"]) == 0
    predicted = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    right = [row["colour"] == rows[row["path"]]["colour"] for row in predicted if rows[row["path"]]["colour"]]
    assert np.mean(right) == pytest.approx(found["answers"]["colour"]["top1"])
    errors = [
        abs(float(row["level"]) - float(rows[row["path"]]["level"])) for row in predicted if rows[row["path"]]["level"]
    ]
    assert np.mean(errors) == pytest.approx(found["answers"]["level"]["mae"], rel=1e-4)
    page = write_report("runs/r-1").read_text()
    assert "gives 4 answers for each image" in page and "Answer: tags" in page

    capsys.readouterr()
    assert main(["evaluate", "runs/r-1", str(table), "--split", "test"]) == 0
    assert "answer level: R2" in capsys.readouterr().out
    for words, said in {
        "evaluate runs/r-1 answers.csv --tta flip": "needs classes",
        "predict runs/r-1 images/90.png --reject 0.5": "predicts several answers",
        "predict runs/r-1 runs/r-1 images/90.png": "given twice",
    }.items():
        assert main(words.split()) == 2
        assert said in capsys.readouterr().err


@pytest.mark.train
def test_a_single_column_is_learned_as_today(tmp_path: Path) -> None:
    """`data.answers` with one column and `data.label_column` make the same run, up to the name of the setting."""
    table = write_answers(tmp_path)
    rows = [row for row in csv.reader(table.open()) if row[1]]  # today a cell must be filled
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    numbers = []
    for data in (Data(str(table), answers=("colour",)), Data(str(table), label_column="colour")):
        result = fit(tiny_run(tmp_path / "out", data=data, augment=Augment(crop="pad", pad=1)))
        numbers.append([(line["loss"], line["top1"]) for line in lines(result.folder, "train")])
    assert numbers[0] == numbers[1] and numbers[0]


def test_verbs_that_know_one_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_answers(tmp_path, 4, 2)
    for name in ("one", "two"):
        model = network()
        model.card = card()
        save(model, Path(name))
    data = "answers.csv --data.answers colour level"
    for words, said in {
        "serve one --reject 0.5": "predicts several answers, of which each has its own probability",
        f"sweep {data} --from one": "sweep compares one number of one answer",
        "weights average one two --out soup": "gives several answers, and networks that do are not averaged",
        "predict one two images/0.png": "gives several answers, and networks that do are not averaged",
        "predict one images/0.png --reject 0.5": "predicts several answers",
        "predict one images/0.png --tiles 8 --out maps": "gets maps of one answer",
        "export one --to web --out web": "a web page shows one answer",
        "export one --to onnx --precision int8 --calibrate answers.csv --out int8": "gives several answers",
        "weights convert one hf-model --format hf": "cannot express several answers",
        "data pack answers.csv packed --data.answers colour level": "stores one label for an image",
        "data next answers.csv --from one": "predicts several answers",
    }.items():
        assert main(words.split()) in (1, 2), words
        assert said in capsys.readouterr().err, words
