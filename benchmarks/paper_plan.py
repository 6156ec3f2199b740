"""Plan the pre-training of ViT-H/14 on 300 million images: compute, memory, communication, input, money.

    python -m benchmarks.paper_plan      writes results/paper_plan.json and docs/paper-plan.md

`vitrail.costs` computes the plan from the recipe `paper/vit-h14-jft`; the input side is simulated (`paper_input`).
Three values are measured here: the bytes of a photograph, the memory of an index, and the rate of writing checkpoints.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import input_pipeline, paper_text, record
from benchmarks.paper_input import TOGETHER, Feed, Store, needed, shares, waiting
from benchmarks.paper_measured import decoding, index, photographs, written
from vitrail.costs.count import activation_bytes, learned_values, training_flops
from vitrail.costs.devices import DAY, DEVICES, dollars, implied_utilisation
from vitrail.costs.estimate import ROWS
from vitrail.costs.memory import state_bytes
from vitrail.costs.published import published_table
from vitrail.data.benchmarks.catalog import CATALOG
from vitrail.model.variants import ViTConfig, variant
from vitrail.recipes.registry import recipe

RECIPE, DATA = "paper/vit-h14-jft", "jft300m"
IMAGES, CLASSES = CATALOG[DATA].splits["train"], CATALOG[DATA].classes
PUBLISHED_DAYS = round(
    1000 * float(published_table("table2_state_of_the_art")["rows"]["TPUv3-core-days"][0].removesuffix("k"))
)
"""TPUv3-core-days of H/14 in the paper's Table 2."""
FLOAT32 = 4
"""Bytes per value of the residual stream between two blocks."""
LLAMA_FAILURES, LLAMA_DAYS, LLAMA_GPUS = 419, 54, 16_384
"""Unexpected interruptions of Llama 3's training (arXiv:2407.21783, section 3.3.4)."""
SHARD = 1 << 30
STEPS = 20_000
"""Number of simulated steps."""


@dataclass(frozen=True)
class Cluster:
    """Machines of eight H100s, from the data sheet of NVIDIA's DGX H100."""

    nodes: int = 4
    per_node: int = 8
    device: str = "h100"
    network: float = 50e9
    """Bytes/s between a device and other nodes in each direction: a port of 400 Gb/s."""
    nvlink: float = 450e9
    """Bytes/s between devices of a node in each direction."""
    reached: float = 0.8
    """Share of these rates that collectives reach; assumed."""
    kilowatts: float = 10.2
    """Highest power of a node."""
    cores: int = 112
    """Processor cores of a node."""
    overhead: float = 1.2
    """Energy of the building over that of the machines; assumed."""

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.per_node

    @property
    def rate(self) -> float:
        """Return the bytes/s of a device in a collective over all devices.

        A ring enters and leaves each node once. With as many rings as ports, the ports of a node work together.
        """
        between = self.per_node * self.network if self.nodes > 1 else self.nvlink
        return self.reached * min(between, self.nvlink)


def config_of(name: str) -> ViTConfig:
    """Return the network of pre-training: with JFT's classes and the hidden layer before them."""
    plain = variant(name)
    assert isinstance(plain, ViTConfig)
    return replace(plain, classes=CLASSES, pre_logits=plain.width, image_size=(224, 224))


def step_seconds(config: ViTConfig, batch: int, cluster: Cluster, utilisation: float | None = None) -> dict[str, float]:
    """Return the seconds of a step: of the arithmetic, of the all-reduce of float32 gradients, and of both together.

    `step` overlaps the sum with the backward pass, two thirds of the arithmetic. `apart` overlaps nothing.
    """
    device, count = DEVICES[cluster.device], cluster.devices
    share = device.utilisation if utilisation is None else utilisation
    arithmetic = training_flops(config) * batch / (count * device.peak * share)
    sent = 2 * (count - 1) / count * 4 * learned_values(config)
    reduce = sent / cluster.rate
    return {
        "arithmetic": arithmetic,
        "sent_bytes": sent,
        "reduce": reduce,
        "step": arithmetic + max(0.0, reduce - 2 / 3 * arithmetic),
        "apart": arithmetic + reduce,
    }


def run_of(config: ViTConfig, epochs: float, batch: int, cluster: Cluster, seconds: float) -> dict[str, float]:
    """Return steps, days, money and energy of a run with steps of this many seconds."""
    steps = IMAGES // batch * epochs
    days = steps * seconds / DAY
    price = DEVICES[cluster.device].usd_per_hour
    assert price is not None
    return {
        "steps": steps,
        "days": days,
        "usd": dollars(days * cluster.devices, price),
        "megawatt_hours": days * 24 * cluster.nodes * cluster.kilowatts * cluster.overhead / 1000,
        "images_per_second": batch / seconds,
    }


def memory(config: ViTConfig, batch: int, cluster: Cluster) -> dict[str, Any]:
    """Return the bytes on one device, by kind, whole or sharded over all devices."""
    count, everything = cluster.devices, learned_values(config)
    each = activation_bytes(config)
    block = activation_bytes(replace(config, depth=3)) - activation_bytes(replace(config, depth=2))
    weights = learned_values(replace(config, depth=3)) - learned_values(replace(config, depth=2))
    tokens = config.prefix + config.grid[0] * config.grid[1]
    recomputed = each - (config.depth - 1) * block + config.depth * tokens * config.width * FLOAT32
    local = batch // count
    held = DEVICES[cluster.device].memory
    casts, sums = 2 * everything, 4 * everything
    states = {
        "whole": state_bytes(everything) + casts + sums,
        "sharded": state_bytes(everything) / count + casts + weights * (2 * 4 + 4),  # two blocks, one gradient
    }
    rows = {}
    for how, state in states.items():
        for what, one in (("kept", each), ("recomputed", recomputed)):
            fits = (0.9 * held - state) / one
            pieces = next((p for p in range(1, local + 1) if local % p == 0 and local / p <= fits), None)
            rows[f"{how}, {what}"] = {"state": state, "activations": local * one, "fits": int(fits), "pieces": pieces}
    return {
        "parameters": everything,
        "weights": 4 * everything,
        "gradients": 4 * everything,
        "moments": 8 * everything,
        "casts": casts,
        "sums": sums,
        "average": 4 * everything,
        "image": each,
        "image_recomputed": recomputed,
        "local_batch": local,
        "device": held,
        "rows": rows,
    }


def communication(config: ViTConfig, cluster: Cluster) -> dict[str, dict[str, float]]:
    """Return the bytes that a device sends in a step and their seconds: ring algorithms, each n - 1 n-ths of the
    tensor.
    """
    count, everything = cluster.devices, learned_values(config)
    part = (count - 1) / count * everything
    sent = {
        "float32 gradients are summed": 2 * 4 * part,
        "`--shard`: float32 weights are gathered twice, gradients summed and cut": (2 * 4 + 4) * part,
        "bfloat16 gradients are summed (not built)": 2 * 2 * part,
    }
    return {what: {"bytes": size, "seconds": size / cluster.rate} for what, size in sent.items()}


def scales(cluster: Cluster, batch: int) -> list[dict[str, Any]]:
    """Return plans for other networks and cluster sizes: the paper's epochs of JFT, at the same batch size."""
    rows = []
    for name, epochs in (("S/16", 7), ("B/16", 7), ("L/16", 14), ("H/14", 14)):
        config = config_of(name)
        for nodes in (1, 4, 16, 64):
            sized = replace(cluster, nodes=nodes)
            seconds = step_seconds(config, batch, sized)
            run = run_of(config, epochs, batch, sized, seconds["step"])
            apart = run_of(config, epochs, batch, sized, seconds["apart"])
            row = {"model": name, "epochs": epochs, "devices": sized.devices, "local_batch": batch // sized.devices}
            row |= {"exaflops": training_flops(config) * IMAGES * epochs / 1e18, **run}
            row |= {"apart_days": apart["days"], "reducing": seconds["reduce"] / seconds["arithmetic"]}
            rows.append(row)
    return rows


def saving(cluster: Cluster, days: float, size: float, rate: float, every: float) -> dict[str, float]:
    """Return the cost of checkpoints: bytes, seconds, and the work that a failure loses.

    The best interval is the square root of twice the time of a save times the time between failures (Young, 1974).
    """
    between = LLAMA_DAYS * LLAMA_GPUS / LLAMA_FAILURES / cluster.devices
    seconds = size / rate
    return {
        "bytes": size,
        "seconds": seconds,
        "every_hours": every * days * 24,
        "share": seconds / (every * days * DAY),
        "days_between_failures": between,
        "failures": days / between,
        "best_hours": math.sqrt(2 * seconds * between * DAY) / 3600,
    }


def computed() -> dict[str, Any]:
    """Return all values that follow from the recipe and the cluster, without measuring or simulating."""
    run, cluster = recipe(RECIPE), Cluster()
    batch, epochs = run.batch_size, 14
    assert batch is not None and str(run.duration) == f"{epochs} epochs"
    config = config_of(run.model)
    paper = next(row for row in ROWS if row.variant == run.model)
    device = DEVICES[cluster.device]
    times = {}
    for share in (0.2, device.utilisation, 0.4):
        seconds = step_seconds(config, batch, cluster, share)
        times[f"{share:g}"] = {
            **seconds,
            "run": run_of(config, epochs, batch, cluster, seconds["step"]),
            "apart_run": run_of(config, epochs, batch, cluster, seconds["apart"]),
        }
    tpu = DEVICES["tpu-v3"]
    flops = training_flops(config) * IMAGES * epochs
    return {
        "recipe": RECIPE,
        "images": IMAGES,
        "epochs": epochs,
        "batch": batch,
        "classes": CLASSES,
        "cluster": {**asdict(cluster), "devices": cluster.devices, "rate": cluster.rate},
        "peak": device.peak,
        "utilisation": device.utilisation,
        "because": device.because,
        "usd_per_hour": device.usd_per_hour,
        "exaflops": flops / 1e18,
        "table6": {"published": paper.published, "ours": paper.exaflops},
        "table2": {"core_days": PUBLISHED_DAYS, "utilisation": implied_utilisation(flops, PUBLISHED_DAYS, tpu)},
        "times": times,
        "memory": memory(config, batch, cluster),
        "communication": communication(config, cluster),
        "scales": scales(cluster, batch),
    }


def fed(found: dict[str, Any], image_bytes: float, decode: float, workers: int = 1) -> Feed:
    """Return the loader of one process of the planned run."""
    cluster = found["cluster"]
    step = found["times"][f"{found['utilisation']:g}"]["step"]
    each = found["batch"] // cluster["devices"]
    return Feed(step, cluster["devices"], each, TOGETHER, image_bytes, decode * workers)


def simulated(feed: Feed, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return the shares of waiting, by how images are requested and how the store behaves."""
    rows = []
    stores = {"no request stalls": Store(), "one in 10,000 takes 5 s": Store(stalls=1e-4)}
    for what, store in stores.items():
        for together in (1, TOGETHER):
            ours = replace(feed, together=together)
            row = {"store": what, "together": together, "requests": -(-feed.batch // together) * feed.processes}
            row["requests_per_second"] = row["requests"] / feed.step
            deeper = (4, 8, 16, 32)
            row["waiting"] = {
                f"{n * feed.batch}": waiting(
                    replace(ours, on_the_way=n * feed.batch, asking=max(ours.asking, n)), store, steps
                )
                for n in deeper
            }
            rows.append({**row, "waiting_now": waiting(ours, store, steps), "needed": needed(ours, store, steps)})
    return rows


def main() -> None:
    """Compute, measure, simulate, and write results/paper_plan.json and docs/paper-plan.md."""
    parser = record.arguments(__doc__)
    parser.add_argument("--images", type=Path, default=input_pipeline.IMAGES, help="a folder of ImageNet's JPEGs")
    options = parser.parse_args()
    record.prepare(options)
    found = computed()
    photos, core = photographs(options.images), decoding()
    feed = fed(found, photos["packed_bytes"], core["packed"])
    per_shard = int(SHARD / photos["packed_bytes"])
    input_side = {
        "photographs": photos,
        "decode": core,
        "feed": asdict(feed),
        "store": asdict(Store()),
        "steps": 200 if options.quick else STEPS,
        "rows": simulated(feed, 200 if options.quick else STEPS),
        "shard_images": per_shard,
        "shares": shares(IMAGES, found["batch"], feed.processes, TOGETHER, per_shard, 4 if options.quick else 100),
        "index": index((100_000, 200_000) if options.quick else (1_000_000, 2_000_000, 5_000_000)),
    }
    rate, planned = written(), found["times"][f"{found['utilisation']:g}"]
    size = found["memory"]["weights"] + found["memory"]["moments"]
    every = recipe(RECIPE).checkpoint_every.value / 100
    kept = {**rate, **saving(Cluster(), planned["run"]["days"], size, rate["bytes_per_second"], every)}
    content = {**found, "input": input_side, "checkpoint": kept}
    text = paper_text.document(json.loads(json.dumps(content)))
    if record.save("paper_plan", options, **content) is None:
        print(text)
    else:
        paper_text.DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
