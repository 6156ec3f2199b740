"""The same weights in the library they come from: what timm, transformers or torchvision computes at every layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import WeightsError
from vitrail.files import read_json_object
from vitrail.model.resnet.network import ResNet
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.weights.archive import open_archive
from vitrail.weights.save import save

PACKAGES = {"timm": "timm", "hf": "transformers", "torchvision": "torchvision"}
"""Format: the package that reads it."""
NO_PACKAGE = {
    "google": "Google's vision_transformer is code for JAX, not a library to install",
    "big_vision": "big_vision is code for JAX, not a library to install",
    "bit": "BiT's repository is code, not a library to install",
    "deit": "the DeiT repository is code, not a library to install",
}

Layers = dict[str, Tensor]
"""Output of every block (of a ResNet: stage), then of the whole network, by name and in order."""


@torch.no_grad()
def our_layers(model: ViT | ResNet, images: Tensor) -> Layers:
    """Return the output of every block, then features and logits, of a model of ours for these images."""
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


def their_layers(path: Path, origin: str, model: ViT | ResNet, images: Tensor) -> Layers:
    """Return the same from the library of the format `origin`, run on the file at `path`, as far as it gives them.

    Where the library needs a folder with a config.json and `path` is none, the model is written to one. Raises
    WeightsError, with the reason, where there is no such library, it is not installed, or it does not take the
    file.
    """
    if origin not in PACKAGES:
        raise WeightsError(NO_PACKAGE.get(origin, f"weights of {origin} have no other library"))
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
        except Exception as error:  # another library's, which may be of any kind
            raise WeightsError(f"{package} cannot run {path}: {type(error).__name__}: {error}") from error


def _has_config(folder: Path, origin: str) -> bool:
    """Is there a config.json that this library understands?"""
    file = folder / "config.json"
    key = "architecture" if origin == "timm" else "model_type"
    return file.is_file() and key in read_json_object(file, WeightsError)


def _in_timm(folder: Path, model: ViT | ResNet, images: Tensor) -> Layers:
    import timm

    network = timm.create_model(f"local-dir:{folder}", pretrained=True).float().eval()
    with _recorded(_blocks(network, model)) as layers:
        result = network(images)
    found = dict(layers)
    if model.config.classes:
        found["logits"] = result
    elif not getattr(model.config, "distilled", False):  # of two tokens timm gives the mean
        found["features"] = result
    return found


def _in_transformers(folder: Path, model: ViT | ResNet, images: Tensor) -> Layers:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    named = (getattr(config, "architectures", None) or ["AutoModel"])[0]
    more: dict[str, Any] = {}
    if config.model_type == "vit_mae":  # the encoder alone, with every patch in its place
        named, config.mask_ratio = "ViTMAEModel", 0.0
        assert isinstance(model.config, ViTConfig)
        cells = model.config.grid[0] * model.config.grid[1]
        more = {"noise": torch.arange(cells, dtype=torch.float32)[None]}
    with _without_bars():
        network = getattr(transformers, named).from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with _recorded(_blocks(network, model)) as layers:
        result = network(images, **more)
    found = dict(layers)
    if isinstance(model, ViT) and model.config.final_norm == "tokens" and "last_hidden_state" in result:
        found["tokens"] = result.last_hidden_state
    return found | ({"logits": result.logits} if "logits" in result and model.config.classes else {})


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within the block transformers draws no progress bars: it is not what was asked for."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _in_torchvision(file: Path, model: ViT | ResNet, images: Tensor) -> Layers:
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


_OPENERS: Mapping[str, Callable[[Path, ViT | ResNet, Tensor], Layers]] = {
    "timm": _in_timm,
    "hf": _in_transformers,
    "torchvision": _in_torchvision,
}


def _blocks(network: nn.Module, model: ViT | ResNet) -> nn.Module:
    """The encoder's blocks, or a ResNet's stages, wherever a library keeps them."""
    names: tuple[str, ...] = ("blocks", "layer", "layers") if isinstance(model, ViT) else ("stages",)
    count = model.config.depth if isinstance(model, ViT) else len(model.config.units)
    for name, module in network.named_modules():
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == count
        if listed and name.rpartition(".")[2] in names and "decoder" not in name:
            return module
    raise WeightsError(f"no list of {count} blocks was found in {type(network).__name__}")


@contextmanager
def _recorded(blocks: nn.Module) -> Iterator[Layers]:
    """Within the block, what each of `blocks` returns is put into the result, as "block 0", "block 1", ..."""
    found: Layers = {}
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
