"""Memory of training, from a model's config alone: what the forward pass keeps of each image, and the rest.

Counted is every tensor that autograd holds between forward and backward pass and that grows with the batch, each
once, from the pixels to the classifier's input; not the loss, the gradients of activations, or scratch space. It
follows the code: the last layer's work on tokens that the pool does not read is never done (`ViT.encode`), so
nothing of it is kept. `vitrail.costs.count` gets the same number from the running network.
"""

from __future__ import annotations

from vitrail.costs.kept import Arithmetic, Kept
from vitrail.costs.memory_resnet import resnet_memory
from vitrail.costs.memory_stem import stem_memory
from vitrail.model.attention import LONGEST_EXPLICIT
from vitrail.model.block import drop_path_rates
from vitrail.model.variants import ResNetConfig, ViTConfig

STATE_BYTES = 16
"""Per parameter: float32 weight, gradient and Adam's two moments."""


def activation_bytes(
    config: ViTConfig | ResNetConfig,
    image_size: int | tuple[int, int] | None = None,
    arithmetic: Arithmetic | None = None,
) -> int:
    """Return the bytes per image that the forward pass of training keeps for the backward pass.

    `image_size` is one side or (height, width) in pixels; None: the config's. `arithmetic` None: bf16 autocast
    on an accelerator.
    """
    size = config.image_size if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    kept = Kept(arithmetic or Arithmetic())
    if isinstance(config, ResNetConfig):
        resnet_memory(kept, config, height, width)
    else:
        _vit(kept, config, height, width)
    return kept.bytes


def state_bytes(parameters: int, learning: int | None = None) -> int:
    """Return the bytes of the training state; of frozen parameters, all but `learning`, that is the weight alone."""
    return STATE_BYTES * parameters if learning is None else 4 * parameters + (STATE_BYTES - 4) * learning


def largest_batch(parameters: int, activations: int, memory: float, learning: int | None = None) -> int:
    """Return how many images of `activations` bytes each fit into `memory` bytes beside the training state.

    An upper bound: scratch space is not counted. 0 where the state of the parameters alone does not fit.
    """
    return max(int((memory - state_bytes(parameters, learning)) // activations), 0)


def _vit(kept: Kept, config: ViTConfig, height: int, width: int) -> None:
    rows, columns = height // config.patch, width // config.patch
    grid, tokens = rows * columns, config.prefix + rows * columns
    stem_memory(kept, config, height, width)
    if config.dropout:
        kept.mask(tokens * config.width, 4)
    read = 1 + config.distilled if config.pool == "cls" else None
    for layer, rate in enumerate(drop_path_rates(config)):
        if config.block == "axial":
            _block(kept, config, rows, columns, grid, rate, None)
            _block(kept, config, columns, rows, grid, rate, None)
        else:
            _block(kept, config, 1, tokens, grid, rate, read if layer == config.depth - 1 else None)
    _summary(kept, config, tokens, grid, read)


def _block(
    kept: Kept, config: ViTConfig, lines: int, tokens: int, grid: int, drop_path: float, read: int | None
) -> None:
    """Attentions, then MLPs, over `lines` sequences of `tokens`; with `read`, only so many tokens come out."""
    left = lines * tokens if read is None else read
    for branch in range(config.branches):
        _layer_norm(kept, config, lines * tokens, branch)
        if read is None:
            _attention(kept, config, lines, tokens, grid)
        else:
            _last_attention(kept, config, tokens, read)
        _residual(kept, config, lines, left, drop_path)
    for branch in range(config.branches):
        _layer_norm(kept, config, left, branch)
        _mlp(kept, config, left)
        _residual(kept, config, lines, left, drop_path)


def _layer_norm(kept: Kept, config: ViTConfig, rows: int, branch: int) -> None:
    """Its input, which parallel branches share unless each casts it, its statistics, and what it hands on."""
    casts_input = kept.arithmetic.cpu and kept.arithmetic.precision == "bf16"
    if not branch or casts_input:
        kept.normal(rows * config.width)
    kept.statistics(rows)
    kept.product(rows * config.width)


def _is_explicit(kept: Kept, tokens: int) -> bool:
    """Is attention over so many tokens computed by the explicit path (`vitrail.model.attention`)?"""
    return kept.arithmetic.cpu and tokens <= LONGEST_EXPLICIT


def _attention(kept: Kept, config: ViTConfig, lines: int, tokens: int, grid: int) -> None:
    rows, maps = lines * tokens, lines * config.heads * tokens**2
    explicit = _is_explicit(kept, tokens)
    kept.product(4 * rows * config.width)  # q, k, v, and the output
    if explicit:
        kept.product(maps)
    else:
        kept.sums(rows * config.heads)
    if config.positions == "relative":  # a copy of the queries, and their products with every offset's embedding
        placed = tokens if config.block == "axial" else grid
        kept.product(lines * placed * config.width)
        kept.product(lines * config.heads * placed * (2 * grid - 1))
        if not explicit:
            kept.product(maps)  # what is added to the logits


def _last_attention(kept: Kept, config: ViTConfig, tokens: int, read: int) -> None:
    """All tokens' keys and values, the queries of those that are read, and the output."""
    kept.product(2 * tokens * config.width)
    kept.product(read * config.width)
    if _is_explicit(kept, tokens):
        kept.product(read * config.heads * (config.width + tokens))  # each query once for each head, and the maps
    else:
        kept.product(read * config.width)
        kept.sums(read * config.heads)
    if not kept.arithmetic.cpu and (kept.arithmetic.casts or read > 1):
        kept.product(read * config.width)  # their rows of the norm's output, copied


def _residual(kept: Kept, config: ViTConfig, lines: int, rows: int, drop_path: float) -> None:
    """Dropout, LayerScale and stochastic depth on the way to the sum."""
    values = rows * config.width
    if config.dropout:
        kept.mask(values, kept.arithmetic.product)
    if config.layer_scale is not None:
        kept.product(values)
    if drop_path:
        kept.bytes += lines * (kept.arithmetic.product if config.layer_scale is None else 4)


def _mlp(kept: Kept, config: ViTConfig, rows: int) -> None:
    hidden = rows * config.mlp_dim
    if config.mlp == "swiglu":
        kept.product(4 * hidden)  # gate, value, silu(gate), their product
    elif config.dropout:
        kept.product(2 * hidden)  # before the GELU, and after dropout
    else:
        _gelu(kept, hidden)
    if config.dropout:
        kept.mask(hidden, kept.arithmetic.product)


def _gelu(kept: Kept, hidden: int) -> None:
    """A GELU in front of a dense layer: its input and its output; a CPU in float32 computes the output again."""
    again = kept.arithmetic.cpu and kept.arithmetic.precision == "float32"
    kept.product(hidden if again else 2 * hidden)


def _summary(kept: Kept, config: ViTConfig, tokens: int, grid: int, read: int | None) -> None:
    """From the last layer's tokens to the classifier's input."""
    rows = tokens if read is None else read
    if config.final_norm == "tokens":
        kept.normal(rows * config.width)
        kept.statistics(rows)
    if config.pool == "map":
        _map_head(kept, config, tokens, grid)
    if config.final_norm == "pooled":
        kept.normal(config.pooled)
        kept.statistics(config.pooled // config.width)
    if config.pre_logits:
        kept.product(config.pooled + config.pre_logits)
    elif config.classes:
        kept.product(config.pooled)


def _map_head(kept: Kept, config: ViTConfig, tokens: int, grid: int) -> None:
    width, maps = config.width, config.heads * grid
    kept.product((tokens if kept.arithmetic.cpu else grid) * width)
    kept.product(2 * grid * width + width)  # keys, values and the probe's query, laid out for batched products
    kept.normal(maps)
    kept.cast(maps)
    kept.product(width)
    kept.normal(width)
    kept.statistics(1)
    kept.product(width)
    _gelu(kept, config.mlp_dim)
