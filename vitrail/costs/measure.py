"""Speed and memory measured on the machine at hand (paper, appendix D.5 and Figure 12).

It measures images/s of prediction and of training steps at the fastest batch size, their peak memory, and the largest
batch that fits. Images come from memory, so the numbers leave out the time of a loader and a disk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.costs.count import LiveTensors
from vitrail.device import ComputePrecision
from vitrail.model.build import build, freeze
from vitrail.model.variants import ResNetConfig, ViTConfig

Mode = Literal["inference", "training"]
ROUNDS = 3
GAIN = 1.02
"""A larger batch size is better only if it is faster by this factor than the best smaller one."""
PATIENCE = 2
"""Number of successive batch sizes without a gain that end the search."""
BATCHES = tuple(2**n for n in range(14))
PROBE = 2
"""Number of images in the smaller of the two batches from which memory is extrapolated."""


class TimedNetwork:
    """A network ready to predict or to train on `device`: calling it with images is one step.

    Inference runs as in `vitrail predict`: a frozen copy on a CPU, autocast elsewhere. Training is a forward pass, a
    backward pass of cross-entropy and an AdamW step, in bfloat16 autocast or float32. `prepare` may change the network
    first, such as freeze a part of it.
    """

    def __init__(
        self,
        config: ViTConfig | ResNetConfig,
        mode: Mode,
        device: torch.device,
        precision: ComputePrecision,
        prepare: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.config, self.mode, self.device, self.precision = config, mode, device, precision
        model: nn.Module = build(config)
        prepare(model)
        frozen = mode == "inference" and device.type == "cpu"
        if frozen:
            model = freeze(model, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.model = model.to(device).train(mode == "training")
        self.autocast = precision == "bf16" and not frozen
        self.optimizer = None
        self.keeps_gradients = False
        if mode == "training":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type != "mps")

    def __call__(self, images: Tensor) -> None:
        """Run one step on uint8 images [batch, channels, height, width]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            if self.optimizer is None:
                with torch.inference_mode():
                    self.model(images)
                return
            logits = self.model(images)
        labels = torch.zeros((len(images), *logits.shape[2:]), dtype=torch.int64, device=self.device)
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def images(self, number: int) -> Tensor:
        """Return `number` random images of the config's size on the device."""
        shape = (number, self.config.channels, *self.config.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that exist between two steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.gradients()
        for state in self.optimizer.state.values() if self.optimizer else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients that exist between two steps."""
        yield from (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)

    def packed_bytes(self) -> int:
        """Return the bytes of a frozen copy's weights, which oneDNN stores in its own layout."""
        weights = (getattr(module, "weight", None) for module in self.model.modules())
        packed = (weight for weight in weights if isinstance(weight, Tensor) and weight.is_mkldnn)
        return sum(weight.numel() * weight.element_size() for weight in packed)


@dataclass(frozen=True)
class Point:
    """Images/s at one batch size: the median, the slowest and the fastest round."""

    batch: int
    images_per_second: float
    low: float
    high: float


def rate(timed: TimedNetwork, batch: int, seconds: float) -> Point:
    """Measure one batch size for about `seconds`, in rounds of at least one step, after one warm-up step."""
    images = timed.images(batch)
    timed(images)
    began = now(timed.device)
    timed(images)
    took = max(now(timed.device) - began, 1e-9)
    if took >= seconds:  # a step this long needs no repetition
        return Point(batch, batch / took, batch / took, batch / took)
    steps = max(1, round(seconds / ROUNDS / took))
    rates = []
    for _ in range(ROUNDS):
        began = now(timed.device)
        for _ in range(steps):
            timed(images)
        rates.append(steps * batch / (now(timed.device) - began))
    return Point(batch, statistics.median(rates), min(rates), max(rates))


def fastest(timed: TimedNetwork, batches: Iterable[int], seconds: float) -> list[Point]:
    """Measure ascending batch sizes (see `sweep`) for a quarter of `seconds` each, and the best one for `seconds`."""
    points = sweep(lambda batch: rate(timed, batch, seconds / 4), batches)
    chosen = points.index(best(points))
    points[chosen] = rate(timed, points[chosen].batch, seconds)
    return points


def sweep(measure: Callable[[int], Point], batches: Iterable[int] = BATCHES) -> list[Point]:
    """Measure ascending batch sizes until `PATIENCE` successive ones are not faster than the best smaller one."""
    points: list[Point] = []
    for batch in batches:
        points.append(measure(batch))
        if len(points) - 1 - points.index(best(points)) >= PATIENCE:
            break
    return points


def best(points: Sequence[Point]) -> Point:
    """Return the measurement at the smallest batch size that no larger one beats by more than `GAIN`."""
    fastest = points[0]
    for point in points:
        if point.images_per_second > GAIN * fastest.images_per_second:
            fastest = point
    return fastest


@dataclass(frozen=True)
class Line:
    """Peak memory in bytes as a function of the batch: fixed + per_image x batch, and at least `floor`.

    A training step has two peaks: one with all activations and no weight gradients, and one with all weight gradients
    and no activations. The first grows with the batch, the second is the floor.
    """

    fixed: float
    per_image: float
    floor: float = 0.0

    def bytes(self, batch: int) -> int:
        """Return the peak at a batch size."""
        return round(max(self.fixed + self.per_image * batch, self.floor))

    def largest(self, memory: float) -> int:
        """Return the largest batch with a peak of at most `memory` bytes; 0 if one image is too many."""
        if memory < self.floor:
            return 0
        return max(int((memory - self.fixed) // max(self.per_image, 1)), 0)


def memory_line(timed: TimedNetwork) -> Line:
    """Measure the peak memory of a step at two small batch sizes, weights and optimiser state included.

    Gradients stay allocated between steps during the measurement. They are then part of both peaks, so that few images
    are enough to show the memory of each, and they are subtracted at the end.
    """
    timed(timed.images(PROBE))  # the optimiser's state exists from here on
    floor = peak_bytes(timed, PROBE)
    timed.keeps_gradients = True
    timed(timed.images(PROBE))
    gradients = sum(gradient.nbytes for gradient in timed.gradients())
    few, more = peak_bytes(timed, PROBE), peak_bytes(timed, 3 * PROBE)
    timed.keeps_gradients = False
    timed.model.zero_grad(set_to_none=True)
    per_image = (more - few) / (2 * PROBE)
    return Line(few - PROBE * per_image - gradients, per_image, floor)


def peak_bytes(timed: TimedNetwork, batch: int) -> int:
    """Return the peak memory of tensors during a step: the allocator's on CUDA, counted elsewhere."""
    images = timed.images(batch)
    if timed.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(timed.device)
        timed(images)
        return torch.cuda.max_memory_allocated(timed.device)
    with LiveTensors([*timed.tensors(), images]) as live:
        timed(images)
    return live.peak + timed.packed_bytes()


def matmul_rate(device: torch.device, precision: ComputePrecision, side: int = 1024, seconds: float = 0.3) -> float:
    """Return the highest FLOP/s of several products of square matrices of `side`."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.rand(side, side, dtype=dtype, device=device) for _ in range(2))
    left @ right
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or fastest == float("inf"):
        began = now(device)
        left @ right
        fastest = min(fastest, now(device) - began)
    return 2 * side**3 / fastest


def now(device: torch.device) -> float:
    """Return the time once `device` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
