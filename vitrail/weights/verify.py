"""`vitrail weights verify`: compare a model with the outputs on its card and with the library it comes from."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.files import read_json_object
from vitrail.model.resnet import ResNet
from vitrail.model.variants import ViTConfig, flat
from vitrail.model.vit import ViT
from vitrail.weights.archive import open_archive
from vitrail.weights.load import load, local_path
from vitrail.weights.reference import IMAGE, TOLERANCE, differences, fixed_images, outputs, relative_error
from vitrail.weights.save import save
from vitrail.words import one_line, shown


@one_line
@dataclass(frozen=True)
class Verification:
    """The comparisons of a model, with the largest relative error of each."""

    path: Path
    format: str
    reference: dict[str, float] | None
    """Error of each output against the card's; None if the card has none."""
    library: str | None
    """Name and version of the package that ran the same weights; None if none did."""
    layers: dict[str, float] = field(default_factory=dict)
    """Error of every block's output, then of the network's outputs, against that library."""
    notes: list[str] = field(default_factory=list)
    """Reasons for comparisons that were not made."""
    tolerance: float = TOLERANCE

    @property
    def compared(self) -> bool:
        """Whether there was anything to compare with."""
        return self.reference is not None or self.library is not None

    @property
    def worst(self) -> float:
        """The largest of all relative errors."""
        return max([*(self.reference or {}).values(), *self.layers.values()], default=0.0)

    @property
    def passed(self) -> bool:
        """Whether all relative errors are within the tolerance; False if nothing was compared."""
        return self.compared and math.isfinite(self.worst) and self.worst <= self.tolerance


def verify(source: Path | str) -> Verification:
    """Run a fixed image through a model (any that `load` takes) and compare features and logits with its card.

    If the library that the weights come from is installed, every layer is compared with it, too. Raises WeightsError
    if the weights cannot be loaded; `notes` lists what could not be compared.
    """
    path = local_path(source)
    model: Any = load(path)
    card, format = model.card, model.load_report.format
    notes: list[str] = []
    kept = None
    if not card.reference:
        notes.append("the card has no reference vector; vitrail.save and `vitrail weights convert` write one")
    elif card.reference.get("image") != IMAGE:
        notes.append(
            f"the reference vector is for another image, {card.reference.get('image')!r}; save the model again"
        )
    else:
        try:
            kept = differences(outputs(model), card.reference)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise WeightsError(f"{path}: the reference vector in the card is damaged ({shown(error)})") from error
    recorded = card.provenance.get("origin")  # the format that the weights were first in
    origin = str((recorded.get("format") if isinstance(recorded, Mapping) else None) or card.source)
    images = fixed_images(model.config)
    library, layers = None, {}
    try:
        theirs = their_layers(path, origin, model, images)
        ours = our_layers(model, images)
        layers = {name: relative_error(ours[name], tensor) for name, tensor in theirs.items() if name in ours}
        library = f"{PACKAGES[origin]} {version(PACKAGES[origin])}"
    except WeightsError as error:
        notes.append(f"not compared with another library: {error}")
    return Verification(path, format, kept, library, layers, notes)


PACKAGES = {"timm": "timm", "hf": "transformers", "torchvision": "torchvision"}
"""Format -> the package that reads it."""
NO_PACKAGE = {
    "google": "Google's vision_transformer is code for JAX, not a library to install",
    "big_vision": "big_vision is code for JAX, not a library to install",
    "bit": "BiT's repository is code, not a library to install",
    "deit": "the DeiT repository is code, not a library to install",
    "open_clip": "OpenCLIP builds an image tower only together with one for texts, which vitrail does not read",
}

LayerOutputs = dict[str, Tensor]
"""Outputs of every block (ResNet: stage), then of the whole network, by name and in order."""


@torch.no_grad()
def our_layers(model: ViT | ResNet, images: Tensor) -> LayerOutputs:
    """Return the output of every block, then features and logits, of a model of vitrail for these images."""
    with _recorded(model.blocks if isinstance(model, ViT) else model.stages) as layers:
        if isinstance(model, ViT):
            tokens = model.encode(model.embed(images), model.grid(images))  # all tokens of the last block too
        else:
            model.features(images)
    found = dict(layers)
    if isinstance(model, ViT):
        found["tokens"] = tokens
    found["features"] = model.features(images)
    return found | ({"logits": model(images)} if model.config.classes else {})


def their_layers(path: Path, origin: str, model: ViT | ResNet, images: Tensor) -> LayerOutputs:
    """Return the same outputs from the library of the format `origin`, which runs the file at `path`.

    If the library needs a folder with a config.json and `path` is not one, the model is written to one. Raises
    WeightsError with the reason if there is no such library, it is not installed, or it rejects the file.
    """
    if origin not in PACKAGES:
        raise WeightsError(NO_PACKAGE.get(origin, f"there is no other library for weights of {origin}"))
    package = PACKAGES[origin]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise WeightsError(f"{package} is not installed: pip install {package}") from error
    with TemporaryDirectory() as scratch:
        if origin != "torchvision" and not (path.is_dir() and _has_config(path, origin)):
            path = Path(scratch) / "model"
            save(model, path, origin)
        elif origin == "torchvision" and path.is_dir():
            path = Path(scratch) / "model.pth"
            save(model, path, origin)
        try:
            with torch.no_grad():
                return _OPENERS[origin](path, model, images)
        except Exception as error:  # another library may raise any exception
            raise WeightsError(f"{package} cannot run {path}: {type(error).__name__}: {error}") from error


def _has_config(folder: Path, origin: str) -> bool:
    """Return whether the folder has a config.json that this library understands, of a network for images alone."""
    file = folder / "config.json"
    key = "architecture" if origin == "timm" else "model_type"
    values = read_json_object(file, WeightsError) if file.is_file() else {}
    return key in values and "text_config" not in values


def _in_timm(folder: Path, model: ViT | ResNet, images: Tensor) -> LayerOutputs:
    import timm

    network = timm.create_model(f"local-dir:{folder}", pretrained=True).float().eval()
    with _recorded(_blocks(network, model)) as layers:
        result = network(images)
    found = dict(layers)
    if model.config.classes:
        found["logits"] = result
    elif not flat(model.config).get("distilled"):  # with two tokens timm returns their mean
        found["features"] = result
    return found


def _in_transformers(folder: Path, model: ViT | ResNet, images: Tensor) -> LayerOutputs:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    named = (getattr(config, "architectures", None) or ["AutoModel"])[0]
    more: dict[str, Any] = {}
    if config.model_type == "vit_mae":  # the encoder alone, with all patches in order
        named, config.mask_ratio = "ViTMAEModel", 0.0
        assert isinstance(model.config, ViTConfig)
        cells = model.config.grid[0] * model.config.grid[1]
        more = {"noise": torch.arange(cells, dtype=torch.float32)[None]}
    with _without_bars():
        network = getattr(transformers, named).from_pretrained(folder, config=config, dtype=torch.float32).eval()
    tower = config.model_type.split("_")[0]
    if tower == "siglip2":
        images, more = _patches(images, model)
    with _recorded(_blocks(network, model)) as layers:
        result = network(images, **more)
    found = dict(layers)
    if tower in ("clip", "siglip", "siglip2"):  # CLIP's last_hidden_state is not normalised
        found |= {"features": result.pooler_output} if "pooler_output" in result else {}
    elif isinstance(model, ViT) and model.config.origin.final_norm == "tokens" and "last_hidden_state" in result:
        found["tokens"] = result.last_hidden_state
    logits = next((name for name in ("logits", "image_embeds") if name in result), None)
    return found | ({"logits": result[logits]} if logits and model.config.classes else {})


def _patches(images: Tensor, model: ViT | ResNet) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the arguments of SigLIP 2: patches as [row, column, channel], of which each image has as many."""
    assert isinstance(model.config, ViTConfig)
    patch, grid = model.config.patch, torch.tensor(model.config.grid)
    patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=patch, q=patch)
    mask = torch.ones(patches.shape[:2], dtype=torch.long)
    return patches, {"pixel_attention_mask": mask, "spatial_shapes": grid.expand(len(images), 2)}


@contextmanager
def _without_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers within the block."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _in_torchvision(file: Path, model: ViT | ResNet, images: Tensor) -> LayerOutputs:
    from torchvision.models import VisionTransformer

    config = model.config
    assert isinstance(config, ViTConfig)
    network = VisionTransformer(
        image_size=config.image_size[0],
        patch_size=config.patch,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_dim,
        num_classes=config.classes or 1,
        representation_size=config.pre_logits,
    ).eval()
    with open_archive(file) as archive:
        state = {name: archive[name].float() for name in archive.names}
    if not config.classes:
        state |= {name: tensor for name, tensor in network.state_dict().items() if name.startswith("heads.")}
    network.load_state_dict(state)
    with _recorded(_blocks(network, model)) as layers:
        result = network(images)
    return dict(layers) | ({"logits": result} if config.classes else {})


_OPENERS: Mapping[str, Callable[[Path, ViT | ResNet, Tensor], LayerOutputs]] = {
    "timm": _in_timm,
    "hf": _in_transformers,
    "torchvision": _in_torchvision,
}


def _blocks(network: nn.Module, model: ViT | ResNet) -> nn.Module:
    """Return the list of the encoder's blocks, or of a ResNet's stages, in another library's network."""
    names: tuple[str, ...] = ("blocks", "layer", "layers") if isinstance(model, ViT) else ("stages",)
    count = model.config.depth if isinstance(model, ViT) else len(model.config.units)
    for name, module in network.named_modules():
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == count
        if listed and name.rpartition(".")[2] in names and "decoder" not in name:
            return module
    raise WeightsError(f"no list of {count} blocks was found in {type(network).__name__}")


@contextmanager
def _recorded(blocks: nn.Module) -> Iterator[LayerOutputs]:
    """Yield a dictionary that records the output of each of `blocks` as "block 0", "block 1", ..."""
    found: LayerOutputs = {}
    handles = []
    for index, block in enumerate(blocks.children()):

        def hook(module: nn.Module, inputs: Any, output: Any, *, name: str = f"block {index}") -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        handles.append(block.register_forward_hook(hook))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
