"""The card of a network as it is now: what was measured on other weights does not stay on it.

Top-1, temperature and thresholds belong to the outputs that they were measured on. A loaded network can be trained,
averaged or merged by hand, and nothing tells its card. Its outputs do: the card has those for a fixed image.
"""

from __future__ import annotations

from torch import nn

from vitrail.weights.card import ORIGIN, PARENTS, Card
from vitrail.weights.reference import IMAGE, TOLERANCE, differences, outputs


def present_card(network: nn.Module, card: Card, loaded: nn.Module | None = None) -> tuple[Card, str]:
    """Return the card of a network as it is now, and a sentence about what was removed from it; "" if nothing was.

    `loaded` is the module with the load report, if that is not `network`. A card without a reference vector stays as it
    is, unless the network was adapted while it was loaded: nothing says that its numbers are another network's.
    """
    report = getattr(network if loaded is None else loaded, "load_report", None)
    adapted = report is not None and bool(report.resampled or report.reset)
    why = "the network was adapted to other images or classes when it was loaded" if adapted else ""
    if card.reference and not why:
        error = _error(network, card)
        if not error <= TOLERANCE:
            why = f"the network's outputs are others now (relative difference {error:.1e})"
    removed = _measured(card) if why else []
    return (card.unmeasured(), f"{', '.join(removed)}, because {why}") if removed else (card, "")


def removed_by_config(before: Card | None, after: Card) -> str:
    """Return a sentence about the results that `card_of` removed because the network has another config; or ""."""
    if before is None or before.config == after.config:
        return ""
    removed = _measured(before)
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


def _measured(card: Card) -> list[str]:
    """Return what of a card belongs to its outputs, in words."""
    found = [f"{name} {value:.4g}" if isinstance(value, float) else name for name, value in card.metrics.items()]
    some = [", ".join(found[:2]) + (f" and {len(found) - 2} more results" if len(found) > 2 else "")] if found else []
    some += [f"the temperature {card.temperature:.4g} of its probabilities"] if card.confidence is not None else []
    chosen = card.thresholds if card.unmeasured().thresholds != card.thresholds else []
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
