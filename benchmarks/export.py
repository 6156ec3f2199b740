"""Predict on the CPU: our frozen torch path against the programs that `vitrail export` writes, in three precisions.

The network, the uint8 images and the number of threads are the same. Each side has a process of its own, ours set as
the command line sets it (`keep_freed_memory`). ONNX Runtime and OpenVINO run the exported programs with their defaults,
except for the number of threads and OpenVINO's precision. int8 programs run as vitrail runs them, and beside them as
OpenVINO runs the same file with nothing of vitrail in between, once with vitrail's choice of the type for what is not
int8 and once with the other. Each program has passed its parity check before it is timed. int8 programs are calibrated
on random images, because only speed is measured.

vitrail makes other int8 programs for processors with AMX, so their figures are kept apart, in results/amx/export.json.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import compare, peers, record
from benchmarks.compare import Contender
from benchmarks.inference import images
from benchmarks.peers import Architecture
from vitrail.device import keep_freed_memory
from vitrail.exports import openvino
from vitrail.exports.engine import Engine
from vitrail.exports.int8 import Samples, quantise
from vitrail.exports.kinds import KINDS, runtime
from vitrail.exports.write import export_model
from vitrail.model.build import freeze

CASES = {"S/16": peers.S16, "B/16": peers.B16}
BATCHES = (1, 8)
CALIBRATION = 16
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}

Step = Callable[[np.ndarray], object]
Make = Callable[[], Step]


def onnx_step(folder: Path) -> Step:
    """Return ONNX Runtime's session of a program, with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {"images": batch})


def openvino_step(folder: Path, precision: str) -> Step:
    """Return OpenVINO's compiled program, with torch's number of threads; what is not int8 is of this precision."""
    from openvino import Core

    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = Core().compile_model(folder / "model.xml", "CPU", settings)
    return lambda batch: compiled(batch, share_inputs=True)


def engine_step(folder: Path) -> Step:
    """Return what `vitrail predict` runs."""
    keep_freed_memory()
    engine = Engine(folder / "model.xml")
    return lambda batch: engine(torch.from_numpy(batch))


def frozen_step(architecture: Architecture, precision: str) -> Step:
    """Return our frozen network."""
    keep_freed_memory()
    model = freeze(peers.ours(architecture).eval(), DTYPES[precision])

    @torch.inference_mode()
    def step(batch: np.ndarray) -> object:
        return model(torch.from_numpy(batch))

    return step


def contender(name: str, make: Make, architecture: Architecture, batch: int) -> Contender:
    """Return the side that predicts with what `make` returns; only torch heeds the setting."""
    step, feed = make(), itertools.cycle([pixels.numpy() for pixels in images(batch, architecture.image_size)])
    return Contender(name, lambda: step(next(feed)), batch, compare.tuned)


def in_int8(exported: Path, folder: Path, to: str) -> Path:
    """Return an int8 copy of a float32 program, calibrated on random images."""
    shutil.copytree(exported, folder)
    shape = (CALIBRATION, 1, 3, 224, 224)
    pixels = [(image, 0) for image in np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)]
    about = json.loads((folder / "card.json").read_text())
    about["program"]["precision"] = "int8"
    module: Any = runtime(to)
    quantise(module, folder / KINDS[to].file, about, Samples(pixels, pixels[:1]), max_drop=100)
    return folder


def programs(model: Any, folder: Path) -> dict[tuple[str, str], Path]:
    """Export a network in every way that is timed, and return (runtime, precision) -> folder."""
    found = {}
    for to, precision in (("onnx", "float32"), ("openvino", "float32"), ("openvino", "bf16")):
        place = folder / f"{to}-{precision}"
        found[to, precision] = export_model(model, place, to, precision=precision).folder  # type: ignore[arg-type]
    for to in ("onnx", "openvino"):
        found[to, "int8"] = in_int8(found[to, "float32"], folder / f"{to}-int8", to)
    return found


def sides(architecture: Architecture, made: dict[tuple[str, str], Path], precision: str) -> dict[str, Make]:
    """Return what makes the sides of one precision: programs, or our frozen network."""
    if precision == "float32":
        return {
            record.OURS: partial(frozen_step, architecture, precision),
            "ONNX Runtime": partial(onnx_step, made["onnx", precision]),
            "OpenVINO": partial(openvino_step, made["openvino", precision], "f32"),
        }
    program = made["openvino", precision]
    if precision == "bf16":
        return {
            record.OURS: partial(frozen_step, architecture, precision),
            "vitrail, OpenVINO program": partial(engine_step, program),
            "OpenVINO": partial(openvino_step, program, "bf16"),
        }
    rest = openvino.hint("int8")
    other = "f32" if rest == "bf16" else "bf16"
    return {
        record.OURS: partial(engine_step, program),
        "OpenVINO": partial(openvino_step, program, rest),
        f"OpenVINO, the rest in {other}": partial(openvino_step, program, other),
        "ONNX Runtime": partial(onnx_step, made["onnx", precision]),
        "vitrail, bf16": partial(frozen_step, architecture, "bf16"),
    }


def measure(name: str, architecture: Architecture, options: Any) -> list[dict[str, Any]]:
    """Time all batch sizes and precisions of one network."""
    model: Any = peers.ours(architecture).eval()
    torch.nn.init.normal_(model.head.weight, std=0.02)
    results = []
    with TemporaryDirectory() as scratch:
        made = programs(model, Path(scratch))
        for precision, batch in itertools.product(("float32", "bf16", "int8"), BATCHES):
            measured = compare.race_apart(
                {
                    who: partial(contender, who, make, architecture, batch)
                    for who, make in sides(architecture, made, precision).items()
                },
                rounds=options.rounds,
                seconds=0.1 if options.quick else 1.2,
            )
            rows = record.rows(measured)
            record.show(f"{name}, 224 px, batch {batch}, {precision}, images/s", rows)
            results.append({"case": name, "batch": batch, "precision": precision, "rows": rows})
        parity = {
            to: json.loads((made[to, "float32"] / "card.json").read_text())["parity"] for to in ("onnx", "openvino")
        }
    differences = {to: found["relative"] for to, found in parity.items()}
    return [{**result, "relative_difference": differences} for result in results]


def main() -> None:
    """Run all cases and write results/export.json, or with AMX results/amx/export.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    results = [row for name, architecture in CASES.items() for row in measure(name, architecture, options)]
    record.save("export", options, by_amx=True, results=results)


if __name__ == "__main__":
    main()
