"""Weights of one number of image channels for another: gray images, or satellite images of ten bands.

The rule is that of timm's `create_model(in_chans=...)`: one channel gets the sum of the kernels, so that a gray image
gives what its three equal channels gave. More or fewer channels get the kernels in turn, scaled by old / new, so that
the outputs keep their size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitrail.model.variants import ResNetConfig, ViTConfig


def is_image_kernel(kernel: Tensor, old: int, new: int, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel reads images of `old` channels, and `shape` is that of such a kernel for `new` ones."""
    return kernel.dim() == 4 and kernel.shape[1] == old and shape == (kernel.shape[0], new, *kernel.shape[2:])


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return a kernel [out, old channels, height, width] as [out, channels, height, width]."""
    old = kernel.shape[1]
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    return _in_turn(kernel, channels) * (old / channels)


def with_channels(config: ViTConfig | ResNetConfig, channels: int) -> dict[str, Any]:
    """Return `channels`, and the mean and std of the pixels for them, as values of a config.

    The values of the old channels are used in turn; one channel gets their averages.
    """
    changed: dict[str, Any] = {"channels": channels}
    for name in ("mean", "std"):
        old = getattr(config, name)
        if channels == config.channels:
            changed[name] = old
        elif len(set(old)) == 1 or channels != 1:
            changed[name] = tuple(old[channel % len(old)] for channel in range(channels))
        else:
            changed[name] = (sum(old) / len(old),)
    return changed


def _in_turn(kernel: Tensor, channels: int) -> Tensor:
    times = -(-channels // kernel.shape[1])
    return kernel.repeat(1, times, 1, 1)[:, :channels].contiguous()
