"""`vitrail.save`: write a model to vitrail's own folder, or in another library's format.

A file is loaded again before it replaces anything, and must compute what the model computes: no part of a model that
the format cannot express is lost unnoticed.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.disk import writing
from vitrail.errors import UsageError, WeightsError, did_you_mean
from vitrail.files import beside, check_writable, take_place
from vitrail.model.own_part import own_parts
from vitrail.model.variants import flat
from vitrail.ranges import checked
from vitrail.weights.archive import SUFFIXES
from vitrail.weights.assemble import check_finite
from vitrail.weights.card import Card
from vitrail.weights.formats import NAMES, format_named
from vitrail.weights.load import load
from vitrail.weights.rebuild import card_of, present_card, rebuilt, removed_by_config, replaced_layers
from vitrail.weights.reference import TOLERANCE, fixed_images, outputs, reference, relative_error
from vitrail.weights.store import save_model
from vitrail.words import without_folders

log = logging.getLogger("vitrail")
OURS = "vitrail"
FORMATS = (OURS, *NAMES)
"""Valid values of `format`."""
FOLDERS = (OURS, "hf")
"""Formats that are always a folder; the others are a file, or depend on the path."""
ENDINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("google", "big_vision", "bit"), (".npz",)),
    **dict.fromkeys(FOLDERS, ()),
}
"""Valid endings of a format's files; formats not listed here take all but .npz."""

UNTOLD = ("mean", "std", "resize_mode", "class_token", "dropout", "drop_path", "drop_path_shape", "init")
"""Fields of a config that do not change the network's outputs for a preprocessed image of its own size."""


@dataclass(frozen=True)
class Saved:
    """What was written, and what the format could not hold."""

    path: Path
    format: str
    error: float = 0.0
    """Largest relative error of features and logits on a fixed image, after the file was loaded again."""
    left_out: list[str] = field(default_factory=list)
    """What accompanied the weights and is not written: this format cannot hold it, or it was measured on other weights.
    The network itself is complete."""

    def __str__(self) -> str:
        text = f"wrote {self.path} in format {self.format}"
        if self.format != OURS:
            text += f"; loaded again, it computes the same (relative error {self.error:.1e})"
        return text + "".join(f"; it does not hold {what}" for what in self.left_out)


@checked
def save(model: nn.Module, path: Path | str, format: str = OURS, *, overwrite: bool = False) -> Saved:
    """Write `model` to `path` in one of the formats "vitrail", "google", "big_vision", "timm", "hf", "torchvision",
    "deit", "bit" and "open_clip".

    "vitrail" and "hf" are folders, which are created; for the other formats see their modules in `vitrail.weights`.
    The card is the loaded model's (`model.card`), or a new one, with the model's config and a new reference vector. It
    follows a head that was replaced by a linear layer (`model.head = nn.Linear(768, 5)`) or by `nn.Identity`; class
    names stay only if there is one for each output. Metrics, temperature, thresholds and the run of origin stay only if
    the model still has the outputs that they were measured on; weights that were changed by hand name the old run as
    their parent.
    An existing file, or the files of a folder, are replaced only with `overwrite`, and only by a complete and checked
    model. A model in half precision is written in float32.

    Raises UsageError for an unknown format or another kind of model; WeightsError if the target exists, the model has
    values that are not finite, the format cannot express it, or layers were replaced, with the reason.
    """
    path = Path(path).expanduser()
    if format not in FORMATS:
        raise UsageError(f"there is no format {format!r}.{did_you_mean(format, FORMATS)} Valid: {', '.join(FORMATS)}")
    network = _plain(model)
    card = card_of(network)
    if (own := own_parts(card.config)) and format != OURS:
        raise WeightsError(
            f"format {format!r} cannot hold the {' and the '.join(own)} of this model, which are code of your own. "
            f"Save it in format {OURS!r}"
        )
    if card.preprocess.resize == "native" and format not in (OURS, "hf"):
        raise WeightsError(
            f"format {format!r} cannot say that images keep their shapes (preprocess.resize native). Save the model in "
            f"format {OURS!r}, or in 'hf' if its positions are resampled as those of SigLIP 2 NaFlex"
        )
    written = rebuilt(network, card)
    gone = removed_by_config(network.card, card)  # type: ignore[arg-type]
    for name, tensor in written.state_dict().items():
        check_finite(name, tensor, f"the model is not saved to {path}")
    card, stale = present_card(written, card, network)
    card = replace(card, provenance=without_folders(card.provenance))
    check_place(path, format, overwrite)
    with writing(path, WeightsError), beside(path) as temporary:
        if format == OURS:
            save_model(temporary, written, replace(card, reference=reference(written)))
        else:
            format_named(format).write(written, card, temporary)
        error, left_out = _read_back(temporary, network, card, format)
        take_place(temporary, path)
    for lost in filter(None, (gone, stale)):
        log.warning("%s does not hold %s", path, lost)
    return Saved(path, format, error, [*_old_names(network, card), *filter(None, (gone, stale)), *left_out])


def _plain(model: nn.Module) -> nn.Module:
    """Return the bare network, in float32 on the CPU, without the wrappers of torch and accelerate."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    model = _bare(model)
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters) or all(p.dtype == torch.float32 and p.is_cpu for p in parameters):
        return model
    return copy.deepcopy(model).to("cpu", torch.float32)


def _bare(module: nn.Module) -> nn.Module:
    """Return a module without the wrappers of torch.compile, checkpointing and accelerate around any of its layers.

    The module itself does not change. If there are wrappers, the result is another one that has the same tensors.
    """
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        if isinstance(inner := getattr(module, wrapper, None), nn.Module):
            return _bare(inner)
    layers = {name: child if child is None else _bare(child) for name, child in module._modules.items()}
    # accelerate puts its autocast, or a hook, in front of the class's own forward, which it keeps beside it
    wrapped = "forward" in vars(module) and {"_original_forward", "_old_forward"} & vars(module).keys()
    if not wrapped and all(layers[name] is child for name, child in module._modules.items()):
        return module
    bare = copy.copy(module)
    bare._modules = layers
    if wrapped:
        del bare.forward
    return bare


def check_place(path: Path, format: str, overwrite: bool) -> None:
    """Raise WeightsError if no model of this format can be written to `path`."""
    endings = ENDINGS.get(format, tuple(ending for ending in SUFFIXES if ending != ".npz"))
    if path.suffix in SUFFIXES and path.suffix not in endings:
        right = f"a file that ends in {', '.join(endings)}" if endings else "a folder"
        raise WeightsError(f"{path} ends in {path.suffix}, but format {format!r} is {right}")
    if format in FOLDERS and path.exists() and not path.is_dir():
        raise WeightsError(f"format {format!r} is a folder, but {path} is a file")
    taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if taken and not overwrite:
        raise WeightsError(f"{path} already exists. Choose another path, or replace it with overwrite (--overwrite).")
    check_writable(path, WeightsError, folder=path.suffix not in SUFFIXES)


def _read_back(path: Path, model: nn.Module, card: Card, format: str) -> tuple[float, list[str]]:
    """Load what was written and compare it with the model: return the relative error and what the format cannot hold.

    Raises WeightsError if the network computes something else.
    """
    loaded = load(path)
    images = fixed_images(card.config)
    expected = outputs(model, images)
    try:
        found = outputs(loaded, images)
    except UsageError:  # the file has another image size, which these images do not fit
        found = {}
    error = max(
        relative_error(found[name], values) if name in found else float("inf") for name, values in expected.items()
    )
    if error > TOLERANCE:
        strangers = [f"the {kind} at {path}" for path, kind in replaced_layers(model, card.config).items()]
        what = ", ".join(_lost(loaded.config, card.config) or strangers) or "some part of this model"
        raise WeightsError(
            f"format {format!r} cannot express this model: loaded again, the written file computes something else "
            f"(relative error {error:.1e}); it does not hold {what}"
        )
    return error, _left_out(loaded.card, card)


def _old_names(model: Any, card: Card) -> list[str]:
    """Return the class names that do not fit the head of the model any more, in words."""
    old = [] if model.card is None else model.card.class_names
    if not old or card.class_names:
        return []
    return [f"the {len(old)} class names, because the head has {card.config.classes} outputs now"]


def _lost(found: Any, config: Any) -> list[str]:
    """Return the fields, with values, in which `config` describes another network than `found`."""
    lost = []
    for name in (name for name in flat(config) if name not in UNTOLD):
        here, there = _value(config, name), _value(found, name)
        if name == "layer_scale":  # the file holds the values themselves
            here, there = here is not None, there is not None
        if here != there:
            lost.append(f"{name} {_value(config, name)}")
    return lost


def _left_out(found: Card, card: Card) -> list[str]:
    """Return what a card says that a reader of the file cannot know."""
    lost = []
    for name in ("mean", "std", "resize_mode"):
        here, there = _value(card.config, name), _value(found.config, name)
        if here != there:
            lost.append(f"{name} {here} (a reader assumes {there})")
    if found.preprocess != card.preprocess:
        lost.append(f"the preprocessing {card.preprocess} (a reader assumes {found.preprocess})")
    if card.class_names and found.class_names != card.class_names:
        lost.append(f"the names of {len(card.class_names)} classes")
    if card.several and not found.several:
        lost.append("that several labels are predicted (sigmoid), and their thresholds")
    elif card.thresholds and card.thresholds != found.thresholds:
        lost.append(f"the thresholds of {len(card.thresholds)} labels (a reader assumes {found.thresholds[0]:g})")
    if card.scale != found.scale:
        what = "that numbers are predicted, and their" if found.scale is None else "the numbers'"
        lost.append(f"{what} mean and deviation")
    if card.answers:
        lost.append(f"which outputs are which of {len(card.answers)} answers, and what they mean")
    if card.temperature != found.temperature:
        lost.append(f"the temperature {card.temperature:.4g} of its probabilities")
    if card.licence and found.licence != card.licence:
        lost.append(f"the licence {card.licence}")
    return lost


def _value(config: Any, name: str) -> Any:
    return flat(config).get(name)
