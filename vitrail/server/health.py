"""Whether the server in a container is ready: `python -m vitrail.server.health`, the health check of Dockerfile.

The port is the one that the container's first process was started with. A container that does not serve is healthy.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

DEFAULT_PORT = 8000


def port_of(words: list[str]) -> int | None:
    """Return the port of a command line `... serve MODEL --port 9000` or `--port=9000`; None if it does not serve."""
    if "serve" not in words:
        return None
    given = [word.removeprefix("--port=") for word in words if word.startswith("--port=")]
    given += [after for word, after in pairwise(words) if word == "--port"]
    return int(given[-1]) if given else DEFAULT_PORT


def main(process: str = "1") -> int:
    """Return 0 if the server that is process `process` is ready, or if the process does not serve; else 1."""
    port = port_of((Path("/proc") / process / "cmdline").read_text("utf-8").split("\0"))
    try:
        return 0 if port is None or urlopen(f"http://127.0.0.1:{port}/readyz", timeout=4).status == 200 else 1
    except OSError:  # nothing listens yet, or the answer is an error
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
