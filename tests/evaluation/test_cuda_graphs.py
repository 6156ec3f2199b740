"""CUDA graphs by a stub: what is launched while a graph is recorded is repeated, with the memory that it had then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_work import DeviceWork
from torch import Tensor, nn

from vitrail.costs.count import ACCELERATOR, fake
from vitrail.errors import UsageError
from vitrail.evaluation.cuda_graphs import Graphs, filled_size
from vitrail.exports.engines import engine_predictor
from vitrail.model.build import build, freeze
from vitrail.model.variants import Rotary, ViTConfig, variant
from vitrail.torch_private import TorchDispatchMode

SMALL = dict(width=16, depth=3, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=5)
NETWORKS: dict[str, dict[str, Any]] = {
    "learned": {},
    "registers": dict(registers=2, layer_scale=0.1),
    "relative_bias": dict(positions="relative_bias"),
    "rotary": dict(positions="none", rotary=Rotary()),
    "parallel": dict(block="parallel", branches=2, pool="gap"),
    "map": dict(pool="map"),
    "axial": dict(block="axial", positions="none", pool="gap"),
}


class Recording(TorchDispatchMode):
    """In place of a CUDA graph: `replay` does the recorded operations again and puts results where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(
                *(one if isinstance(one, tuple | list) else [one] for one in (result, again)), strict=True
            ):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> str:
        return "memory"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recording, object]]:
    """The graphs that were recorded, with the pools they got."""
    found: list[tuple[Recording, object]] = []

    @contextmanager
    def graph(recording: Recording, pool: object) -> Iterator[None]:
        found.append((recording, pool))
        with recording:
            yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    return found


def images(count: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 16, 16), generator=rng, dtype=torch.uint8)


def test_batches_are_filled_to_few_sizes() -> None:
    assert [filled_size(count) for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 48, 100)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        16,
        24,
        48,
        104,
    ]


@pytest.mark.parametrize("kind", ["learned", "relative_bias", "parallel"])
def test_outputs_are_those_without_graphs(kind: str, recorded: list[tuple[Recording, object]]) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**SMALL, **NETWORKS[kind])).eval()
    nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
    with torch.inference_mode():
        graphs, kept = Graphs(model), []
        for number, count in enumerate((5, 8, 3, 7, 1, 8)):
            batch = images(count, number)
            kept.append((graphs(batch), model(batch)))
        for found, expected in kept:  # a later batch has not changed an earlier result
            torch.testing.assert_close(found, expected)
    assert [graph.replays for graph, _ in recorded] == [4, 1, 1]  # of 8, 4 and 1 images
    assert [pool for _, pool in recorded] == [None, "memory", "memory"]


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_launches_the_same_kernels_for_all_images(kind: str) -> None:
    """Nothing in it waits for the device or copies from the CPU, which a graph cannot record."""
    check(ViTConfig.of(**SMALL, **NETWORKS[kind]))


def test_so_does_a_resnet() -> None:
    check(variant("R50x1", units=(1, 1), width=8, classes=3, image_size=32))


def check(config: Any) -> None:
    with fake(lambda: freeze(build(config), torch.bfloat16)) as network, torch.no_grad():
        pixels = torch.zeros(4, 3, *config.image_size, dtype=torch.uint8, device=ACCELERATOR)
        network(pixels)  # what is kept from the first call on
        with DeviceWork(ACCELERATOR) as work:
            network(pixels)
    assert work.found() == {} and sum(work.launches.values()) > 10


def test_graphs_are_for_cuda() -> None:
    with pytest.raises(UsageError, match="the engine graphs is for CUDA, and the device is cpu"):
        engine_predictor(build(ViTConfig.of(**SMALL)), torch.device("cpu"), engine="graphs")
