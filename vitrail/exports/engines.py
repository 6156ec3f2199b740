"""Engines: torch, or a program of another runtime that computes the same network on this machine, perhaps faster.

Programs are written at first use into the cache folder, under a name that stands for the network, the processor and the
versions of the runtimes. Each of them has passed its parity check on this machine. `auto` takes the fastest that
`vitrail bench MODEL --engines` has measured on this machine, and torch if none was measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

import torch

from vitrail.data.cache import cache_folder
from vitrail.device import ComputePrecision, Precision, available_cores, compute_precision, processor
from vitrail.errors import ExportError, UsageError
from vitrail.evaluation.classify import Predict, predictor
from vitrail.exports.engine import Engine
from vitrail.exports.kinds import KINDS, EngineName, Installed, RuntimeName
from vitrail.files import read_json_object, replacing_text
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.weights.rebuild import card_of
from vitrail.weights.store import checksum

log = logging.getLogger("vitrail")
RUNTIMES: tuple[RuntimeName, ...] = ("openvino", "onnx")
MEASURED = "engines.json"
GAIN = 1.03
"""An engine replaces torch if it is faster by this factor."""
BATCHES = (1, 8)
"""Batch sizes that are measured: the first for latency, the last for speed."""


@dataclass(frozen=True)
class TimedEngine:
    """One engine, measured on this machine."""

    engine: Installed
    precision: ComputePrecision
    images_per_second: float
    """Speed with batches of 8 images."""
    latency_ms: float
    """Time for a single image."""
    memory_bytes: int
    """Memory of a process that only computes this network, with its libraries."""
    difference: float
    """Largest difference from the network in float32, relative to its largest output."""


class Engines:
    """The engines of one network on the CPU of this machine, in one precision."""

    def __init__(self, network: ViT | ResNet, precision: Precision = "auto") -> None:
        self.network = network
        self.precision = compute_precision(torch.device("cpu"), precision)

    @cached_property
    def folder(self) -> Path:
        """The folder of the programs and the measurements."""
        about = {
            "weights": checksum(self.network.state_dict()),
            "card": card_of(self.network).to_dict(),
            "precision": self.precision,
            "machine": [processor(), available_cores(), torch.get_num_threads()],
            "versions": [_version(package) for package in ("vitrail", "torch", *_packages())],
        }
        text = json.dumps(about, sort_keys=True, default=str)
        return _all_engines() / hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def program(self, name: RuntimeName, *, features: bool = False) -> Engine:
        """Return the program of a runtime, written at first use. Raises UsageError and ExportError if there is none."""
        output: Literal["features", "logits"] = "features" if features else "logits"
        place = self.folder / f"{name}-{output}"
        file = place / KINDS[name].file
        if file.is_file():
            try:
                return Engine(file, output)
            except ExportError as error:
                log.warning("a program in the cache cannot be used and is written again: %s", error)
        from vitrail.exports.write import export_model  # torch.export takes a while to import

        log.info("writing a program for %s, once: %s", name, place)
        export_model(self.network, place, name, output=output, precision=self.precision, overwrite=True)
        return Engine(file, output)

    def names(self) -> list[Installed]:
        """Return the engines that are installed and compute in this precision."""
        able = [name for name in RUNTIMES if self.precision in KINDS[name].precisions]
        return ["torch", *(name for name in able if all(_version(package) for package in KINDS[name].packages))]

    def measured(self) -> list[TimedEngine]:
        """Return what was measured here, the fastest first; empty if nothing was, or if the file is damaged."""
        if not _all_engines().is_dir() or not (file := self.folder / MEASURED).is_file():
            return []
        try:
            found = [TimedEngine(**row) for row in read_json_object(file, UsageError)["engines"]]
            if not all(row.engine in get_args(Installed) and row.images_per_second > 0 for row in found):
                raise ValueError("a value that is not valid")
        except (UsageError, LookupError, TypeError, ValueError) as error:
            log.warning("%s is not used (%s). Measure again: vitrail bench MODEL --engines", file, error)
            return []
        return sorted(found, key=lambda row: -row.images_per_second)

    def remember(self, rows: Sequence[TimedEngine]) -> None:
        """Store the measurements, by which `auto` chooses."""
        with replacing_text(self.folder / MEASURED) as file:
            file.write(json.dumps({"engines": [asdict(row) for row in rows]}, indent=1) + "\n")

    def fastest(self) -> Installed:
        """Return the fastest measured engine, and log the reason; torch if none was measured."""
        rows = {row.engine: row for row in self.measured() if row.engine in self.names()}
        if not rows or "torch" not in rows:
            log.debug("engine: torch, because no other was measured here (vitrail bench MODEL --engines)")
            return "torch"
        best, torch_row = next(iter(rows.values())), rows["torch"]
        if best.images_per_second < GAIN * torch_row.images_per_second:
            best = torch_row
        others = [f"{row.engine} {row.images_per_second:.1f}" for row in rows.values() if row is not best]
        log.info("engine %s: %.1f images/s here (%s)", best.engine, best.images_per_second, ", ".join(others))
        return best.engine


def engine_predictor(
    network: ViT | ResNet | Engine,
    device: torch.device,
    precision: Precision = "auto",
    *,
    engine: EngineName = "auto",
    features: bool = False,
) -> Predict:
    """Return images -> float32 logits, or features, of a network, computed by an engine.

    An exported program in place of a network computes what it was exported for. If the engine that `auto` chose cannot
    be used, torch computes, with a warning. Raises UsageError for an engine that is not installed or cannot compute in
    this precision or on this device, and ExportError if its outputs differ from the network's.
    """
    if isinstance(network, Engine):
        return network.features if features else network
    if device.type != "cpu" and engine not in ("auto", "torch"):
        raise UsageError(f"the engine {engine} computes on a CPU, and the device is {device}: add --device cpu")
    if device.type != "cpu" or engine == "torch":
        return predictor(network, device, precision, features=features)
    engines = Engines(network, precision)
    chosen = engines.fastest() if engine == "auto" else engine
    if chosen == "torch":
        return predictor(network, device, precision, features=features)
    if engines.precision not in KINDS[chosen].precisions:
        raise UsageError(f"the engine {chosen} does not compute in {engines.precision}: add --precision float32")
    try:
        return engines.program(chosen, features=features)
    except (ExportError, UsageError) as error:
        if engine != "auto":
            raise
        log.warning("engine torch, because the engine %s cannot be used: %s", chosen, error)
        return predictor(network, device, precision, features=features)


def _all_engines() -> Path:
    return cache_folder() / "engines"


def _packages() -> list[str]:
    return sorted({package for name in RUNTIMES for package in KINDS[name].packages})


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
