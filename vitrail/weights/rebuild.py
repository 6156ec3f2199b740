"""The network that a file can hold, for a model that was changed by hand: vitrail's own layers with its tensors.

A file holds tensors and a card, and the card describes vitrail's own layers. One linear layer as the head is among
them: after `model.head = nn.Linear(768, 5)` the card follows. Other changes are refused with the call that undoes them.

What was measured on other weights does not stay on the card. Top-1, temperature and thresholds belong to the outputs
that they were measured on. A loaded network can be trained, averaged or merged by hand, and nothing tells its card. Its
outputs do: the card has those for a fixed image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitrail.errors import UsageError, WeightsError
from vitrail.model.own_part import is_own_part
from vitrail.model.resnet import ResNet
from vitrail.model.variants import Config
from vitrail.model.vit import ViT
from vitrail.weights.assemble import expected_of, fill, skeleton
from vitrail.weights.card import ORIGIN, PARENTS, Card
from vitrail.weights.reference import IMAGE, TOLERANCE, differences, outputs

HEADS = ("head", "head_dist")


def card_of(model: nn.Module) -> Card:
    """Return the card of a model: the one it was loaded with, or a new one, with the model's current config.

    Class names stay if there is one for each output; what was measured with another config does not. Raises
    UsageError if `model` is not a ViT or ResNet of vitrail.
    """
    if not isinstance(model, ViT | ResNet):
        merge = " Save what its merge_and_unload() returns." if hasattr(model, "merge_and_unload") else ""
        raise UsageError(f"save takes a ViT or a ResNet of vitrail, not a {type(model).__name__}.{merge}")
    config = current_config(model)
    card: Card = model.card or Card(config)
    if card.config == config:
        return card
    same = card.config.classes == config.classes
    names = card.class_names if len(card.class_names) == config.classes else []
    card = card.unmeasured() if same else card.with_new_outputs(config=config)
    return replace(card, config=config, class_names=names)


def present_card(
    network: nn.Module, card: Card, loaded: nn.Module | None = None, *, resized: bool = False
) -> tuple[Card, str]:
    """Return the card of a network as it is now, and a sentence about what was removed from it; "" if nothing was.

    `loaded` is the module with the load report, if that is not `network`. A card without a reference vector stays as it
    is, unless the network was adapted while it was loaded: nothing says that its numbers are another network's. With
    `resized`, a network that was adapted keeps its temperature and its thresholds, as a loaded one has them.
    """
    report = getattr(network if loaded is None else loaded, "load_report", None)
    adapted = report is not None and bool(report.resampled or report.reset)
    why = "the network was adapted to other images or classes when it was loaded" if adapted else ""
    if card.reference and not why:
        error = _error(network, card)
        if not error <= TOLERANCE:
            why = f"the network's outputs are others now (relative difference {error:.1e})"
    now = card.resampled() if adapted and resized else card.unmeasured()
    removed = _measured(card, now) if why else []
    return (now, f"{', '.join(removed)}, because {why}") if removed else (card, "")


def removed_by_config(before: Card | None, after: Card) -> str:
    """Return a sentence about the results that `card_of` removed because the network has another config; or ""."""
    if before is None or before.config == after.config:
        return ""
    removed = _measured(before, before.unmeasured())
    return f"{', '.join(removed)}, because the network has another head now" if removed else ""


def parents(card: Card) -> list[str]:
    """Return the weights that these were made from by hand, in words."""
    found = card.provenance.get(PARENTS)
    return [_named(parent) for parent in found] if isinstance(found, list) else []


def _error(network: nn.Module, card: Card) -> float:
    """Return the largest relative difference of the outputs from those on the card; infinite if they do not compare."""
    if card.reference.get("image") != IMAGE:
        return float("inf")
    try:
        return max(differences(outputs(network), card.reference).values(), default=float("inf"))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError):  # a damaged vector
        return float("inf")


def _measured(card: Card, now: Card) -> list[str]:
    """Return what of a card belongs to its outputs and is not in the card `now`, in words."""
    found = [f"{name} {value:.4g}" if isinstance(value, float) else name for name, value in card.metrics.items()]
    some = [", ".join(found[:2]) + (f" and {len(found) - 2} more results" if len(found) > 2 else "")] if found else []
    some += (
        [f"the temperature {card.temperature:.4g} of its probabilities"] if card.confidence != now.confidence else []
    )
    chosen = card.thresholds if now.thresholds != card.thresholds else []
    some += [f"the thresholds of {len(chosen)} labels"] if chosen else []
    own = card.provenance.keys() - {ORIGIN, PARENTS}
    return some + (["the run that it came from (now a parent)"] if own else [])


def _named(parent: object) -> str:
    """Return a parent in words: the text that names it, or the run, its data and what that run started from."""
    if not isinstance(parent, dict):
        return str(parent)
    named = {"run": "", "step": "step ", "data": "trained on ", "from": "from "}
    said = [f"{before}{parent[name]}" for name, before in named.items() if parent.get(name) not in (None, "")]
    return ", ".join(said) or ", ".join(f"{name} {value}" for name, value in parent.items())


def current_config(model: ViT | ResNet) -> Config:
    """Return the config of a model, with the classes of the head that it has now.

    No head, and `nn.Identity` in its place, are 0 classes.
    """
    changed: dict[str, Any] = {}
    if isinstance(model.head, nn.Linear) and not is_own_part(model.head):
        changed = {"classes": model.head.out_features}
        changed |= {"head": None} if isinstance(model, ViT) else {}
    elif model.head is None or isinstance(model.head, nn.Identity):
        changed["classes"] = 0
    if isinstance(model, ViT) and isinstance(model.pre_logits, nn.Identity):
        changed["pre_logits"] = None
    return replace(model.config, **changed)


def rebuilt(model: nn.Module, card: Card) -> ViT | ResNet:
    """Return the network of a card with the tensors of `model`, in eval mode. The two share memory.

    A head without bias gets one of zeros. Raises WeightsError for a model that is not the card's, with the call that
    makes it so.
    """
    state = dict(model.state_dict())
    for name in HEADS:
        head = getattr(model, name, None)
        if type(head) is nn.Linear and head.bias is None:
            state[f"{name}.bias"] = torch.zeros(head.out_features)
    check_described(model, card.config, state)
    for name, tensor in state.items():
        if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            kind = "has no values: it is on the meta device" if tensor.is_meta else f"is a {type(tensor).__name__}"
            raise WeightsError(f"the model cannot be saved: {name!r} {kind}. Give it plain tensors first.")
    network = skeleton(card.config)
    fill(network, state)
    network.card = card
    return network.eval()


def check_described(model: nn.Module, config: Config, state: Mapping[str, Tensor]) -> None:
    """Raise WeightsError if the tensors of a model are not those that `load` expects for this config.

    The message names the layer and the call that makes it one of vitrail's own layers again.
    """
    needed = expected_of(config)
    for name in [*needed, *(name for name in state if name not in needed)]:
        tensor = state.get(name)
        if tensor is None or name not in needed or tensor.shape != needed[name].shape:
            there = "it has none" if tensor is None else f"it has one of shape {tuple(tensor.shape)}"
            wanted = f"shape {tuple(needed[name].shape)}" if name in needed else "none with this name"
            raise WeightsError(
                f"the model cannot be saved: a file needs its tensor {name!r} in {wanted}, and {there}. "
                f"{_remedy(model, config, name)}"
            )


def replaced_layers(model: nn.Module, config: Config) -> dict[str, str]:
    """Return the outermost layers of a model that are of another class than those of its config: {path: class}."""
    found: dict[str, str] = {}
    for path, ours in skeleton(config).named_modules():
        if path and not any(path.startswith(f"{outer}.") for outer in found):
            theirs = _module(model, path)
            if type(theirs) is not type(ours):
                found[path] = type(theirs).__name__
    return found


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _remedy(model: nn.Module, config: Config, name: str) -> str:
    """Return what to do about the layer of a tensor that does not fit."""
    strangers = replaced_layers(model, config)
    path = next((path for path in strangers if name.startswith(f"{path}.")), name.rpartition(".")[0])
    layer = _module(model, path)
    call = f'model.get_submodule("{path}")'
    own = {} if layer is None else dict(layer.named_parameters()) | dict(layer.named_buffers())
    if layer is None:
        return f"It has no layer {path!r}. {_KEEP}"
    if parametrize.is_parametrized(layer):
        which = next(iter(layer.parametrizations))  # type: ignore[arg-type]
        return f'Call torch.nn.utils.parametrize.remove_parametrizations({call}, "{which}") first.'
    if "weight_g" in own:
        return f"Call torch.nn.utils.remove_weight_norm({call}) first."
    if "weight_u" in own:
        return f"Call torch.nn.utils.remove_spectral_norm({call}) first."
    if "weight_orig" in own:
        return f'Call torch.nn.utils.prune.remove({call}, "weight") first.'
    if hasattr(layer, "base_layer") and hasattr(layer, "merge"):
        return f"{path} is an adapter of peft: save what merge_and_unload() of the peft model returns."
    is_a = f"model.{path} is a {type(layer).__name__}. "
    if path in HEADS:
        inputs = getattr(config, "head_width", config.features)
        every = "".join(f"model.{head} = " for head in HEADS if getattr(model, head, None) is not None)
        return f"{is_a}A head is {every}nn.Linear({inputs}, classes), or model.reset_head(classes). {_KEEP}"
    return f"{is_a}{_KEEP}"


_KEEP = "Any other network is stored by torch.save(model.state_dict(), PATH)."
