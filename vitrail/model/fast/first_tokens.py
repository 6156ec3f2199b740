"""The last layer computes only the tokens that the head reads, if nobody can see the others.

With a class token this saves about 7 % of B/16's cost and does not change the result.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vitrail.model.attention import Attention, QKNorm
from vitrail.model.block import MLP, AttentionBranch, Block, MLPBranch, Residual, SwiGLU
from vitrail.model.compute import how_computed
from vitrail.model.fast.frozen import FrozenBlock
from vitrail.model.layers import QuickGELU
from vitrail.model.low_rank import LowRank
from vitrail.torch_private import has_hooks

_PER_TOKEN = (
    *(Block, AttentionBranch, Attention, QKNorm, MLPBranch, MLP, SwiGLU, Residual, QuickGELU, LowRank),
    *(nn.ModuleList, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.ReLU, nn.Dropout, nn.Identity),
)
"""Types of modules that compute the attention of ours, or each token from itself."""
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.Identity)


def num_queries(model: Any) -> int | None:
    """Return the number of tokens at the front that the pool of a `ViT` reads, for `ViT.encode`.

    It is None (all tokens) if hooks, or modules that are not ours, may see the others.
    """
    last = model.blocks[-1]
    if how_computed() == "definition" or not isinstance(model.norm, _NORMS) or not _mixes_by_attention_alone(last):
        return None
    parts = (*last.modules(), model.norm, model.pool)
    return None if any(has_hooks(part) for part in parts) else getattr(model.pool, "reads", None)


def _mixes_by_attention_alone(block: nn.Module) -> bool:
    """Return whether only the attention of a block mixes tokens, and it is ours."""
    if isinstance(block, FrozenBlock):
        return True
    return isinstance(block, Block) and all(isinstance(part, _PER_TOKEN) for part in block.modules())
