"""The batch script that `vitrail launch slurm` prints. Torch-free.

srun starts one process per GPU, without torchrun: torchrun turns every signal into exit status 1 and kills processes
after 30 s, but the script must know whether the training has saved. Slurm signals the script (`B:`), which uses
`scancel` to send SIGTERM to the processes: if srun itself receives SIGTERM, it kills them at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

SAVED = 143
"""Exit code of a training that saved and ended after SIGTERM: 128 + 15."""


@dataclass(frozen=True)
class Slurm:
    """The settings of a job."""

    nodes: int
    tasks: int
    """Number of processes per node."""
    gpus: int
    cpus: int
    """Number of cores per process."""
    time: str
    saving: int
    """Seconds before the time limit at which the training saves."""
    name: str
    options: Sequence[str]
    image: str | None
    mounts: Sequence[str]
    """Folders that the container sees, in addition to the one that the job is submitted from."""
    setup: Sequence[str]
    python: str
    out: str
    restarts: int


def sbatch(job: Slurm, command: Sequence[str]) -> str:
    """Return the script of `job`; `command` is a training verb with its flags."""
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.tasks}",
        f"cpus-per-task={job.cpus}",
        *([f"gpus-per-node={job.gpus}"] if job.gpus else []),
        f"time={job.time}",
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        f"signal=B:USR1@{job.saving}",
        *job.options,
    ]
    inside = []
    if job.image is not None:
        mounts = "".join(f",{shlex.quote(f'{folder}:{folder}')}" for folder in job.mounts)
        inside = [f"--container-image={shlex.quote(job.image)}", f'--container-mounts="$PWD:$PWD"{mounts}']
        inside += ['--container-workdir="$PWD"']
    return TEMPLATE.format(
        options="\n".join(f"#SBATCH --{option}" for option in options),
        saving=job.saving,
        out=shlex.quote(job.out),
        setup="".join(f"{line}\n" for line in job.setup),
        command=shlex.join([job.python, "-m", "vitrail", *command]),
        srun=" ".join(["srun", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=1", *inside]),
        restarts=job.restarts,
        saved=SAVED,
    )


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
