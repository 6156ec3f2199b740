"""What FSDP2 gathers, and when: counted by two processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from forked import in_two_processes

from vitrail import world
from vitrail.data.loading.loader import Batch
from vitrail.errors import UsageError
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.objective.base import RunFacts
from vitrail.objective.settings import Supervised
from vitrail.training import parallel
from vitrail.training.parallel import distribute, shards
from vitrail.training.processes import in_process_group
from vitrail.training.run import Run
from vitrail.training.step import backward

CONFIG = ViTConfig(width=32, depth=4, heads=2, mlp_dim=64, patch=8, image_size=(16, 16), classes=5)
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.14
OF_BLOCK = 4 * 32 * 33 + 2 * 32 * 64 + 64 + 32 + 4 * 32
"""Parameters of a block: attention, MLP and two norms (Eq. 2 and 3)."""


def gradients(run: Run) -> tuple[list[str], float, dict[str, torch.Tensor]]:
    """Return what happened in a step, its loss, and the whole gradient of each parameter."""
    torch.manual_seed(0)
    model = build(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    objective, events = Supervised().build(model, RunFacts(classes=5)), list[str]()
    network = distribute(objective, run)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: events.append(f"block {number}"))
    gather = getattr(dist, GATHER)

    def gathering(output_tensor: Any, *arguments: Any, **options: Any) -> Any:
        events.append(f"gather {output_tensor.nbytes}")
        return gather(output_tensor, *arguments, **options)

    generator = torch.Generator().manual_seed(world.rank())
    images = torch.randint(0, 256, (6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    batch = Batch(images, torch.arange(6) % 5, torch.arange(6))
    setattr(dist, GATHER, gathering)
    try:
        options: dict[str, Any] = {"parts": 1, "autocast": run.precision == "bf16", "network": network}
        sums = backward(objective, batch, step=0, **options)
    finally:
        setattr(dist, GATHER, gather)
    whole: Callable[[Any], torch.Tensor] = lambda one: one.full_tensor() if world.is_sharded(one) else one  # noqa: E731
    found = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    assert {value.dtype for value in found.values()} == {torch.float32}
    return events, sums.loss, found


def in_group(out: Path) -> NoReturn:
    """Compare whole and sharded gradients in both precisions, and write what happened in the sharded steps."""
    with in_process_group():
        happened = {}
        for precision in ("float32", "bf16"):
            run = Run(precision=precision)  # type: ignore[arg-type]
            (_, loss, whole), (events, mine, sharded) = gradients(run), gradients(replace(run, shard=True))
            happened[precision] = events
            assert abs(mine - loss) < (1e-6 if precision == "float32" else 1e-2), (loss, mine)
            ours, theirs = (torch.cat([each[name].flatten() for name in whole]) for each in (sharded, whole))
            assert (ours - theirs).norm() < (1e-5 if precision == "float32" else 0.02) * theirs.norm()
        if world.is_main():
            (out / "events.json").write_text(json.dumps(happened))
    world.leave(0)


@pytest.mark.processes
def test_blocks_are_gathered_ahead_and_in_the_precision_of_their_products(tmp_path: Path) -> None:
    assert in_two_processes(in_group, tmp_path) == [0, 0]
    happened = json.loads((tmp_path / "events.json").read_text())
    for precision, size in (("float32", 4), ("bf16", 2)):
        block = f"gather {size * OF_BLOCK}"
        events = [event for event in happened[precision] if event == block or event.startswith("block")]
        # the next block is gathered before a block is computed; in the backward pass the last block is still there
        assert events[:8] == [block, block, "block 0", block, "block 1", block, "block 2", "block 3"], events
        assert set(events[8:]) == {block}


def test_groups_must_divide_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel.world, "size", lambda: 12)
    assert [shards(Run(shard=count)) for count in (True, 4, 12, 16)] == [12, 4, 12, 12]
    with pytest.raises(UsageError, match=r"--shard is 8, but 12 processes cannot .* Use --shard 2, 3, 4, 6, 12, or"):
        shards(Run(shard=8))
