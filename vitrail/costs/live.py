"""How many bytes of tensors are alive, were at most, or are kept: memory counted where an allocator cannot tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Context that follows every tensor made inside it until it is freed.

    `held` are tensors from before that count too. Tensors that share memory count once; scratch space inside a
    kernel is not seen. After the block, `peak` is the most that was alive at a time, in bytes.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in held:
            self._follow(tensor)

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
        address, size = storage._cdata, storage.nbytes()
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

    From the difference of two batches, so that what does not grow with the batch, such as the weights, is not
    counted. Tensors that share memory count once. `images` is the smaller batch: with one image, tensors can be
    viewed in ways that more do not allow.
    """

    def measure(number: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage  # held, so that no other gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(number)
        total = sum(storage.nbytes() for storage in storages.values())
        del result
        return total

    return (measure(2 * images) - measure(images)) / images
