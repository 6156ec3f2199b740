"""Predicting in float32 on the CPU: our frozen torch path against the programs that `vitrail export` writes.

The same network, the same uint8 images, the same threads, one process; ONNX Runtime and OpenVINO run the exported
programs with their defaults but for the number of threads, and OpenVINO in float32 instead of what it would choose.
Each program has passed its parity check before the race.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import compare, peers, record
from benchmarks.compare import Contender
from benchmarks.inference import images, predictor
from benchmarks.peers import Architecture
from vitrail.exports.write import export_model
from vitrail.model.frozen import freeze

CASES = {"S/16": peers.S16, "B/16": peers.B16}
BATCHES = (1, 8)

Step = Callable[[np.ndarray], object]


def onnx_step(folder: Path) -> Step:
    """ONNX Runtime on a program, with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"images": batch})


def openvino_step(folder: Path) -> Step:
    """OpenVINO on a program, with torch's number of threads, in float32."""
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(folder / "model.xml", "CPU", settings)
    return lambda batch: compiled(batch, share_inputs=True)


def feeding(step: Step, batches: list[torch.Tensor]) -> Callable[[], object]:
    """A step that answers the next batch."""
    feed = itertools.cycle([batch.numpy() for batch in batches])
    return lambda: step(next(feed))


def measure(name: str, architecture: Architecture, options: Any) -> list[dict[str, Any]]:
    """All batch sizes of one network."""
    model: Any = peers.ours(architecture).eval()
    torch.nn.init.normal_(model.head.weight, std=0.02)
    frozen = freeze(model)
    results = []
    with TemporaryDirectory() as scratch:
        exported = {to: export_model(model, Path(scratch) / to, to) for to in ("onnx", "openvino")}  # type: ignore[arg-type]
        steps = {
            "ONNX Runtime": onnx_step(exported["onnx"].folder),
            "OpenVINO": openvino_step(exported["openvino"].folder),
        }
        for batch in BATCHES:
            pixels = images(batch, architecture.image_size)
            field = [
                Contender(record.OURS, predictor(frozen, pixels), batch, compare.tuned),
                *(Contender(peer, feeding(step, pixels), batch) for peer, step in steps.items()),
            ]
            measured = compare.race(field, rounds=options.rounds, seconds=0.1 if options.quick else 1.2)
            rows = record.rows(measured)
            record.show(f"{name}, 224 px, batch {batch}, float32, images/s", rows)
            results.append({"case": name, "batch": batch, "precision": "float32", "rows": rows})
    parity = {to: made.parity.relative for to, made in exported.items()}
    return [{**result, "relative_difference": parity} for result in results]


def main() -> None:
    """Run all cases and write results/export.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    results = [row for name, architecture in CASES.items() for row in measure(name, architecture, options)]
    record.save("export", options, results=results)


if __name__ == "__main__":
    main()
