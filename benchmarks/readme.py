"""Write the benchmark tables of the documents from benchmarks/results/*.json: `python -m benchmarks.readme`.

docs/numbers/benchmarks.md has all of them, README.md three rows, docs/cookbook/resources.md those of memory, and
docs/studies.md the claims of the papers. No figure is typed by hand: this command writes them, a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    ablation,
    adviser,
    audit,
    class_change,
    compare,
    continued,
    dedup,
    finetune_default,
    first_run,
    framing,
    int8,
    label_budget,
    long_tail,
    memory,
    multi_label,
    record,
    segmentation,
    several,
    several_answers,
    shapes,
    shipped,
    transfer,
)
from benchmarks.learn import SIDES
from vitrail.studies.catalog import NAMES
from vitrail.studies.results import read

BEGIN, END = "<!-- {}: written by python -m benchmarks.readme -->", "<!-- end of {} -->"
"""Around a section with a name."""


def ratio(value: dict[str, float]) -> str:
    """Return a median with its spread, as "1.83x (1.80 to 1.85)"."""
    return f"{value['median']:.2f}x ({value['low']:.2f} to {value['high']:.2f})"


def _rate(rows: list[dict[str, Any]], name: str) -> str:
    return f"{next(row['images_per_second'] for row in rows if row['name'] == name):,.1f}"


def train_step(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of training: images/s, over timm with its defaults, over its best settings, memory."""
    lines: list[tuple[str, ...]] = [
        ("one training step", "images/s", "over timm", "over timm's best", "memory, of timm's")
    ]
    for r in document["results"]:
        ours, theirs = (r["peak_memory_mib"].get(name) for name in (record.OURS, "timm"))
        memory = f"{ours / theirs:.2f}" if ours and theirs else ""
        label = f"{r['case']}, batch {r['batch']}, {r['precision']}"
        rate = _rate(r["rows"], record.OURS)
        lines.append((label, rate, ratio(r["over_timm"]), ratio(r["over_timm_at_its_best"]), memory))
    return lines


def tokens(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of training over tokens: images/s, share of the ceiling, over timm."""
    header = ("one training step", "images/s", "of the ceiling", "over timm", "over timm's best")
    lines: list[tuple[str, ...]] = [header]
    for r in document["results"]:
        ours = next(row for row in r["rows"] if row["name"] == record.OURS)
        label, share = f"{r['case']}, batch {r['batch']}, {r['precision']}", f"{ours['share_of_ceiling']:.0%}"
        over = (ratio(r["over_timm"]), ratio(r["over_timm_at_its_best"]))
        lines.append((label, f"{ours['images_per_second']:,.0f}", share, *over))
    return lines


def tune(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of tuning a part of a network: speed, memory and storage relative to tuning all weights."""
    counted = ("kept_bytes_per_image", "peak_bytes", "optimizer_bytes", "stored_bytes")
    header = ("activations", "peak memory", "optimiser", "stored")
    lines: list[tuple[str, ...]] = [("fine-tuning a part, over all of it", "images/s", *header)]
    for r in document["results"]:
        whole = r["rows"][0]
        for row in r["rows"][1:]:
            label = f"{r['case']}, batch {r['batch']}, {r['precision']}: {row['name']}"
            lines.append((label, ratio(row["over_all"]), *(f"{row[name] / whole[name]:.2f}" for name in counted)))
    return lines


def allocator(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of `keep_freed_memory`: images/s, over those without it, and the peak memory."""
    lines: list[tuple[str, ...]] = [
        ("freed memory kept for the next step", "images/s", "over given back", "peak memory")
    ]
    for r in document["results"]:
        kept, given_back = r["rows"]
        label = f"{r['work']}, {r['case']}, batch {r['batch']}, {r['precision']}"
        peak = f"{kept['peak_mib'] / given_back['peak_mib']:.2f}"
        lines.append((label, f"{kept['images_per_second']:,.1f}", ratio(given_back["ours_over_this"]), peak))
    return lines


def inference(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of prediction: images/s, over timm, over the best peer."""
    lines: list[tuple[str, ...]] = [("predicting, B/16, 224 px", "images/s", "over timm", "over the best peer")]
    for r in document["results"]:
        best = f"{ratio(r['over_best_peer'])}, {r['best_peer']}"
        label = f"batch {r['batch']}, {r['precision']}"
        lines.append((label, _rate(r["rows"], record.OURS), ratio(r["over_timm"]), best))
    return lines


def export(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of exported programs: images/s of ours, and ours over the runtimes."""
    peers = ("OpenVINO", "ONNX Runtime", f"{record.OURS}, bf16")
    lines: list[tuple[str, ...]] = [("predicting", "images/s", *(f"over {peer}" for peer in peers))]
    for r in document["results"]:
        over = {row["name"]: ratio(row["ours_over_this"]) for row in r["rows"] if row["name"] != record.OURS}
        label = f"{r['case']}, batch {r['batch']}, {r['precision']}"
        lines.append((label, _rate(r["rows"], record.OURS), *(over.get(peer, "") for peer in peers)))
    return lines


def input_pipeline(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of loading: images/s on one core, over timm's loader and over its uint8 part."""
    lines: list[tuple[str, ...]] = [
        ("full-size JPEG to 224 px batch, one core", "images/s", "over timm", "over its uint8 part")
    ]
    for label, name, key in (("files", record.OURS, ""), ("packed shards", f"{record.OURS}, packed", "packed_")):
        over, over_uint8 = (ratio(document[f"{key}over_{peer}"]) for peer in ("timm", "timm_uint8"))
        lines.append((label, _rate(document["rows"], name), over, over_uint8))
    return lines


def left_to_the_device(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of what the core of the table before does if a device crops and decodes."""
    rows = (
        ("packed shards, crops left to the device", "packed, crops left", "packed_crops_left_over_packed"),
        ("packed shards, JPEGs left to the device", "packed, JPEGs left", "packed_jpegs_left_over_packed"),
        ("files, JPEGs left to the device", "JPEGs left", "jpegs_left_over_ours"),
    )
    return [
        ("the same core, the rest left to a device", "images/s", "over all on the core"),
        *(
            (label, _rate(document["rows"], f"{record.OURS}, {name}"), ratio(document[key]))
            for label, name, key in rows
        ),
    ]


def input_workers(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of processes over threads: images alone and beside launches, and launches meanwhile."""
    columns = ("alone", "beside", "launches")
    lines = [("processes over threads", "workers", "images", "images beside launches", "launches meanwhile")]
    for row in document["rows"]:
        ratios = (ratio(row[f"processes over threads, {name}"]) for name in columns)
        lines.append((row["name"], str(row["workers"]), *ratios))  # type: ignore[arg-type]
    return lines  # type: ignore[return-value]


def startup(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of start-up times."""
    names = ("vitrail --help", "import torch", "import timm")
    rows = [(f"`{name}`", f"{document['results'][name]['median']:.2f}") for name in names]
    return [("start-up", "seconds"), *rows]


def report(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of reports: size, time to write and to open."""
    header = ("100 classes, 10,000 validation images", "MB", "seconds to open", "seconds to write")
    pages = {"report": "`report.html`", "comparison": "`vitrail report RUN RUN`"}
    rows = ((title, document["results"][kind]) for kind, title in pages.items())
    return [
        header,
        *((title, f"{r['megabytes']:.1f}", f"{r['seconds']:.2f}", f"{r['seconds_to_write']:.1f}") for title, r in rows),
    ]


def learn(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of top-1 after equal time."""
    lines: list[tuple[str, ...]] = [
        (f"CIFAR-100 from scratch in {document['minutes']:g} minutes", "test top-1", "parameters")
    ]
    for side in sorted(document["summary"], key=SIDES.index):
        row = document["summary"][side]
        spread = f" ± {row['deviation']:.2f}" if row["deviation"] is not None else ""
        size = f"{row['parameters'] / 1e6:.1f} M" if row["parameters"] else ""
        lines.append((side, f"{row['mean']:.2f} %{spread} ({row['seeds']} seeds)", size))
    return lines


def digits(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the result of the README's first command."""
    row, seconds = document["summary"], [run["seconds"] for run in document["runs"]]
    accuracy = f"{row['mean']:.1f} % ± {row['deviation']:.1f} ({row['seeds']} seeds)"
    header = ("`vitrail demo`", "test top-1", "seconds of training")
    return [header, ("handwritten digits, 8 px", accuracy, f"{min(seconds):.0f} to {max(seconds):.0f}")]


def mae(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of a step's cost when the encoder sees one patch in four."""
    lines: list[tuple[str, ...]] = [
        (f"a step of {document['case']}, batch {document['batch']}", "ms", "MAE is faster by", "memory")
    ]
    first = document["rows"][0]
    for row in document["rows"]:
        took = 1000 * document["batch"] / row["images_per_second"]
        over = ratio(row["mae_over_this"]) if row is not first else ""
        lines.append((row["name"], f"{took:,.0f}", over, f"{row['peak_bytes'] / first['peak_bytes']:.2f}"))
    return lines


def inspect(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the memory that inspecting a large network takes, by number of images."""
    lines: list[tuple[str, ...]] = [(f"inspecting {document['model']} at {document['size']} px", "images", "peak MiB")]
    return lines + [(row["what"], str(row["images"]), f"{row['peak_mib']:,.0f}") for row in document["rows"]]


def soak(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of memory, files and threads in the second and the last quarter of a long run."""
    lines: list[tuple[str, ...]] = [("held, early and late", "MiB", "open files", "threads")]
    for what, told in (("serving", "{requests:,} requests served"), ("training", "{minutes:g} minutes of training")):
        held = [document[what]["held"][name] for name in ("mib", "files", "threads")]
        lines.append((told.format(**document[what]), *(f"{one['early']:.0f}, {one['late']:.0f}" for one in held)))
    return lines


def saving(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of how long training stops for a checkpoint."""
    found = document["results"]
    header = (
        f"a checkpoint of {document['model']}, {found['megabytes']:.0f} MB",
        "standing still, s",
        "a step then, s",
    )
    rows = (("written at once", "at_once", "step"), ("while training goes on", "meanwhile", "step_meanwhile"))
    return [header, *((title, f"{found[stop]:.2f}", f"{found[step]:.2f}") for title, stop, step in rows)]


def weights(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of loading L/16: seconds, and the peak memory as a multiple of the file."""
    peaks = {row["name"]: f"{row['peak_over_file']:.2f}" for row in document["peak_memory"]}
    rows = document["load_seconds"]
    header = ("loading L/16 from safetensors", "seconds", "peak memory, of the file")
    return [header, *((row["name"], f"{row['seconds']:.2f}", peaks.get(row["name"], "")) for row in rows)]


def serve(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of both servers with the same clients, and the memory of ours."""
    percentiles = ("p50", "p95", "p99")
    header = f"serving B/16, 224 px, to {document['clients']} clients at once"
    lines: list[tuple[str, ...]] = [(header, "images/s", *(f"{name}, s" for name in percentiles))]
    for row in document["rows"]:
        lines.append((row["name"], f"{row['images_per_second']:.1f}", *(f"{row[name]:.2f}" for name in percentiles)))
    over = document["ours_over_peer"]
    lines.append(("vitrail over LitServe", *(ratio(over[name]) for name in ("images_per_second", *percentiles))))
    return lines


def gpu(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of a GPU: training and prediction against timm, with memory, kernels and the time between."""
    header = ("images/s", "of the ceiling", "over timm", "memory, of timm's", "kernels, timm's", "idle")
    lines: list[tuple[str, ...]] = [("on a GPU, bf16", *header)]
    for r in document["results"]:
        sides = {side["name"]: side for side in r["rows"]}
        peers = [name for name in sides if name.startswith("timm")]
        if record.OURS not in sides or not peers:
            continue
        ours, theirs = sides[record.OURS], max((sides[name] for name in peers), key=lambda x: x["images_per_second"])
        pairs = zip(ours["rounds"], theirs["rounds"], strict=True)
        over = compare.Ratio([a / b for a, b in pairs]).summary()
        lines.append(
            (
                r["row"],
                f"{ours['images_per_second']:,.0f}",
                f"{ours['share_of_ceiling']:.0%}",
                f"{ratio(over)}, {theirs['name']}",
                f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}",
                f"{ours['launches']:,}, {theirs['launches']:,}",
                f"{ours['idle_share']:.0%}",
            )
        )
    return lines


Table = Callable[[dict[str, Any]], list[tuple[str, ...]]]


def shape_speeds(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the steps with images of several shapes."""
    rows = [
        (row["network"], row["way"], f"{row['images_per_second']:,.1f}", ratio(row["over_pad"]))
        for row in document["speeds"]
    ]
    return [("network", "way", "images/s", "over padded images"), *rows]


TABLES: dict[str, tuple[str, Table] | tuple[str, Table, Table]] = {
    "train_step": ("Training step", train_step),
    "tokens": ("Training step by number of tokens", tokens),
    "allocator": ("Freed memory that is kept", allocator),
    "tune": ("Fine-tuning a part", tune),
    "inference": ("Prediction", inference),
    "export": ("Exported programs", export),
    "serve": ("Server", serve),
    "input_pipeline": ("Reading images", input_pipeline, left_to_the_device),
    "input_workers": ("Reading images beside a GPU", input_workers),
    "startup": ("Start-up", startup),
    "weights": ("Loading weights", weights),
    "report": ("Reports", report),
    "digits": ("The demo", digits),
    "learn": ("Learning from scratch", learn),
    "transfer": ("Fine-tuning against training from scratch", transfer.summary),
    "int8": ("Accuracy in int8", int8.summary),
    "ablation": ("Which settings of scratch-small pay", ablation.summary),
    "finetune_default": ("The default of fine-tuning", finetune_default.summary),
    "adviser": ("Which method for how many images", adviser.summary),
    "mae": ("A step of MAE", mae),
    "saving": ("Checkpoints", saving),
    "audit": ("Wrong labels", audit.summary),
    "label_budget": ("What to label next", label_budget.summary),
    "multi_label": ("Several labels", multi_label.summary),
    "long_tail": ("Rare classes", long_tail.summary),
    "several": ("Several runs as one", several.summary),
    "several_answers": ("One network for several answers", several_answers.summary),
    "class_change": ("Classes that are added", class_change.summary),
    "shapes": ("Images of any shape", shapes.summary, shape_speeds),
    "segmentation": ("The class of each pixel", segmentation.summary),
    "continued": ("Learning on without labels", continued.summary),
    "dedup": ("Copies among images that look alike", dedup.summary),
    "inspect": ("Memory of looking inside", inspect),
    "soak": ("Long runs", soak),
    "gpu": ("On a GPU", gpu),
}
"""Benchmark -> the title of its section and the functions that make its tables."""
COMMANDS = {"input_workers": "input_pipeline --workers 4"}
"""Benchmark -> module and arguments, where its name is not that of the module."""
SHORT_STEP = ("S/16, 224 px", "bf16")
SHORT_PREDICTION = (1, "float32")
SHORT_GPU = 2
"""Rows of the README that are from a GPU: S/16, eager and compiled."""


def markdown(lines: list[tuple[str, ...]]) -> str:
    """Return a Markdown table from a header row and other rows; figures are aligned to the right."""
    rule = ("---", *["---:"] * (len(lines[0]) - 1))
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def section(results: Path = record.RESULTS) -> str:
    """Return all tables, each below its title and above its command, machine and date."""
    parts = []
    for name, (title, *made) in TABLES.items():
        parts.append(f"## {title}")
        paths = [path for path in record.kept(name, results) if path.exists()]
        if not paths:
            parts.append(f"`python -m benchmarks.{name}`: no measurement is kept yet.")
        for path in paths:
            document = json.loads(path.read_text())
            tables = [markdown(table(document)) for table in made]
            parts.append("\n\n".join(tables) + f"\n\n{_origin(name, document)}")
    return "\n\n".join(parts)


def shortlist(results: Path = record.RESULTS) -> str:
    """Return the three rows of the README: one training step, one prediction, and learning from scratch."""
    train, predict, scratch = (
        json.loads((results / f"{name}.json").read_text()) for name in ("train_step", "inference", "learn")
    )
    step = next(r for r in train["results"] if (r["case"], r["precision"]) == SHORT_STEP)
    one = next(r for r in predict["results"] if (r["batch"], r["precision"]) == SHORT_PREDICTION)
    header, (_, ours, _), (peer, theirs, _), *_ = learn(scratch)
    rows: list[tuple[str, ...]] = [
        ("", "vitrail", "over timm", "over the best settings or peer", "measured"),
        (
            f"training, {step['case']}, batch {step['batch']}, {step['precision']}",
            f"{_rate(step['rows'], record.OURS)} images/s",
            ratio(step["over_timm"]),
            f"{ratio(step['over_timm_at_its_best'])}, timm",
            _origin("train_step", train),
        ),
        (
            f"predicting, B/16, 224 px, batch {one['batch']}, {one['precision']}",
            f"{_rate(one['rows'], record.OURS)} images/s",
            ratio(one["over_timm"]),
            f"{ratio(one['over_best_peer'])}, {one['best_peer']}",
            _origin("inference", predict),
        ),
        (f"{header[0]}, {header[1]}", ours, f"{peer}: {theirs}", "", _origin("learn", scratch)),
    ]
    gpu_file = results / "gpu.json"
    told = "No figure of a GPU is here: `python -m benchmarks.gpu` has not run yet."
    if gpu_file.exists():
        on_a_gpu = json.loads(gpu_file.read_text())
        told = f"{markdown(gpu(on_a_gpu)[: 1 + SHORT_GPU])}\n\n{_origin('gpu', on_a_gpu)}"
    return f"{markdown(rows)}\n\n{told}"


def fitting(results: Path = record.RESULTS) -> str:
    """Return the tables of memory: computed, and measured on a CPU."""
    document = json.loads((results / "memory.json").read_text())
    tables = (markdown(table(document)) for table in (memory.table, memory.measured_table))
    return "\n\n".join([*tables, _origin("memory", document)])


TITLES = {
    "clothing": "clothing, 10 classes",
    "brain": "brain scans, 4",
    "pets": "pets, 3",
    "tiles": "magnetic tiles, 6",
    "solar": "solar cells, 4",
    "flowers12": "flowers, 12",
    "trashnet": "litter, 6",
    "rooms4": "rooms, 4",
    "flowers5": "flowers, 5",
    "monkeys10": "monkeys, 10",
    "satellite7": "satellite images, 7",
}
"""Set of a first run -> its name and number of classes in the table."""


def first_runs(results: Path = record.RESULTS) -> str:
    """Return what the shipped weights reach in three minutes beside simple baselines, and what their features know."""
    document = json.loads((results / "first_run.json").read_text())
    header, *lines = first_run.summary(document)
    named = [("set, classes", *header[1:])]
    for name, *cells in lines:
        set_name, rest = name.split(", ", 1)
        named.append((f"{TITLES[set_name]}; {rest}", *cells))
    other = json.loads((results / "shipped.json").read_text())
    tables = [markdown(named), _origin("first_run", document)]
    tables += [markdown(shipped.table(other, document)), _origin("shipped", other)]
    ways = json.loads((results / "framing.json").read_text())
    tables += [markdown(framing.table(ways)), _origin("framing", ways)]
    return "\n\n".join(tables)


def claims(results: Path = record.RESULTS) -> str:
    """Return the verdict on every claim of the papers, by the studies in `results`."""
    lines: list[tuple[str, ...]] = [("study", "claim", "verdict", "difference", "p", "seeds")]
    for name in NAMES:
        path = results / "studies" / f"{name}.json"
        found, title = read(path), f"`{name}`"
        seeds = len({result.seed for result in found.results})
        for answer in found.answers():
            error = "" if math.isnan(answer.error) else f" ± {answer.error:.2f}"
            needed = answer.advice.replace("; ", ", ").replace(" seeds", "")
            numbers = (f"{answer.difference:+.2f}{error}", f"{answer.p:.2g}", f"{seeds}{needed}")
            lines.append((title, answer.claim.text, answer.verdict, *numbers))
            title = ""
    return markdown(lines).replace("---:", "---")


def _origin(name: str, document: dict[str, Any]) -> str:
    """Return the command, the machine and the date of a measurement."""
    machine = document["machine"]
    amx = ", AMX" if any(flag.startswith("amx") for flag in machine.get("flags", ())) else ""
    where = (
        f"{machine.get('gpu', machine['cpu'])}{amx}, {machine['threads']} threads, torch {machine['versions']['torch']}"
    )
    if "gflops" in machine:  # results from before the machine's speed was measured have none
        where += "".join(f", {machine['gflops'][kind]:,.0f} GFLOP/s {kind}" for kind in ("float32", "bf16", "int8"))
    return f"`python -m benchmarks.{COMMANDS.get(name, name)}` ({where}, {document['date']})"


SECTIONS = {
    "docs/numbers/benchmarks.md": ("benchmarks", section),
    "README.md": ("shortlist", shortlist),
    "docs/cookbook/resources.md": ("memory", fitting),
    "docs/cookbook/tiny.md": ("first runs", first_runs),
    "docs/studies.md": ("claims", claims),
}
"""Document -> the name of its section, and the function that writes it."""


def replaced(text: str, name: str, new: str) -> str:
    """Return a document with the section `name` replaced. Raises ValueError if its markers are missing."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def main() -> None:
    """Rewrite the sections of all documents."""
    for document, (name, made) in SECTIONS.items():
        path = record.ROOT / document
        path.write_text(replaced(path.read_text(), name, made()))


if __name__ == "__main__":
    main()
