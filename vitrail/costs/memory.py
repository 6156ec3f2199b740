"""Bytes of training: which tensors are alive or kept for the backward pass, the training state, the largest batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.model.compute import computed
from vitrail.torch_private import TorchDispatchMode, storage_number, tree_leaves

STATE_BYTES = 16
"""Bytes per trainable parameter: float32 weight, gradient and Adam's two moments."""


class LiveTensors(TorchDispatchMode):
    """Context that follows every tensor made inside it until it is freed, where no allocator reports a peak.

    `held` are earlier tensors that count too. Tensors that share memory count once. Scratch space inside a kernel is
    not seen. After the block, `peak` is the largest number of bytes that were alive at one time. Networks compute as
    fast as without this context.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._fast = computed("fast")
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._follow(tensor)

    def __enter__(self) -> LiveTensors:
        self._fast.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fast.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage_number(storage), storage.nbytes()
        if address in self._known:
            return
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address, size))

    def _forget(self, address: int, size: int) -> None:
        del self._known[address]
        self.alive -= size


def kept_bytes(forward: Callable[[int], object], images: int = 2) -> float:
    """Return the bytes per image that autograd keeps after `forward(number of images)`.

    They are the difference between batches of `images` and of 2 * `images`, so that tensors which do not grow with the
    batch, such as weights, are not counted. Tensors that share memory count once. One image is too small a batch: it
    allows views that larger batches do not.
    """

    def measure(number: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage_number(storage)] = storage  # the reference prevents another storage at this address
            # a result that its own operation keeps would keep that operation, too: a cycle that is never freed
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(number)
        total = sum(storage.nbytes() for storage in storages.values())
        del result
        return total

    return (measure(2 * images) - measure(images)) / images


def state_bytes(parameters: int, trainable: int | None = None) -> int:
    """Return the bytes of the training state. Frozen parameters count with their weight alone.

    `trainable` is the number of parameters that are not frozen; None: all of them.
    """
    return 4 * parameters + (STATE_BYTES - 4) * (parameters if trainable is None else trainable)


def largest_batch(parameters: int, activations: int, memory: float, trainable: int | None = None) -> int:
    """Return the number of images of `activations` bytes each that fit into `memory` bytes with the training state.

    It is an upper bound, because scratch space is not counted. It is 0 if the training state alone does not fit.
    """
    return max(int((memory - state_bytes(parameters, trainable)) // activations), 0)
