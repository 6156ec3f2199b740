"""The number of processes that a machine of given cores, memory and GPUs takes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

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
