"""Measure every table again on this machine, one after another: `python -m benchmarks.all`, about three quiet hours.

All tables of one release come from one machine. The command continues where it was stopped, in a long benchmark with
the first run that is missing; `--again` starts anew. Tables of accuracy that take hours are measured only with
`--everything`.
After each table it names the figures that moved by more than their spread since the result that was kept before, and
at the end it writes the documents (`benchmarks.readme`). `results/all.json` lists what was measured and what moved.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import readme, record

IDENTITY = ("work", "case", "shape", "name", "batch", "precision", "engine")
"""Fields of a result that say what was measured."""
OTHERS = ("attention", "memory", "reading", "probe", "plan")
"""Benchmarks without a section of docs/numbers/benchmarks.md."""
LONG = ("ablation", "finetune_default", "audit", "label_budget", "multi_label", "long_tail", "dedup", "several")
"""Benchmarks of accuracy that take hours. Only finetune_default depends on the machine: its runs have minutes."""
ELSEWHERE = ("gpu",)
"""Benchmarks that need another machine than the others: they are measured by themselves."""
WITH_LOG = ("ablation", "learn", "transfer", "finetune_default", "long_tail", "several", "inspect", "soak")
"""Benchmarks that keep their finished runs in a log."""
NETWORKS = Path("runs") / "benchmarks"
"""Where `benchmarks.learn` and `benchmarks.transfer` leave their networks, which others need, and all their logs."""


class Figure(NamedTuple):
    """A measured figure and its spread."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def figures(part: Any, label: str = "") -> Iterator[tuple[str, Figure]]:
    """Yield all figures with a spread in a result document, each with what was measured."""
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from figures(item, f"{label}/{_identity(item) or number}")
    if not isinstance(part, dict):
        return
    median = part.get("median", part.get("images_per_second"))
    if isinstance(median, int | float) and "low" in part and "high" in part:
        yield label, Figure(part["low"], median, part["high"])
    for key, item in part.items():
        if key not in ("machine", "rounds"):
            yield from figures(item, f"{label}/{key}")


def _identity(item: Any) -> str:
    known = [item[key] for key in IDENTITY if key in item] if isinstance(item, dict) else []
    return ", ".join(str(value) for value in known if value is not None)


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each figure of both documents whose spreads do not overlap."""
    old = dict(figures(before))
    return [
        f"{label.lstrip('/')}: {old[label]} -> {new}"
        for label, new in figures(after)
        if label in old and (new.low > old[label].high or new.high < old[label].low)
    ]


def measure(name: str, more: Sequence[str], results: Path = record.RESULTS) -> dict[str, Any]:
    """Run one benchmark. Return its seconds and what moved. Raises SystemExit if it fails."""
    before = _documents(name, results)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *more], cwd=record.ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.{name} failed with {done.returncode}. The same command continues with it.")
    pairs = zip(before, _documents(name, results), strict=True)
    return {"seconds": round(time.monotonic() - start), "moved": [line for pair in pairs for line in moved(*pair)]}


def _documents(name: str, results: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) if path.exists() else {} for path in record.kept(name, results)]


def special(name: str, place: Path) -> list[str]:
    """Return the arguments that only this benchmark takes; `place` holds networks and logs."""
    networks = [str(path) for path in sorted(place.glob("scratch-small-*"))]
    flowers = [str(path) for path in sorted(place.glob("flowers12/*"))]
    keep = ["--keep", str(place)]
    words = {
        "learn": keep,
        "transfer": [*networks, *keep],
        "int8": [*networks, *flowers],
        "audit": [f"--network={network}" for network in networks[:1]],
    }
    return [*words.get(name, []), *([f"--log={place / name}.jsonl"] if name in WITH_LOG else [])]


def main() -> None:
    """Measure all that is not measured yet, and write the documents."""
    parser = record.arguments(__doc__)
    parser.add_argument("--again", action="store_true", help="measure all tables, also those that are finished")
    parser.add_argument("--everything", action="store_true", help="also the tables of accuracy that take hours")
    options = parser.parse_args()
    more = [f"--rounds={options.rounds}", *(["--quick"] if options.quick else [])]
    path = record.RESULTS / "all.json"
    # a quick run leaves the networks and logs of a real one as they are
    place = Path(tempfile.mkdtemp()) if options.quick else NETWORKS
    if options.again:
        shutil.rmtree(place, ignore_errors=True)
    state = {} if options.again or not path.exists() else json.loads(path.read_text())
    if state and state["machine"]["cpu"] != (here := record.processor()[0]):
        before = state["machine"]["cpu"]
        raise SystemExit(f"{path} was begun on {before}, this is {here}: one release needs one machine (--again)")
    finished: dict[str, Any] = state.get("finished", {})
    left_out = ELSEWHERE if options.everything else (*ELSEWHERE, *LONG)
    for name in (*readme.TABLES, *OTHERS):
        if name in finished or name in left_out:
            continue
        print(f"benchmarks.{name}", file=sys.stderr, flush=True)
        finished[name] = measure(name, [*special(name, place), *more])
        print(*(f"  moved: {line}" for line in finished[name]["moved"]), sep="\n", flush=True)
        record.save("all", options, finished=finished)
    if not options.quick:
        readme.main()


if __name__ == "__main__":
    main()
