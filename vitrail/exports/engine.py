"""`vitrail.load`: a network from any weights, or an exported program in its place (`Engine`).

A program is used as the network is that it was exported from: `vitrail.load("flowers-onnx")`, `vitrail predict
flowers-onnx photos/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from vitrail.errors import ExportError, UsageError, WeightsError
from vitrail.exports.describe import card_in
from vitrail.exports.kinds import CARD, KINDS, find_program, runtime
from vitrail.exports.parity import check_here
from vitrail.files import open_regular
from vitrail.model.limits import ResizeMode
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.model.vit import ViT
from vitrail.ranges import checked
from vitrail.tasks.catalog import task_of
from vitrail.weights.card import Card
from vitrail.weights.load import Changes
from vitrail.weights.load import load as load_weights
from vitrail.words import shown

READ = ("onnx", "openvino", "executorch", "litert")
"""Kinds of program whose files hold no code. PyTorch would run the code in an exported program."""


class Engine(nn.Module):
    """images [batch, channels, height, width] -> float32 [batch, classes or features], by the program's runtime.

    It is called as the network is that it was exported from, has a `card` and a `config`, and computes on `device`. A
    program for probabilities returns their logarithms, which are logits, or with several labels their logits, both
    times the temperature of its card, by which logits are divided before they become probabilities.
    """

    def __init__(
        self,
        path: Path,
        wanted: Literal["logits", "features"] | None = None,
        device: str = "cpu",
        *,
        trusted: bool = False,
    ) -> None:
        """Open a program; with `wanted`, only one that computes this. `trusted`: also one that can hold code.

        Raises ExportError if vitrail did not write it or if it computes something else here than where it was exported,
        and UsageError if its runtime is missing.
        """
        super().__init__()
        kind = next(name for name in KINDS if path.suffix == Path(KINDS[name].file).suffix)
        if kind not in READ and not trusted:
            raise ExportError(
                f"{path} is not run, because such files can hold code. Use the model itself, or export it to "
                f"{', '.join(READ[:-1])} or {READ[-1]}"
            )
        for file in (path, path.with_suffix(".bin"), path.with_name(f"{path.name}.data")):
            if os.path.lexists(file):  # a runtime would wait for a pipe, and end the process at a loop of links
                try:
                    open_regular(file).close()
                except OSError as error:
                    raise ExportError(f"{file} cannot be read: {error.strerror}") from error
        here = runtime(kind, writing=False)
        try:
            opened = here.read(path, device)
            self._run, about = opened.run, opened.about
            if not about and KINDS[kind].single:
                raise ExportError(f"its description is missing, the {CARD} that was written beside it")
            self.card: Card = card_in(about)
        except (ExportError, WeightsError) as error:
            raise ExportError(f"{path}: {error}") from error
        made = about.get("made_by")
        self.weights_sha256 = str(made.get("weights_sha256", "")) if isinstance(made, dict) else ""
        """SHA-256 of the tensors of the network that was exported."""
        self._compute, self._how = opened.compute, (path, wanted, device, trusted)
        self._exported = self.card  # `card` may be replaced, such as by one without a temperature
        self.path, self._output, self._width = path, about["output"]["name"], about["output"]["shape"][1]
        if wanted is not None and (self._output == "features") != (wanted == "features"):
            meant = "classes" if wanted == "logits" else wanted
            raise ExportError(f"{path} computes {self._output}, not {meant}: vitrail export MODEL --output {wanted}")
        if self._output != "features":
            self._width = self.card.config.classes
        self._dimensions = len(about["output"]["shape"])
        check_here(path, self._run, kind, self.card, device)

    def __reduce__(self) -> tuple[Callable[..., Engine], tuple[Any, ...]]:
        """Pickle the path: the program is opened anew where it is unpickled."""
        return _opened, self._how

    @property
    def config(self) -> ViTConfig | ResNetConfig:
        """The architecture of the network that was exported."""
        return self.card.config

    def forward(self, images: Tensor) -> Tensor:
        """See the class. Raises UsageError for images of another type, ExportError if the program does not run."""
        if images.dtype != getattr(torch, self.card.input_type):
            wanted = "uint8 images from 0 to 255" if self.card.input_type == "uint8" else "float32 images, normalised"
            raise UsageError(f"{self.path} takes {wanted}, and these are {images.dtype}")
        if self._compute is not None:
            outputs = self._compute(images)
        else:
            outputs = torch.from_numpy(self._run(images.cpu().numpy()))
        if outputs.shape[:2] != (len(images), self._width) or outputs.ndim != self._dimensions:
            raise ExportError(
                f"{self.path} computes outputs of shape {tuple(outputs.shape)} for {len(images)} images, but its card "
                f"describes {self._width} {'features' if self._output == 'features' else 'classes'}. Export the model "
                "again (vitrail export)."
            )
        if self._output != "probabilities":
            return outputs
        return task_of(self._exported).outputs(outputs, self._exported)

    def features(self, images: Tensor) -> Tensor:
        """Return the features [batch, features] of a program that computes them. Raises UsageError for others."""
        if self._output != "features":
            raise UsageError(
                f"{self.path} computes {self._output}, not features: vitrail export MODEL --output features"
            )
        outputs: Tensor = self(images)
        return outputs

    def extra_repr(self) -> str:
        """Return what the program is, for `print`."""
        return f"{shown(str(self.path))}, output={self._output}"


def _opened(path: Path, wanted: Literal["logits", "features"] | None, device: str, trusted: bool) -> Engine:
    return Engine(path, wanted, device, trusted=trusted)


Loaded = TypeVar("Loaded", ViT, ResNet, Engine)


@overload
def load(source: Path | str, *, kind: type[Loaded], **changes: Unpack[Changes]) -> Loaded: ...
@overload
def load(source: Path | str, *, kind: None = None, **changes: Unpack[Changes]) -> ViT | ResNet: ...
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
    changes: Changes = {"classes": classes, "image_size": image_size, "resize_mode": resize_mode}
    changes |= {"patch": patch, "channels": channels, "drop_path": drop_path}
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
