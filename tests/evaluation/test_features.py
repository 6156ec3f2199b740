from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrail import world
from vitrail.errors import DataError
from vitrail.evaluation.features import Features, collect, extract
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.weights.card import Card
from vitrail.weights.save import save

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=16, classes=5)


@dataclass
class Batch:
    images: Tensor
    labels: Tensor
    index: Tensor


@dataclass
class Fake:
    """A loader of given images in a given order."""

    images: Tensor
    labels: Tensor
    order: Tensor
    batch_size: int = 3
    bad: list[Any] = field(default_factory=list)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for part in self.order.split(self.batch_size) if len(self.order) else ():
            yield Batch(self.images[part], self.labels[part], part)


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)


def shuffled(count: int, **more: Any) -> Fake:
    """All images once, out of order, but for two that come twice."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(count))
    return Fake(images(count), torch.arange(count) % 5, torch.cat([order, order[:2]]), **more)


def random_model(config: ViTConfig | ResNetConfig) -> Any:
    torch.manual_seed(0)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


NAMES = list("abcde")
OPTIONS: list[dict[str, Any]] = [
    dict(),
    dict(pool="gap"),
    dict(pool="map"),
    dict(pool="cls+gap"),
    dict(distilled=True),
    dict(pre_logits=24),
    dict(final_norm="pooled", registers=2),
    dict(block="parallel", branches=2),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_features_are_what_the_classifier_is_given(options: dict[str, Any]) -> None:
    model = random_model(ViTConfig.of(**(TINY | options)))
    seen: list[Tensor] = []
    heads = [model.head] if model.head_dist is None else [model.head, model.head_dist]
    for head in heads:
        head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(images(11))
    expected = torch.cat(seen, dim=1)
    found = extract(model, shuffled(11), NAMES, precision="float32")
    np.testing.assert_allclose(found.features, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert found.features.dtype == np.float32 and found.width == model.config.head_width * len(heads)
    np.testing.assert_array_equal(found.index, np.arange(11))
    np.testing.assert_array_equal(found.labels, np.arange(11) % 5)
    with torch.no_grad():
        torch.testing.assert_close(model.classify(torch.from_numpy(found.features)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axial", [False, True])
def test_features_of_a_resnet_are_the_means_of_its_last_map(axial: bool) -> None:
    model = random_model(ResNetConfig(units=(1, 1), width=16, image_size=(16, 16), classes=5, axial=axial))
    seen: list[Tensor] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(images(4))
    found = extract(model, shuffled(4), NAMES, precision="float32")
    np.testing.assert_allclose(found.features, seen[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(), dict()),
        (dict(pool="gap"), dict(global_pool="avg", class_token=False, fc_norm=False)),
        (dict(pool="map"), dict(global_pool="map", class_token=False)),
    ],
    ids=["cls", "gap", "map"],
)
def test_features_are_timms_pre_logits(ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    one_head = dict(width=64, heads=1, mlp_dim=128)  # timm's files say nothing of the heads: 64 features each
    config = ViTConfig.of(**(TINY | one_head | ours))  # type: ignore[arg-type]
    model = random_model(config)
    model.card = Card(config, NAMES)
    save(model, tmp_path / "model.safetensors", "timm")
    peer = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=64, depth=2, num_heads=1, mlp_ratio=2, num_classes=5, **theirs
    ).eval()
    peer.load_state_dict(load_file(tmp_path / "model.safetensors"))
    pixels = images(6)
    with torch.no_grad():
        tokens = peer.forward_features(pixels.float() / 127.5 - 1)
        expected = peer.forward_head(tokens, pre_logits=True).numpy()
    found = extract(model, shuffled(6), NAMES, precision="float32")
    np.testing.assert_allclose(found.features, expected, rtol=1e-4, atol=1e-5)


def test_extracting_leaves_model_and_random_numbers_alone() -> None:
    model = random_model(ViTConfig.of(**TINY, dropout=0.5)).train()  # type: ignore[arg-type]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    first, second = (extract(model, shuffled(7), NAMES) for _ in range(2))
    np.testing.assert_array_equal(first.features, second.features)
    assert model.training and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]  # type: ignore[index,union-attr]


def test_reduced_precision_agrees_to_its_rounding() -> None:
    model = random_model(ViTConfig.of(**TINY))  # type: ignore[arg-type]
    exact = extract(model, shuffled(9), NAMES, precision="float32").features
    rounded = extract(model, shuffled(9), NAMES, precision="bf16").features
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


def flat(pixels: Tensor) -> Tensor:
    return pixels.flatten(1)[:, :6].float()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_process_gets_all_rows(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes played by threads: what one hands over, all get, in the order of the ranks."""
    whole = shuffled(11)
    mine = threading.local()
    barrier, shared = threading.Barrier(ranks), [None] * ranks

    def gather(value: Any) -> list[Any]:
        shared[mine.rank] = value
        barrier.wait(30)
        values = list(shared)
        barrier.wait(30)
        return values

    monkeypatch.setattr(world, "gather", gather)
    found: dict[int, Features] = {}

    def process(rank: int) -> None:
        mine.rank = rank
        part = Fake(whole.images, whole.labels, whole.order[rank::ranks], 2, [(f"bad{rank}", "truncated")])
        found[rank] = collect(flat, part, NAMES)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(ranks):
        np.testing.assert_array_equal(found[rank].features, flat(whole.images).numpy())
        np.testing.assert_array_equal(found[rank].labels, whole.labels.numpy())
        assert found[rank].bad == [(f"bad{one}", "truncated") for one in range(ranks)]


def test_a_process_without_images_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    other = collect(flat, shuffled(5), NAMES)
    rows = [(np.arange(5), other.labels, 6)], [("x", "empty")]
    answers = iter([rows, (np.arange(5), other.labels, other.features)])

    def gather(value: Any) -> list[Any]:
        return [value, next(answers)]

    monkeypatch.setattr(world, "gather", gather)
    found = collect(flat, Fake(images(5), torch.zeros(5), torch.empty(0, dtype=torch.int64)), NAMES)
    np.testing.assert_array_equal(found.features, other.features)
    assert found.bad == [("x", "empty")]


def test_memory_is_that_of_the_rows() -> None:
    """Images are let go of: they would be three times the bytes of the features."""
    count, width = 4000, 512

    class Endless(Fake):
        def epoch(self, epoch: int) -> Iterator[Batch]:
            for begin in range(0, count, 50):
                index = torch.arange(begin, begin + 50)
                yield Batch(torch.from_numpy(np.zeros((50, 3 * 4 * width), np.uint8)), index % 5, index)

    def embed(pixels: Tensor) -> Tensor:
        return torch.from_numpy(np.ones((len(pixels), width), np.float32))

    tracemalloc.start()
    try:
        found = collect(embed, Endless(torch.empty(0), torch.empty(0), torch.empty(0)), NAMES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.features.nbytes == count * width * 4
    assert peak < 2.3 * found.features.nbytes  # the rows as they came, and the place they go to


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(DataError, match=r"no image could be read: 1 no extension \(empty\)"):
        collect(flat, Fake(images(0), torch.empty(0), torch.empty(0, dtype=torch.int64), bad=[("a", "empty")]), NAMES)
    with pytest.raises(DataError, match="label 4 in the data; with 2 classes they go from 0 to 1"):
        collect(flat, shuffled(5), NAMES[:2])
    found = collect(flat, shuffled(5), [])  # files without classes
    with pytest.raises(DataError, match="features of test image 3 are not finite"):
        found.features[3, 1] = np.nan
        found.labelled("test")


def test_images_without_a_class_are_embedded_but_not_counted() -> None:
    loader = shuffled(6)
    loader.labels[2:4] = -1
    found = collect(flat, loader, NAMES)
    assert len(found) == 6
    features, labels = found.labelled("test")
    np.testing.assert_array_equal(features, flat(loader.images).numpy()[[0, 1, 4, 5]])
    np.testing.assert_array_equal(labels, [0, 1, 4, 0])
    loader.labels[:] = -1
    with pytest.raises(DataError, match="none of the 6 test images has a known class"):
        collect(flat, loader, NAMES).labelled("test")


def test_a_module_keeps_its_place() -> None:
    model = random_model(ViTConfig.of(**TINY))  # type: ignore[arg-type]
    assert isinstance(model, nn.Module)
    extract(model, shuffled(3), NAMES, device="cpu")
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in model.parameters())
