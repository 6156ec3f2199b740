"""How transformers names the tensors of its vision encoders, on disk and in memory.

transformers 5 renamed most modules but still writes, and reads, the names of version 4:

| | on disk | in memory since 5.0 |
|---|---|---|
| layer | `encoder.layer.0.` | `layers.0.` (DINOv2: as on disk) |
| query, key, value | `attention.attention.query` | `attention.q_proj` |
| output projection | `attention.output.dense` | `attention.o_proj` |
| MLP | `intermediate.dense`, `output.dense` | `mlp.fc1`, `mlp.fc2` |

A folder has the names on disk, a bare `state_dict()` those in memory. A model with a head puts the encoder's
own name in front of the encoder's tensors (`vit.embeddings...`), a bare encoder does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.model.variants import ViTConfig

STEM = "embeddings.patch_embeddings.projection"

DISK = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}
MEMORY = {
    "query": "attention.q_proj",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
    "out": "attention.o_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}


@dataclass(frozen=True)
class Layout:
    """How one file names its tensors, as far as the model's own config does not say it."""

    model_type: str
    """Of config.json: which family."""
    architecture: str
    """The class in transformers."""
    prefix: str = ""
    """In front of the encoder's names: "vit." where the model has a head."""
    disk: bool = True
    """Are the names those of files, or those of modules since 5.0?"""
    norm: str = "layernorm"
    """Whole name of the LayerNorm after the last block."""
    qkv_bias: bool = True
    """Do queries, keys and values have a bias?"""


def refusal_of_all(config: ViTConfig) -> str:
    """Why no encoder of transformers can express a config; "" where one may."""
    learned = config.positions == "1d"
    checks = {
        f"transformers' encoders have linear stems, not {config.stem}": config.stem != "linear",
        f"transformers' encoders have no {config.block} blocks": config.block != "sequential",
        "transformers' encoders have no attention pooling": config.pool == "map",
        "every encoder of transformers has a class token": not config.has_class_token,
        "transformers adds positions at the input only": learned and config.place != "input",
        "in transformers the class token has a position of its own": learned and not config.cls_position,
        f"transformers has no {config.positions} positions": config.positions in ("2d", "relative", "sincos"),
    }
    return next((reason for reason, there in checks.items() if there), "")
