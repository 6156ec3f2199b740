"""`config.json` of transformers: reading it, comparing it with the shapes of the tensors, and writing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.data.labels.numbers import TargetScale
from vitrail.errors import WeightsError, did_you_mean
from vitrail.model.variants import ViTConfig, flat
from vitrail.weights.archive import Archive
from vitrail.weights.card import USUAL_THRESHOLD, Card
from vitrail.weights.formats import origin_of
from vitrail.weights.hf.encoder import Encoder
from vitrail.weights.mapping import count, number_in, size_in, text_in, usual_heads
from vitrail.words import shown

SEVERAL = "multi_label_classification"
"""`problem_type` in config.json of a network that predicts several labels."""
NUMBERS = "regression"
"""`problem_type` in config.json of a network that predicts numbers."""
PROBLEMS = ("single_label_classification", SEVERAL, NUMBERS)
"""Valid values of `problem_type` in config.json."""
FIELDS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_channels": "channels",
    "patch_size": "patch",
}
"""Entry of config.json -> field of ViTConfig with the same value; `_fields` adds those of an encoder."""
ACTIVATIONS = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_fast": "tanh",
    "quick_gelu": "quick",
    "gelu_accurate": "tanh",
}
"""`hidden_act` in config.json -> kind of GELU. The first name of each kind is written."""
MOST_LABELS = 100_000
"""Maximum number of labels in the config.json of a model without a classifier."""
COMMON = dict(num_attention_heads=12, hidden_act="gelu")
"""transformers' defaults for missing entries of config.json, for all encoders."""


def infer(archive: Archive, encoder: Encoder) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ViTConfig without mean and std, and the assumptions made. Raises WeightsError."""
    settings = {**COMMON, **encoder.defaults, **archive.config}
    notes = list(encoder.remarks)
    width, channels, patch = encoder.stem_sizes(archive, settings)
    depth = count(archive, f"{encoder.layers}.")
    if not depth:
        raise WeightsError(f"{archive.path} lacks the tensor '{encoder.theirs('blocks.0.attentions.0.norm.weight')}'")
    size = archive.config.get("image_size") if encoder.resize_mode != "naflex" else None
    size = encoder.side(archive) * patch if size is None else size
    values: dict[str, Any] = dict(
        width=width,
        depth=depth,
        mlp_dim=encoder.mlp_dim(archive),
        patch=patch,
        channels=channels,
        norm_eps=_positive(archive, settings, encoder.eps_name),
        gelu=_gelu(archive, encoder.activation(archive, settings)),
        resize_mode=encoder.resize_mode,
        image_size=size_in(size, "image_size of config.json", str(archive.path)),
        **encoder.own(archive, settings),
    )
    if archive.config:
        heads = _positive(archive, settings, "num_attention_heads")
        if not heads.is_integer():
            raise WeightsError(
                f"{archive.path}: num_attention_heads of config.json is {heads:g}; valid: a whole number"
            )
        values["heads"] = int(heads)
    else:
        values["heads"], sentence = usual_heads(archive, width, encoder.head_features)
        notes.append(
            f"{sentence}, LayerNorm epsilon {values['norm_eps']:g} and GELU {values['gelu']!r}, the defaults of "
            f"{encoder.bare()}, because there is no config.json"
        )
    for name, field in _fields(encoder).items():
        said, found = archive.config.get(name, values[field]), values[field]
        if said not in (found, [found, found]):
            raise WeightsError(
                f"{archive.path}: config.json says {name} {shown(said)}, but the tensors are of {shown(found)}"
            )
    classes = values["classes"]
    said = archive.config.get("num_labels", classes)  # transformers makes a name for each
    if said != classes and (classes or not isinstance(said, int) or not 0 <= said <= MOST_LABELS):
        raise WeightsError(
            f"{archive.path}: config.json says num_labels {shown(said)}, but the tensors are of {classes} classes"
        )
    return values, notes


def _fields(encoder: Encoder) -> dict[str, str]:
    return {**FIELDS, encoder.eps_name: "norm_eps", **encoder.fields}


def _positive(archive: Archive, settings: Mapping[str, Any], name: str) -> float:
    value = number_in(settings, name, f"{archive.path}, config.json")
    if value <= 0:
        raise WeightsError(f"{archive.path}: {name} of config.json is {value:g}; valid: a number above 0")
    return value


def _gelu(archive: Archive, name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise WeightsError(
            f"{archive.path}: hidden_act of config.json is {shown(name)}, which vitrail's models do not have."
            f"{did_you_mean(str(name), ACTIVATIONS)} Valid: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def class_names(archive: Archive, classes: int) -> list[str]:
    """Return the names in `id2label` of config.json, [] if it has only placeholders. Raises WeightsError."""
    labels = archive.config.get("id2label")
    if not classes or not labels:
        return []
    if not isinstance(labels, dict) or set(labels) != {str(index) for index in range(classes)}:
        count = len(labels) if isinstance(labels, dict) else shown(labels)
        raise WeightsError(
            f"{archive.path}: id2label of config.json should name the classes 0 to {classes - 1} of the classifier; "
            f"it has {count}"
        )
    found = [labels[str(index)] for index in range(classes)]
    where = str(archive.path)
    names = [str(name) if isinstance(name, int) else text_in(name, "a name in id2label", where) for name in found]
    return [] if names == placeholders(classes) else names


def meaning(archive: Archive, classes: int, notes: list[str]) -> dict[str, Any]:
    """Return what the outputs of a network mean, by `problem_type` of config.json, as values of a card.

    Several labels have the usual threshold, because transformers stores none. Numbers are the outputs as they are. One
    output without a `problem_type` is one label, as in transformers' pipeline; `notes` gets a line about it. Raises
    WeightsError for a `problem_type` that transformers does not have, or one that does not fit one output.
    """
    problem = archive.config.get("problem_type")
    if not classes or problem is None:
        if classes == 1:
            notes.append("the one output is the logit of a label (sigmoid), because config.json has no problem_type")
        return {}
    if problem not in PROBLEMS or (classes == 1 and problem == PROBLEMS[0]):
        few = " for one output" if problem in PROBLEMS else ""
        raise WeightsError(
            f"{archive.path}: problem_type of config.json is {shown(problem)}{few}."
            f"{did_you_mean(str(problem), PROBLEMS)} Valid: {', '.join(PROBLEMS[1:] if few else PROBLEMS)}"
        )
    if problem == NUMBERS:
        return {"scale": TargetScale((0.0,) * classes, (1.0,) * classes)}
    return {"thresholds": [USUAL_THRESHOLD] * classes} if problem == SEVERAL else {}


def placeholders(classes: int) -> list[str]:
    """Return the names that transformers gives to classes without names."""
    return [f"LABEL_{index}" for index in range(classes)]


def to_json(config: ViTConfig, card: Card, encoder: Encoder, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model, with unrelated entries of the file from which it was loaded."""
    origin = origin_of(card, "hf")
    same_kind = origin.get("layout", {}).get("model_type") == encoder.model_type
    values: dict[str, Any] = dict(origin.get("config", {})) if same_kind else {}
    if ACTIVATIONS.get(str(values.get("hidden_act"))) != config.origin.gelu:
        values["hidden_act"] = next(name for name, gelu in ACTIVATIONS.items() if gelu == config.origin.gelu)
    height, width = config.image_size
    values |= dict(
        architectures=[encoder.architecture],
        model_type=encoder.model_type,
        image_size=height if height == width else [height, width],
        dtype=dtype,
        **{name: flat(config)[field] for name, field in _fields(encoder).items()},
        **encoder.constants,
        **encoder.json(config),
    )
    values.pop("torch_dtype", None)  # the older name of dtype
    if card.task != "classes":
        values["problem_type"] = NUMBERS if card.task == "numbers" else SEVERAL
    elif values.get("problem_type") != PROBLEMS[0]:
        values.pop("problem_type", None)
    if config.classes or encoder.has_head(config):
        names = card.class_names or placeholders(config.classes)
        values["id2label"] = {str(index): name for index, name in enumerate(names)}
        values["label2id"] = {name: index for index, name in enumerate(names)}
    return encoder.document(values)
