"""`fit` with objects of Python: a network, a loss, data and functions to call."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own import EXAMPLES, importable, weights
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vitrail
from vitrail import Run, Steps, Supervised, cli, create, fit
from vitrail.config import merge
from vitrail.data.check import leaked
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError, UsageError, WeightsError
from vitrail.model.variants import ForeignConfig, ResNetConfig
from vitrail.objective.settings import MAE
from vitrail.training.assemble import set_up
from vitrail.training.checkpoints.state import defaults, differing, identity, of_foreign, with_defaults
from vitrail.training.python_objects import PythonObjects

TINY: dict[str, Any] = dict(width=16, depth=1, heads=2, mlp_dim=16, patch=4)
SMALL: dict[str, Any] = dict(
    duration=Steps(4),
    batch_size=64,
    accumulate=1,
    precision="float32",
    device="cpu",
    workers=0,
    evaluate_every=Steps(2),
    checkpoint_every=Steps(2),
)


def small(out: Path, **changes: Any) -> Run:
    return merge(
        Run(), {**SMALL, "vit": TINY, "image_size": 8, "schedule": {"warmup": "0 steps"}, "out": str(out), **changes}
    )


class Net(nn.Module):
    """A network as people write it, with a BatchNorm."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, classes)
        self.seen: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        self.seen = images
        return self.head(F.relu(self.norm(self.conv(images))).flatten(1))


def pixels() -> tuple[Tensor, Tensor]:
    found = load_digits()
    grey = torch.from_numpy((found.images * 255 / 16).round().astype(np.uint8))
    return grey[:, None].expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(found.target)


@pytest.mark.train
def test_any_network_is_trained_evaluated_and_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    result = fit(small(tmp_path), model=net)
    assert (
        net.seen is not None
        and net.seen.dtype == torch.float32
        and -1.01 <= float(net.seen.min()) < float(net.seen.max()) <= 1.01
    )
    text = (result.folder / "config.yaml").read_text()
    assert text.startswith("# Given in Python") and "Net" in text.splitlines()[0]
    saved = load_file(result.folder / "model/last/model.safetensors")
    for name, tensor in net.state_dict().items():
        assert torch.equal(saved[name], tensor), name
    assert result.test is not None and result.test["count"] == 359

    with pytest.raises(WeightsError, match=r"best/model.safetensors has no model card: .* network.load_state_dict\("):
        vitrail.load(result.folder)

    # interrupted and resumed, the same bits
    first = fit(small(tmp_path, duration=Steps(2)), model=twin)
    with pytest.raises(UsageError, match=r"only Python can give: model=.*Net.*resume="):
        fit(small(tmp_path), resume=first.folder)
    assert cli.main(["train", "--resume", str(first.folder), "--quiet"]) == 2
    torch.manual_seed(1)
    fit(small(tmp_path, duration=Steps(4)), model=Net(), resume=first.folder)
    for name, tensor in load_file(first.folder / "model/last/model.safetensors").items():
        if tensor.is_floating_point():  # its schedule was shorter at first
            assert torch.isfinite(tensor).all(), name


@pytest.mark.train
def test_a_run_of_any_network_resumes_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    steady = dict(schedule={"warmup": "0 steps", "shape": "constant"})
    whole = fit(small(tmp_path, **steady), model=net)
    half = Net()
    half.load_state_dict(start)
    cut = fit(small(tmp_path, **steady, duration=Steps(2)), model=half)
    fit(small(tmp_path, **steady), model=Net(), resume=cut.folder)
    for name, tensor in weights(whole.folder).items():
        assert torch.equal(tensor, weights(cut.folder)[name]), name


def test_a_network_that_is_not_ours_has_a_config_of_its_own_kind(tmp_path: Path) -> None:
    run = small(tmp_path)
    with set_up(run, open_data(run.data, seed=run.seed), objects=PythonObjects(model=Net())) as setup:
        assert setup.decision.config == ForeignConfig(image_size=(8, 8), classes=10)
        saved = setup.validation.saved
        assert not saved.has_card and not saved.has_features
        with pytest.raises(AssertionError):
            _ = setup.decision.our_config


def test_features_need_a_network_of_ours(tmp_path: Path) -> None:
    for probe in (dict(knn=5), dict(fewshot=(5,))):
        with pytest.raises(UsageError, match="knn and fewshot need the features of a network of vitrail"):
            fit(small(tmp_path, **probe), model=Net())
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_call_any_network_a_resnet_are_of_the_same_run(tmp_path: Path) -> None:
    """Earlier versions wrote so."""
    foreign, resnet = ForeignConfig((8, 8), classes=10), ResNetConfig(image_size=(8, 8), classes=10)
    run = small(tmp_path)
    now, before = (identity(run, config, [], "0") for config in (foreign, resnet))
    expected = defaults(run, foreign)
    assert differing(with_defaults(of_foreign(before, now), expected), now) == []
    assert of_foreign(now, before) == now and of_foreign(before, before) == before
    other = identity(run, replace(resnet, image_size=(16, 8)), [], "0")
    assert differing(with_defaults(of_foreign(other, now), expected), now) == ["model.image_size[0]: 16 there, 8 here"]


@pytest.mark.train
def test_our_own_network_given_is_the_run_itself(tmp_path: Path) -> None:
    run = small(tmp_path / "settings")
    by_settings = fit(run)
    torch.manual_seed(run.seed)
    model = create("S/16", **TINY, classes=10, image_size=8)
    given = fit(replace(run, out=str(tmp_path / "given")), model=model)
    for name, tensor in weights(by_settings.folder).items():
        assert torch.equal(tensor, weights(given.folder)[name]), name
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(vitrail.load(given.folder / "model/last")(images), model.eval()(images))


@pytest.mark.train
def test_a_network_of_ours_with_another_layer(tmp_path: Path) -> None:
    model = create("S/16", **TINY, classes=10, image_size=8)
    model.head = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 10))  # type: ignore[assignment]
    result = fit(small(tmp_path), model=model)
    assert "head.2.weight" in weights(result.folder)


@pytest.mark.train
def test_a_function_as_loss_is_torchs(tmp_path: Path) -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(reduction="none")(logits, targets)

    run = small(tmp_path / "ours")
    ours = fit(run)
    theirs = fit(replace(run, out=str(tmp_path / "theirs")), objective=loss)
    for name, tensor in weights(ours.folder).items():
        assert torch.equal(tensor, weights(theirs.folder)[name]), name
    assert "objective" in json.loads((theirs.folder / "run.json").read_text())["given"]
    doubled = fit(
        replace(run, out=str(tmp_path / "doubled")), objective=lambda logits, targets: 2 * loss(logits, targets)
    )
    lines = [json.loads(line) for line in (doubled.folder / "metrics.jsonl").read_text().splitlines()]
    once = [json.loads(line) for line in (ours.folder / "metrics.jsonl").read_text().splitlines()]
    first = [next(line["loss"] for line in each if line["kind"] == "train") for each in (once, lines)]
    assert first[1] == pytest.approx(2 * first[0], rel=1e-5)


@pytest.fixture
def examples() -> Iterator[None]:
    with importable(EXAMPLES):
        yield


@pytest.mark.train
def test_settings_given_are_settings(tmp_path: Path, examples: None) -> None:
    from focal import Focal

    result = fit(small(tmp_path), objective=Focal(gamma=1.0), data=Data(holdout=0.2))
    text = (result.folder / "config.yaml").read_text()
    assert "class: focal:Focal" in text and not text.startswith("#") and "holdout: 0.2" in text
    assert cli.main(["train", "--resume", str(result.folder), "--duration", "5 steps", "--quiet"]) == 0


@pytest.mark.train
def test_data_of_torch(tmp_path: Path) -> None:
    images, labels = pixels()
    splits = {"train": TensorDataset(images[:1400], labels[:1400]), "test": TensorDataset(images[1400:], labels[1400:])}
    result = fit(small(tmp_path), data=splits)
    facts = json.loads((result.folder / "run.json").read_text())
    assert facts["data"]["images"] == {"train": 1260, "validation": 140, "test": 397}
    assert json.loads((result.folder / "classes.json").read_text()) == [str(number) for number in range(10)]
    assert facts["given"] == {"data": "builtins.dict"}
    with pytest.raises(UsageError, match=r"only Python can give: data=builtins.dict. .*resume=.*, data=\.\.\.\)"):
        vitrail.train(resume=result.folder)
    # the validation images are a tenth of each class, as of any other data
    held_out = json.loads((result.folder / "split.json").read_text())["ids"]
    rows = [int(re.sub(r"\D", "", id)) for id in held_out]
    counts, all_counts = Counter(labels[rows].tolist()), Counter(labels[:1400].tolist())
    assert all(abs(counts[label] - all_counts[label] / 10) <= 1 for label in range(10))


def test_settings_of_the_data_hold_for_objects() -> None:
    """Which images are used, and what a label is."""

    def splits(labels: Any, **data: Any) -> Any:
        images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
        items = [(image, labels[number % len(labels)]) for number, image in enumerate(images)]
        changes = {"objective": {"kind": "regression"}} if data.pop("regression", False) else {}
        run = merge(Run(), {"data": {"path": "x", **data}, **changes})
        return PythonObjects(data={"train": items, "test": items[:10]}).splits(run)

    assert isinstance(splits([0, 1], labels_per_image="several").train.labels, LabelSets)
    with pytest.raises(DataError, match=r"has 2 labels, and data.labels_per_image is 'one'"):
        splits([["a", "b"], ["a"]], labels_per_image="one")
    left = splits([0, 1], exclude=["*[[]3?]"])
    assert len(left.train) + len(left.validation) == 30 and left.report.ignored
    for labels in ([0.5, 1.5], [3, 4]):
        numbers = splits(labels, regression=True)
        assert set(numbers.train.labels.values.ravel()) == set(labels) and numbers.class_names == ["target"]
    # what is stored is not known, so that the images are not read to compare splits before the run
    assert leaked(numbers.train, numbers.test) is None


@pytest.mark.train
def test_functions_are_called(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    numbers: dict[int, dict[str, float]] = {}
    result = fit(small(tmp_path), on_log=lines.append, on_evaluate=numbers.__setitem__)
    written = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"], line.get("loss")) for line in lines] == [
        (line["kind"], line["step"], line.get("loss")) for line in written
    ]
    assert (
        list(numbers) == [2, 4]
        and numbers[4]["top1"] == [line["top1"] for line in written if line["kind"] == "validation"][-1]
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(model=Net(classes=7)), r"returned \(2, 7\) for 2 images.*\(2, 10\)"),
        (dict(model=nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 10), nn.Unflatten(1, (5, 2)))), "must return logits"),
        (dict(model=create("S/16", **TINY, classes=7, image_size=8)), r"7 outputs.*reset_head\(10\)"),
        (dict(model="S/16"), "a network of torch"),
        (dict(model=Net), "model is <class .*a network of torch"),
        (dict(model=nn.Flatten()), "nothing to train: the model, a Flatten, has no parameters"),
        (dict(objective="focal"), "must be settings"),
        (dict(data=3), "must have a length"),
    ],
)
def test_what_cannot_be_given(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(vitrail.VitrailError, match=reason):
        fit(small(tmp_path), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.train
@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (nn.CrossEntropyLoss(), r"shape \(\) for 64 images.*reduction='none'"),
        (lambda logits, targets: logits, r"shape \(64, 10\) for 64 images"),
        (lambda logits, targets: 3.0, "returned 3.0 for 64 images"),
    ],
)
def test_a_loss_is_one_for_each_image(loss: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=found):
        fit(small(tmp_path), objective=loss)


def test_a_run_is_needed() -> None:
    with pytest.raises(UsageError, match=r"run is 'digits'; it must be a Run, such as vitrail.recipe\("):
        fit("digits")


def test_a_function_needs_labels(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="learns from labels"):
        fit(replace(small(tmp_path), objective=MAE()), objective=lambda logits, targets: logits.sum(1))
    assert Supervised().labels and not MAE().labels
