"""transformers' EoMT (`EomtForUniversalSegmentation`): a DINOv2 or a DINOv3 with queries (`vitrail.model.queries`).

The names of files are those of modules. Files hold the share of masked attention in each block at the end of training,
`attn_mask_probs`; published weights have 0, because it is annealed.
"""

from __future__ import annotations

from typing import ClassVar

from vitrail.weights.hf.encoder import OUTSIDE, apart
from vitrail.weights.hf.families import DinoV2
from vitrail.weights.mapping import NameTable, unbatched, within

QUERIES: NameTable = {
    "tokens": unbatched("query.weight"),
    "classify.{part}": "class_predictor.{part}",
    "mask.0.{part}": "mask_head.fc1.{part}",
    "mask.1.{part}": "mask_head.fc2.{part}",
    "mask.2.{part}": "mask_head.fc3.{part}",
    "upscale.{unit}.up.{part}": "upscale_block.block.{unit}.conv1.{part}",
    "upscale.{unit}.mix.{part}": "upscale_block.block.{unit}.conv2.{part}",
    "upscale.{unit}.norm.{part}": "upscale_block.block.{unit}.layernorm2d.{part}",
}
"""The queries and their heads."""


class Eomt(DinoV2):
    """EoMT on a DINOv2 with registers, whose class token and registers have no position."""

    model_type = "eomt"
    title = "Eomt"
    headed = ""
    outside: ClassVar[NameTable] = {
        **{ours: theirs for ours, theirs in OUTSIDE.items() if not ours.startswith("head.")},
        "registers": "{prefix}embeddings.register_tokens",
        "positions.embedding": unbatched("{prefix}embeddings.position_embeddings.weight"),
        **within("head.", "{prefix}", QUERIES),
    }
    block: ClassVar[NameTable] = {
        **DinoV2.block,
        **apart("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attentions.0.attention.out.{part}": "attention.out_proj.{part}",
    }
    in_memory: ClassVar[NameTable] = {}
    lists = ("layers", "layers")
    disk_sign = "layers.0.mlp.weights_in.weight"
    front = 0
    table_axes = 2
    resize_mode = "timm"
