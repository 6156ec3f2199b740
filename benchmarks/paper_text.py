"""Write docs/paper-plan.md: the text of paper_plan.template.md with the numbers of results/paper_plan.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from benchmarks import record

DOCUMENT = record.ROOT / "docs" / "paper-plan.md"
WORDS = Path(__file__).with_name("paper_plan.template.md")
GB = 1e9
ACTIVATIONS = {"kept": "stored", "recomputed": "recomputed"}
"""Words for the kinds of activations in results/paper_plan.json."""


def document(plan: dict[str, Any]) -> str:
    """Return the whole document."""
    parts = (_run(plan), _times(plan), _memory(plan), _communication(plan), _reading(plan), _waiting(plan))
    parts += (_index(plan), _checkpoints(plan), _scales(plan))
    return Template(WORDS.read_text()).substitute({name: text for part in parts for name, text in part.items()})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with numbers aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _usual(plan: dict[str, Any]) -> dict[str, Any]:
    times: dict[str, Any] = plan["times"][f"{plan['utilisation']:g}"]
    return times


def _run(plan: dict[str, Any]) -> dict[str, str]:
    cluster, table2 = plan["cluster"], plan["table2"]
    return {
        "images_millions": f"{plan['images'] / 1e6:,.0f}",
        **{name: str(plan[name]) for name in ("recipe", "epochs", "because")},
        **{name: f"{plan[name]:,}" for name in ("batch", "classes")},
        **{name: f"{cluster[name]:g}" for name in ("nodes", "per_node", "devices", "cores", "kilowatts")},
        "peak": f"{plan['peak'] / 1e12:,.0f}",
        "device_memory": f"{plan['memory']['device'] / 2**30:.0f}",
        "network": f"{8 * cluster['network'] / GB:.0f}",
        "reached": f"{cluster['reached']:.0%}",
        "usd_per_hour": f"{plan['usd_per_hour']:.2f}",
        "overhead": f"{cluster['overhead'] - 1:.0%}",
        "exaflops": f"{plan['exaflops']:,.0f}",
        "table6_ours": f"{plan['table6']['ours']:,.0f}",
        "table6_published": f"{plan['table6']['published']:,.0f}",
        "core_days": f"{table2['core_days']:,}",
        "core_utilisation": f"{table2['utilisation']:.0%}",
        "utilisation": f"{plan['utilisation']:.0%}",
    }


def _times(plan: dict[str, Any]) -> dict[str, str]:
    rows = []
    for share, times in plan["times"].items():
        run = times["run"]
        rows.append(
            (
                f"{float(share):.0%}",
                f"{times['arithmetic']:.3f} + {times['reduce']:.3f}",
                f"{run['images_per_second']:,.0f}",
                f"{run['days']:.1f}",
                f"${run['usd']:,.0f}",
                f"{run['megawatt_hours']:.1f}",
                f"{times['apart_run']['days']:.1f}",
            )
        )
    header = ("share of peak", "seconds per step: arithmetic + all-reduce", "images/s", "days", "cost", "MWh")
    run = _usual(plan)["run"]
    return {
        "times": table((*header, "days without overlap"), rows),
        "steps": f"{run['steps']:,.0f}",
        "days": f"{run['days']:.1f}",
        "usd": f"{run['usd']:,.0f}",
        "mwh": f"{run['megawatt_hours']:.1f}",
        "images_per_second": f"{run['images_per_second']:,.0f}",
        "images_per_node": f"{run['images_per_second'] / plan['cluster']['nodes']:,.0f}",
    }


def _memory(plan: dict[str, Any]) -> dict[str, str]:
    held = plan["memory"]
    parts = {
        "weights": "weights, float32",
        "gradients": "gradients, float32",
        "moments": "Adam's two moments",
        "casts": "bfloat16 copies of the weights, during a step",
        "sums": "buffers of the gradient all-reduce, during a step",
        "average": "moving average of the weights, if chosen (the recipe has none)",
        "image": "activations of one image, all stored for the backward pass",
        "image_recomputed": "activations of one image, blocks recomputed (`--activation-checkpointing`)",
    }
    states = {"whole": "replicated", "sharded": f"sharded over all {plan['cluster']['devices']} (`--shard`)"}
    rows = []
    for name, row in held["rows"].items():
        how, what = name.split(", ")
        sizes = (f"{row['state'] / GB:.1f}", f"{row['activations'] / GB:.1f}", f"{row['fits']}")
        rows.append((states[how], ACTIVATIONS[what], *sizes, _pieces(row, held["local_batch"])))
    images = f"{held['local_batch']} images, GB"
    header = ("state", "activations", "state, GB", images, "largest batch", "micro-batches")
    whole, sharded = held["rows"]["whole, kept"], held["rows"]["sharded, kept"]
    return {
        "parameters": f"{held['parameters'] / 1e6:,.0f}",
        "local_batch": f"{held['local_batch']}",
        "memory_parts": table(("per device", "GB"), [(what, f"{held[name] / GB:.2f}") for name, what in parts.items()]),
        "memory_rows": table(header, rows),
        "used": f"{(whole['state'] + whole['activations']) / 2**30:.0f}",
        "pieces": _pieces(whole, held["local_batch"]),
        "pieces_recomputed": _pieces(held["rows"]["whole, recomputed"], held["local_batch"]),
        "sharding_saves": f"{(whole['state'] - sharded['state']) / GB:.1f}",
    }


def _pieces(row: dict[str, Any], images: int) -> str:
    if row["pieces"] is None:
        return "does not fit"
    return f"{row['pieces']} x {images // row['pieces']}"


def _communication(plan: dict[str, Any]) -> dict[str, str]:
    arithmetic = _usual(plan)["arithmetic"]
    rows = [
        (what, f"{row['bytes'] / GB:.2f}", f"{row['seconds']:.3f}", f"{row['seconds'] / arithmetic:.0%}")
        for what, row in plan["communication"].items()
    ]
    header = ("per step", "GB sent per device", "seconds", "relative to arithmetic")
    return {"communication": table(header, rows), "rate": f"{plan['cluster']['rate'] / GB:.0f}"}


def _reading(plan: dict[str, Any]) -> dict[str, str]:
    side, rate, nodes = plan["input"], _usual(plan)["run"]["images_per_second"], plan["cluster"]["nodes"]
    photos, core, shares = side["photographs"], side["decode"], side["shares"]
    kinds = {"as published": ("bytes", "whole"), "packed, short side 256": ("packed_bytes", "packed")}
    rows = []
    for what, (size_name, speed) in kinds.items():
        size = photos[size_name]
        amounts = (f"{size / 1e3:.0f}", f"{size * plan['images'] / 1e12:.1f}", f"{size * rate / GB:.2f}")
        rows.append((what, *amounts, f"{size * rate / nodes / GB:.2f}", f"{rate / nodes / core[speed]:.1f}"))
    header = ("photographs", "KB each", "TB in total", "GB/s", "GB/s per machine", "cores per machine")
    low, high = shares["requests_of_a_process"]
    (epoch_steps,) = shares["batches_of_a_process"]
    return {
        "photographs": f"{photos['images']}",
        "decode_whole": f"{core['whole']:,.0f}",
        "decode_packed": f"{core['packed']:,.0f}",
        "decode_date": core["date"],
        "data_rows": table(header, rows),
        "data_gbs": f"{photos['packed_bytes'] * rate / GB:.2f}",
        "data_cores": f"{rate / nodes / core['packed']:.1f}",
        "shards": f"{plan['images'] / side['shard_images']:,.0f}",
        "shard_images": f"{side['shard_images']:,}",
        "together": f"{side['feed']['together']}",
        "looked": f"{shares['batches']}",
        "requests": f"{low}" if low == high else f"{low} to {high}",
        "twice": f"{shares['twice'] or 'no'}",
        "at_once": f"{shares['requests_to_one_shard_at_once']}",
        "epoch_steps": f"{epoch_steps:,}",
    }


def _waiting(plan: dict[str, Any]) -> dict[str, str]:
    side, feed, store = plan["input"], plan["input"]["feed"], plan["input"]["store"]
    header = ("object store", "neighbours", "requests/s")
    header += tuple(f"{int(depth):,} requested" for depth in side["rows"][0]["waiting"])
    rows = []
    for row in side["rows"]:
        needed = "more than 16,384" if row["needed"] is None else f"{row['needed']:,}"
        shares = (f"{share:.2%}" for share in row["waiting"].values())
        rows.append((row["store"], f"{row['together']}", f"{row['requests_per_second']:,.0f}", *shares, needed))
    now = [f"{row['waiting_now']:.2%}" for row in side["rows"]]
    names = ("wait_calm_single", "wait_calm", "wait_stalls_single", "wait_stalls")
    return {
        "simulated": f"{side['steps']:,}",
        "median": f"{1000 * store['median']:.0f}",
        "p99": f"{1000 * store['p99']:.0f}",
        "bandwidth": f"{store['bandwidth'] / 1e6:.0f}",
        "waiting": table((*header, "needed for 0.1%"), rows),
        "on_the_way": f"{feed['on_the_way']:,}",
        "asking": f"{feed['asking']}",
        **dict(zip(names, now, strict=True)),
    }


def _index(plan: dict[str, Any]) -> dict[str, str]:
    index, images = plan["input"]["index"], plan["images"]
    own = index["own_bytes"] * images
    grown = {
        "images": images,
        "open_seconds": index["open_microseconds"] * images / 1e6,
        "own_mb": own / 1e6,
        "index_mb": index["index_bytes"] * images / 1e6,
    }
    rows = [
        (f"{row['images']:,}", f"{row['open_seconds']:.1f}", f"{row['own_mb']:,.0f}", f"{row['index_mb']:,.0f}")
        for row in (*index["rows"], grown)
    ]
    header = ("images", "seconds to open", "MB per process", "MB of the mapped index")
    return {
        "index_rows": table(header, rows),
        "index_node": f"{plan['cluster']['per_node'] * own / GB:.0f}",
        "own_bytes": f"{index['own_bytes']:.0f}",
        "order": f"{index['order_bytes'] * images / 1e6:.0f}",
        "order_single": f"{index['order_bytes_single'] * images / GB:.1f}",
    }


def _checkpoints(plan: dict[str, Any]) -> dict[str, str]:
    kept = plan["checkpoint"]
    return {
        "checkpoint": f"{kept['bytes'] / GB:.1f}",
        "write_rate": f"{kept['bytes_per_second'] / GB:.2f}",
        "write_seconds": f"{kept['seconds']:.0f}",
        "every_hours": f"{kept['every_hours']:.1f}",
        "write_share": f"{kept['share']:.2%}",
        "failure_days": f"{kept['days_between_failures']:.0f}",
        "failures": f"{kept['failures']:.2f}",
        "best_hours": f"{kept['best_hours']:.1f}",
    }


def _scales(plan: dict[str, Any]) -> dict[str, str]:
    header = ("network, epochs", "exaFLOPs", "H100s", "images each", "days", "cost", "all-reduce / arithmetic")
    rows = [
        (
            f"{row['model']}, {row['epochs']}",
            f"{row['exaflops']:,.0f}",
            f"{row['devices']}",
            f"{row['local_batch']}",
            f"{row['days']:.2f}",
            f"${row['usd']:,.0f}",
            f"{row['reducing']:.0%}",
            f"{row['apart_days']:.2f}",
        )
        for row in plan["scales"]
    ]
    return {"scales": table((*header, "days without overlap"), rows)}
