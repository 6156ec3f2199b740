"""The settings that verbs share when they run a network on images. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vitrail.device import Precision, available_cores, choose_device
from vitrail.errors import UsageError
from vitrail.exports.kinds import EngineName
from vitrail.ranges import Count, InputSize, Settings, Threads, shortest_size

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vitrail.data.images.geometry import Op
    from vitrail.data.item import IndexedSource
    from vitrail.data.loading.loader import Loader
    from vitrail.evaluation.classify import Predict


@dataclass(frozen=True)
class Compute(Settings):
    """How a verb runs a network on images. Each text below is the help of the flag with this name.

    Raises UsageError for a value that is not valid, and for a device that this machine does not have.
    """

    image_size: InputSize | None = None
    """Size of the input in pixels: the side of a square, or height and width, such as 32 64. Position embeddings are
    resampled (default: the network's own size)."""
    batch_size: Count = 64
    """Number of images per batch."""
    workers: Threads | None = None
    """Number of threads that decode images (default: from the machine)."""
    device: str | None = None
    """Device to compute on: cpu, cuda, cuda:1 or mps (default: the best available)."""
    precision: Precision = "auto"
    """Number format of the computation. 'auto' chooses bf16 if the device is fast at it."""
    engine: EngineName = "auto"
    """What computes: torch; compiled (torch.compile); graphs (CUDA graphs, for small batches); or a program of another
    runtime, which is written and checked once: onnx (ONNX Runtime, on a GPU with TensorRT or CUDA), aoti (AOTInductor,
    compiled for the device), or on a CPU openvino. 'auto' takes the fastest that `vitrail bench MODEL --engines` has
    measured on this machine (torch if none was), on a GPU torch, or compiled for many images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None:
            object.__setattr__(self, "image_size", shortest_size(self.image_size))
        if self.precision not in get_args(Precision):
            raise UsageError(f"no precision is called {self.precision!r}. Valid: {', '.join(get_args(Precision))}")
        if self.engine not in get_args(EngineName):
            raise UsageError(f"no engine is called {self.engine!r}. Valid: {', '.join(get_args(EngineName))}")
        if self.device is not None:
            self.place()

    def place(self) -> torch.device:
        """Return the device. Raises UsageError if this machine does not have it."""
        return choose_device(self.device)

    def threads(self, *, alone: bool = False) -> int:
        """Return the number of threads that decode images.

        The default is half of the cores, or all of them if the threads run `alone`, without a network.
        """
        if self.workers is not None:
            return self.workers
        return available_cores() if alone else available_cores() // 2

    def predictor(self, network: Any, *, features: bool = False, images: Callable[[], int] = lambda: 0) -> Predict:
        """Return images -> float32 logits, or features, of a network, on the chosen device by the chosen engine.

        images: Returns their number, if it is known.
        """
        from vitrail.exports.engines import engine_predictor
        from vitrail.tasks.ensemble import Ensemble

        if isinstance(network, Ensemble):
            each = self.of_each(network, images=images)
            return lambda images: network.mean([predict(images) for predict in each])
        place, engine = self.place(), self.engine
        return engine_predictor(network, place, self.precision, engine=engine, features=features, images=images)

    def of_each(self, network: Any, *, images: Callable[[], int] = lambda: 0) -> list[Predict]:
        """Return what `predictor` returns, or for several networks images -> outputs of each (`Ensemble.outputs`)."""
        from vitrail.tasks.ensemble import Ensemble

        if not isinstance(network, Ensemble):
            return [self.predictor(network, images=images)]
        return network.outputs([self.predictor(member, images=images) for member in network.members])

    def loader(
        self,
        source: IndexedSource,
        transform: Op,
        image_size: int | tuple[int, int],
        progress: Callable[[int, int], None] | None = None,
    ) -> Loader:
        """Return a loader that reads each image of `source` once, in order. The caller closes it."""
        from vitrail.data.loading.loader import Loader

        return Loader(
            source,
            transform=transform,
            image_size=image_size,
            batch_size=self.batch_size,
            workers=self.threads(),
            shuffle=False,
            drop_last=False,
            progress=progress,
        )
