"""`vitrail launch slurm`: check a training command, and print a batch script that runs it on a Slurm cluster.

    vitrail launch slurm --nodes 4 --gpus-per-node 8 -- train s3://bucket/packed --recipe ... > train.sbatch

The command after `--` is parsed like a command line, so that mistakes are reported now and not when the job starts. The
script starts and resumes a run with the same command: a folder that belongs to the job, and `--resume auto`.

srun starts one process per GPU, without torchrun: torchrun turns every signal into exit status 1 and kills processes
after 30 s, but the script must know whether the training has saved. Slurm signals the script (`B:`), which uses
`scancel` to send SIGTERM to the processes: if srun itself receives SIGTERM, it kills them at once. Torch-free.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import Devices, Nodes, Whole, checked
from vitrail.recipes.asked import RECIPE_OF, Asked, require_images, with_weights
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run, check_batch
from vitrail.verbs.flags.declared import GLOBAL
from vitrail.verbs.flags.parse import parse
from vitrail.verbs.train.train import finetune, train
from vitrail.words import one_line

SAVED = 143
"""Exit code of a training that saved and ended after SIGTERM: 128 + 15."""
LAUNCHED: dict[str, Callable[..., Any]] = {"train": train, "finetune": finetune}
OURS = {
    "out": "it is a flag of the launcher: vitrail launch slurm --out DIR -- train ...",
    "resume": "the script resumes by itself",
    "nproc": "the script starts the processes; set their number with --nodes and --gpus-per-node",
    "print_config": "use it without the launcher",
    "dry_run": "use it without the launcher",
}
"""Flags that a launched command cannot have, and the reason."""
WORD = re.compile(r"[\w.,:@%+-]+")


@one_line
@dataclass(frozen=True)
class Script:
    """A script, and what it launches."""

    text: str
    run: Run
    """The run, as far as it is known without the data."""
    processes: int


@checked
def slurm(
    *command: str,
    nodes: Nodes = 1,
    gpus_per_node: Devices = 8,
    cpus_per_task: Nodes = 8,
    time: str = "24:00:00",
    saving: Whole = 180,
    name: str = "vitrail",
    partition: str | None = None,
    account: str | None = None,
    option: tuple[str, ...] = (),
    image: str | None = None,
    mount: tuple[str, ...] = (),
    setup: tuple[str, ...] = (),
    python: str | None = None,
    out: str = "runs",
    restarts: Whole = 100,
) -> Script:
    """Print a batch script for Slurm that trains, saves before its time limit, and queues itself again.

    srun starts one process per GPU. The run folder is OUT/slurm-JOB: a restart uses the same folder, a new submission
    another one. After a time limit, a lost node or preemption, the job continues from its last checkpoint. A job that
    is done, has failed or was cancelled is not queued again.

    Args:
        command: The command to launch, after `--`: train photos/ --recipe ....
        nodes: Number of machines.
        gpus_per_node: Number of GPUs and processes on each machine; 0 starts one process each, without a GPU.
        cpus_per_task: Number of cores of each process, which no other process uses. They decode images.
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
    run, words = checked_run(command, nodes, tasks)
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
    options = [
        f"job-name={name}",
        f"nodes={nodes}",
        f"ntasks-per-node={tasks}",
        f"cpus-per-task={cpus_per_task}",
        *([f"gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        f"time={time}",
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        f"signal=B:USR1@{saving}",
        *([] if partition is None else [f"partition={partition}"]),
        *([] if account is None else [f"account={account}"]),
        *option,
    ]
    python = python or ("python" if image is not None else sys.executable)
    srun = ["srun", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', *_bound(gpus_per_node), "--kill-on-bad-exit=1"]
    srun += _inside(image, mount)
    text = TEMPLATE.format(
        options="\n".join(f"#SBATCH --{line}" for line in options),
        saving=saving,
        out=shlex.quote(out),
        setup="".join(f"{line}\n" for line in setup),
        command=shlex.join([python, "-m", "vitrail", *words]),
        srun=" ".join(srun),
        restarts=restarts,
        saved=SAVED,
    )
    _require_utf8(text)
    return Script(text, run, nodes * tasks)


def checked_run(command: Sequence[str], nodes: int, tasks: int) -> tuple[Run, list[str]]:
    """Return the run that `command` describes, and its words. Raises UsageError; data are not opened."""
    _require_utf8(" ".join(command))
    words = list(command[1:] if command[:1] == ("vitrail",) else command)
    if not words:
        raise UsageError("no command is given: vitrail launch slurm --nodes 2 -- train photos/ --recipe scratch-small")
    verb, *rest = words
    if verb not in LAUNCHED:
        raise UsageError(f"cannot launch {verb!r}, only: {', '.join(LAUNCHED)}.{did_you_mean(verb, LAUNCHED)}")
    _, given = parse(LAUNCHED[verb], rest, f"vitrail {verb}")
    for name, why in OURS.items():
        if name in given:
            raise UsageError(f"Remove --{name.replace('_', '-')} from the launched command: {why}")
    own = {name: given.pop(name, None) for name in ("path", "recipe", "epochs", "lr", "weights")}
    config = given.pop("config", ())
    arguments = Asked(**own, config=config, settings={name: given[name] for name in given if name not in GLOBAL})
    if verb == "finetune":
        arguments = with_weights(arguments)
    else:
        require_images(arguments)
    base = arguments.recipe or RECIPE_OF.get(verb)
    run, _ = arguments.applied_to(Run() if base is None else named(base))
    processes = nodes * tasks
    if run.batch_size is not None:
        check_batch(run.batch_size, processes, f"{nodes} x {tasks}")
    return run, words


def _require_utf8(text: str) -> None:
    """Raise UsageError if `text` contains a file name that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        name = os.fsencode(error.object[error.start : error.end])
        raise UsageError(f"{name!r} in a name is not UTF-8, so a script cannot contain it. Rename the file.") from error


def _bound(gpus: int) -> list[str]:
    """Return the flags of srun that give each process neighbouring cores of its own, and all GPUs of its machine.

    The first processes are on the first socket, whose GPUs usually have the first numbers. A process that saw only its
    own GPU could not copy to others directly, and would not find it under its number, `LOCAL_RANK`.
    """
    return ["--cpu-bind=cores", "--distribution=block:block", *(["--gpu-bind=none"] if gpus else [])]


def _inside(image: str | None, folders: Sequence[str]) -> list[str]:
    """Return the flags of srun for a container that sees these folders and the one that the job is submitted from."""
    if image is None:
        return []
    mounts = "".join(f",{shlex.quote(f'{folder}:{folder}')}" for folder in folders)
    return [
        f"--container-image={shlex.quote(image)}",
        f'--container-mounts="$PWD:$PWD"{mounts}',
        '--container-workdir="$PWD"',
    ]


def show(result: Script) -> str:
    """Return the script."""
    return result.text.rstrip("\n")


def as_json(result: Script) -> Any:
    """Return the script, the number of processes it starts, and the run."""
    from vitrail.config import plain

    return {"script": result.text, "processes": result.processes, "run": plain(result.run)}


TEMPLATE = """\
#!/bin/bash
{options}

# Slurm sends USR1 to this script {saving} s before the time limit. The script makes the training save and end, and then
# queues the job again: the same script continues in the same folder. To continue the run of another job: sbatch
# --export=ALL,RUNS=runs/slurm-123 FILE

out={out}
runs=${{RUNS:-$out/slurm-$SLURM_JOB_ID}}
{setup}command=({command} --out "$runs" --resume auto)

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

over=
trap 'over=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to the training only
trap : TERM                                               # after scancel: wait until the training has saved

numbered='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"'
{srun} bash -c "$numbered" vitrail "${{command[@]}}" &
step=$!
while kill -0 "$step" 2> /dev/null; do wait "$step"; done # a signal ends a wait
wait "$step"
code=$?

if [[ $over && $code -eq {saved} ]]; then
    if ((${{SLURM_RESTART_COUNT:-0}} < {restarts})); then
        echo "saved; job $SLURM_JOB_ID is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "saved; not queued again after {restarts} restarts"
    fi
fi
exit "$code"
"""
