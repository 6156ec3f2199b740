"""A network whose launches a GPU repeats by itself: CUDA graphs, one for each of a few sizes of batches.

A step of prediction launches a hundred kernels or more. For small batches and small networks the processor needs longer
to launch them than the GPU to run them. A graph launches all of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EVEN = 8
"""Beyond this number, sizes of batches are its multiples; below, powers of two."""
WARM_UP = 3
"""Calls before a graph is recorded, in which libraries choose their kernels and allocate what they keep."""


def filled_size(count: int) -> int:
    """Return the size of the batch that `count` images fill: 1, 2, 4, and multiples of `EVEN`."""
    return 2 ** (count - 1).bit_length() if count <= EVEN else -(-count // EVEN) * EVEN


class Graphs:
    """`call`, which maps images on a CUDA device to a tensor with a row for each, recorded once for each size of batch.

    Every call must launch the same kernels: nothing in it may depend on values, or copy from the CPU. A batch that does
    not fill its size is followed by images of earlier batches, whose outputs are dropped. All graphs share the memory
    of their activations.
    """

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        self._call = call
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None
        self._lock = threading.Lock()  # the threads of a server share the memory of the images

    def __call__(self, images: Tensor) -> Tensor:
        """Return the outputs for images [batch, ...] on the device."""
        size = filled_size(len(images))
        key = (size, images.shape[1:], images.dtype)
        with self._lock:
            if key not in self._graphs:
                self._graphs[key] = self._recorded(size, images)
            graph, inputs, outputs = self._graphs[key]
            inputs[: len(images)].copy_(images, non_blocking=True)
            graph.replay()
            return outputs[: len(images)].clone()

    def _recorded(self, size: int, images: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Return a graph, and the memory from which it reads images and into which it writes outputs."""
        inputs = images[:1].expand(size, *images.shape[1:]).contiguous(memory_format=torch.channels_last)
        current, aside = torch.cuda.current_stream(images.device), torch.cuda.Stream(images.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._call(inputs)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._call(inputs)
        self._pool = graph.pool()
        return graph, inputs, outputs
