from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from hub_server import REPOSITORY, FakeHub, serving, use
from huggingface_hub import ModelCard
from torch import nn
from transformers import AutoModelForImageClassification

from vitrail.data.settings import Preprocess
from vitrail.errors import WeightsError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.weights.card import Card, architecture
from vitrail.weights.load import load
from vitrail.weights.publish import HubFormat, prepare_upload, push, readme

CLASSES = ["tabby *cat*", "<script>alert(1)</script>", "a|b"]
CONFIG = ViTConfig(
    width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 24), classes=3, mean=(0.1, 0.2, 0.3)
)


def made(**card: Any) -> Any:
    torch.manual_seed(0)
    model: Any = build(CONFIG)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    preprocess = Preprocess((16, 24), crop=0.9, interpolation="bicubic")
    values = dict(class_names=CLASSES, preprocess=preprocess, metrics={"validation top1": 0.93210}, licence="mit")
    model.card = Card(CONFIG, **{**values, **card})
    return model.eval()


def header(text: str) -> dict[str, Any]:
    _, top, _ = text.split("---\n", 2)
    return yaml.safe_load(top)


def test_the_folder_is_a_model_with_a_readme(tmp_path: Path) -> None:
    model = made()
    files = prepare_upload(model, tmp_path, "owner/name")
    assert sorted(files) == ["README.md", "card.json", "model.safetensors"]
    assert files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    loaded = load(tmp_path)
    images = torch.randn(1, 3, 16, 24)
    with torch.inference_mode():
        assert torch.equal(loaded(images), model(images))
    assert loaded.card.reference


def test_the_readme_says_accuracy_preprocessing_classes_and_licence(tmp_path: Path) -> None:
    prepare_upload(made(), tmp_path, "owner/name")
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert header(text)["license"] == "mit"
    assert header(text)["pipeline_tag"] == "image-classification"
    for part in ("validation top1 | 0.9321", "16 x 24 pixels", "central 0.9", "bicubic", "0.1, 0.2, 0.3", "owner/name"):
        assert part in text
    assert "0. tabby \\*cat\\*" in text and "a\\|b" in text
    assert "<script>" not in text


def test_a_licence_can_be_given_and_its_lack_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare_upload(made(licence=""), tmp_path / "a", "owner/name")
    assert "--licence" in caplog.text
    text = (tmp_path / "a" / "README.md").read_text()
    assert "license" not in header(text) and "Not stated" in text
    prepare_upload(made(licence=""), tmp_path / "b", "owner/name", licence="apache-2.0")
    assert header((tmp_path / "b" / "README.md").read_text())["license"] == "apache-2.0"
    assert load(tmp_path / "b").card.licence == "apache-2.0"


def test_the_hub_reads_results_and_the_base_model(tmp_path: Path) -> None:
    metrics = {"validation top1": 0.93210, "validation nll": 0.2, "test top1": 0.9, "test top5": 1.0, "step": 3}
    provenance = {"data": "photos/flowers/", "from": "google/vit-base-patch16-224-in21k"}
    prepare_upload(made(metrics=metrics, provenance=provenance), tmp_path / "m", "owner/name")
    found = ModelCard.load(tmp_path / "m" / "README.md").data
    assert found.base_model == "google/vit-base-patch16-224-in21k" and found.library_name == "vitrail"
    assert [(one.dataset_name, one.dataset_split, one.metric_name, one.metric_value) for one in found.eval_results] == [
        ("flowers", "validation", "top-1 accuracy", 0.9321),
        ("flowers", "test", "top-1 accuracy", 0.9),
        ("flowers", "test", "top-5 accuracy", 1.0),
    ]
    for number, start in enumerate(("runs/train-1/model", "vitrail/tiny", "runs/finetune-1", "finetune-1")):
        place = tmp_path / f"other{number}"
        prepare_upload(made(metrics={}, provenance={"from": start}), place, "owner/name")
        assert header((place / "README.md").read_text()).keys() & {"base_model", "model-index"} == set()


@pytest.mark.parametrize(("format", "library"), [("hf", "transformers"), ("timm", "timm")])
def test_users_of_other_libraries_load_it_by_its_name(tmp_path: Path, format: HubFormat, library: str) -> None:
    model, images = square(), torch.randn(2, 3, 16, 16)
    files = prepare_upload(model, tmp_path / "m", "owner/name", format=format)
    assert sorted(files) == sorted({"README.md", "config.json", "model.safetensors", *extra(format)})
    text = (tmp_path / "m" / "README.md").read_text()
    assert header(text)["library_name"] == library and 'owner/name"' in text
    with torch.inference_mode():
        if format == "timm":
            found = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()(images)
        else:
            found = AutoModelForImageClassification.from_pretrained(tmp_path / "m").eval()(images).logits
        torch.testing.assert_close(found, model(images), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(load(tmp_path / "m")(images), model(images), rtol=1e-5, atol=1e-5)


def extra(format: str) -> set[str]:
    return {"preprocessor_config.json"} if format == "hf" else set()


def square() -> Any:
    """A network that all three libraries have."""
    torch.manual_seed(0)
    config = ViTConfig(width=64, depth=2, heads=1, mlp_dim=256, patch=8, image_size=(16, 16), classes=3)
    model: Any = build(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.card = Card(config, ["a", "b", "c"], Preprocess((16, 16), crop=0.9, interpolation="bicubic"), licence="mit")
    return model


def test_the_home_folder_stays_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    provenance = {"data": str(tmp_path / "somebody" / "photos"), "from": [str(tmp_path / "somebody")], "step": 3}
    prepare_upload(made(provenance=provenance), tmp_path / "m", "owner/name")
    assert load(tmp_path / "m").card.provenance == {"data": "photos", "from": ["~"], "step": 3}
    assert "somebody" not in (tmp_path / "m" / "card.json").read_text()


def test_what_is_not_known_is_said() -> None:
    text = readme(Card(CONFIG), 10, "owner/name")
    for part in ("Not measured", "3, whose names are not known", "Not stated"):
        assert part in text
    many = readme(Card(ViTConfig(classes=1500), [f"class-{n}" for n in range(1500)]), 10, "owner/name")
    assert "999. class-999" in many and "1000. " not in many and "500 more: see card.json" in many


def test_an_architecture_in_a_sentence() -> None:
    assert architecture(ViTConfig()) == (
        "ViT B/16 (width 768, depth 12, 12 heads, MLP 3072, patch 16), 224 x 224 pixels, 1000 classes"
    )
    text = architecture(CONFIG)
    assert text.startswith("ViT (width 16, depth 2, 2 heads, MLP 32, patch 4), 16 x 24 pixels, 3 classes")
    assert "pool gap" in architecture(ViTConfig(pool="gap"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub()) as fake:
        use(monkeypatch, fake.endpoint, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
        yield fake


def test_push_uploads_the_folder_as_it_is(tmp_path: Path, hub: FakeHub) -> None:
    prepare_upload(made(), tmp_path / "m", REPOSITORY)
    assert push(tmp_path / "m", REPOSITORY) == f"{hub.endpoint}/{REPOSITORY}"
    assert hub.committed == {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}


@pytest.mark.parametrize(
    ("refused", "said"), [((401, ""), "hf auth login"), ((403, ""), "refuses access"), ((500, ""), "was not written")]
)
def test_what_the_hub_refuses_is_said_in_words(
    tmp_path: Path, hub: FakeHub, refused: tuple[int, str], said: str
) -> None:
    prepare_upload(made(), tmp_path / "m", REPOSITORY)
    hub.refuse = refused
    with pytest.raises(WeightsError, match=said):
        push(tmp_path / "m", REPOSITORY)


def test_without_a_network_nothing_is_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_upload(made(), tmp_path / "m", REPOSITORY)
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    with pytest.raises(WeightsError, match="cannot be reached"):
        push(tmp_path / "m", REPOSITORY)
