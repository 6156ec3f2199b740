"""The task that `vitrail launch sky` prints, for SkyPilot's managed jobs. Torch-free.

Machines of a cloud vanish without a signal that could be relied upon, so what counts is the newest checkpoint in the
bucket. It is mounted with a cache: a plain mount cannot append, and metrics.jsonl grows by appending.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

RUNS = "/runs"
"""Where the bucket is on the machines."""
PATIENCE = 600
"""Seconds that torchrun gives the processes after a signal to save, in place of its 30."""


@dataclass(frozen=True)
class Sky:
    """What a task asks for."""

    nodes: int
    accelerator: str
    gpus: int
    """Of each machine."""
    bucket: str
    spot: bool
    name: str
    workdir: str
    install: str
    image: str | None
    setup: Sequence[str]


def sky_yaml(task: Sky, command: Sequence[str]) -> str:
    """Return the task as YAML, for `command`, a verb that trains with its flags."""
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
    note = "# sky jobs launch FILE: a job whose machines are taken away goes on with others, from its last checkpoint\n"
    return note + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Block(str):
    """Text of several lines."""


class _Dumper(yaml.SafeDumper):
    """Writes such text as it is, line for line."""


_Dumper.add_representer(_Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))

RUN = """\
head=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
processes=$((SKYPILOT_NUM_GPUS_PER_NODE > 0 ? SKYPILOT_NUM_GPUS_PER_NODE : 1))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={patience}
exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node "$processes" \\
    --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$head" --master-port 29500 \\
    -m vitrail {command} --out "{runs}/$SKYPILOT_TASK_ID" --resume auto
"""
