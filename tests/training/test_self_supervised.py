"""Training without labels, end to end: it learns, goes on exactly where it was, and does not count processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrail.config import from_yaml, to_yaml
from vitrail.data.settings import Augment, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs, Percent, Steps
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.features import extract
from vitrail.evaluation.knn import knn
from vitrail.objective.beit.tokenizer import ImageTokenizer
from vitrail.objective.dino.objective import DINOObjective
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Tokenizer
from vitrail.reports.page import write_report
from vitrail.training import loop
from vitrail.training import step as stepping
from vitrail.training.batches import evaluation_loader, training_loader
from vitrail.training.checkpoints import checkpoint
from vitrail.training.guard import Interrupted
from vitrail.training.run import Average, Model, Optim, Run, Schedule
from vitrail.weights.load import load

OBJECTIVES: dict[str, Any] = {
    "masked-patch": MaskedPatch(),
    "masked-patch-pixels": MaskedPatch(target="pixels"),
    "mae": MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
    "beit": BEiT(smallest_block=2),
    "tokenizer": Tokenizer(codes=16, width=16, depth=1, features=4, decay=0.9),
    "dino": DINO(
        outputs=32, hidden=32, bottleneck=8, view=1.5, local_crops=2, local_size=0.5, freeze_last_layer=Steps(1)
    ),
}
OBJECTIVES["dino-sinkhorn"] = replace(OBJECTIVES["dino"], centring="sinkhorn")


def tiny(out: Path, name: str, **changes: Any) -> Run:
    """Four steps on handwritten digits of 16 x 16 pixels, with dropout and an average."""
    objective = OBJECTIVES[name]
    if name == "beit":  # a tokenizer that knows nothing does for this
        torch.manual_seed(0)
        ImageTokenizer(OBJECTIVES["tokenizer"], 4).save(out / "tokenizer")
        objective = replace(objective, tokenizer=str(out / "tokenizer"))
    run = Run(
        name=name,
        out=str(out),
        data=Data(path="digits", subset=64, test="none"),
        model="Ti/4",
        vit=Model(width=16, depth=2, heads=2, mlp_dim=32, dropout=0.1),
        image_size=16,
        objective=objective,
        augment=Augment(scale=(0.5, 1.0)),
        optim=Optim(lr=3e-3),
        average=Average(kind="ema", decay=0.9) if "dino" not in name else Average(),  # whose teacher is one
        duration=Steps(4),
        batch_size=16,
        accumulate=2,
        evaluate_every=Steps(2),
        checkpoint_every=Steps(2),
        precision="float32",
        workers=0,
        device="cpu",
    )
    return replace(run, **changes)


@pytest.fixture(scope="module", params=OBJECTIVES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never interrupted."""
    return loop.fit(tiny(tmp_path_factory.mktemp("whole"), request.param)).folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest_valid(folder / "checkpoints")
    assert newest is not None
    (last,) = (folder / "model/last").glob("*.safetensors")
    files = [last, newest / "model.safetensors", newest / "state.safetensors"]
    return {f"{number} {key}": tensor for number, file in enumerate(files) for key, tensor in load_file(file).items()}


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def interrupted(run: Run, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start a run and stop it by a signal in the middle of `step`."""
    original = stepping.seed_step

    def seed_step(seed: int, at: int, rank: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(seed, at, rank)

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "seed_step", seed_step)
        with pytest.raises(Interrupted):
            loop.fit(run)
    return Path(run.out) / f"{run.name}-1"


@pytest.mark.train
def test_a_resumed_run_ends_with_the_same_bits(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(tmp_path, from_yaml(whole / "config.yaml", Run()).name)
    folder = interrupted(run, 2, monkeypatch)
    loop.fit(run, resume=folder)
    ours, theirs = state(folder), state(whole)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert [line["loss"] for line in lines(folder, "train")] == [line["loss"] for line in lines(whole, "train")]


@pytest.mark.train
def test_a_run_that_another_began_goes_on_without_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = from_yaml(whole / "config.yaml", Run()).name
    if name == "tokenizer":
        pytest.skip("a tokenizer starts from no weights")
    first = Path(shutil.copytree(whole, tmp_path / "first"))
    run = tiny(tmp_path, name, weights=str(first), vit=Model(dropout=0.1))
    expected = state(loop.fit(replace(run, out=str(tmp_path / "never stopped"))).folder)
    folder = interrupted(run, 2, monkeypatch)
    shutil.rmtree(first)
    loop.fit(run, resume=folder)
    found = state(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.train
def test_the_network_kept_has_no_classifier_and_can_be_finetuned(whole: Path, tmp_path: Path) -> None:
    recorded = from_yaml(whole / "config.yaml", Run())
    if recorded.name == "tokenizer":
        pytest.skip("a tokenizer is no network to fine-tune")
    kept = load(whole)
    assert kept.config.classes == 0 and kept.card.class_names == []
    run = Run(
        out=str(tmp_path),
        data=recorded.data,
        weights=str(whole),
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


@pytest.mark.full_size
def test_the_report_shows_what_it_sees(whole: Path) -> None:
    with Image.open(whole / "seen.png") as picture:
        width, height = picture.size
    assert width > 4 * 100 and height > 8 * 100  # 4 columns of 8 images
    page = write_report(whole).read_text()
    assert "What it predicts" in page and "validation loss" in page and "not evaluated" not in page
    best = json.loads((whole / "run.json").read_text())["result"]["best"]
    losses = [line["loss"] for line in lines(whole, "validation")]
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
    for name in OBJECTIVES:
        data = Data(path=str(tmp_path / "photos"), holdout=0.2)
        run = tiny(
            tmp_path, name, data=data, image_size=32, vit=Model(width=32, depth=1, heads=2, mlp_dim=64),
            schedule=Schedule(shape="constant", warmup=Percent(0)), average=Average(), accumulate=1,
            duration=Epochs(8), evaluate_every=Epochs(1), checkpoint_every=Epochs(8),
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
@pytest.mark.parametrize("name", ["masked-patch", "mae", "beit", "dino"])
def test_a_run_starts_from_another_with_all_that_it_learned(tmp_path: Path, name: str) -> None:
    first = loop.fit(tiny(tmp_path, name)).folder
    still = dict(weights=str(first), vit=Model(), optim=Optim(lr=1e-30, weight_decay=0.0), average=Average())
    more = tiny(tmp_path, name, **still, duration=Steps(1))
    if isinstance(more.objective, DINO):  # a teacher that does not move
        more = replace(more, objective=replace(more.objective, teacher_momentum=1.0))
    before, after = (checkpoint.latest_valid(one / "checkpoints") for one in (first, loop.fit(more).folder))
    assert before is not None and after is not None
    theirs, ours = (checkpoint.load(path) for path in (before, after))
    learned = theirs["model"] | theirs["average"]["mean"]
    owned = [key for key in learned if not key.startswith("model.") and key != "centre"]  # it moves without gradients
    assert owned
    for key in owned:
        assert torch.equal(ours["model"][key], learned[key]), key


@pytest.mark.train
def test_what_predicts_is_fresh_where_it_does_not_fit(tmp_path: Path) -> None:
    first = loop.fit(tiny(tmp_path, "mae")).folder
    start = dict(weights=str(first), vit=Model(), duration=Steps(1))

    def said(name: str, **changes: Any) -> str:
        folder = loop.fit(tiny(tmp_path, name, **{**start, **changes})).folder
        return str(json.loads((folder / "run.json").read_text())["decisions"]["pre-training"])

    fresh = "the prediction head starts fresh"
    assert said("masked-patch") == f"{fresh}: {first} was trained with objective mae, not masked-patch"
    deeper = replace(OBJECTIVES["mae"], decoder_width=32)
    assert "decoder.mask is (16,) in" in said("mae", objective=deeper)
    assert "a model folder contains only the network" in said("mae", weights=str(first / "model" / "last"))
    beit = loop.fit(tiny(tmp_path, "beit")).folder
    torch.manual_seed(1)
    ImageTokenizer(OBJECTIVES["tokenizer"], 4).save(tmp_path / "another")
    other = replace(OBJECTIVES["beit"], tokenizer=str(tmp_path / "another"))
    assert said("beit", weights=str(beit), objective=other) == f"{fresh}: {beit} has another tokenizer"


def test_a_configuration_chooses_by_kind() -> None:
    run = from_yaml("objective: {kind: masked-patch, corrupt: 0.15}", Run())
    assert run.objective == MaskedPatch(corrupt=0.15)
    assert from_yaml("objective: {mask: 0.5}", run).objective == MaskedPatch(corrupt=0.15, mask=0.5)
    assert from_yaml(to_yaml(run), Run()) == run
    assert from_yaml("objective: {kind: supervised}", run).objective == Run().objective
    with pytest.raises(UsageError, match=r"objective\.kind: expected one of supervised, regression, masked-patch, mae"):
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

    def after_step(self: DINOObjective) -> None:
        moved.append(round(self.moment.done * self.moment.total))
        after(self)

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
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "tokenizer"])  # whose noise is as dropout's
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
