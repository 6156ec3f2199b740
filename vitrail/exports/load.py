"""`vitrail.load`: a network from any weights, or an exported program in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, overload

from vitrail.errors import UsageError, WeightsError
from vitrail.exports.engine import Engine
from vitrail.exports.kinds import find_program
from vitrail.model.limits import ResizeMode
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.ranges import checked
from vitrail.weights.load import load as load_weights
from vitrail.words import shown

Loaded = TypeVar("Loaded", ViT, ResNet, Engine)


@overload
def load(
    source: Path | str,
    *,
    kind: type[Loaded],
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: ResizeMode | None = None,
    patch: int | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
) -> Loaded: ...
@overload
def load(
    source: Path | str,
    *,
    kind: None = None,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: ResizeMode | None = None,
    patch: int | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
) -> ViT | ResNet: ...
@checked
def load(
    source: Path | str,
    *,
    kind: type[Any] | None = None,
    classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    resize_mode: ResizeMode | None = None,
    patch: int | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
) -> ViT | ResNet | Engine:
    """Return the model at `source`, in eval mode, with `model.card` and `model.load_report`.

    source is a model or run folder of vitrail; a weight file of Google's vision_transformer, big_vision, BiT, timm,
    transformers, torchvision or DeiT, or a folder with one; or a hub name such as "google/vit-base-patch16-224-in21k".
    Format and architecture are recognised from the content. The model computes what its origin computed, in float32.
    `kind=vitrail.ViT` or `kind=vitrail.ResNet` refuses the other kind, and type checkers then know what is returned.

    source may also be a program that `vitrail export` wrote for ONNX Runtime or OpenVINO. It is returned as a
    `vitrail.Engine`, which is called like the network and cannot be changed; type checkers know it by
    `kind=vitrail.Engine`.

    `classes` replaces the head (pre-logits included) by a zero linear layer, even if the number of classes does not
    change; the model then has no class names. `image_size`, in pixels (one side, or height and width), resamples the
    positions with `resize_mode` (default: the mode of the weights' origin). `patch`, in pixels, resamples the patch
    kernels (FlexiViT) and, because the grid changes, the positions. `channels` adapts the kernels that read the image:
    for one channel they are summed; for other numbers they are repeated and scaled, so that the outputs keep their
    size. The pixels' mean and std follow. `drop_path` is the rate of stochastic depth in training. `model.config`
    records all of them. The tensors are in memory: a file that is changed or removed later does not change the model.
    A .pth file that is cut during the call ends the process (SIGBUS), because PyTorch maps it; other files raise.

    A run that tuned only a part of a network (`Run.tune`) holds that part. The rest is read from the weights it
    started from, which must be unchanged and in the same place.

    Raises WeightsError, naming file and tensor, for a tensor that is missing, unexpected, of a wrong shape, not finite
    or unsafe, and for weights of another `kind`; UsageError for values that do not fit the model; ExportError for a
    program that cannot be run or has lost its parity.
    """
    if kind not in (None, ViT, ResNet, Engine):
        raise UsageError(f"kind is {shown(kind)}; valid: vitrail.ViT, vitrail.ResNet, vitrail.Engine, or None for all")
    changes: dict[str, Any] = {
        "classes": classes,
        "image_size": image_size,
        "resize_mode": resize_mode,
        "patch": patch,
        "channels": channels,
        "drop_path": drop_path,
    }
    program = find_program(source)
    if program is None and kind is Engine:
        raise WeightsError(f"{source} holds no program that `vitrail export` wrote, and kind is Engine")
    if program is None:
        return load_weights(source, kind=kind, **changes)  # type: ignore[arg-type]
    if kind not in (None, Engine):
        raise WeightsError(f"{program} is an exported program, and kind is {kind.__name__}. Give the model itself")
    if wanted := [name for name, value in changes.items() if value is not None]:
        raise UsageError(f"{program} is an exported program, which cannot be changed: remove {', '.join(wanted)}")
    return Engine(program)
