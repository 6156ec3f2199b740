"""Results of batches on the CPU. An accelerator computes the next batch while the caller works with the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from vitrail.errors import finite
from vitrail.torch_private import tree_leaves, tree_map

Batch = TypeVar("Batch")
Values = TypeVar("Values")
"""A tensor, or tensors in tuples and dicts, or None."""
Result = TypeVar("Result")
More = TypeVar("More")


class HasImages(Protocol):
    """A batch of images."""

    @property
    def images(self) -> Tensor:
        """[batch, channels, height, width]."""
        ...


WithImages = TypeVar("WithImages", bound=HasImages)


class HostCopy(Generic[Values]):
    """Tensors on their way to the CPU. `get` waits for them, and not for what the device was told to do later."""

    def __init__(self, values: Values) -> None:
        devices = {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
        on_cuda = [device for device in devices if device.type == "cuda"]  # only there a copy may be waited for alone

        def copied(leaf: Any) -> Any:
            return leaf.to("cpu", non_blocking=bool(on_cuda)) if isinstance(leaf, Tensor) else leaf

        self._values = tree_map(copied, values)
        self._copied = None
        if on_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_cuda[0]))

    @property
    def is_there(self) -> bool:
        """Return whether nothing is waited for."""
        return self._copied is None

    def get(self) -> Values:
        """Return the tensors on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


def ahead(batches: Iterable[Batch], launch: Callable[[Batch], Values]) -> Iterator[tuple[Batch, Values]]:
    """Yield each batch with what `launch` returns for it, on the CPU.

    A CUDA device has been told to compute the next batch by then; other devices compute one batch after the other.
    """
    launched: deque[tuple[Batch, HostCopy[Values]]] = deque()
    for batch in batches:
        copy = HostCopy(launch(batch))
        launched.append((batch, copy))
        while len(launched) > (0 if copy.is_there else 1):
            first, values = launched.popleft()
            yield first, values.get()
    for first, values in launched:
        yield first, values.get()


class Refusing:
    """`launch`, but raises WeightsError (see `vitrail.errors.not_finite`) if a number it returns is not finite.

    What a CUDA device computes is checked when it has been told to compute the next batch, so that it never waits; the
    last batch is checked at the end of the context.
    """

    def __init__(self, launch: Callable[[Tensor], Values], precision: str | None = None) -> None:
        self._launch: Callable[[Tensor], Any] = launch
        self._precision = precision
        self._unchecked: deque[HostCopy[list[Tensor]]] = deque()

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._check(0)

    def __call__(self, images: Tensor) -> Any:
        """Return what `launch` returns for images."""
        outputs = self._launch(images)
        parts = [part for part in tree_leaves(outputs) if part.numel()]
        self._unchecked.append(HostCopy([part.abs().amax() for part in parts]))  # NaN if there is one
        self._check(most=int(not self._unchecked[-1].is_there))
        return outputs

    def _check(self, most: int) -> None:
        while len(self._unchecked) > most:
            for largest in self._unchecked.popleft().get():
                finite(largest, "output for an image", self._precision)


class Computed(Generic[Values, Result]):
    """A function of images in two halves: `launch` tells the device what to compute, `finish` does the rest on the CPU.

    Raises WeightsError if a number is not finite; see `Refusing`.
    """

    def __init__(
        self, launch: Callable[[Tensor], Values], finish: Callable[[Values], Result], precision: str | None = None
    ) -> None:
        self._launch, self._finish, self._precision = launch, finish, precision

    def __call__(self, images: Tensor) -> Result:
        """Return the result for one batch, for which the caller waits."""
        with Refusing(self._launch, self._precision) as launch:
            return self._finish(HostCopy(launch(images)).get())

    def over(self, batches: Iterable[WithImages]) -> Iterator[tuple[WithImages, Result]]:
        """Yield each batch with its result (see `ahead`)."""
        with Refusing(self._launch, self._precision) as launch:
            for batch, values in ahead(batches, lambda batch: launch(batch.images)):
                yield batch, self._finish(values)

    def then(self, more: Callable[[Result], More]) -> Computed[Values, More]:
        """Return the function whose result is `more` of this one's."""
        return Computed(self._launch, lambda values: more(self._finish(values)), self._precision)
