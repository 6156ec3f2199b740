"""Position embeddings: {none, 1-D, 2-D, relative, sincos} x {at the input, at every layer, shared} (Table 8); BEiT's.

Two methods cover all of them: `tokens` returns values to add to the tokens, `logits` values to add to the attention
logits. Any kind may go with rotary positions, for which `rotation` rotates queries and keys (`vitrail.model.rotary`).
Grid tokens are counted in raster order. The config says which of the tokens in front have a position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vitrail.model.layers import device_of_constants
from vitrail.model.native import UNSEEN, Grids, Resampler, Unseen
from vitrail.model.own_part import OwnPart, build_part, is_own_part
from vitrail.model.resize import resize_bias, resize_line, resize_positions
from vitrail.model.rotary import RotaryPositions, Rotation
from vitrail.model.variants import ViTConfig
from vitrail.strip import longest_side
from vitrail.torch_private import has_hooks

Grid = tuple[int, int]


class Queried(NamedTuple):
    """A grid whose tokens are followed by queries (`vitrail.model.queries`), which have no position."""

    grid: Grid
    queries: int
    hidden: Tensor | None = None
    """bool [batch, queries, rows * columns]: the grid's tokens that a query does not see. None: it sees all of them"""


Bias = Callable[[Tensor], Tensor | None]
"""scaled queries [batch, heads, n, features] -> values to add to the logits [batch or 1, heads, n, tokens]

With rotary positions it has a method `rotation` (`AtLayer`).
"""


class Positions(nn.Module):
    """No position information: the image is a bag of patches (D.4). Base of the other kinds."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config, self.copies = config, config.position_tables
        self.at_input = config.place == "input"
        self.rotary = None if config.origin.rotary is None else RotaryPositions(config, config.origin.rotary)

    @property
    def needs_grid(self) -> bool:
        """Whether blocks need to know where tokens are. Otherwise any module tokens -> tokens can be a block."""
        own_attention = isinstance(self.config.attention, OwnPart)  # it may depend on places in a way of its own
        return own_attention or self.rotary is not None or type(self).logits is not Positions.logits

    @property
    def reaches_attention(self) -> bool:
        """Whether blocks have to ask for values of their layer: positions need the grid, or `forward` was replaced."""
        return self.needs_grid or "forward" in vars(self)

    def forward(
        self, layer: int | None, query: Tensor | None = None, places: Any = None, grid: Any = None
    ) -> Tensor | None:
        """Return `tokens`, or with a query `logits`."""
        values = self.tokens(layer, grid) if query is None else self.logits(layer or 0, query, places, grid)
        # without gradients, a view of a parameter claims to need one, which hooks of torch's counters take for an error
        recorded = torch.is_grad_enabled() or torch.jit.is_tracing()
        return values if values is None or recorded else values.detach()

    def added(self, layer: int | None, grid: Grid | Grids) -> Tensor | None:
        """Return `tokens`, through `forward` if it was replaced or has hooks."""
        return self(layer, grid=grid) if has_hooks(self) else self.tokens(layer, grid)

    def table(self, layer: int, grid: Grid) -> Tensor | None:
        """Return the embeddings [1, front + rows * columns, width] of `layer`, with front <= `config.front`."""
        return None

    def tables(self, layer: int, grids: Grids) -> Tensor | None:
        """Return `table` for each image of a batch of strips, [batch, front + tokens, width]."""
        return None

    def tokens(self, layer: int | None, grid: Grid | Grids) -> Tensor | None:
        """Return values to add to all tokens [1, prefix + rows * columns, width]; layer None is the encoder's input.

        For strips they are [batch, prefix + tokens, width].
        """
        if (layer is None) != self.at_input:
            return None
        copy = (layer or 0) % self.copies
        if isinstance(grid, Grids):
            table, count = self.tables(copy, grid), grid.tokens
        else:
            table, count = self.table(copy, grid), grid[0] * grid[1]
        if table is None:
            return None
        missing = self.config.prefix + count - table.shape[1]
        if not missing:
            return table
        # zeros for the tokens in front without a position: before the registers' rows if they have some, else after
        front = 0 if self.config.origin.register_positions else table.shape[1] - count
        zeros = table.new_zeros(table.shape[0], missing, table.shape[2])
        return torch.cat([table[:, :front], zeros, table[:, front:]], dim=1)

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor | None:
        """Return values to add to the attention logits [batch or 1, heads, n, tokens]; None: nothing.

        query [batch, heads, n, features] holds the scaled queries of the first n tokens, often of all tokens. places
        [tokens - prefix] or [batch, tokens - prefix] are the raster indices of the grid tokens, which come last.
        """
        return None

    def _of_queries(self, layer: int, places: Tensor, grid: Grid) -> Bias:
        """Return `logits` of a layer for these places, as a function of the queries.

        What depends on the number of the layer and on the grid is computed here, outside of compiled blocks: the
        function holds tensors alone, so that one graph serves all layers and all grids.
        """
        return partial(self.logits, layer, places=places, grid=grid)

    def rotation(self, layer: int, places: Tensor, grid: Grid) -> Rotation | None:
        """Return the rotation of queries and keys, None without rotary positions. `places` are those of `logits`."""
        return None if self.rotary is None else self.rotary(layer, places, grid)


class AtLayer:
    """The positions at one layer, as attention takes them: a call gives `logits` for its queries; see `rotation`."""

    _rotation: Rotation | None
    _logits: Bias

    def __init__(self, positions: Positions, layer: int, places: Any, grid: Any) -> None:
        self.places, self.grid = places, grid
        if isinstance(grid, Queried):
            before = AtLayer(positions, layer, places, grid.grid)
            self._rotation = None if before._rotation is None else before._rotation.extended(grid.queries)
            self._logits = partial(_with_queries, before._logits, grid)
            return
        if isinstance(grid, Grids):  # the kinds that go with strips add nothing else
            self._rotation, self._logits = None, Unseen(grid, positions.config.prefix)
            return
        self._rotation = positions.rotation(layer, places, grid)
        if "forward" in vars(positions):  # if it was replaced or has hooks, they see the queries
            self._logits = partial(positions, layer, places=places, grid=grid)
        elif is_own_part(positions):  # which may override `logits` alone
            self._logits = partial(positions.logits, layer, places=places, grid=grid)
        else:
            self._logits = positions._of_queries(layer, places, grid)

    def __call__(self, query: Tensor) -> Tensor | None:
        """See `Positions.logits`."""
        return self._logits(query)

    def rotation(self) -> Rotation | None:
        """See `Positions.rotation`."""
        return self._rotation


def _with_queries(before: Bias, grid: Queried, query: Tensor) -> Tensor | None:
    """Return `Positions.logits` with zeros for the queries behind the grid, and without what is hidden from them."""
    count = grid.queries
    added = before(query[:, :, :-count])
    if added is not None:
        added = F.pad(added, (0, count, 0, count))
    if grid.hidden is None:
        return added
    front = query.shape[2] - count - grid.hidden.shape[-1]
    hidden = F.pad(grid.hidden, (front, count, query.shape[2] - count, 0))[:, None].to(query.dtype) * UNSEEN
    return hidden.expand(-1, query.shape[1], -1, -1) if added is None else added + hidden


def rotation_of(bias: Bias | None) -> Rotation | None:
    """Return the rotation of queries and keys that comes with a bias, None without rotary positions."""
    rotation = getattr(bias, "rotation", None)
    return None if rotation is None else rotation()


def rotated(qkv: Tensor, bias: Bias | None) -> Tensor:
    """Rotate queries and keys of qkv [batch, tokens, 3, heads, features] by the rotation of `bias`, if it has one."""
    rotation = rotation_of(bias)
    return qkv if rotation is None else torch.cat([rotation.turn(qkv[:, :, :2]), qkv[:, :, 2:]], dim=2)


class Learned1D(Positions):
    """One embedding per patch in raster order: the default of the paper (Eq. 1, E_pos)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        self.embedding = nn.Parameter(torch.zeros(self.copies, config.front + rows * columns, config.width))
        self.resampler = Resampler(config.grid, config.origin.resize_mode) if config.native else None

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        return resize_positions(self.embedding[layer, None], self.config.grid, grid, self.config.origin.resize_mode)

    def tables(self, layer: int, grids: Grids) -> Tensor:
        """See `Positions.tables`."""
        assert self.resampler is not None
        table, front = self.embedding[layer], self.config.front
        grid = self.resampler(table[front:], grids)
        return torch.cat([table[:front].expand(grid.shape[0], -1, -1), grid], dim=1)


class Learned2D(Positions):
    """Half of the features depend on the row, half on the column (D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (rows, columns), half = config.grid, config.width // 2
        self.rows = nn.Parameter(torch.zeros(self.copies, rows, half))
        self.columns = nn.Parameter(torch.zeros(self.copies, columns, half))
        self.front = nn.Parameter(torch.zeros(self.copies, config.front, config.width))
        self.resampler = Resampler(config.grid, "official") if config.native else None  # as `resize_line` does

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        x = repeat(resize_line(self.columns[layer, None], grid[1]), "1 w d -> 1 (h w) d", h=grid[0])
        y = repeat(resize_line(self.rows[layer, None], grid[0]), "1 h d -> 1 (h w) d", w=grid[1])
        return torch.cat([self.front[layer, None], torch.cat([x, y], dim=2)], dim=1)

    def tables(self, layer: int, grids: Grids) -> Tensor:
        """See `Positions.tables`."""
        assert self.resampler is not None
        y, x = self.resampler.lines(self.rows[layer], self.columns[layer], grids)
        return torch.cat([self.front[layer].expand(x.shape[0], -1, -1), torch.cat([x, y], dim=2)], dim=1)


class SinCos(Positions):
    """Fixed sines and cosines of row and column (MoCo v3, MAE, big_vision), without parameters."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        # an empty buffer that moves with the model
        self.register_buffer("where", torch.empty(0, device=device_of_constants()), persistent=False)
        self.where: Tensor

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        width = self.config.width
        divisor = width // 4 if self.config.origin.sines == "mae" else None
        if torch.compiler.is_compiling():  # a tensor of a graph must not outlive it
            return sincos_2d(grid, width, divisor)[None].to(self.where)
        return sincos_table(grid, width, divisor, self.where.device, self.where.dtype)

    def tables(self, layer: int, grids: Grids) -> Tensor:
        """See `Positions.tables`: a place has the same values in every grid."""
        side = longest_side(grids.tokens)
        row, column = grids.places()
        return self.table(layer, (side, side))[0][row * side + column]


class Relative(Positions):
    """1-D relative attention: each raster offset p_q - p_k has an embedding that the query attends to (D.4).

    The result is added to the logits. Every layer has its own table unless `place` is "shared". Tokens in front of the
    grid have no offset and get no bias.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        distances, features = 2 * config.grid[0] * config.grid[1] - 1, config.width // config.heads
        self.embedding = nn.Parameter(torch.zeros(self.copies, distances, features))

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor | None:
        """See `Positions.logits`."""
        return self._of_queries(layer, places, grid)(query)

    def _of_queries(self, layer: int, places: Tensor, grid: Grid) -> Bias:
        """See `Positions._of_queries`."""
        count = grid[0] * grid[1]
        keys = resize_line(self.embedding[layer % self.copies, None], 2 * count - 1)[0]
        offsets = places[..., :, None] - places[..., None, :] + count - 1
        return partial(_by_offset, self.config.prefix, keys, offsets[:, None] if offsets.dim() == 3 else offsets)


def _by_offset(front: int, keys: Tensor, offsets: Tensor, query: Tensor) -> Tensor | None:
    """Return the product of each query [batch, heads, n, features] with the key of its offset to each token.

    keys [2 * grid tokens - 1, features] belong to the possible offsets. offsets [(batch, 1,) tokens, tokens] count from
    0; the `front` tokens before them have none.
    """
    if query.shape[2] <= front:
        return None
    by_offset = query[:, :, front:] @ keys.to(query.dtype).T  # [batch, heads, tokens, offsets]
    offsets = offsets[..., : by_offset.shape[2], :]
    bias = by_offset.gather(-1, offsets.expand(*by_offset.shape[:3], -1))
    return F.pad(bias, (front, 0, front, 0))


class RelativeBias(Positions):
    """BEiT's relative positions: each offset in rows and columns has a number for each head, added to its logits.

    `bias` is [tables, (2h - 1)(2w - 1) + 3, heads] for a grid of h x w. It has one row for each offset of query minus
    key: the vertical offset first, both counted from the most negative. Three rows follow: for the class token's
    attention to the grid, for the grid's attention to the class token, and for the class token's attention to itself.
    Every layer has its own table unless `place` is "shared".
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        offsets = (2 * rows - 1) * (2 * columns - 1)
        self.bias = nn.Parameter(torch.zeros(self.copies, offsets + 3, config.heads))

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor:
        """See `Positions.logits`."""
        return self._of_queries(layer, places, grid)(query)  # type: ignore[return-value]

    def _of_queries(self, layer: int, places: Tensor, grid: Grid) -> Bias:
        """See `Positions._of_queries`."""
        table = self.bias[layer % self.copies, None]
        table = resize_bias(table, self.config.grid, grid, self.config.origin.resize_mode)[0]
        return partial(_of_rows, table, bias_rows(places, grid, class_token=self.config.has_class_token))


def _of_rows(table: Tensor, rows: Tensor, query: Tensor) -> Tensor:
    """Return the biases [batch or 1, heads, n, tokens] of n queries: `rows` [(batch,) tokens, tokens] of the table."""
    bias = rearrange(F.embedding(rows[..., : query.shape[2], :], table), "... q k h -> ... h q k")
    return bias if rows.dim() == 3 else bias[None]


def bias_rows(places: Tensor, grid: Grid, *, class_token: bool) -> Tensor:
    """Return the row of `RelativeBias.bias` for each pair of tokens, [..., query, key].

    places [..., tokens] are raster indices in `grid`. With `class_token` there is one more token in front.
    """
    (rows, columns), span = grid, 2 * grid[1] - 1
    line = places + places // columns * (span - columns)  # a difference of two is dy * span + dx
    table = line[..., :, None] - line[..., None, :] + (rows - 1) * span + columns - 1
    if not class_token:
        return table
    last = places.new_zeros(()) + (2 * rows - 1) * span  # a tensor, so that a trace leaves it open
    table = F.pad(table, (1, 0, 1, 0))
    table[..., 0, :] = last
    table[..., 1:, 0] = last + 1
    table[..., 0, 0] = last + 2
    return table


def sincos_2d(grid: Grid, width: int, divisor: int | None = None) -> Tensor:
    """Return sines and cosines of the column, then of the row, [rows * columns, width]; 4 must divide `width`.

    Each takes a quarter of the features. The frequencies are 10000^(-i / divisor) for i from 0. The default of
    `divisor`, width / 4 - 1, is that of MoCo v3 and big_vision.
    """
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (divisor or max(width // 4 - 1, 1)))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    angles = [rearrange(axis, "h w -> (h w) 1") * frequencies for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


@lru_cache(maxsize=8)
def sincos_table(grid: Grid, width: int, divisor: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `sincos_2d` as [1, rows * columns, width] on `device`. The tables of the last few grids are kept there."""
    with torch.inference_mode(False):  # training may use a table that evaluation made
        return sincos_2d(grid, width, divisor)[None].to(device, dtype)


KINDS: dict[str, type[Positions]] = {
    "none": Positions,
    "1d": Learned1D,
    "2d": Learned2D,
    "sincos": SinCos,
    "relative": Relative,
    "relative_bias": RelativeBias,
}


def build_positions(config: ViTConfig) -> Positions:
    """Return the position embeddings of a config."""
    positions: Positions = build_part(config.positions, config, KINDS, Positions)
    return positions
