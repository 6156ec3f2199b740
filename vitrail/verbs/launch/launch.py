"""`vitrail launch`: check a training command, and print a script that runs it on a cluster.

    vitrail launch slurm --nodes 4 --gpus-per-node 8 -- train s3://bucket/packed --recipe ... > train.sbatch
    vitrail launch sky --nodes 2 --accelerator H100 --bucket my-runs -- train s3://bucket/packed > train.yaml

The command after `--` is parsed like a command line, so that mistakes are reported now and not when the job starts.
Both scripts start and resume a run with the same command: a folder that belongs to the job, and `--resume auto`.
Torch-free.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import UsageError, did_you_mean
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run
from vitrail.verbs.finetune import asking_for_weights, finetune
from vitrail.verbs.flags.parse import GLOBAL, parse
from vitrail.verbs.flags.settings import Asked, asking_for_images
from vitrail.verbs.launch.sky import Sky, sky_yaml
from vitrail.verbs.launch.slurm import Slurm, sbatch
from vitrail.verbs.train import files, train

LAUNCHED: dict[str, Callable[..., Any]] = {"train": train, "finetune": finetune}
OURS = {
    "out": "it is a flag of the launcher: vitrail launch ... --out DIR -- train ...",
    "resume": "the script resumes by itself",
    "nproc": "the script starts the processes; set their number with --nodes and --gpus-per-node",
    "print_config": "use it without the launcher",
    "dry_run": "use it without the launcher",
}
"""Flags that a launched command cannot have, and the reason."""
WORD = re.compile(r"[\w.,:@%+-]+")


@dataclass(frozen=True)
class Script:
    """A script, and what it launches."""

    text: str
    run: Run
    """The run, as far as it is known without the data."""
    processes: int


def slurm(
    *command: str,
    nodes: int = 1,
    gpus_per_node: int = 8,
    cpus_per_task: int = 8,
    time: str = "24:00:00",
    saving: int = 180,
    name: str = "vitrail",
    partition: str | None = None,
    account: str | None = None,
    option: tuple[str, ...] = (),
    image: str | None = None,
    mount: tuple[str, ...] = (),
    setup: tuple[str, ...] = (),
    python: str | None = None,
    out: str = "runs",
    restarts: int = 100,
) -> Script:
    """Print a batch script for Slurm that trains, saves before its time limit, and queues itself again.

    srun starts one process per GPU. The run folder is OUT/slurm-JOB: a restart uses the same folder, a new submission
    another one. After a time limit, a lost node or preemption, the job continues from its last checkpoint. A job that
    is done, has failed or was cancelled is not queued again.

    Args:
        command: The command to launch, after `--`: train photos/ --recipe ....
        nodes: Number of machines.
        gpus_per_node: Number of GPUs and processes on each machine; 0 starts one process each, without a GPU.
        cpus_per_task: Number of cores of each process. They decode images.
        time: Time limit of the job, as Slurm writes it: 24:00:00, 2-12.
        saving: Seconds before the time limit at which training saves a checkpoint.
        name: Name of the job.
        partition: Partition to queue in.
        account: Account to charge.
        option: Another option of sbatch, such as 'qos=high'. May be repeated.
        image: A container image (needs Slurm's pyxis). The folder from which the job is submitted is mounted.
        mount: A further folder that the container can see. May be repeated.
        setup: A line of shell to run first, such as 'module load cuda'. May be repeated.
        python: The Python with vitrail on the machines (default: this one, or `python` in an image).
        out: Folder for the runs, which all machines must see.
        restarts: Maximum number of times that the job queues itself again.
    """
    tasks = max(gpus_per_node, 1)
    run, words = _checked(command, nodes, tasks)
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time):
        raise UsageError(f"--time is {time!r}, which Slurm cannot read. Write minutes, 24:00:00 or 2-12 (days-hours).")
    for what, value in (("name", name), ("partition", partition), ("account", account)):
        if value is not None and not WORD.fullmatch(value):
            raise UsageError(f"--{what} is {value!r}. It may contain letters, digits and .,:@%+-_")
    for text in option:
        if not re.fullmatch(r"[a-z][a-z-]*(=[^\s'\"\\#]+)?", text):
            raise UsageError(f"--option is {text!r}, which cannot be written as an option of sbatch; write qos=high")
    if mount and image is None:
        raise UsageError("--mount needs a container. Give its --image.")
    _at_least(1, cpus_per_task=cpus_per_task)
    _at_least(0, gpus_per_node=gpus_per_node, saving=saving, restarts=restarts)
    given = Slurm(
        nodes=nodes,
        tasks=tasks,
        gpus=gpus_per_node,
        cpus=cpus_per_task,
        time=time,
        saving=saving,
        name=name,
        options=(*_named("partition", partition), *_named("account", account), *option),
        image=image,
        mounts=mount,
        setup=setup,
        python=python or ("python" if image is not None else sys.executable),
        out=out,
        restarts=restarts,
    )
    return _script(sbatch(given, words), run, nodes * tasks)


def sky(
    *command: str,
    nodes: int = 1,
    accelerator: str = "H100",
    gpus_per_node: int = 8,
    bucket: str | None = None,
    on_demand: bool = False,
    name: str = "vitrail",
    workdir: str = ".",
    install: str = ".[remote]",
    image: str | None = None,
    setup: tuple[str, ...] = (),
) -> Script:
    """Print a task for SkyPilot that trains on rented machines and continues after they were taken away.

    The task is for `sky jobs launch`, which then finds other machines. torchrun starts one process per GPU. The run is
    in a folder of the bucket that belongs to the job and stays the same after a recovery. Only the work after the last
    checkpoint (--checkpoint-every) is lost.

    Args:
        command: The command to launch, after `--`: train s3://bucket/packed --recipe ....
        nodes: Number of machines.
        accelerator: SkyPilot's name of the GPU.
        gpus_per_node: Number of GPUs and processes on each machine; 0 starts one process each, without a GPU.
        bucket: Bucket for the runs: s3://NAME, gs://NAME, or a name for a bucket that SkyPilot creates.
        on_demand: Rent machines that are not taken away, at their higher price.
        name: Name of the task.
        workdir: Folder of this machine that is copied to the rented machines, and in which the command runs.
        install: What pip installs there: vitrail, from the copied folder or from an address.
        image: A machine or container image, as SkyPilot writes it: docker:owner/name:tag.
        setup: A line of shell to run first, once on each machine. May be repeated.
    """
    if bucket is None:
        raise UsageError("Checkpoints need a bucket, since machines are taken away: --bucket s3://NAME, or a new NAME")
    if not re.fullmatch(r"[a-z0-9]+://\S+|[a-z0-9][a-z0-9._-]{2,62}", bucket):
        raise UsageError(f"--bucket is {bucket!r}. Give s3://NAME, gs://NAME, or a lower-case name.")
    if not WORD.fullmatch(name) or not WORD.fullmatch(accelerator):
        raise UsageError(f"names may contain letters, digits and .,:@%+-_, unlike {name!r} or {accelerator!r}")
    _at_least(0, gpus_per_node=gpus_per_node)
    tasks = max(gpus_per_node, 1)
    run, words = _checked(command, nodes, tasks)
    if run.shard and nodes > 1:
        raise UsageError(
            "--shard on several machines needs a folder that all of them see, not a bucket. Remove --shard."
        )
    given = Sky(
        nodes=nodes,
        accelerator=accelerator,
        gpus=gpus_per_node,
        bucket=bucket,
        spot=not on_demand,
        name=name,
        workdir=workdir,
        install=install,
        image=image,
        setup=setup,
    )
    return _script(sky_yaml(given, words), run, nodes * tasks)


def _checked(command: Sequence[str], nodes: int, tasks: int) -> tuple[Run, list[str]]:
    """Return the run that `command` describes, and its words. Raises UsageError; data are not opened."""
    _at_least(1, nodes=nodes)
    _require_utf8(" ".join(command))
    words = list(command[1:] if command[:1] == ("vitrail",) else command)
    if not words:
        raise UsageError("Launch what? vitrail launch slurm --nodes 2 -- train photos/ --recipe scratch-small")
    verb, *rest = words
    if verb not in LAUNCHED:
        raise UsageError(f"cannot launch {verb!r}, only: {', '.join(LAUNCHED)}.{did_you_mean(verb, LAUNCHED)}")
    _, given = parse(LAUNCHED[verb], rest, f"vitrail {verb}")
    for name, why in OURS.items():
        if name in given:
            raise UsageError(f"Remove --{name.replace('_', '-')} from the launched command: {why}")
    own = {name: given.pop(name, None) for name in ("path", "recipe", "epochs", "lr", "weights")}
    config = files(given.pop("config", ()))
    asked = Asked(**own, config=config, settings={name: given[name] for name in given if name not in GLOBAL})
    (asking_for_weights if verb == "finetune" else asking_for_images)(asked)
    run = asked.over(named(asked.recipe or "finetune") if asked.recipe or verb == "finetune" else Run())
    processes = nodes * tasks
    if run.batch_size is not None and run.batch_size % processes:
        raise UsageError(
            f"batch_size is {run.batch_size}. It must be a multiple of the number of processes, {processes} "
            f"({nodes} x {tasks})."
        )
    return run, words


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UsageError(f"--{name.replace('_', '-')} is {number}. It must be {least} or more.")


def _named(name: str, value: str | None) -> tuple[str, ...]:
    return () if value is None else (f"{name}={value}",)


def _script(text: str, run: Run, processes: int) -> Script:
    _require_utf8(text)
    return Script(text, run, processes)


def _require_utf8(text: str) -> None:
    """Raise UsageError if `text` contains a file name that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object[error.start : error.end])
        raise UsageError(f"{name!r} in a name is not UTF-8, so a script cannot contain it. Rename the file.") from error


def show(result: Script) -> str:
    """Return the script."""
    return result.text.rstrip("\n")


def as_json(result: Script) -> Any:
    """Return the script, the number of processes it starts, and the run."""
    from vitrail.config import plain

    return {"script": result.text, "processes": result.processes, "run": plain(result.run)}
