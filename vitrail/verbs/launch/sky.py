"""The task that `vitrail launch sky` prints, for SkyPilot's managed jobs. Torch-free.

Machines of a cloud disappear without a reliable signal, so a run continues from the newest checkpoint in the bucket.
The bucket is mounted with a cache, because a plain mount cannot append, and metrics.jsonl grows by appending.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

RUNS = "/runs"
"""The folder on the machines at which the bucket is mounted."""
PATIENCE = 600
"""Seconds that torchrun gives the processes to save after a signal; its default is 30."""


@dataclass(frozen=True)
class Sky:
    """The settings of a task."""

    nodes: int
    accelerator: str
    gpus: int
    """Number of GPUs per machine."""
    bucket: str
    spot: bool
    name: str
    workdir: str
    install: str
    image: str | None
    setup: Sequence[str]


def sky_yaml(task: Sky, command: Sequence[str]) -> str:
    """Return the task as YAML; `command` is a training verb with its flags."""
    resources: dict[str, Any] = {"accelerators": f"{task.accelerator}:{task.gpus}"} if task.gpus else {}
    resources |= {"use_spot": task.spot, **({} if task.image is None else {"image_id": task.image})}
    where = {"source": task.bucket} if "://" in task.bucket else {"name": task.bucket}
    document = {
        "name": task.name,
        "resources": resources,
        "num_nodes": task.nodes,
        "workdir": task.workdir,
        "file_mounts": {RUNS: {**where, "mode": "MOUNT_CACHED"}},
        "setup": _Block("".join(f"{line}\n" for line in [*task.setup, f"pip install {shlex.quote(task.install)}"])),
        "run": _Block(RUN.format(patience=PATIENCE, command=shlex.join(command), runs=RUNS)),
    }
    note = "# sky jobs launch FILE: if machines are taken away, others continue from the newest checkpoint\n"
    return note + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


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
