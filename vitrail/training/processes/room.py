"""The number of processes that fit on this machine: for `--nproc`, for `--parallel`, and for trials by default."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from vitrail.costs.count import activation_bytes, parameters, state_bytes
from vitrail.device import available_cores, choose_device, compute_precision, free_memory, has_cuda
from vitrail.errors import UsageError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.batch_size import LARGEST, OVERHEAD, SHARE
from vitrail.training.decide import network_config
from vitrail.training.run import Run
from vitrail.weights.load import read_card

log = logging.getLogger("vitrail")
PER_CORE = 4
"""Maximum number of processes that share one core."""
PROCESS_BYTES = 400 << 20
"""Memory of one process that it shares with no other: torch takes 320 MiB, a small network and its batches the rest."""


def check_devices(processes: int, run: Run) -> None:
    """Raise UsageError if `run` has fewer GPUs than processes, or uses none and `check_room` rejects the number."""
    count = torch.cuda.device_count() if _on_gpu(run, None) else processes
    if processes > count:
        raise UsageError(
            f"--nproc is {processes}, but this machine has {count} GPU{'s' if count > 1 else ''}, and each process "
            f"needs one. Give --nproc {count} or less, or train with --device cpu."
        )
    check_room("--nproc", processes, run)


def check_room(flag: str, processes: int, run: Run, device: str | None = None) -> None:
    """Raise UsageError if memory or cores do not suffice for `processes` of `run`; warn if they share cores.

    The memory of a process is `PROCESS_BYTES`, and on a CPU the training state (`state_bytes`). Processes
    cut their batches to the memory that is free, so activations are not counted. One process is never rejected.
    """
    if processes <= 1:
        return
    gpu, cores, free = _on_gpu(run, device), available_cores(), free_memory(torch.device("cpu"))
    each = PROCESS_BYTES
    if not gpu:
        each += state_bytes(parameters(_network(run)))
    fitting = max(1, min(free // each, processes if gpu else PER_CORE * cores))
    if processes > fitting:
        raise UsageError(
            f"{flag} is {processes}, but only {fitting} fit{'s' if fitting == 1 else ''} on this machine. It has "
            f"{free / 2**30:.1f} GiB of free memory, of which each process needs about {each / 2**30:.1f} GiB, and "
            f"{cores} core{'s' if cores > 1 else ''} for at most {PER_CORE} processes each. "
            f"Give {flag} {fitting} or less."
        )
    if processes > cores and not gpu:
        log.warning("%s is %d, but there are %d cores: the processes share them and are slower", flag, processes, cores)


def trials_at_once(runs: Sequence[Run]) -> int:
    """Return the number of trials to train at the same time if nobody has chosen it: 1 on accelerators.

    On a CPU small networks leave cores idle, and several trials of one thread do more than one trial of several
    threads. So there is one trial for each core, as far as the memory holds whole batches of the largest run.
    """
    cpu = torch.device("cpu")
    if not runs or any(choose_device(run.device) != cpu for run in runs):
        return 1
    most = min(len(runs), available_cores())
    if most == 1:
        return 1
    return max(1, min(most, int(SHARE * free_memory(cpu) / max(_bytes_of_batches(runs)))))


def _bytes_of_batches(runs: Sequence[Run]) -> Iterator[float]:
    """Yield the bytes that a process of each different network takes on a CPU with a whole batch."""
    for config, batch, precision in {(_network(run), run.batch_size or LARGEST, run.precision) for run in runs}:
        activations = activation_bytes(config, None, compute_precision(torch.device("cpu"), precision), "cpu")
        yield PROCESS_BYTES + state_bytes(parameters(config)) + OVERHEAD * activations * batch


def _network(run: Run) -> ViTConfig | ResNetConfig:
    """Return the config of the network of `run`, without a classifier."""
    return network_config(run, None if run.weights is None else read_card(run.weights))[0]


def _on_gpu(run: Run, device: str | None) -> bool:
    """Return whether processes of `run` on `device` (default: the run's own) compute on a CUDA device."""
    return has_cuda() and (device or run.device or "cuda").startswith("cuda")
