"""An augmentation, a data source and a metric of the user's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own import SMALL, config, train, weights, write
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from vitrail import Augment, Preprocess, cli
from vitrail.data.images.ops import train_transform
from vitrail.data.settings import Columns
from vitrail.data.sources.indexed import TorchSource, data_set
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import classify

# augmentation


@pytest.mark.train
def test_an_own_augmentation_trains_and_is_written(tmp_path: Path, examples: None) -> None:
    run = train(tmp_path / "own", "--augment", "solarise:Solarised", "--augment.share", "1", "--workers", "1")
    written = config(run)["augment"]
    assert (written["class"], written["share"], written["scale"]) == ("solarise:Solarised", 1.0, [0.75, 1.0])
    plain = train(tmp_path / "plain")
    none = train(tmp_path / "none", "--augment", "solarise:Solarised", "--augment.share", "0")
    assert any(not torch.equal(tensor, weights(run)[name]) for name, tensor in weights(plain).items())
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(none)[name]), name


def test_solarised_is_pillows(examples: None) -> None:
    from PIL import ImageOps
    from solarise import Solarised

    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    transform = train_transform(Solarised(crop="center", flip=False, share=1.0), Preprocess((8, 8), resize="squash"))
    expected = np.asarray(ImageOps.solarize(Image.fromarray(image), 128))
    assert np.array_equal(transform(image, np.random.default_rng(1)), expected)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("image / 255", "float64"),
        ("image[0]", r"\(8, 3\)"),
        ("None", "None"),
    ],
)
def test_an_operation_that_returns_no_image(body: str, reason: str, mine: Path) -> None:
    name = f"bad_{len(body)}"
    write(
        mine,
        name,
        f"""
        from dataclasses import dataclass
        from vitrail import Augment

        @dataclass(frozen=True)
        class Mine(Augment):
            def operations(self, preprocess):
                return [lambda image, rng: {body}]
        """,
    )
    transform = train_transform(__import__(name).Mine(), Preprocess((8, 8)))
    with pytest.raises(UsageError, match=reason):
        transform(np.zeros((8, 8, 3), np.uint8), np.random.default_rng(0))


def test_the_built_in_augmentation_uses_the_same_method() -> None:
    assert len(Augment(color_jitter=0.1, erasing=0.5).operations(Preprocess((8, 8)))) == 4


# data


def digits(place: Path) -> Path:
    found = load_digits()
    np.savez(place, pixels=(found.images * 255 / 16).round().astype(np.uint8), answers=found.target)
    return place


@pytest.mark.train
def test_an_own_source_gives_the_same_network_as_ours(tmp_path: Path, examples: None) -> None:
    """The same arrays under the names that our own reader knows."""
    found = load_digits()
    pixels = (found.images * 255 / 16).round().astype(np.uint8)
    np.savez(tmp_path / "ours.npz", images=pixels, labels=found.target)
    theirs = digits(tmp_path / "theirs.npz")
    words = (
        "--data",
        "npz_source:Arrays",
        "--data.images",
        "pixels",
        "--data.labels",
        "answers",
        "--data.holdout",
        "0",
    )
    assert cli.main(["train", str(theirs), "--out", str(tmp_path / "own"), *SMALL, *words]) == 0
    assert (
        cli.main(["train", str(tmp_path / "ours.npz"), "--out", str(tmp_path / "ours"), *SMALL, "--data.holdout", "0"])
        == 0
    )
    own, ours = tmp_path / "own/digits-1", tmp_path / "ours/digits-1"
    assert config(own)["data"]["class"] == "npz_source:Arrays" and config(own)["data"]["images"] == "pixels"
    for name, tensor in weights(ours).items():
        assert torch.equal(tensor, weights(own)[name]), name
    assert cli.main(["train", "--resume", str(own), "--duration", "8 steps", "--quiet"]) == 0


class Torch(torch.utils.data.Dataset):
    """A data set as torch's users write it."""

    def __init__(self, images: Any, labels: Any, **more: Any) -> None:
        self.images, self.answers = images, labels
        for name, value in more.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.answers[index]


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)
FORMS = {
    "array": list(PIXELS),
    "pillow": [Image.fromarray(image) for image in PIXELS],
    "tensor": torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image(form: str) -> None:
    source = TorchSource("train", Torch(FORMS[form], [2, 0, 2, 0]))
    assert source.class_names == ["0", "2"] and source.labels.tolist() == [1, 0, 1, 0]
    for index in range(4):
        assert np.array_equal(source[index].image, PIXELS[index]) and source[index].id == f"train[{index}]"


def test_grey_images_have_three_channels() -> None:
    for grey in (PIXELS[0, :, :, 0], PIXELS[0, :, :, :1], torch.from_numpy(PIXELS[0, :, :, 0])):
        found = TorchSource("x", [(grey, 0)])[0].image
        assert np.array_equal(found, np.repeat(PIXELS[0, :, :, :1], 3, axis=2))


class Files(list):
    """Images alone, with their labels beside them."""

    targets = (1, 0)


def test_images_may_be_alone_if_labels_are_beside_them() -> None:
    found = TorchSource("x", Files([b"one file", b"another"]))
    assert [(item.image, item.label) for item in (found[0], found[1])] == [(b"one file", 1), (b"another", 0)]


def test_names_of_classes() -> None:
    named = TorchSource("x", Torch(FORMS["array"], ["cat", "ant", "cat", None]))
    assert named.class_names == ["ant", "cat"] and named.labels.tolist() == [1, 0, 1, -1]
    torchvisions = Torch(FORMS["array"], [1, 1, 0, 1], classes=["b", "a"], targets=[1, 1, 0, 1])
    assert TorchSource("x", torchvisions).class_names == ["b", "a"]


def test_labels_that_are_numbers() -> None:
    columns = Columns(per_image="numbers", label="age")
    for labels in ([1, -1, 2.5, None], np.array([1, -1, 2.5, np.nan])[:3], torch.tensor([1.0, -1.0, 2.5])):
        found = TorchSource("x", Torch(FORMS["array"], labels), columns)
        assert found.class_names == ["age"] and found.labels.values[:3, 0].tolist() == [1, -1, 2.5]
        assert found.labels.known.tolist() == [True, True, True, False][: len(labels)]
    two = TorchSource("x", Torch(FORMS["array"], [[1, 2], (3, 4.5), np.array([5, 6])]), Columns(per_image="numbers"))
    assert two.labels.values.tolist() == [[1, 2], [3, 4.5], [5, 6]] and two.class_names == ["target 1", "target 2"]
    for wrong in ([1.0, float("nan")], [[1, 2], [3]]):
        with pytest.raises(DataError, match=r"x\[1\] has the label .* finite numbers for each image"):
            TorchSource("x", Torch(FORMS["array"], wrong), columns)


def test_images_of_other_bands() -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (6, 5, 4), dtype=np.uint16)
    for image in (deep, torch.from_numpy(deep).permute(2, 0, 1)):
        assert np.array_equal(TorchSource("x", [(image, 0)], bands=True)[0].image, deep)
    clear = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    assert np.array_equal(TorchSource("x", [(Image.fromarray(clear), 0)], bands=True)[0].image, clear)
    with pytest.raises(DataError, match=r"x\[0\] is None. Valid are PIL pictures"):
        TorchSource("x", [(None, 0)], bands=True)[0]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (3, "must have a length"),
        ([PIXELS[0]], "not pairs"),
        ([(PIXELS[0], 0.5)], "a label is 0.5"),
        ([(PIXELS[0], np.array([0, 2, 0]))], r"a label is array\(\[0, 2, 0\]\); an array marks the classes"),
        ([(PIXELS[0], torch.tensor([0.0, 0.5]))], r"a label is tensor\(\[0.0*, 0.50*\]\)"),
        ([(PIXELS[0], np.array([0, 1, 0])), (PIXELS[0], np.array([0, 1]))], r"train\[1\] has the label array.*of 3"),
        ([(PIXELS[0], np.array([0, 1, 0])), (PIXELS[0], 2)], r"train\[1\] has the label 2, and .*train\[0\] is an"),
        (Torch([PIXELS[0]], [np.array([0, 1, 1])], classes=["a", "b"]), "arrays of 3 zeros and ones, and there are 2"),
        ([(PIXELS[0], 0, "more")], "not pairs .image, label.: one is a tuple of 3"),
        ([{"image": PIXELS[0], "label": 0}], "one is a dict of 2"),
        (({0: (PIXELS[0], 0)}, {0: (PIXELS[0], 1)}), r"one is a dict of 1. Give several splits by name: {'train': ..."),
        (Torch([PIXELS[0]], [2], classes=["a"]), "only 1 class names"),
    ],
)
def test_what_is_no_data_set(found: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        data_set(found)


@pytest.mark.parametrize("image", [PIXELS[0] / 255, torch.zeros(3, 4, 4), "a.png", PIXELS[0, :, :, :2]])
def test_what_is_no_image(image: Any) -> None:
    with pytest.raises(DataError, match=r"x\[0\].*Valid are PIL pictures"):
        TorchSource("x", [(image, 0)])[0]


# metric


@pytest.mark.train
def test_an_own_metric_is_logged_and_chooses(tmp_path: Path, examples: None) -> None:
    run = train(tmp_path, "--metric", "balanced_accuracy:Balanced", "--evaluate-every", "2 steps")
    assert config(run)["metric"]["class"] == "balanced_accuracy:Balanced"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "validation"]
    assert len(found) == 3 and all(0 <= line["balanced"] <= 1 for line in found)
    facts = json.loads((run / "run.json").read_text())["result"]
    assert facts["best"]["balanced"] == max(line["balanced"] for line in found)
    assert "balanced" in facts["test"]
    with np.load(run / "evaluation.npz") as stored:
        label, top = stored["labels"], stored["classes"]
        assert top.shape[1] == 5
    assert facts["best"]["balanced"] == pytest.approx(balanced_accuracy_score(label, top[:, 0]), abs=1e-6)


@pytest.mark.train
def test_a_metric_of_all_classes_is_scikit_learns(tmp_path: Path, mine: Path) -> None:
    write(
        mine,
        "auroc",
        """
        from dataclasses import dataclass
        import numpy as np
        from sklearn.metrics import roc_auc_score
        from vitrail.evaluation.metric import Metric

        @dataclass(frozen=True)
        class AUROC(Metric):
            all_classes = True
            def value(self, found):
                scores = np.zeros(found.top.shape)
                np.put_along_axis(scores, found.top, found.probability, axis=1)
                return roc_auc_score(found.label, scores / scores.sum(1, keepdims=True), multi_class="ovr")
        """,
    )
    run = train(tmp_path, "--metric", "auroc:AUROC", "--data.holdout", "0.2")
    best = json.loads((run / "run.json").read_text())["result"]["best"]
    from vitrail import from_yaml, load
    from vitrail.data.images.ops import eval_transform
    from vitrail.data.sources.open import open_data
    from vitrail.training.run import Run

    settings = from_yaml(run / "config.yaml", Run())
    held_out = open_data(settings.data, seed=settings.seed).validation
    assert held_out is not None
    transform = eval_transform(settings.preprocess)
    rng = np.random.default_rng(0)
    images = np.stack([transform(held_out[index].image, rng) for index in range(len(held_out))])
    with torch.no_grad():
        logits = load(run / "model/best")(torch.from_numpy(images).permute(0, 3, 1, 2))
    expected = roc_auc_score(held_out.labels, logits.double().softmax(1).numpy(), multi_class="ovr")
    assert best["auroc"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.train
def test_the_loss_can_choose(tmp_path: Path) -> None:
    run = train(tmp_path, "--metric.name", "nll", "--evaluate-every", "2 steps")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = json.loads((run / "run.json").read_text())["result"]["best"]
    assert best["nll"] == min(line["nll"] for line in lines if line["kind"] == "validation")


@pytest.mark.train
def test_a_metric_must_be_a_number(tmp_path: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        mine,
        "words",
        """
        from dataclasses import dataclass
        from vitrail.evaluation.metric import Metric

        @dataclass(frozen=True)
        class Words(Metric):
            def value(self, found):
                return "good"
        """,
    )
    assert cli.main(["train", "digits", *SMALL, "--out", str(tmp_path), "--metric", "words:Words"]) == 2
    assert "words:Words.value returned 'good'" in capsys.readouterr().err


def test_a_metric_needs_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["train", "digits", *SMALL, "--out", str(tmp_path), "--objective", "mae", "--metric.name", "nll"]) == 2
    )
    assert "metric" in capsys.readouterr().err


def test_top5_counts_five_of_many() -> None:
    """With all classes kept, top-5 is still about five."""
    logits = torch.arange(8.0).repeat(2, 1)  # best is class 7, then 6, ...

    class Batches:
        def __init__(self) -> None:
            self.bad: list[Any] = []

        def epoch(self, epoch: int) -> Iterator[Any]:
            yield type("Batch", (), dict(images=logits, labels=torch.tensor([3, 2]), index=torch.arange(2)))

    found = classify(lambda images: images, Batches(), [str(name) for name in range(8)], best=8)
    assert found.top.shape == (2, 8) and found.top5 == 0.5
