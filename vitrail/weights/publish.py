"""A model for the hub: the weights with their card, and a README.md that says what they are and how to use them.

The weights are in vitrail's format, or in that of transformers or timm, whose users then load them by the repository's
name. The header of the README is what the hub reads: library, licence, base model and results.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import nn

from vitrail.data.images.ops import CROPPED
from vitrail.errors import WeightsError
from vitrail.weights.card import Card, architecture, parameters
from vitrail.weights.download import refusal, unreachable
from vitrail.weights.rebuild import card_of, parents, present_card, rebuilt
from vitrail.weights.reference import reference
from vitrail.weights.save import save
from vitrail.words import without_folders

log = logging.getLogger("vitrail")
README = "README.md"
HubFormat = Literal["vitrail", "hf", "timm"]
"""Formats that the hub's users load by the name of a repository."""
LIBRARIES: dict[HubFormat, str] = {"vitrail": "vitrail", "hf": "transformers", "timm": "timm"}
USES: dict[HubFormat, str] = {
    "vitrail": 'import vitrail\n\nmodel = vitrail.load("{}")',
    "hf": "from transformers import AutoModelForImageClassification\n\n"
    'model = AutoModelForImageClassification.from_pretrained("{}")',
    "timm": 'import timm\n\nmodel = timm.create_model("hf-hub:{}", pretrained=True)',
}
MEASURES = {"top1": ("accuracy", "top-1 accuracy"), "top5": ("accuracy", "top-5 accuracy"), "map": ("mAP", "mAP")}
"""Measure of a card -> its type and name in the hub's results."""
NAMED = 1000
"""Class names written into the README; card.json has all of them."""


def prepare_upload(
    model: nn.Module, folder: Path | str, repository: str, licence: str | None = None, format: HubFormat = "vitrail"
) -> dict[str, int]:
    """Write everything that `push` uploads into `folder`, and return the size of each file in bytes.

    `licence` takes the place of the card's. Raises WeightsError as `save` does, for example if the library of `format`
    has no such network.
    """
    folder = Path(folder)
    card = card_of(model)
    card, gone = present_card(rebuilt(model, card), card, model)
    if gone:
        log.warning("not published: %s", gone)
    card = replace(card, reference=reference(model), provenance=without_folders(card.provenance))
    card = card if licence is None else replace(card, licence=licence)
    if not card.licence:
        log.warning("no licence is known for these weights, so others may not use them: say it with --licence")
    network: Any = rebuilt(model, card)
    network.card = card
    save(network, folder, format)
    (folder / README).write_text(readme(card, parameters(model), repository, format), encoding="utf-8")
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def push(folder: Path | str, repository: str, *, private: bool = False) -> str:
    """Upload a folder that `prepare_upload` made to the hub, into a new repository if need be; return its address.

    Raises WeightsError where the hub refuses (say who you are with `hf auth login`) or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="vitrail")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=os.fspath(folder), commit_message="Model of vitrail")
    except HfHubHTTPError as error:
        raise WeightsError(refusal(repository, "main", error) or f"{repository} was not written: {error}") from error
    except ValueError as error:  # a name, or a licence, that the hub does not know
        raise WeightsError(f"{repository} was not written: {error}") from error
    except unreachable() as error:
        raise WeightsError(f"{repository} was not written: {api.endpoint} cannot be reached ({error})") from error
    return f"{api.endpoint}/{repository}"


def readme(card: Card, count: int, repository: str, format: HubFormat = "vitrail") -> str:
    """Return the model card for the hub, Markdown with the hub's header; `count` is the number of parameters."""
    name = repository.rpartition("/")[2]
    header: dict[str, Any] = {"license": card.licence} if card.licence else {}
    header |= {"library_name": LIBRARIES[format], "pipeline_tag": "image-classification"}
    header |= {"tags": ["vision-transformer", "vitrail"]}
    if base := _base(card):
        header["base_model"] = base
    if results := _results(card):
        header["model-index"] = [{"name": name, "results": results}]
    made = "\n".join(f"- {_escaped(parent)}" for parent in parents(card))
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {name}",
        f"{architecture(card.config)}, {count:,} parameters. Weights from: {card.source}.",
        *([f"Made from:\n\n{made}"] if made else []),
        f"```bash\nvitrail predict {repository} photos/\n```",
        f"```python\n{USES[format].format(repository)}\n```",
        "## Accuracy",
        _table("measure", card.metrics) or "Not measured by the card that came with these weights.",
        "## Preprocessing",
        _preprocessing(card),
        "## Classes",
        _classes(card),
        "## Licence",
        card.licence or "Not stated: ask the owner before using these weights.",
    ]
    return "\n\n".join(parts) + "\n"


def _base(card: Card) -> str | None:
    """Return the repository of the weights that these were trained from, if they came from the hub.

    What vitrail ships is on no hub, and runs of earlier versions name folders below runs.
    """
    start = str(card.provenance.get("from") or "")
    if start.partition("/")[0] in ("vitrail", "runs"):
        return None
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", start) and not Path(start).exists()
    return start if named else None


def _results(card: Card) -> list[dict[str, Any]]:
    """Return the accuracies of the card as the hub's results, one entry for each split that was measured."""
    splits: dict[str, list[dict[str, Any]]] = {}
    for measure, value in card.metrics.items():
        split, _, name = measure.rpartition(" ")
        if name in MEASURES and isinstance(value, float):
            kind, title = MEASURES[name]
            splits.setdefault(split, []).append({"type": kind, "name": title, "value": round(value, 6)})
    data = Path(str(card.provenance.get("data") or "images")).name or "images"
    return [
        {
            "task": {"type": "image-classification"},
            "dataset": {"type": data, "name": data, **({"split": split} if split else {})},
            "metrics": metrics,
        }
        for split, metrics in splits.items()
    ]


def _preprocessing(card: Card) -> str:
    height, width = card.preprocess.image_size
    how = "Resize to exactly this size"
    if card.preprocess.resize == "pad":
        how = "Resize to the largest picture of the same aspect ratio that fits into this size; fill the rest with mean"
    if card.preprocess.resize in CROPPED:
        what = "the short side" if card.preprocess.resize == "small" else "both sides, whatever their ratio"
        how = f"Resize {what}, then take the central {card.preprocess.crop:.4g}"
    return _table(
        "step",
        {
            "input": f"{height} x {width} pixels, {card.config.channels} channels",
            "resize": f"{how}; {card.preprocess.interpolation}, antialiased",
            "mean": ", ".join(f"{value:.6g}" for value in card.config.mean),
            "std": ", ".join(f"{value:.6g}" for value in card.config.std),
        },
    )


def _classes(card: Card) -> str:
    if not card.config.classes:
        return "None: the model returns features."
    if not card.class_names:
        return f"{card.config.classes}, whose names are not known."
    lines = [f"{number}. {_escaped(name)}" for number, name in enumerate(card.class_names[:NAMED])]
    more = len(card.class_names) - NAMED
    return "\n".join(lines) + (f"\n\nand {more:,} more: see card.json" if more > 0 else "")


def _table(what: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    lines = [f"| {_escaped(name)} | {_escaped(text)} |" for name, text in texts.items()]
    return "\n".join([f"| {what} | value |", "|---|---|", *lines])


def _escaped(text: Any) -> str:
    """Text that Markdown shows as it is: names of classes are other people's folders."""
    shown = os.fsencode(str(text)).decode("utf-8", "backslashreplace").replace("\n", " ")
    for mark in "\\`*_[]<>|#":
        shown = shown.replace(mark, f"\\{mark}")
    return shown
