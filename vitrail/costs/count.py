"""Parameters, multiply-accumulates (MACs) and memory of any network, counted while it runs.

The network runs on torch's meta device, where tensors have a shape and a type but no values, so that H/14 is counted as
fast as Ti/16. Memory also depends on the device. It is counted with fake tensors, which have a device but do not need
it, so that the memory of a GPU is counted on a machine without one.

MACs are those of linear layers, convolutions and attention (relative positions included), for every token of every
layer. Norms, activations, the softmax and resampled positions are not counted. One MAC is 2 FLOPs, and a training step
costs 3 forward passes, because the backward pass computes gradients of inputs and of weights. The paper counts like
this (Table 6). Tools that trace a running model can miss fused attention, which is 4 % of B/16.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vitrail.device import ComputePrecision, autocast_dtype
from vitrail.model.build import build
from vitrail.model.compute import attention_path, computed
from vitrail.model.variants import Config, ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.torch_private import FakeTensorMode, TorchDispatchMode, flash_attention, storage_number, tree_leaves

ImageSize = int | tuple[int, int]
DeviceKind = Literal["accelerator", "cpu"]
Module = TypeVar("Module", bound=nn.Module)
ACCELERATOR = "cuda"
"""The device of fake tensors that stand for any accelerator."""


@cache
def learned_values(config: Config) -> int:
    """Return the number of learned values, without the running statistics of BatchNorm."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def macs(config: Config, image_size: ImageSize | None = None) -> int:
    """Return the MACs of the forward pass of one image of `image_size` (height, width); None: the config's."""
    return _macs(sized(config, image_size))


def training_flops(config: Config, image_size: ImageSize | None = None) -> int:
    """Return the FLOPs of training on one image once: forward and backward pass, 3 x 2 x MACs."""
    return 3 * 2 * macs(config, image_size)


def activation_bytes(
    config: Config,
    image_size: ImageSize | None = None,
    precision: ComputePrecision = "bf16",
    place: DeviceKind = "accelerator",
) -> int:
    """Return the bytes per image that the forward pass of training keeps for the backward pass.

    Every tensor from the pixels to the classifier's input counts once. The loss, gradients of activations, scratch
    space and tensors that do not grow with the batch are not counted. bf16 is autocast with float32 weights. A
    CPU and an accelerator keep different tensors: see `vitrail.model.fast`.
    """
    return _activation_bytes(sized(config, image_size), precision, place)


def sized(config: Config, image_size: ImageSize | None) -> Config:
    """Return the config with another image size: one side or (height, width) in pixels; None: the config's own."""
    if image_size is None:
        return config
    return replace(config, image_size=(image_size, image_size) if isinstance(image_size, int) else image_size)


@cache
def _macs(config: Config) -> int:
    if (total := of_few_layers(_macs, config, different=1)) is not None:
        return total
    number = 2 if isinstance(config, ResNetConfig) else 1  # GroupNorm refuses a single pixel of a single image
    with torch.device("meta"):
        # torch's counter takes a parameter that is returned as it is for a result with a gradient
        model, images = build(config).eval().requires_grad_(False).to("meta"), _images(config, number, "meta")
    return counted_macs(lambda: every_token(model, images)) // number


def of_few_layers(count: Callable[[Config], int], config: Config, different: int) -> int | None:
    """Return the count of a network from those of less deep ones; None if nothing is gained by that.

    `different` is the number of layers of a ViT that may differ from each other. All further layers count the same, as
    do all units of a ResNet's stage after the first.
    """
    counts = _repetitions(config)
    few = [min(number, 1) for number in counts]
    if isinstance(config, ViTConfig):
        few[0] = min(config.depth, different)
    deeper = [place for place, number in enumerate(counts) if number > few[place]]
    if sum(few) + len(deeper) * (sum(few) + 1) >= sum(counts):  # as many layers would be counted
        return None
    least = total = count(_repeated(config, few))
    for place in deeper:
        one_more = _repeated(config, [*few[:place], few[place] + 1, *few[place + 1 :]])
        total += (counts[place] - few[place]) * (count(one_more) - least)
    return total


def _repetitions(config: Config) -> list[int]:
    """Return the number of layers of a ViT, and those of units in each stage of a ResNet."""
    return [config.depth, *config.stem_units] if isinstance(config, ViTConfig) else [*config.units]


def _repeated(config: Config, counts: list[int]) -> Config:
    """Return the config with other `_repetitions`."""
    if isinstance(config, ViTConfig):
        return replace(config, depth=counts[0], stem_units=tuple(counts[1:]))
    return replace(config, units=tuple(counts))


@cache
def _activation_bytes(config: Config, precision: ComputePrecision, place: DeviceKind) -> int:
    # the first layer is never left out, and the last one keeps fewer tokens
    total = of_few_layers(lambda fewer: _activation_bytes(fewer, precision, place), config, different=2)
    if total is not None:
        return total
    device = "cpu" if place == "cpu" else ACCELERATOR
    with (
        fake(lambda: build(config), device) as model,
        fake_autocast(device, precision),
        FusedAttention(device),
        computed("fast"),
    ):
        model.train()
        with torch.inference_mode(False):
            return round(kept_bytes(lambda number: model(_images(config, number, device))))


@contextmanager
def fake(make: Callable[[], Module], device: str = ACCELERATOR) -> Iterator[Module]:
    """Context with the module that `make` builds, on fake tensors: operations within it compute shapes only."""
    with torch.device("meta"):  # initialisation looks at values, except on the meta device
        module = make()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield module.to_empty(device=device)


def counted_macs(forward: Callable[[], object]) -> int:
    """Return the MACs of `forward()`, with attention computed in the explicit way."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), attention_path("explicit"), counter:
        forward()
    return counter.get_total_flops() // 2


def every_token(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits as Eq. 1-4 compute them, for every token of the last layer.

    `model(images)` gives the same logits, but skips tokens of the last layer that the classifier does not read.
    """
    if not isinstance(model, ViT) or model.config.segmentation:  # a head for pixels reads every token
        return model(images)
    return model.classify(model.summary(model.encode(model.embed(images), model.grid(images))))


def _images(config: Config, number: int, device: str) -> Tensor:
    return torch.empty(number, config.channels, *config.image_size, device=device)


@contextmanager
def fake_autocast(device: str, precision: ComputePrecision) -> Iterator[None]:
    """Context like `torch.autocast` that also accepts "cuda" on a machine without a GPU."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    half = autocast_dtype(precision)
    torch.set_autocast_enabled(device, half is not None)
    torch.set_autocast_dtype(device, half or torch.bfloat16)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


class FusedAttention(TorchFunctionMode):
    """Context in which attention on an accelerator is one operation, like the accelerator's own kernels.

    Without a GPU, torch would compute it from matrix products and keep the attention maps. The CPU's operation is used,
    because it keeps the same tensors as an accelerator's. It gives the attention mask no gradient.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.fuses = device == ACCELERATOR

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        fuses = self.fuses and func is F.scaled_dot_product_attention
        return (_fused_attention if fuses else func)(*args, **(kwargs or {}))


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
    mask = None if attn_mask is None else attn_mask.detach()
    return flash_attention(query, key, value, mask, rest.get("scale"))


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
