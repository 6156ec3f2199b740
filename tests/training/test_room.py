"""The number of processes that a machine of given cores, memory and GPUs takes."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vitrail import world
from vitrail.errors import UsageError
from vitrail.training import processes
from vitrail.training.run import Model, Run

SMALL = Run(model="Ti/16", vit=Model(width=16, depth=1, heads=2, mlp_dim=32), image_size=32, device="cpu")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, 8 GiB of free memory and no GPU."""
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    monkeypatch.setattr(processes, "free_memory", lambda _: 8 << 30)
    monkeypatch.setattr(processes, "has_cuda", lambda: False)


def test_processes_share_cores_with_a_warning_up_to_a_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vitrail"):
        processes.check_devices(2, SMALL)
        assert not caplog.records
        processes.check_devices(4, SMALL)
        assert "--nproc is 4, but there are 2 cores" in caplog.text
    processes.check_devices(8, SMALL)
    with pytest.raises(UsageError, match=r"--nproc is 9, but only 8 fit .* Give --nproc 8 or less"):
        processes.check_devices(9, SMALL)


def test_memory_limits_them_before_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(SMALL, model="H/16", vit=Model())  # 632 million parameters (paper, table 1) of 16 bytes: 9.4 GiB
    monkeypatch.setattr(processes, "free_memory", lambda _: 35 << 30)
    processes.check_room("--parallel", 3, large)
    with pytest.raises(UsageError, match=r"--parallel is 4, but only 3 fit .* each process needs about 9\.[789] GiB"):
        processes.check_room("--parallel", 4, large)
    monkeypatch.setattr(processes, "free_memory", lambda _: 1 << 20)
    processes.check_room("--parallel", 1, large)
    with pytest.raises(UsageError, match="only 1 fits"):
        processes.check_room("--parallel", 2, large)


def test_each_process_of_a_run_has_a_gpu_and_trials_may_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    run = replace(SMALL, device=None)
    processes.check_devices(2, run)
    with pytest.raises(UsageError, match=r"--nproc is 3, but this machine has 2 GPUs.* Give --nproc 2 or less"):
        processes.check_devices(3, run)
    processes.check_devices(3, SMALL)  # on the processor
    processes.check_room("--parallel", 12, run, "cuda:1")
    with pytest.raises(UsageError, match="--parallel is 1000, but only 20 fit"):
        processes.check_room("--parallel", 1000, run)


def test_a_cpu_trains_one_trial_per_core_by_default_if_memory_holds_their_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = replace(SMALL, vit=Model(width=32, depth=1, heads=2, mlp_dim=64), batch_size=64)
    assert processes.trials_at_once([]) == 1
    assert processes.trials_at_once([SMALL]) == 1, "a single trial has all cores"
    assert processes.trials_at_once([SMALL, wide, wide]) == 2
    need = max(processes._bytes_of_batches([SMALL, wide]))
    monkeypatch.setattr(processes, "free_memory", lambda _: int(1.9 * need / processes.SHARE))
    assert processes.trials_at_once([SMALL, wide]) == 1, "two processes of the larger one do not fit"
    monkeypatch.setattr(processes, "free_memory", lambda _: 0)
    assert processes.trials_at_once([SMALL, wide]) == 1
    monkeypatch.setattr(processes, "free_memory", lambda _: 8 << 30)
    monkeypatch.setattr(processes, "choose_device", torch.device)
    assert processes.trials_at_once([replace(run, device="cuda:0") for run in (SMALL, wide)]) == 1


def test_one_gpu_is_refused_for_several_processes_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    named = replace(SMALL, device="cuda:1")
    with pytest.raises(UsageError, match=r"--device is cuda:1, a single GPU.* CUDA_VISIBLE_DEVICES"):
        processes.launch(named, None, 8)
    processes.check_devices(1, named)
    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():  # as torchrun starts them
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="a single GPU"), processes.in_process_group(device="cuda:1"):
        pass


@pytest.mark.parametrize(("device", "gpu"), [(None, torch.device("cuda", 3)), ("cpu", None)])
def test_nccl_connects_at_once_to_the_gpu_of_its_number(
    monkeypatch: pytest.MonkeyPatch, device: str | None, gpu: torch.device | None
) -> None:
    """With stand-ins for torch's functions: nothing is started."""
    chosen, given = list[torch.device](), dict[str, Any]()

    def started(backend: str, **options: Any) -> None:
        given.update(options, backend=backend)
        raise KeyboardInterrupt  # nothing after it works without a group

    monkeypatch.setattr(processes, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(processes.dist, "rendezvous", lambda _: iter([(dist.HashStore(), 3, 8)]))
    monkeypatch.setattr(processes.dist, "init_process_group", started)
    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt), processes.in_process_group(device=device):
        pass
    assert chosen == [gpu] * (gpu is not None) and given["device_id"] == gpu
    assert given["backend"] == ("gloo" if gpu is None else "cpu:gloo,cuda:nccl")
    assert given["timeout"] == timedelta(minutes=30)


def test_others_are_waited_for_a_shorter_time_once_a_step_has_been_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = list[timedelta]()
    monkeypatch.setattr(world.torch_private, "set_timeout", set_to.append)
    for later, expected in ((600.0, [timedelta(minutes=10)]), (None, [])):
        pulse = world.Pulse(dist.HashStore(), 1800.0, later)
        for step in range(7, 10):
            pulse.begin(step, first=step == 7)
            assert pulse.timeout == (1800.0 if step == 7 else later or 1800.0)
        assert set_to == expected
        set_to.clear()
