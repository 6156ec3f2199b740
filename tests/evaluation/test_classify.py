from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from forked import server
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrail import world
from vitrail.errors import DataError
from vitrail.evaluation.classify import (
    Classification,
    applied,
    classify,
    predictor,
)
from vitrail.model.build import create
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.tasks.catalog import load_results, save_results


@dataclass
class Batch:
    images: Tensor
    labels: Tensor
    index: Tensor


@dataclass
class Fake:
    """A loader whose "images" are the logits themselves, so that `predict` is the identity."""

    logits: Tensor
    labels: Tensor
    batch_size: int = 7
    index: Tensor | None = None
    bad: list[Any] = field(default_factory=list)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        index = torch.arange(len(self.labels)) if self.index is None else self.index
        for part in index.split(self.batch_size) if len(index) else ():
            yield Batch(self.logits[part], self.labels[part], part)


def names(classes: int) -> list[str]:
    return [f"class {i}" for i in range(classes)]


def identity(images: Tensor) -> Tensor:
    return images


def draw(images: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, classes, images))
    return torch.from_numpy(rng.normal(size=(images, classes)) * 3).float(), labels


same = np.testing.assert_array_equal
sizes = dict(images=st.integers(1, 60), classes=st.integers(1, 12), seed=st.integers(0, 10**6))


@pytest.mark.filterwarnings("ignore:A single label", "ignore:y_pred contains classes")
@given(**sizes)
def test_scores_that_count_every_class_the_same_are_those_of_scikit_learn(images: int, classes: int, seed: int) -> None:
    logits, labels = draw(images, classes, seed)
    found, answer = classify(identity, Fake(logits, labels), names(classes)), logits.argmax(1)
    assert found.balanced_accuracy == pytest.approx(sklearn.metrics.balanced_accuracy_score(labels, answer))
    assert found.macro_f1 == pytest.approx(sklearn.metrics.f1_score(labels, answer, average="macro"))
    assert found.metrics()["macro_f1"] == found.macro_f1


@pytest.mark.full_size
@given(**{**sizes, "classes": st.integers(2, 12)}, batch_size=st.integers(1, 64))
def test_numbers_agree_with_scikit_learn(images: int, classes: int, seed: int, batch_size: int) -> None:
    logits, labels = draw(images, classes, seed)
    found = classify(identity, Fake(logits, labels, batch_size), names(classes))
    score, true, every = logits.numpy(), labels.numpy(), np.arange(classes)
    answer = score.argmax(1)
    assert found.count == images
    assert found.top1 == pytest.approx(sklearn.metrics.accuracy_score(true, answer))
    if classes > 5:
        expected = sklearn.metrics.top_k_accuracy_score(true, score, k=5, labels=every)
        assert found.top5 == pytest.approx(expected)
    else:
        assert found.top5 == 1.0
    odds = np.exp(score.astype(np.float64))
    expected = sklearn.metrics.log_loss(true, odds / odds.sum(1, keepdims=True), labels=every)
    assert found.nll == pytest.approx(expected, rel=1e-5, abs=1e-6)  # the probability is float32
    same(found.confusion, sklearn.metrics.confusion_matrix(true, answer, labels=every))
    recall = sklearn.metrics.recall_score(true, answer, labels=every, average=None, zero_division=np.nan)
    np.testing.assert_allclose(found.class_accuracy, recall)
    same(found.class_count, np.bincount(true, minlength=classes))
    same(found.top, np.argsort(-score, axis=1)[:, :5])
    assert found.probability.shape == found.top.shape


@pytest.mark.full_size
@given(**sizes, batch_size=st.integers(1, 64), ranks=st.integers(1, 4))
def test_every_image_counts_once_however_it_is_split(
    images: int, classes: int, seed: int, batch_size: int, ranks: int
) -> None:
    logits, labels = draw(images, classes, seed)
    alone = classify(identity, Fake(logits, labels), names(classes))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(images))
    padded = torch.cat([order, order[: -images % ranks]])  # as samplers that wrap around do
    parts: list[Any] = []

    def collect(value: Any) -> list[Any]:
        parts.append(value)
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "gather", collect)  # the last rank to arrive sees the parts of all
        for rank in range(ranks):
            loader = Fake(logits, labels, batch_size, padded[rank::ranks], [(f"bad{rank}", "truncated")])
            try:
                found = classify(identity, loader, names(classes))
            except DataError:  # a rank without images on its own
                assert rank < ranks - 1
    for name in ("index", "label", "top", "probability", "loss", "brier", "confusion"):
        same(getattr(found, name), getattr(alone, name))
    assert found.metrics() == alone.metrics()
    assert found.bad == [(f"bad{rank}", "truncated") for rank in range(ranks)]


def test_images_without_a_known_class_are_answered_but_not_counted() -> None:
    logits, labels = draw(20, 4, 0)
    labels[5:9] = -1
    found = classify(identity, Fake(logits, labels), names(4))
    known = classify(identity, Fake(logits, labels, index=torch.arange(20)[labels >= 0]), names(4))
    assert len(found.index) == 20
    assert found.metrics() == known.metrics()
    same(found.confusion, known.confusion)


def test_logits_that_are_not_finite_are_wrong_whatever_the_label() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [0.0, float("inf")], [3.0, 0.0]])
    found = classify(identity, Fake(logits, torch.tensor([1, 1, 1, 0])), names(2))
    assert found.top1 == 0.5
    same(found.top[:, 0], [1, -1, -1, 0])
    assert found.confusion.sum() == 2
    assert np.isnan(found.nll)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 1, 3], 3, "label 3 in the data; with 3 classes they go from 0 to 2"),
        ([0, 1, 2], 4, "the model has 3 outputs, but the data have 4 classes"),
        ([-1, -1, -1], 3, "none of the 3 images has a known class"),
        ([], 3, "no image could be evaluated, because none could be read: 1 .jpg"),
    ],
)
def test_data_that_do_not_fit_are_refused(labels: list[int], classes: int, message: str) -> None:
    loader = Fake(torch.zeros(len(labels), 3), torch.tensor(labels, dtype=torch.int64), bad=[("a.jpg", "empty")])
    with pytest.raises(DataError, match=message):
        classify(identity, loader, names(classes))


def test_the_metrics_have_names_and_follow_the_weights() -> None:
    logits, labels = draw(30, 6, 1)
    loader = Fake(logits, labels)
    first = classify(identity, loader, names(6)).metrics()
    assert set(first) == {"top1", "top5", "balanced_accuracy", "macro_f1", "nll", "count"}
    second = classify(lambda images: -images, loader, names(6))
    assert second.metrics() != first
    assert second.top1 == second.metrics()["top1"]


def test_answers_survive_the_disk(tmp_path: Path) -> None:
    logits, labels = draw(30, 6, 2)
    found = classify(identity, Fake(logits, labels, bad=[("a,b.jpg", "truncated")]), names(6))
    save_results(tmp_path / "evaluation.npz", found)
    again = load_results(tmp_path / "evaluation.npz", names(6))
    for name in ("index", "label", "top", "probability", "loss", "brier"):
        same(getattr(again, name), getattr(found, name))
    assert (again.bad, again.metrics()) == (found.bad, found.metrics())


def test_answers_of_before_the_brier_score_are_read_without_it(tmp_path: Path) -> None:
    logits, labels = draw(30, 6, 2)
    found = classify(identity, Fake(logits, labels), names(6))
    save_results(tmp_path / "evaluation.npz", found)
    with np.load(tmp_path / "evaluation.npz") as file:
        np.savez(tmp_path / "old.npz", **{name: file[name] for name in file.files if name != "brier"})
    again = load_results(tmp_path / "old.npz", names(6))
    assert np.isnan(again.brier).all() and again.brier.shape == (30,)
    assert again.metrics() == found.metrics()


def test_torn_answers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.npz"
    save_results(path, classify(identity, Fake(*draw(30, 6, 2)), names(6)))
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"evaluation.npz cannot be read"):
            load_results(path, names(6))


def tiny() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(width=32, depth=2, heads=2, mlp_dim=64, patch=4, image_size=(16, 16), classes=5, dropout=0.5))
    torch.nn.init.normal_(model.head.weight, std=0.3)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("training", [True, False])
def test_predictor_computes_what_the_model_does_in_eval_mode(training: bool) -> None:
    model = tiny()
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    model.train(training)
    logits = predictor(model, "cpu", "float32")(images)
    assert model.training is training
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(images))
    assert logits.dtype == torch.float32 and not logits.requires_grad


def test_reduced_precision_agrees_to_its_rounding() -> None:
    model = tiny()
    images = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8)
    exact, rounded = (predictor(model, "cpu", p)(images) for p in ("float32", "bf16"))  # type: ignore[arg-type]
    assert not torch.equal(exact, rounded)
    error: Callable[[Tensor], float] = lambda x: float(x.abs().max())  # noqa: E731
    assert error(exact - rounded) < 0.05 * error(exact)


def _rank(rank: int, port: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    logits, labels = draw(41, 8, 3)
    loader = Fake(logits, labels, 4, torch.arange(41)[rank::2], [(f"bad{rank}", "empty")])
    save_results(Path(out) / f"{rank}.npz", classify(identity, loader, names(8)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [server().Process(target=_rank, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    alone = classify(identity, Fake(*draw(41, 8, 3)), names(8))
    for rank in range(2):
        found: Classification = load_results(tmp_path / f"{rank}.npz", names(8))
        assert found.metrics() == alone.metrics()
        assert found.bad == [("bad0", "empty"), ("bad1", "empty")]
        same(found.confusion, alone.confusion)


def test_a_predictor_leaves_the_callers_model_alone() -> None:
    model = create("Ti/16", classes=3, depth=1, image_size=32).train()
    before = {name: (id(tensor), tensor.device.type, tensor.dtype) for name, tensor in model.named_parameters()}
    for place, precision in (("meta", "float32"), ("cpu", "bf16"), ("cpu", "float32")):
        predict = predictor(model, place, precision)
        if place == "cpu":
            predict(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        after = {name: (id(tensor), tensor.device.type, tensor.dtype) for name, tensor in model.named_parameters()}
        assert after == before, place
        assert model.training and all(part.training for part in model.modules())


def test_an_accelerator_computes_with_a_copy_of_the_weights_in_16_bits() -> None:
    """Autocast would read float32 weights and cast them for each batch."""
    model = create("Ti/4", width=32, depth=1, heads=2, mlp_dim=64, image_size=8, classes=3)

    def dtypes(network: Any, images: torch.Tensor) -> tuple[set[torch.dtype], set[str], bool]:
        assert images.device.type == "meta" and images.dtype == torch.uint8
        parameters = list(network.parameters())
        here = {parameter.device.type for parameter in parameters}
        return {parameter.dtype for parameter in parameters}, here, torch.is_autocast_enabled("cpu")

    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert applied(dtypes, model, "meta", "bf16")(images) == ({torch.bfloat16}, {"meta"}, False)
    assert applied(dtypes, model, "meta", "float32")(images) == ({torch.float32}, {"meta"}, False)
    assert model.training and all(parameter.dtype == torch.float32 for parameter in model.parameters())
