"""What a device does for a step, counted operation by operation: launches of kernels, and everything that waits.

`DeviceWork` follows each operation on fake CUDA tensors, which need no driver, or on CPU tensors by name. A driver is
not there to say whether memory is pinned: the context says so itself, of what `Tensor.pin_memory` returned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.torch_private import TorchDispatchMode, storage_number, tree_leaves

aten = torch.ops.aten
SIZES = {"nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "bincount"}
"""Operations whose result has a size that only the device knows."""
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias"}
NO_KERNEL |= {"_reshape_alias", "_unsafe_view", "set_", "resize_", "device", "scalar_tensor"}


class Elsewhere(Tensor):
    """A CPU tensor that says it is on a GPU: code that asks takes the path which reads nothing."""

    device = property(lambda tensor: torch.device("cuda"))  # type: ignore[assignment]


class Copied:
    """In place of `torch.cuda.Event`, which needs a driver: it counts how often it was waited for."""

    waits = 0

    def record(self, stream: object) -> None:
        """Follow the copies of a stream."""

    def synchronize(self) -> None:
        """Wait for them."""
        Copied.waits += 1


def copies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies from `Elsewhere` and from fake CUDA tensors be followed by `Copied` until the test ends."""
    monkeypatch.setattr(Copied, "waits", 0)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)


def told(value: bool) -> Tensor:
    """Return whether a step was finite, as a GPU would know it."""
    return torch.tensor(value).as_subclass(Elsewhere)


class DeviceWork(TorchDispatchMode):
    """Context that counts what operations do on `device`; enter it within a `FakeTensorMode` of its tensors.

    `waits` has a count for each kind of wait, `launches` one for each operation that starts a kernel.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._pinned: dict[int, torch.UntypedStorage] = {}  # kept alive, so that a number stands for one memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "_pin_memory":
            copy = args[0].clone()
            self._pinned[storage_number(copy.untyped_storage())] = copy.untyped_storage()
            return copy
        here = [leaf for leaf in tree_leaves((args, kwargs)) if self._here(leaf)]
        if name == "_local_scalar_dense" and here:
            self.waits["item"] += 1
            if self.device != "cpu":
                return 1.0 if args[0].is_floating_point() else True if args[0].dtype == torch.bool else 1
        if name in SIZES and here:
            self.waits[name] += 1
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            masks = [each for each in args[1] if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)]
            self.waits["boolean index"] += bool(masks and here)
            if masks and self.device != "cpu":
                args = (args[0], [place for each in args[1] for place in self._places(each)], *args[2:])
        result = func(*args, **kwargs)
        if here or any(map(self._here, tree_leaves(result))):
            if name in ("_to_copy", "copy_"):
                self._copied(name, args, kwargs, result)
            if not func.is_view and name not in NO_KERNEL:
                self.launches[name] += 1
        return result

    def _here(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.device.type == self.device

    def _is_pinned(self, tensor: Tensor) -> bool:
        return storage_number(tensor.untyped_storage()) in self._pinned

    def _copied(self, name: str, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        source = args[0] if name == "_to_copy" else args[1]
        if source.device.type == result.device.type:
            return
        soon = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        self.waits["blocking copy"] += not soon
        # torch pins the memory of a copy to the CPU that must not block
        self.waits["pageable copy"] += source.device.type == "cpu" and not self._is_pinned(source)

    @staticmethod
    def _places(index: Tensor | None) -> list[Tensor | None]:
        """Return places in place of a mask, as many as it could choose: fake tensors do not know how many it does."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return [torch.zeros(index.numel(), dtype=torch.int64, device=index.device)] * index.ndim

    def found(self) -> dict[str, int]:
        """Return the waits that happened."""
        return {name: count for name, count in self.waits.items() if count}
