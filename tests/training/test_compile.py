"""Compilation: the graphs of a whole run, whatever the layers, and results and names as without it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import server
from torch import nn

from vitrail.data.settings import Augment
from vitrail.evaluation.classify import predictor
from vitrail.model import block
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, Rotary, ViTConfig, variant
from vitrail.objective.mae import MAEObjective
from vitrail.objective.settings import MAE, Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.training.parallel import distribute, prepare_model
from vitrail.training.run import Run
from vitrail.training.step import backward, seed_step

SIDES = (16, 20, 24, 28, 32, 36)
SMALL = dict(width=16, heads=2, mlp_dim=32, patch=4, image_size=(36, 36), classes=5)


@dataclass
class Images:
    images: torch.Tensor
    labels: torch.Tensor
    index: torch.Tensor

    @classmethod
    def of(cls, count: int, side: int) -> Images:
        rng = torch.Generator().manual_seed(1)
        pixels = torch.randint(0, 256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
        return cls(pixels, torch.randint(0, 5, (count,), generator=rng), torch.arange(count))


@dataclass
class Counter:
    """A backend of torch.compile that only counts."""

    graphs: int = 0
    calls: int = 0
    seen: list[int] = field(default_factory=list)
    """Calls of each step."""

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run

    def step(self, function: Callable[[], Any]) -> None:
        before = self.calls
        function()
        self.seen.append(self.calls - before)

    @property
    def breaks(self) -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    yield from compiling(monkeypatch, found := Counter(), found)


def compiling(monkeypatch: pytest.MonkeyPatch, backend: Any, given: Any = None) -> Iterator[Any]:
    """Compile with this backend, from nothing and with torch's limit of graphs."""
    import torch._dynamo

    whole: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: whole(function, **options | {"backend": backend}))
    block._compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config: Any = torch.compiler.config
    with config.patch(recompile_limit=8):
        yield given
    block._compiled.cache_clear()


NETWORKS: dict[str, dict[str, Any]] = {
    "learned": {},
    "drop_path": dict(drop_path=0.1, registers=2),
    "relative": dict(positions="relative"),
    "relative_bias": dict(positions="relative_bias", drop_path=0.1),
    "rotary": dict(positions="none", rotary=Rotary(), drop_path=0.1),
    "mixed": dict(positions="none", rotary=Rotary(frequencies="mixed")),
    "parallel": dict(block="parallel", branches=2, positions="relative_bias"),
}


def run_all(counter: Counter, depth: int, checkpointing: bool, changes: dict[str, Any], sides: Any = SIDES) -> int:
    """Train with batches of two sizes and images of several, then evaluate with a last batch of one image."""
    model = build(ViTConfig.of(**SMALL, depth=depth, **changes))
    prepare_model(model, Run(compile=True, activation_checkpointing=checkpointing))

    def train(count: int, side: int) -> None:
        model.train()(Images.of(count, side).images).sum().backward()

    def evaluate(count: int) -> None:
        with torch.inference_mode():
            model.eval()(Images.of(count, SIDES[-1]).images)

    for count, side in [(3, sides[0]), *((4, side) for side in sides)]:
        counter.step(lambda count=count, side=side: train(count, side))  # type: ignore[misc]
    for count in (4, 3, 1):
        counter.step(lambda count=count: evaluate(count))  # type: ignore[misc]
    return sum(isinstance(part, block.Block) for part in model.modules())


@pytest.mark.export
@pytest.mark.parametrize(
    ("kind", "depth", "checkpointing"),
    [("drop_path", 12, False), ("relative_bias", 24, False), ("rotary", 12, True)],
)
def test_ten_graphs_serve_a_whole_progressive_run(counter: Counter, kind: str, depth: int, checkpointing: bool) -> None:
    blocks = run_all(counter, depth, checkpointing, NETWORKS[kind])
    assert counter.seen == [blocks] * len(counter.seen) and blocks == depth
    assert counter.graphs <= 10 and counter.breaks == 0


@pytest.mark.export
@pytest.mark.nightly("test_ten_graphs_serve_a_whole_progressive_run of the other networks")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
def test_ten_graphs_serve_every_network(counter: Counter, kind: str, checkpointing: bool) -> None:
    blocks = run_all(counter, 12, checkpointing, NETWORKS[kind])
    assert counter.seen == [blocks] * len(counter.seen)
    assert counter.graphs <= 10 and counter.breaks == 0


@pytest.mark.export
def test_masked_images_are_compiled_in_encoder_and_decoder(counter: Counter) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**SMALL | dict(classes=0), depth=5, pool="gap"))
    objective = MAEObjective(model, MAE(decoder_width=8, decoder_depth=3, decoder_heads=2), 0).train()
    prepare_model(objective, Run(compile=True))
    for count in (3, 4):
        counter.step(lambda count=count: backward(objective, Images.of(count, 36), step=0, parts=2, autocast=False))  # type: ignore[misc]
    assert counter.seen == [2 * 8] * 2 and counter.graphs <= 4 and counter.breaks == 0  # of two widths


@pytest.mark.export
@pytest.mark.parametrize("kind", ["learned", "relative_bias", "parallel"])
def test_predictions_for_batches_of_any_size_share_their_graphs(counter: Counter, kind: str) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**SMALL, depth=6, **NETWORKS[kind]))
    nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
    plain, compiled = (predictor(model, "cpu", "float32", how=how) for how in ("torch", "compiled"))  # type: ignore[arg-type]
    for count in (8, 8, 3, 5, 1):
        images = Images.of(count, 36).images
        counter.step(lambda images=images: torch.testing.assert_close(compiled(images), plain(images)))  # type: ignore[misc]
    assert counter.seen == [6] * 5 and counter.breaks == 0
    assert counter.graphs <= 4  # the last layer computes what its head reads; one image is a size of its own
    assert not any(part.compiled for part in model.modules() if isinstance(part, block.Block))


@pytest.mark.export
def test_predictions_of_a_network_without_blocks_are_compiled_as_a_whole(counter: Counter) -> None:
    model = build(ResNetConfig(units=(1, 1), width=32, image_size=(32, 32), classes=5))
    images = Images.of(2, 32).images
    plain = predictor(model, "cpu", "float32", features=True)
    compiled = predictor(model, "cpu", "float32", features=True, how="compiled")
    torch.testing.assert_close(compiled(images), plain(images))
    assert counter.graphs == 1 and counter.calls == 1


def check_results(changes: dict[str, Any], checkpointing: bool) -> None:
    def gradients(run: Run) -> tuple[dict[str, torch.Tensor], list[str]]:
        torch.manual_seed(0)
        model: nn.Module = build(ViTConfig.of(**SMALL, depth=3, **changes))
        objective = SupervisedObjective(model, Supervised(), Augment(), 5, 0).train()
        torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
        prepare_model(objective, run)
        seed_step(0, 0, 0)
        backward(objective, Images.of(4, 24), step=3, parts=1, autocast=False)
        found = {name: part.grad for name, part in objective.named_parameters() if part.grad is not None}
        return found, list(objective.state_dict())

    expected, names = gradients(Run())
    found, compiled_names = gradients(Run(compile=True, activation_checkpointing=checkpointing))
    assert compiled_names == names
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.export
@pytest.mark.parametrize(
    ("changes", "checkpointing"), [({}, False), ({}, True), (NETWORKS["relative"], False)], ids=str
)
def test_compilation_changes_neither_results_nor_names(
    changes: dict[str, Any], checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the graphs that TorchInductor gets, and no C++ of its own."""
    for _ in compiling(monkeypatch, "aot_eager_decomp_partition"):
        check_results(changes, checkpointing)


@pytest.mark.export
@pytest.mark.nightly("test_compilation_changes_neither_results_nor_names of the graphs that TorchInductor gets")
def test_torchinductor_changes_neither_results_nor_names() -> None:
    check_results({}, checkpointing=False)


def _compiled_in_two_processes(rank: int, port: int, shard: bool, out: str) -> None:
    """Train for two steps, compiled and not; save losses and counts."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    counter = Counter()
    for _ in compiling(pytest.MonkeyPatch(), counter):
        for compiled in (False, True):
            torch.manual_seed(0)
            model = build(ViTConfig.of(**SMALL, depth=4, positions="relative_bias"))
            torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
            objective = SupervisedObjective(model, Supervised(), Augment(), 5, 0).train()
            run = Run(compile=compiled, shard=shard, activation_checkpointing=compiled)
            network = distribute(objective, run)
            optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
            losses = []
            for step, count in enumerate((4, 3)):
                sums = backward(objective, Images.of(count, 24), step=step, parts=2, autocast=False, network=network)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(sums.loss)
            found[str(compiled)] = losses
    found |= {"calls": counter.calls, "graphs": counter.graphs, "breaks": counter.breaks}
    Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("shard", [False, True])
def test_processes_and_shards_compile_every_block(shard: bool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        server().Process(target=_compiled_in_two_processes, args=(rank, port, shard, str(tmp_path)))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found["True"] == pytest.approx(found["False"], rel=1e-5)
        assert (found["calls"], found["breaks"]) == (2 * 2 * 4, 0) and found["graphs"] <= 4


@pytest.mark.export
def test_compiled_stochastic_depth_keeps_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's rate is its own: a branch is kept with the probability 1 - rate, and divided by it."""
    for _ in compiling(monkeypatch, "aot_eager"):
        residual = block.Residual(ViTConfig.of(**SMALL, depth=3, drop_path=0.4), 0.25).train()
        factors = torch.compile(residual._factors, fullgraph=True)(torch.ones(4000, 1, 1)).flatten()
        assert sorted(set(factors.tolist())) == pytest.approx([0, 4 / 3])
        assert factors.mean() == pytest.approx(1, abs=5 * (0.25 / 0.75 / 4000) ** 0.5)


@pytest.mark.export
def test_a_network_without_blocks_is_compiled_as_a_whole(counter: Counter) -> None:
    config = variant("R50x1", units=(1, 1), width=8, classes=3, image_size=32)
    assert isinstance(config, ResNetConfig)
    model = build(config)
    prepare_model(model, Run(compile=True))
    counter.step(lambda: model(torch.rand(2, 3, 32, 32)).sum().backward())
    assert counter.seen == [1] and counter.breaks == 0
