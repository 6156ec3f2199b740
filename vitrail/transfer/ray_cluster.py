"""A Ray cluster: connecting to it, and its cores and GPUs for each task that runs there; needs the extra `[ray]`."""

from __future__ import annotations

import logging
import os
from typing import Any

from vitrail.errors import UsageError
from vitrail.version import install_extra

LOCAL = "local"
"""In place of an address: a cluster that is started on this machine."""


def connected(address: str) -> Any:
    """Return the connected library. Raises UsageError if it is not installed or there is no cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"Ray is not installed: {install_extra('ray')}") from error
    try:
        own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {error}") from error
    return ray


def cores_of_each(ray: Any, parallel: int | None = None) -> int:
    """Return the number of cores of one of `parallel` tasks; None: one task per GPU, or without GPUs one per node."""
    total = ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return max(1, int(total.get("CPU", 1)) // (parallel or int(total.get("GPU", 0)) or max(nodes, 1)))


def gpus_of_each(ray: Any, parallel: int | None = None) -> float:
    """Return the number of GPUs of one task: 1, or a fraction if there are more parallel tasks than GPUs."""
    gpus = ray.cluster_resources().get("GPU", 0)
    return min(1.0, gpus / (parallel or gpus)) if gpus else 0.0
