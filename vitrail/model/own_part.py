"""Parts of a network: the built-in ones by name, and the user's own by their settings. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError
from vitrail.import_path import Extensible, import_path
from vitrail.words import shown

if TYPE_CHECKING:
    from torch import nn

OWN = "is_own_part"
"""Attribute of the module of a part of the user's own."""


class OwnPart(Extensible):
    """Base of a part of a network of the user's own: its settings, and `build`, which makes the module.

    | field of `ViTConfig` | the module |
    |---|---|
    | `stem` | normalised images [batch, channels, H, W] -> [batch, width, H/patch, W/patch] |
    | `attention` | (tokens [batch, n, width], bias, num_queries) -> the same shape, or the first `num_queries` tokens |
    | `positions` | a `vitrail.model.posemb.Positions` |
    | `head` | features [batch, config.head_width] -> logits [batch, config.classes] |

    The module initialises itself. `vitrail.model.attention.Attention` explains `bias` and `num_queries`.
    """

    def build(self, config: Any) -> nn.Module:
        """Return the module for a network of this `ViTConfig`."""
        raise UsageError(f"{import_path(type(self))} has no method build(self, config)")


def own_parts(config: Any) -> dict[str, OwnPart]:
    """Return the parts of the user's own in a config, by the names of their fields."""
    parts = {name: getattr(config, name, None) for name in ("stem", "attention", "positions", "head")}
    return {name: part for name, part in parts.items() if isinstance(part, OwnPart)}


def build_part(
    part: str | OwnPart, config: Any, kinds: Mapping[str, Any], base: type, arguments: Sequence[str] = ()
) -> Any:
    """Return the module of a part: of the class in `kinds` that `part` names, or what the user's own part builds.

    Raises UsageError unless it is a `base` whose `forward` takes the `arguments`.
    """
    if not isinstance(part, OwnPart):
        return kinds[part](config)
    built = f"{import_path(type(part))}.build"
    check_arguments(part.build, ("config",), built)
    module = part.build(config)
    if not isinstance(module, base):
        raise UsageError(f"{built} returned {shown(module)}; it must return a {base.__name__}")
    if arguments:
        check_arguments(module.forward, arguments, f"{built} returned {type(module).__name__}, whose forward")
    setattr(module, OWN, True)
    return module


def check_arguments(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Raise UsageError, with `what`, unless a function of the user's own can be called with these arguments."""
    try:
        signature(function).bind(*arguments)
    except TypeError:
        raise UsageError(f"{what} takes {signature(function)}; it is called with ({', '.join(arguments)})") from None


def is_own_part(module: nn.Module) -> bool:
    """Return whether a module is a whole part of the user's own."""
    return bool(getattr(module, OWN, False))


def built_in_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and all modules in it, except parts of the user's own and what is in them."""
    if not is_own_part(module):
        yield module
        for child in module.children():
            yield from built_in_modules(child)
