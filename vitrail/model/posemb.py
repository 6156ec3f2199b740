"""Position embeddings: {none, 1-D, 2-D, relative, sincos} x {at the input, at every layer, shared} (Table 8).

Two methods cover all of them: `tokens` gives what is added to the tokens, `logits` what is added to the
attention logits. Positions of grid tokens are counted in raster order; of the tokens in front, only the class
token has one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from vitrail.model.config import ViTConfig
from vitrail.model.resize import resize_line, resize_positions

Grid = tuple[int, int]


class Positions(nn.Module):
    """No position information: the image is a bag of patches (D.4). Base of the other kinds."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.copies = config.depth if config.place == "every" else 1
        self.at_input = config.place == "input"

    def table(self, layer: int, grid: Grid) -> Tensor | None:
        """Embeddings [1, front + rows * columns, width] used at `layer`, front = 1 for a class token."""
        return None

    def tokens(self, layer: int | None, grid: Grid) -> Tensor | None:
        """What to add to all tokens [1, prefix + rows * columns, width]; layer None is the encoder's input."""
        if (layer is None) != self.at_input:
            return None
        table = self.table((layer or 0) % self.copies, grid)
        if table is None:
            return None
        missing = self.config.prefix + grid[0] * grid[1] - table.shape[1]
        if not missing:
            return table
        # registers, and a class token without a position, sit in front of the grid's tokens and get nothing
        front = table.shape[1] - grid[0] * grid[1]
        return torch.cat([table[:, :front], table.new_zeros(1, missing, table.shape[2]), table[:, front:]], dim=1)

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor | None:
        """What to add to the attention logits [batch, heads, tokens, tokens].

        query [batch, heads, tokens, features] is already scaled; places [tokens] or [batch, tokens] gives the
        raster index of the grid tokens, which are the last ones.
        """
        return None


class Learned1D(Positions):
    """One embedding per patch in raster order: the default of the paper (Eq. 1, E_pos)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        rows, columns = config.grid
        front = int(config.pool == "cls" and config.cls_position)
        self.embedding = nn.Parameter(torch.empty(self.copies, front + rows * columns, config.width))

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        return resize_positions(self.embedding[layer, None], self.config.grid, grid, self.config.resize_mode)


class Learned2D(Positions):
    """Half of the features from the row, half from the column (D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        (rows, columns), half = config.grid, config.width // 2
        self.rows = nn.Parameter(torch.empty(self.copies, rows, half))
        self.columns = nn.Parameter(torch.empty(self.copies, columns, half))
        front = int(config.pool == "cls" and config.cls_position)
        self.front = nn.Parameter(torch.empty(self.copies, front, config.width))

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        x = repeat(resize_line(self.columns[layer, None], grid[1]), "1 w d -> 1 (h w) d", h=grid[0])
        y = repeat(resize_line(self.rows[layer, None], grid[0]), "1 h d -> 1 (h w) d", w=grid[1])
        return torch.cat([self.front[layer, None], torch.cat([x, y], dim=2)], dim=1)


class SinCos(Positions):
    """Fixed sines and cosines of row and column (MoCo v3, MAE, big_vision): nothing to learn."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.register_buffer("where", torch.empty(0), persistent=False)  # follows the model
        self.where: Tensor

    def table(self, layer: int, grid: Grid) -> Tensor:
        """See `Positions.table`."""
        return sincos_2d(grid, self.config.width)[None].to(self.where)


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

    def logits(self, layer: int, query: Tensor, places: Tensor, grid: Grid) -> Tensor:
        """See `Positions.logits`."""
        count = grid[0] * grid[1]
        keys = resize_line(self.embedding[layer % self.copies, None], 2 * count - 1)[0].to(query.dtype)
        front = query.shape[2] - places.shape[-1]
        by_offset = query[:, :, front:] @ keys.T  # [batch, heads, tokens, offsets]
        offsets = places[..., :, None] - places[..., None, :] + count - 1
        if offsets.dim() == 3:
            offsets = offsets[:, None]
        bias = by_offset.gather(-1, offsets.expand(*by_offset.shape[:3], -1))
        return F.pad(bias, (front, 0, front, 0))


def sincos_2d(grid: Grid, width: int, temperature: float = 10_000.0) -> Tensor:
    """Sines and cosines of the column, then of the row, a quarter of the features each.

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
}


def build_positions(config: ViTConfig) -> Positions:
    """Return the positions a config asks for."""
    return KINDS[config.positions](config)
