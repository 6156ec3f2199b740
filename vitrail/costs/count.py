"""Parameters, MACs and activation memory counted on the running network, to check the formulas by.

The network is built on the meta device, where every operation runs and no number is computed, so that H/14 is
counted as fast as Ti/16. Arithmetic is float32; attention and dropout are those of an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vitrail.costs.live import kept_bytes
from vitrail.model.attention import attention_path
from vitrail.model.build import build
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT


@dataclass(frozen=True)
class Counted:
    """What a network was seen to have and to do."""

    parameters: int
    macs: int
    """Of the forward pass of one image, every token of every layer."""
    activation_bytes: int
    """Kept by the forward pass of training, per image, in float32 on an accelerator."""


def count(config: ViTConfig | ResNetConfig, image_size: int | tuple[int, int] | None = None) -> Counted:
    """Build the network of `config` on the meta device and count while it runs on images of `image_size`."""
    size = config.image_size if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    with torch.device("meta"):
        model = build(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if (height, width) != config.image_size:  # resampling positions is in no formula
            model = build(replace(config, image_size=(height, width)))

    def images(number: int) -> Tensor:
        return torch.empty(number, config.channels, height, width, device="meta")

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), attention_path("explicit"), counter:
        every_token(model.eval(), images(1))
    model.train()
    with attention_path("fused"), _AcceleratorKernels():
        kept = kept_bytes(lambda number: model(images(number)))
    return Counted(parameters, counter.get_total_flops() // 2, round(kept))


def every_token(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits computed as Eq. 1-4 write them.

    `model(images)` gives the same and spares the last layer the work on tokens that nobody reads.
    """
    if not isinstance(model, ViT):
        return model(images)
    return model.classify(model.summary(model.encode(model.embed(images), model.grid(images))))


class _AcceleratorKernels(TorchFunctionMode):
    """Has the meta device run attention and dropout as one operation each, where it would spell them out."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
    """torch's own kernel for the CPU, which keeps what those of accelerators keep; no gradient to the mask."""
    mask = None if attn_mask is None else attn_mask.detach()
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, attn_mask=mask, scale=rest.get("scale"))[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input
