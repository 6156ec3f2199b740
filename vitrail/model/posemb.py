"""Position embeddings: {none, 1-D, 2-D, relative, sincos} x {at the input, at every layer, shared} (Table 8); BEiT's.

Two methods cover all of them: `tokens` gives what is added to the tokens, `logits` what is added to the
attention logits. Positions of grid tokens are counted in raster order; which of the tokens in front have one is
for the config to say.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vitrail.model.layers import device_of_constants
from vitrail.model.resize import resize_bias, resize_line, resize_positions
from vitrail.model.variants import ViTConfig

Grid = tuple[int, int]


class Positions(nn.Module):
    """No position information: the image is a bag of patches (D.4). Base of the other kinds."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.copies = config.depth if config.place == "every" else 1
        self.at_input = config.place == "input"

    def table(self, layer: int, grid: Grid) -> Tensor | None:
        """Return the embeddings [1, front + rows * columns, width] of `layer`, with front <= `config.front`."""
        return None

    def tokens(self, layer: int | None, grid: Grid) -> Tensor | None:
        """Return values to add to all tokens [1, prefix + rows * columns, width]; layer None is the encoder's input."""
        if (layer is None) != self.at_input:
            return None
        table = self.table((layer or 0) % self.copies, grid)
        if table is None:
            return None
        missing = self.config.prefix + grid[0] * grid[1] - table.shape[1]
        if not missing:
            return table
        # tokens in front without a position get nothing; registers come last of them, so with rows they come after
        front = 0 if self.config.register_positions else table.shape[1] - grid[0] * grid[1]
        return torch.cat([table[:, :front], table.new_zeros(1, missing, table.shape[2]), table[:, front:]], dim=1)

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor | None:
        """Return values to add to the attention logits [batch or 1, heads, n, tokens]; None: nothing.

        query [batch, heads, n, features] is already scaled and that of the first n tokens, often all; places
        [tokens - prefix] or [batch, tokens - prefix] gives the raster index of the grid tokens, the last ones.
        """
        return None


class Learned1D(Positions):
    """One embedding per patch in raster order: the default of the paper (Eq. 1, E_pos)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        self.embedding = nn.Parameter(torch.empty(self.copies, config.front + rows * columns, config.width))

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        return resize_positions(self.embedding[layer, None], self.config.grid, grid, self.config.resize_mode)


class Learned2D(Positions):
    """Half of the features depend on the row, half on the column (D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (rows, columns), half = config.grid, config.width // 2
        self.rows = nn.Parameter(torch.empty(self.copies, rows, half))
        self.columns = nn.Parameter(torch.empty(self.copies, columns, half))
        self.front = nn.Parameter(torch.empty(self.copies, config.front, config.width))

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        x = repeat(resize_line(self.columns[layer, None], grid[1]), "1 w d -> 1 (h w) d", h=grid[0])
        y = repeat(resize_line(self.rows[layer, None], grid[0]), "1 h d -> 1 (h w) d", w=grid[1])
        return torch.cat([self.front[layer, None], torch.cat([x, y], dim=2)], dim=1)


class SinCos(Positions):
    """Fixed sines and cosines of row and column (MoCo v3, MAE, big_vision), without parameters."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.register_buffer(
            "where", torch.empty(0, device=device_of_constants()), persistent=False
        )  # follows the model
        self.where: Tensor
        self._tables: dict[tuple[Grid, torch.device, torch.dtype], Tensor] = {}

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`; the tables of the last few grids are cached."""
        if torch.compiler.is_compiling():  # a tensor of a graph must not outlive it
            return sincos_2d(grid, self.config.width)[None].to(self.where)
        key = (grid, self.where.device, self.where.dtype)
        if key not in self._tables:
            if len(self._tables) == 8:
                self._tables.clear()
            with torch.inference_mode(False):  # training may use a table that evaluation made
                self._tables[key] = sincos_2d(grid, self.config.width)[None].to(self.where)
        return self._tables[key]


class Relative(Positions):
    """1-D relative attention: each raster offset p_q - p_k has an embedding that the query attends to (D.4).

    The result biases the content logits. It lives in the attention, so every layer has its own table unless
    `place` is "shared"; tokens in front of the grid have no offset and get no bias.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.copies = 1 if config.place == "shared" else config.depth
        rows, columns = config.grid
        self.embedding = nn.Parameter(torch.empty(self.copies, 2 * rows * columns - 1, config.width // config.heads))

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor | None:
        """See `Positions.logits`."""
        front = self.config.prefix
        if query.shape[2] <= front:
            return None
        count = grid[0] * grid[1]
        keys = resize_line(self.embedding[layer % self.copies, None], 2 * count - 1)[0].to(query.dtype)
        by_offset = query[:, :, front:] @ keys.T  # [batch, heads, tokens, offsets]
        asking = places[..., : by_offset.shape[2]]
        offsets = asking[..., :, None] - places[..., None, :] + count - 1
        if offsets.dim() == 3:
            offsets = offsets[:, None]
        bias = by_offset.gather(-1, offsets.expand(*by_offset.shape[:3], -1))
        return F.pad(bias, (front, 0, front, 0))


class RelativeBias(Positions):
    """BEiT's relative positions: each offset in rows and columns has a number for each head, added to its logits.

    `bias` [copies, (2h - 1)(2w - 1) + 3, heads] for a grid of h x w, with one row for each offset of query
    minus key, down first, both counted from the most negative; then one for the class token's attention to the
    grid, one for the grid's to it, and one for its own to itself. Every layer has its own table unless `place`
    is "shared".
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.copies = 1 if config.place == "shared" else config.depth
        rows, columns = config.grid
        self.bias = nn.Parameter(torch.empty(self.copies, (2 * rows - 1) * (2 * columns - 1) + 3, config.heads))

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor:
        """See `Positions.logits`."""
        table = self.bias[layer % self.copies, None]
        table = resize_bias(table, self.config.grid, grid, self.config.resize_mode)[0]
        rows = bias_rows(places, grid, class_token=self.config.has_class_token)[..., : query.shape[2], :]
        bias = F.embedding(rows, table).movedim(-1, -3)
        return bias if places.dim() == 2 else bias[None]


def bias_rows(places: Tensor, grid: Grid, *, class_token: bool) -> Tensor:
    """Return the row of `RelativeBias.bias` for each pair of tokens, [..., query, key].

    places [..., tokens] are raster indices in `grid`; with `class_token` there is one token more in front.
    """
    (rows, columns), span = grid, 2 * grid[1] - 1
    line = places // columns * span + places % columns  # a difference of two is dy * span + dx
    table = line[..., :, None] - line[..., None, :] + (rows - 1) * span + columns - 1
    if not class_token:
        return table
    last = (2 * rows - 1) * span
    table = F.pad(table, (1, 0, 1, 0), value=last)
    table[..., 1:, 0] = last + 1
    table[..., 0, 0] = last + 2
    return table


def sincos_2d(grid: Grid, width: int, temperature: float = 10_000.0) -> Tensor:
    """Return sines and cosines of the column, then of the row, each for a quarter of the features.

    Returns [rows * columns, width], as MoCo v3 and big_vision lay them out; `width` must be divisible by 4.
    """
    frequencies = temperature ** -(torch.arange(width // 4, dtype=torch.float64) / max(width // 4 - 1, 1))
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    angles = [rearrange(axis, "h w -> (h w) 1") * frequencies for axis in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


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
    return KINDS[config.positions](config)
