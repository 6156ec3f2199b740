"""A GPU computes the next batch while the CPU works with the last one, and evaluation never waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_work import Copied, DeviceWork, Elsewhere, copies_elsewhere
from torch import Tensor

from vitrail.data.labels.numbers import TargetScale
from vitrail.errors import WeightsError
from vitrail.evaluation import classify, features, label_scores, number_scores
from vitrail.evaluation.ahead import Computed, HostCopy, Refusing, ahead
from vitrail.evaluation.confidence import averaged, calibrated
from vitrail.evaluation.imagenet import choosing
from vitrail.torch_private import FakeTensorMode, tree_map

CLASSES, BATCH = 7, 4
NAMES = [f"class {number}" for number in range(CLASSES)]


def batches(labels: Tensor, count: int = 3) -> Any:
    rows = [
        SimpleNamespace(
            images=torch.zeros(BATCH, 3, 8, 8, dtype=torch.uint8), labels=labels, index=torch.arange(BATCH) + BATCH * at
        )
        for at in range(count)
    ]
    return SimpleNamespace(epoch=lambda number: iter(rows), bad=[], bad_index=[])


def outputs(images: Tensor) -> Tensor:
    """What a network on a GPU returns at once, for images on the CPU."""
    return torch.ones(len(images), CLASSES, device="cuda")


MEASURES: dict[str, Callable[[Any], object]] = {
    "classes": lambda predict: classify.classify(predict, batches(torch.arange(BATCH)), NAMES),
    "calibrated classes": lambda predict: classify.classify(
        calibrated(predict, 2.0), batches(torch.arange(BATCH)), NAMES
    ),
    "chosen classes": lambda predict: classify.classify(
        choosing(predict, np.array([5, 2, 0, 1])), batches(torch.arange(BATCH)), NAMES[:4]
    ),
    "mean of views": lambda predict: classify.classify(averaged(predict, 2, 1.5), batches(torch.arange(BATCH)), NAMES),
    "labels": lambda predict: label_scores.score_labels(
        predict, batches(torch.eye(BATCH, CLASSES, dtype=torch.int8)), NAMES
    ),
    "numbers": lambda predict: number_scores.score_numbers(
        predict,
        batches(torch.arange(float(BATCH * CLASSES)).view(BATCH, CLASSES).double()),
        NAMES,
        TargetScale((0.0,) * CLASSES, (1.0,) * CLASSES),
    ),
    "features": lambda predict: features.collect(predict, batches(torch.arange(BATCH)), NAMES),
}


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_in_an_evaluation_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_elsewhere(monkeypatch)
    work, fake = DeviceWork("cuda"), FakeTensorMode(allow_non_fake_inputs=True)
    launches = 0

    def followed(batches: Iterable[Any], launch: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
        nonlocal launches
        for batch in batches:
            with fake, work:
                found = HostCopy(launch(batch)).get()
            launches += 1
            yield batch, tree_map(lambda leaf: torch.ones(leaf.shape, dtype=leaf.dtype), found)

    for module in (classify, label_scores, number_scores, features):
        monkeypatch.setattr(module, "ahead", followed)
    with Refusing(outputs) as refusing:  # its own numbers are fake, so they are checked below
        monkeypatch.setattr(refusing, "_check", lambda most: None)
        MEASURES[name](refusing)
    assert launches == 3 and work.launches
    assert work.found() == {}


def elsewhere(values: Tensor) -> Tensor:
    return values.as_subclass(Elsewhere)


@pytest.mark.parametrize(
    ("gpu", "order", "waits"),
    [(False, "launch 0 read 0 launch 1 read 1", 0), (True, "launch 0 launch 1 read 0 read 1", 2)],
)
def test_a_gpu_is_one_batch_ahead(gpu: bool, order: str, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_elsewhere(monkeypatch)
    said = []

    def launch(batch: int) -> dict[str, Tensor]:
        said.append(f"launch {batch}")
        values = torch.full((2,), float(batch))
        return {"values": elsewhere(values) if gpu else values}

    for batch, found in ahead(range(2), launch):
        assert found["values"].tolist() == [batch, batch]
        said.append(f"read {batch}")
    assert " ".join(said) == order
    assert Copied.waits == waits


def test_batches_without_a_result_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_elsewhere(monkeypatch)
    every = [elsewhere(torch.zeros(1)), None, None, elsewhere(torch.zeros(1)), elsewhere(torch.zeros(1)), None]
    assert [number for number, _ in ahead(range(6), lambda number: every[number])] == list(range(6))


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_output_that_is_not_finite_is_refused_before_its_batch_is_read(
    bad: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_elsewhere(monkeypatch)
    read = []

    def launch(images: Tensor) -> dict[str, Tensor]:
        number = int(images[0])
        values = torch.tensor([1.0, value if number == bad else 2.0])
        return {"values": elsewhere(values), "none": torch.zeros(0)}

    asked = Computed(launch, lambda found: read.append(found["values"].tolist()), "bf16")
    with pytest.raises(WeightsError, match="try --precision float32"):
        for _ in asked.over(SimpleNamespace(images=torch.tensor([number])) for number in range(3)):
            pass
    assert [1.0, 2.0] not in read[bad:]
    with pytest.raises(WeightsError, match="NaN or infinity"):
        asked(torch.tensor([bad]))
