"""Training without labels, end to end: it learns, goes on exactly where it was, and does not count processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from references import copy_of
from safetensors.torch import load_file
from tiny_runs import lines
from torch import Tensor

from tests.properties.every_kind import ROWS, TOKENIZER, whole
from vitrail.config import from_yaml, to_yaml
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs, Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import extract
from vitrail.evaluation.knn import knn
from vitrail.objective.dino import DINOObjective
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch
from vitrail.objective.tokenizer import ImageTokenizer
from vitrail.reports.page import write_report
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.batches import evaluation_loader, training_loader
from vitrail.training.checkpoints import checkpoint
from vitrail.training.run import Average, Model, Optim, Run, Schedule
from vitrail.weights.load import load

OBJECTIVES = ("masked-patch", "masked-patch-pixels", "mae", "beit", "tokenizer", "dino", "dino-sinkhorn", "dinov2")
"""Rows of tests/properties/every_kind.py; `whole` is the run of one."""


def tiny(out: Path, name: str, **changes: Any) -> Run:
    """Four steps on handwritten digits of 16 x 16 pixels, with dropout and an average."""
    return replace(ROWS[name].run(name, out), **changes)


@pytest.mark.train
@pytest.mark.parametrize("name", ["masked-patch", "mae", "beit", "dino"])  # a tokenizer is no network to fine-tune
def test_the_network_kept_has_no_classifier_and_can_be_finetuned(name: str, tmp_path: Path) -> None:
    first = whole(name)
    recorded = from_yaml(first / "config.yaml", Run())
    kept = load(first)
    assert kept.config.classes == 0 and kept.card.class_names == []
    run = Run(
        out=str(tmp_path),
        data=recorded.data,
        weights=str(first),
        augment=Augment(crop="center"),
        optim=Optim(lr=1e-30),
        duration=Steps(1),
        batch_size=16,
        device="cpu",
        workers=0,
    )
    found = load(loop.fit(run).folder)
    assert found.config.classes == 10
    after = found.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in kept.state_dict().items())


@pytest.mark.train
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_report_shows_what_it_sees(name: str, tmp_path: Path) -> None:
    folder = copy_of(whole(name), tmp_path)
    with Image.open(folder / "seen.png") as picture:
        width, height = picture.size
    assert width > 4 * 100 and height > 8 * 100  # 4 columns of 8 images
    page = write_report(folder).read_text()
    assert "What it predicts" in page and "validation loss" in page and "not evaluated" not in page
    best = json.loads((folder / "run.json").read_text())["result"]["best"]
    losses = [line["loss"] for line in lines(folder, "validation")]
    assert best["loss"] == (losses[-1] if best["step"] == 4 and "entropy" in best else min(losses))
    assert f"{best['loss']:.4f}" in page


@pytest.mark.train
def test_it_learns_from_photographs_without_class_folders(shared_data: Path, tmp_path: Path) -> None:
    place = tmp_path / "photos" / "2024" / "may"
    place.mkdir(parents=True)
    cifar = open_data(Data(path=str(shared_data / "cifar100"), subset=100, holdout=0.001)).train
    for index in range(100):
        item = cifar[index]
        (place.parents[1] if index < 60 else place).joinpath(f"{index}.webp").write_bytes(bytes(item.image))
    with pytest.raises(DataError):
        open_data(Data(path=str(tmp_path / "photos")))
    for name in ("masked-patch", "mae", "beit", "tokenizer", "dino"):
        data = Data(path=str(tmp_path / "photos"), holdout=0.2)
        run = tiny(
            tmp_path, name, data=data, image_size=16, vit=Model(width=32, depth=1, heads=2, mlp_dim=64),
            schedule=Schedule(shape="constant", warmup=Percent(0)), average=Average(), accumulate=1,
            duration=Epochs(8), evaluate_every=Epochs(4), checkpoint_every=Epochs(8),
        )  # fmt: skip
        folder = loop.fit(run).folder
        found = lines(folder, "validation")
        if "dino" in name:  # its loss says nothing: 1 of 32 would agree by chance
            assert found[-1]["agreement"] > 2 / 32
        else:
            assert found[-1]["loss"] < found[0]["loss"], name
        assert json.loads((folder / "run.json").read_text())["data"]["images"] == {"train": 80, "validation": 20}


@pytest.mark.train
def test_a_published_mae_goes_on_with_its_decoder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        decoder_hidden_size=16, decoder_num_attention_heads=2, decoder_num_hidden_layers=1,
        decoder_intermediate_size=64,
    )  # fmt: skip
    theirs = transformers.ViTMAEForPreTraining(config)
    theirs.save_pretrained(tmp_path / "theirs")
    still = Optim(lr=1e-30)
    run = tiny(tmp_path, "mae", weights=str(tmp_path / "theirs"), vit=Model(), optim=still, duration=Steps(1))
    folder = loop.fit(run).folder
    newest = checkpoint.latest_valid(folder / "checkpoints")
    assert newest is not None
    ours = load_file(newest / "model.safetensors")
    assert torch.equal(ours["decoder.predict.weight"], theirs.decoder.decoder_pred.weight)
    assert (
        "tensors of the pretrained weights"
        in json.loads((folder / "run.json").read_text())["decisions"]["pre-training"]
    )


@pytest.mark.train
@pytest.mark.parametrize("name", ["masked-patch", "mae", "beit", "dino", "dinov2"])
def test_a_run_starts_from_another_with_all_that_it_learned(tmp_path: Path, name: str) -> None:
    first = whole(name)
    still = dict(weights=str(first), vit=Model(), optim=Optim(lr=1e-30, weight_decay=0.0), average=Average())
    more = tiny(tmp_path, name, **still, duration=Steps(1))
    if isinstance(more.objective, DINO):  # a teacher that does not move
        more = replace(more, objective=replace(more.objective, teacher_momentum=1.0))
    before, after = (checkpoint.latest_valid(one / "checkpoints") for one in (first, loop.fit(more).folder))
    assert before is not None and after is not None
    theirs, ours = (checkpoint.load(path) for path in (before, after))
    learned = theirs["model"] | theirs["average"]["mean"]
    moving = ("model.", "centre", "patch_centre", "anchor.", "refreshes")  # the centres move without gradients
    owned = [key for key in learned if not key.startswith(moving)]
    assert owned
    for key in owned:
        assert torch.equal(ours["model"][key], learned[key]), key
    anchored = {key.removeprefix("anchor."): value for key, value in ours["model"].items() if key.startswith("anchor.")}
    assert bool(anchored) == (name == "dinov2")  # what was loaded, not what the other run was anchored to
    assert all(torch.equal(value, learned[f"teacher.{key}"]) for key, value in anchored.items())


@pytest.mark.train
def test_what_predicts_is_fresh_where_it_does_not_fit(tmp_path: Path) -> None:
    first = whole("mae")
    start = dict(weights=str(first), vit=Model(), duration=Steps(1))

    def said(name: str, **changes: Any) -> str:
        folder = loop.fit(tiny(tmp_path, name, **{**start, **changes})).folder
        return str(json.loads((folder / "run.json").read_text())["decisions"]["pre-training"])

    fresh = "the prediction head starts fresh"
    assert said("masked-patch") == f"{fresh}: {first} was trained with objective mae, not masked-patch"
    deeper = MAE(decoder_width=32, decoder_depth=1, decoder_heads=2)
    assert "decoder.mask is (16,) in" in said("mae", objective=deeper)
    assert "a model folder contains only the network" in said("mae", weights=str(first / "model" / "last"))
    beit = whole("beit")
    torch.manual_seed(1)
    ImageTokenizer(TOKENIZER, 4).save(tmp_path / "another")
    other = BEiT(smallest_block=2, tokenizer=str(tmp_path / "another"))
    assert said("beit", weights=str(beit), objective=other) == f"{fresh}: {beit} has another tokenizer"


def test_a_configuration_chooses_by_kind() -> None:
    run = from_yaml("objective: {kind: masked-patch, corrupt: 0.15}", Run())
    assert run.objective == MaskedPatch(corrupt=0.15)
    assert from_yaml("objective: {mask: 0.5}", run).objective == MaskedPatch(corrupt=0.15, mask=0.5)
    assert from_yaml(to_yaml(run), Run()) == run
    assert from_yaml("objective: {kind: supervised}", run).objective == Run().objective
    with pytest.raises(UsageError, match=r"objective\.kind: expected one of supervised, .*masked-patch, mae"):
        from_yaml("objective: {kind: masked}", Run())
    with pytest.raises(UsageError, match="unknown setting"):
        from_yaml("objective: {corrupt: 0.15}", Run())


@pytest.mark.train
def test_knn_during_training_is_that_of_the_kept_features(tmp_path: Path) -> None:
    run = tiny(tmp_path, "masked-patch", knn=5, average=Average())
    folder = loop.fit(run).folder
    logged = lines(folder, "knn")
    assert [line["step"] for line in logged] == [2, 4]
    recorded = from_yaml(folder / "config.yaml", Run())
    splits = open_data(recorded.data, seed=recorded.seed)
    assert splits.validation is not None
    model = load(folder / "model" / "last")
    train, held_out = (
        extract(model, evaluation_loader(recorded, source), splits.class_names, precision="float32")
        for source in (splits.train, splits.validation)
    )
    unit = [part.features / np.linalg.norm(part.features, axis=1, keepdims=True) for part in (train, held_out)]
    nearest = np.argsort(-(unit[1] @ unit[0].T), axis=1, kind="stable")[:, :5]
    right = 0.0
    for row, truth in zip(range(len(nearest)), held_out.labels, strict=True):
        votes = np.zeros(10)
        for place in nearest[row]:
            votes[train.labels[place]] += np.exp(float(unit[1][row] @ unit[0][place]) / 0.07)
        right += votes.argmax() == truth
    assert logged[-1]["knn"] == pytest.approx(right / len(nearest), abs=2 / len(nearest))
    assert logged[-1]["knn"] > 0.15  # ten classes
    assert "kNN accuracy" in write_report(folder).read_text()
    with pytest.raises(UsageError, match=r"knn is 0; it must be from 1 to 100,000"):
        loop.fit(tiny(tmp_path, "masked-patch", knn=0))


@pytest.mark.train
def test_the_teacher_is_what_is_kept_and_what_neighbours_are_looked_for_with(tmp_path: Path) -> None:
    run = tiny(tmp_path, "dino", knn=5, optim=Optim(lr=0.01))
    folder = loop.fit(run).folder
    newest = checkpoint.latest_valid(folder / "checkpoints")
    assert newest is not None
    saved = load_file(newest / "model.safetensors")
    for place in ("last", "best"):  # the newest is the best
        network = load(folder / "model" / place)
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, saved[f"teacher.{name}"])
    assert not torch.equal(saved["model.cls"], saved["teacher.cls"]) and saved["centre"].abs().max() > 0
    recorded = from_yaml(folder / "config.yaml", Run())
    splits = open_data(recorded.data, seed=recorded.seed)
    assert splits.validation is not None
    train, held_out = (
        extract(network, evaluation_loader(recorded, source), splits.class_names, precision="float32")
        for source in (splits.train, splits.validation)
    )
    assert lines(folder, "knn")[-1]["knn"] == knn(train, held_out, k=(5,)).top1[5]


def test_what_a_teacher_makes_pointless_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"set --average\.kind none"):
        loop.fit(tiny(tmp_path, "dino", average=Average(kind="ema")))
    with pytest.raises(UsageError, match="leave out --early-stop"):
        loop.fit(tiny(tmp_path, "dino", early_stop=2))


def test_186_an_anchor_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"objective\.gram_weight is 1: .* set --objective\.gram-weight 0"):
        loop.fit(tiny(tmp_path, "dinov2", weights=None, model="Ti/4"))


@pytest.mark.train
def test_weights_that_learn_on_are_measured_first(tmp_path: Path) -> None:
    """By the neighbours that a probe of the weights finds; and a step at no rate changes nothing."""
    run = tiny(tmp_path, "dinov2", optim=Optim(lr=1e-30, weight_decay=0.0), duration=Steps(1))
    folder = loop.fit(run).folder
    recorded = from_yaml(folder / "config.yaml", Run())
    splits = open_data(recorded.data, seed=recorded.seed)
    assert splits.validation is not None and run.weights is not None
    network = load(run.weights, classes=0, image_size=16)
    train, held_out = (
        extract(network, evaluation_loader(recorded, source), splits.class_names, precision="float32")
        for source in (splits.train, splits.validation)
    )
    found = knn(train, held_out, k=(3,)).top1[3]
    assert [(line["step"], line["knn"]) for line in lines(folder, "knn")] == [(0, found), (1, found)]
    parts = [name for name in lines(folder, "train")[-1] if name.endswith(" loss")]
    assert parts == ["DINO loss", "iBOT loss", "KoLeo loss", "Gram loss"]


def test_crops_are_cut_from_a_larger_view(tmp_path: Path) -> None:
    run = replace(tiny(tmp_path, "dino"), preprocess=Preprocess((16, 16)), augment=Augment(crop="random"))
    splits = open_data(run.data)
    loader = training_loader(run, splits.train)
    assert next(loader.epoch(0)).images.shape[-2:] == (24, 24)  # 1.5 times 16, and whole patches or not
    assert next(evaluation_loader(run, splits.train).epoch(0)).images.shape[-2:] == (16, 16)


@pytest.mark.train
def test_a_step_that_is_skipped_moves_no_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    after, backward = DINOObjective.after_step, stepping.backward

    def after_step(self: DINOObjective, finite: Tensor) -> None:
        owned = {
            name: part.clone() for name, part in self.state_dict().items() if name.startswith(("teacher", "centre"))
        }
        after(self, finite)
        if any(not torch.equal(part, owned[name]) for name, part in self.state_dict().items() if name in owned):
            moved.append(round(self.moment.done * self.moment.total))

    def poisoned(*arguments: Any, step: int, **options: Any) -> Any:
        outcome = backward(*arguments, step=step, **options)
        outcome.values[outcome.names.index("loss")] *= float("nan") if step == 1 else 1
        return outcome

    monkeypatch.setattr(DINOObjective, "after_step", after_step)
    monkeypatch.setattr(stepping, "backward", poisoned)
    loop.fit(tiny(tmp_path, "dino"))
    assert moved == [0, 2, 3]


def test_what_needs_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"augment\.mixup"):
        loop.fit(tiny(tmp_path, "masked-patch", augment=Augment(mixup=0.2)))


@pytest.mark.train
@pytest.mark.parametrize(
    "name", ["masked-patch", "mae", "beit", "dino-sinkhorn"]
)  # a tokenizer's noise is as dropout's
def test_running_out_of_memory_within_a_step_changes_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The number of micro-batches is found by measuring; the second step fails once, when it is all but done."""
    still = Model(width=16, depth=1, heads=2, mlp_dim=32)
    run = tiny(tmp_path, name, vit=still, accumulate=None, evaluate_every=Steps(9), optim=Optim("sgd", lr=0.1))
    calm = loop.fit(run).folder
    assert json.loads((calm / "run.json").read_text())["decisions"]["accumulate"].startswith("1: micro-batches that")
    backward, failures = stepping.backward, [1]

    def failing(*arguments: Any, step: int, **options: Any) -> Any:
        outcome = backward(*arguments, step=step, **options)
        if step in failures:
            failures.remove(step)
            raise MemoryError
        return outcome

    monkeypatch.setattr(stepping, "backward", failing)
    folder = loop.fit(run).folder
    (said,) = lines(folder, "out of memory")
    assert said["step"] == 1 and said["accumulate"] == from_yaml(folder / "config.yaml", Run()).accumulate == 2
    expected = [line["loss"] for line in lines(calm, "train")]
    assert [line["loss"] for line in lines(folder, "train")] == pytest.approx(expected, abs=1e-5)
