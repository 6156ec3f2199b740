"""`vitrail launch sky`: print a task for SkyPilot's managed jobs. Torch-free.

Machines of a cloud disappear without a reliable signal, so a run continues from the newest checkpoint in the bucket.
The bucket is mounted with a cache, because a plain mount cannot append, and metrics.jsonl grows by appending.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from vitrail.errors import UsageError
from vitrail.ranges import Devices, Nodes, checked
from vitrail.verbs.launch.launch import WORD, Script, as_json, checked_run, script, show

__all__ = ["as_json", "show", "sky"]

RUNS = "/runs"
"""The folder on the machines at which the bucket is mounted."""
PATIENCE = 600
"""Seconds that torchrun gives the processes to save after a signal; its default is 30."""


@checked
def sky(
    *command: str,
    nodes: Nodes = 1,
    accelerator: str = "H100",
    gpus_per_node: Devices = 8,
    bucket: str | None = None,
    on_demand: bool = False,
    name: str = "vitrail",
    workdir: str = ".",
    install: str = ".[train,remote]",
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
    tasks = max(gpus_per_node, 1)
    run, words = checked_run(command, nodes, tasks)
    if run.shard and nodes > 1:
        raise UsageError(
            "--shard on several machines needs a folder that all of them see, not a bucket. Remove --shard."
        )
    resources: dict[str, Any] = {"accelerators": f"{accelerator}:{gpus_per_node}"} if gpus_per_node else {}
    resources |= {"use_spot": not on_demand, **({} if image is None else {"image_id": image})}
    where = {"source": bucket} if "://" in bucket else {"name": bucket}
    document = {
        "name": name,
        "resources": resources,
        "num_nodes": nodes,
        "workdir": workdir,
        "file_mounts": {RUNS: {**where, "mode": "MOUNT_CACHED"}},
        "setup": _Block("".join(f"{line}\n" for line in [*setup, f"pip install {shlex.quote(install)}"])),
        "run": _Block(RUN.format(patience=PATIENCE, command=shlex.join(words), runs=RUNS)),
    }
    note = "# sky jobs launch FILE: if machines are taken away, others continue from the newest checkpoint\n"
    text = note + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return script(text, run, nodes * tasks)


class _Block(str):
    """Text of several lines."""


class _Dumper(yaml.SafeDumper):
    """Writes a `_Block` line by line, without escapes."""


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))

RUN = """\
head=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
processes=$((SKYPILOT_NUM_GPUS_PER_NODE > 0 ? SKYPILOT_NUM_GPUS_PER_NODE : 1))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}
exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$processes" \\
    --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$head" --master-port 29500 \\
    -m vitrail {command} --out "{runs}/$SKYPILOT_TASK_ID" --resume auto
"""
