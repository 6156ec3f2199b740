"""Parameters and MACs of any model in closed form, from its config alone, to compare counted numbers with."""

from __future__ import annotations

from dataclasses import dataclass

from vitrail.model.stem import hmlp_stages
from vitrail.model.variants import ResNetConfig, ViTConfig


def parameters(config: ViTConfig | ResNetConfig) -> int:
    """Return the number of learned values; BatchNorm's running statistics are not among them."""
    return _count(config, None).parameters


def macs(config: ViTConfig | ResNetConfig, image_size: int | tuple[int, int] | None = None) -> int:
    """Return the MACs of the forward pass of one image of `image_size` (height, width); None: the config's."""
    return _count(config, image_size).macs


@dataclass
class _Tally:
    """Counts layers as they are named; `times` is how often the layer exists."""

    parameters: int = 0
    macs: int = 0

    def dense(self, inputs: int, outputs: int, rows: int, *, bias: bool = True, times: int = 1) -> None:
        """A linear layer applied to `rows` vectors, or a convolution of inputs * kernel^2 at `rows` places."""
        self.parameters += times * (inputs * outputs + bias * outputs)
        self.macs += times * rows * inputs * outputs

    def norm(self, features: int, times: int = 1) -> None:
        """A norm with scale and bias."""
        self.parameters += times * 2 * features


def _count(config: ViTConfig | ResNetConfig, image_size: int | tuple[int, int] | None) -> _Tally:
    size = config.image_size if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    tally = _Tally()
    if isinstance(config, ResNetConfig):
        _resnet(tally, config, height, width)
    else:
        _vit(tally, config, height, width)
    return tally


def _vit(tally: _Tally, config: ViTConfig, height: int, width: int) -> None:
    rows, columns = height // config.patch, width // config.patch
    _stem(tally, config, height, width)
    tally.parameters += config.prefix * config.width  # class token, distillation token, registers
    _positions(tally, config)
    if config.block == "axial":
        _layers(tally, config, lines=rows, tokens=columns, grid=rows * columns)
        _layers(tally, config, lines=columns, tokens=rows, grid=rows * columns)
    else:
        _layers(tally, config, lines=1, tokens=config.prefix + rows * columns, grid=rows * columns)
    tally.norm(config.width)
    if config.pool == "map":
        _map_head(tally, config, rows * columns)
    if config.pre_logits:
        tally.dense(config.pooled, config.pre_logits, 1)
    if config.classes:
        tally.dense(config.head_width, config.classes, 1, times=1 + config.origin.distilled)


def _layers(tally: _Tally, config: ViTConfig, *, lines: int, tokens: int, grid: int) -> None:
    """All layers' attentions and MLPs, over `lines` independent sequences of `tokens` from a grid of `grid`."""
    width, count = config.width, config.depth * config.branches
    tally.norm(width, times=2 * count)
    tally.dense(width, 3 * width, lines * tokens, times=count)  # q, k, v
    tally.macs += count * lines * 2 * tokens**2 * width  # q k^T, and the maps times v
    tally.dense(width, width, lines * tokens, times=count)
    gates = config.mlp_dim if config.origin.mlp == "swiglu" else 0
    tally.dense(width, config.mlp_dim + gates, lines * tokens, times=count)
    tally.dense(config.mlp_dim, width, lines * tokens, times=count)
    if config.layer_scale is not None:
        tally.parameters += 2 * count * width
    if config.positions == "relative":  # each query times the embedding of every offset
        tally.macs += count * lines * (tokens - config.prefix) * (2 * grid - 1) * width


def _positions(tally: _Tally, config: ViTConfig) -> None:
    """The tables of `vitrail.model.posemb`; they are for `config.image_size`, whatever the image's."""
    rows, columns = config.grid
    copies = config.depth if config.place == "every" else 1
    if config.positions == "1d":
        tally.parameters += copies * (config.front + rows * columns) * config.width
    elif config.positions == "2d":
        tally.parameters += copies * (config.front * config.width + (rows + columns) * (config.width // 2))
    elif config.positions in ("relative", "relative_bias"):
        copies = 1 if config.place == "shared" else config.depth
        if config.positions == "relative":
            table = (2 * rows * columns - 1) * (config.width // config.heads)
        else:
            table = ((2 * rows - 1) * (2 * columns - 1) + 3) * config.heads
        tally.parameters += copies * table


def _map_head(tally: _Tally, config: ViTConfig, tokens: int) -> None:
    width = config.width
    tally.parameters += width  # the probe
    tally.dense(width, width, 1)  # its query
    tally.dense(width, 2 * width, tokens)
    tally.macs += 2 * tokens * width
    tally.dense(width, width, 1)
    tally.norm(width)
    tally.dense(width, config.mlp_dim, 1)
    tally.dense(config.mlp_dim, width, 1)


def _stem(tally: _Tally, config: ViTConfig, height: int, width: int) -> None:
    area, inputs = height * width, config.channels
    if config.stem == "linear":
        tally.dense(inputs * config.patch**2, config.width, area // config.patch**2)
    elif config.stem == "resnet":
        _hybrid_stem(tally, config, area)
    elif config.stem == "hmlp":
        *stages, last = hmlp_stages(config.patch)
        for kernel in stages:
            area //= kernel**2
            tally.dense(inputs * kernel**2, config.width // 4, area)
            tally.norm(config.width // 4)
            inputs = config.width // 4
        tally.dense(inputs * last**2, config.width, area // last**2)
        tally.norm(config.width)
    else:  # levit, early: 3x3 convolutions of stride 2, the width doubling up to the model's
        for step in reversed(range(config.patch.bit_length() - 1)):
            outputs, area = config.width // 2**step, area // 4
            tally.dense(inputs * 9, outputs, area, bias=False)
            tally.norm(outputs)
            inputs = outputs
        if config.stem == "early":
            tally.dense(inputs, config.width, area)


def _hybrid_stem(tally: _Tally, config: ViTConfig, area: int) -> None:
    """The ResNet of post-activation bottlenecks in front of a hybrid; each norm follows its convolution."""
    area //= 4
    tally.dense(config.channels * 49, 64, area, bias=False)
    tally.norm(64)
    area, inputs = area // 4, 64  # the max pool
    for stage, units in enumerate(config.stem_units):
        width = 64 * 2**stage
        for unit in range(units):
            before, area = area, area // 4 if stage and not unit else area
            tally.dense(inputs, width, before, bias=False)
            tally.dense(width * 9, width, area, bias=False)
            tally.dense(width, 4 * width, area, bias=False)
            tally.norm(width, times=2)
            tally.norm(4 * width)
            if not unit:  # the shortcut changes resolution or width
                tally.dense(inputs, 4 * width, area, bias=False)
                tally.norm(4 * width)
            inputs = 4 * width
    cell = config.patch // (4 * 2 ** max(len(config.stem_units) - 1, 0))
    tally.dense(inputs * cell**2, config.width, area // cell**2)


def _resnet(tally: _Tally, config: ResNetConfig, height: int, width: int) -> None:
    """BiT's pre-activation bottlenecks; sizes round up at every stride."""
    size, spans = (_half(height), _half(width)), tuple(_half(_half(side)) for side in config.image_size)
    tally.dense(config.channels * 49, config.width, size[0] * size[1], bias=False)
    size = (_half(size[0]), _half(size[1]))  # the max pool
    inputs = config.width
    for stage, units in enumerate(config.units):
        features = config.width * 2**stage
        for unit in range(units):
            strided = stage > 0 and unit == 0
            after = (_half(size[0]), _half(size[1])) if strided else size
            cells = after[0] * after[1]
            tally.norm(inputs)
            tally.norm(features, times=2)
            tally.dense(inputs, features, size[0] * size[1], bias=False)
            if config.axial:
                _row_column_attention(tally, features, size, spans)
            else:
                tally.dense(features * 9, features, cells, bias=False)
            tally.dense(features, 4 * features, cells, bias=False)
            if not unit:
                tally.dense(inputs, 4 * features, cells, bias=False)
            inputs, size = 4 * features, after
            spans = tuple(_half(side) for side in spans) if strided else spans
    tally.norm(inputs)
    if config.classes:
        tally.dense(inputs, config.classes, 1)


def _row_column_attention(tally: _Tally, width: int, size: tuple[int, int], spans: tuple[int, ...]) -> None:
    """What AxialResNet has for a 3x3 convolution: 8 heads, keys half as wide as values, positions for all three."""
    tally.norm(width)
    for lines, tokens, span in ((size[0], size[1], spans[1]), (size[1], size[0], spans[0])):
        tally.dense(width, 2 * width, lines * tokens, bias=False)
        tally.parameters += width // 8 * 2 * (2 * span - 1)
        # q k^T, q r_q and k r_k are half as wide as the maps times v and times r_v
        tally.macs += lines * tokens**2 * (3 * (width // 2) + 2 * width)


def _half(side: int) -> int:
    return (side + 1) // 2
