"""A tokenizer of images: it gives each patch one of `codes` visual tokens. It is trained on the user's own images.

An encoder of convolutions computes a vector for each patch. The nearest code of a codebook replaces it (van den Oord et
al. 2017, as in BEiT v2). A decoder of convolutions predicts the image from the codes. The encoder gets the gradients of
the codes (straight-through). BEiT takes its tokenizer from DALL-E, which samples codes by a Gumbel
softmax; trained for minutes instead of weeks, that leaves most codes unused and little to predict.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail import world
from vitrail.config import merge
from vitrail.errors import UsageError, WeightsError
from vitrail.files import parse_json, replacing
from vitrail.model.stem import hmlp_stages
from vitrail.objective.base import Prepared
from vitrail.objective.self_supervised import SelfSupervised, require_pixels, to_pixels
from vitrail.objective.settings import Tokenizer
from vitrail.ranges import LARGEST_SIDE
from vitrail.words import shown

FILE = "tokenizer.safetensors"
_PLACES = ("", "best", "last", "model/best", "model/last")


class _Residual(nn.Module):
    """Two 3x3 convolutions around a ReLU, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.layers(maps)


class ImageTokenizer(nn.Module):
    """uint8 images [batch, 3, height, width] <-> codes, int64 [batch, patches], in raster order.

    The strides of the convolutions are the prime factors of the patch size, or 4 first if it divides the patch size.
    """

    def __init__(self, config: Tokenizer, patch: int) -> None:
        super().__init__()
        self.config = config
        self.patch = patch
        stages, width = hmlp_stages(patch), config.width
        layers: list[nn.Module] = []
        for stage, factor in enumerate(stages):
            layers += [nn.Conv2d(3 if stage == 0 else width, width, factor, factor), nn.ReLU()]
        layers += [_Residual(width) for _ in range(config.depth)]
        self.encoder = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, config.features, 1))
        self.codebook = Codebook(config.codes, config.features, config.decay)
        upwards = [nn.ConvTranspose2d(width, width, factor, factor) for factor in reversed(stages)]
        residuals = [_Residual(width) for _ in range(config.depth)]
        last = nn.Conv2d(width, 3, 1)  # the order of creation decides the initial values
        layers = [nn.Conv2d(config.features, width, 1), *residuals]
        for layer in (*upwards, last):
            layers += [nn.ReLU(), layer]
        self.decoder = nn.Sequential(*layers)

    def find(self, images: Tensor) -> Tensor:
        """Return the encoder's vectors [batch, rows, columns, features], each of mean 0 and variance 1."""
        if images.shape[-2] % self.patch or images.shape[-1] % self.patch:
            raise UsageError(
                f"this tokenizer gives each patch of {self.patch} pixels a token: images of {images.shape[-2]} x "
                f"{images.shape[-1]} pixels are not whole patches"
            )
        vectors = self.encoder(to_unit_range(images)).movedim(1, -1)
        return F.layer_norm(vectors, vectors.shape[-1:])  # otherwise one feature, brightness, dominates all others

    @torch.no_grad()
    def codes(self, images: Tensor) -> Tensor:
        """Return the tokens of images, int64 [batch, patches]."""
        return self.codebook.nearest(self.find(images)).flatten(1)

    @torch.no_grad()
    def pictures(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return uint8 images [batch, 3, height, width] for tokens [batch, patches]."""
        return from_unit_range(self.paint(self.codebook.vectors[codes.unflatten(1, grid)]))

    def paint(self, vectors: Tensor) -> Tensor:
        """Return pixels in -1..1 [batch, 3, height, width] for vectors [batch, rows, columns, features]."""
        return self.decoder(vectors.movedim(-1, 1)).float()

    def save(self, folder: Path) -> None:
        """Write `tokenizer.safetensors` into `folder`, and replace an older file atomically."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        header = {"tokenizer": json.dumps({"patch": self.patch, **asdict(self.config)})}
        with replacing(folder / FILE) as temporary:
            save_file(tensors, temporary, metadata=header)


def to_unit_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1."""
    require_pixels(images, "a visual token")
    return images.float() / 127.5 - 1


def from_unit_range(values: Tensor) -> Tensor:
    """float -1..1 -> uint8 0..255."""
    return to_pixels((values + 1) * 127.5)


def load_tokenizer(source: str | Path) -> ImageTokenizer:
    """Return the tokenizer in a file, a model folder or a run folder, in evaluation mode and frozen.

    Raises UsageError if `source` is empty, WeightsError if there is no tokenizer or it cannot be read.
    """
    if not str(source):
        raise UsageError(
            "objective beit needs a tokenizer: train one on these images first (vitrail train DIR --recipe tokenizer), "
            "then set objective.tokenizer to its run folder"
        )
    places = (Path(source), *(Path(source) / place / FILE for place in _PLACES))
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise WeightsError(f"there is no tokenizer at {source}: give a run folder or a {FILE}")
    try:
        with safe_open(file, framework="pt") as opened:
            config, patch = _config((opened.metadata() or {})["tokenizer"])
            with torch.device("meta"):
                needed = {name: tuple(like.shape) for name, like in ImageTokenizer(config, patch).state_dict().items()}
            stored = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if wrong := sorted(name for name in needed | stored if needed.get(name) != stored.get(name)):
                shape, valid = stored.get(wrong[0]), needed.get(wrong[0])
                raise ValueError(f"{shown(wrong[0])} has the shape {shape}; its settings require {valid}")
            tokenizer = ImageTokenizer(config, patch)
            tokenizer.load_state_dict({name: opened.get_tensor(name) for name in needed})
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError, UsageError) as error:
        raise WeightsError(f"{file} is not a tokenizer of vitrail: {error}") from error
    return tokenizer.eval().requires_grad_(False)


def _config(text: str) -> tuple[Tokenizer, int]:
    """Return the settings in a file's header, and the patch. Raises ValueError or UsageError for invalid ones."""
    values = parse_json(text)
    patch = values.pop("patch", None) if isinstance(values, dict) else None
    if not isinstance(patch, int) or not 1 <= patch <= LARGEST_SIDE:
        raise ValueError(f"patch is {shown(patch)}; valid: 1 to {LARGEST_SIDE:,}")
    return merge(Tokenizer(), values), patch


class TokenizerObjective(SelfSupervised):
    """Train a tokenizer. The loss is the mean squared error of pixels in -1..1 plus `commitment` times that of codes.

    In evaluation the loss is the error of the pixels alone. Metrics: "use", the evenness of the codes' use
    (`Codebook.use`).
    """

    model: ImageTokenizer

    def __init__(self, model: ImageTokenizer) -> None:
        super().__init__(model)
        self.config = model.config
        self._tally: Tensor | None = None
        """Sums over the micro-batches of this step so far (`Codebook.tally`)."""

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Start, or restart, a step."""
        self._tally = None
        return prepared

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        book, vectors = self.model.codebook, self.model.find(prepared.images).float()
        codes = book.nearest(vectors)
        chosen = book.vectors[codes]
        painted = self.model.paint(vectors + (chosen - vectors).detach())
        losses = (painted - to_unit_range(prepared.images)).square().mean((1, 2, 3))
        if self.training:
            losses = losses + self.config.commitment * (vectors - chosen).square().mean((1, 2, 3))
            tally = book.tally(vectors, codes)
            self._tally = tally if self._tally is None else self._tally + tally
        return losses.sum(), len(prepared), {"use": book.use * len(prepared)}

    @torch.no_grad()
    def after_step(self, finite: Tensor) -> None:
        """Move each code towards the mean of the vectors that it replaced."""
        if self._tally is not None:
            self.model.codebook.move(world.sum_(self._tally), finite)
            self._tally = None

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. No patch is hidden; in place of the mask each token is drawn as a shade of grey."""
        images = prepared.images
        codes = self.model.codebook.nearest(self.model.find(images))
        shades = (codes * 255 // (self.config.codes - 1)).to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
        shades = shades.repeat_interleave(self.model.patch, -2).repeat_interleave(self.model.patch, -1)
        pictures = from_unit_range(self.model.paint(self.model.codebook.vectors[codes]))
        return {"input": images, "tokens": shades, "prediction": pictures, "target": images}


UNUSED = 0.05
"""A code is unused if it has less than this share of the vectors that the average code has."""
NEXT = 7919
"""Rows of a table of noise between the first ones of two updates: a prime number."""


class Codebook(nn.Module):
    """Replace each vector by its nearest code, the mean of its vectors (van den Oord et al. 2017, A.1).

    Codes get no gradients: each moves to the moving average of the vectors that it is nearest to. A code with hardly
    any vectors moves next to a code with many, and they share these. This depends only on the averages, so it is the
    same in all processes. `vectors` are [codes, features], and `counts` [codes] the moving averages of the number of
    vectors per code.
    """

    vectors: Tensor
    counts: Tensor
    updates: Tensor
    normal: Tensor

    def __init__(self, codes: int, features: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("vectors", torch.randn(codes, features))
        self.register_buffer("counts", torch.zeros(codes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        table = torch.randn(codes, features, generator=torch.Generator().manual_seed(0), device="cpu")
        self.register_buffer("normal", table, persistent=False)

    def nearest(self, features: Tensor) -> Tensor:
        """Return the codes, int64 [...], nearest to vectors [..., features], in float32 whatever their precision."""
        with torch.autocast(features.device.type, enabled=False):
            rows = features.float().flatten(0, -2)
            distances = torch.addmm(self.vectors.square().sum(1), rows, self.vectors.T, alpha=-2)
            return distances.argmin(1).view(features.shape[:-1])

    @property
    def use(self) -> Tensor:
        """The perplexity of the codes divided by their number: 1 if all codes have equally many vectors."""
        shares = self.counts / self.counts.sum().clamp(min=torch.finfo(self.counts.dtype).tiny)
        return torch.special.entr(shares).sum().exp() / len(shares)

    @torch.no_grad()
    def tally(self, features: Tensor, codes: Tensor) -> Tensor:
        """Return the input of `move` [codes, features + 2]: sum of vectors, number, sum of squared distances per code.

        found: [..., features]; codes: the nearest code of each. The tallies of micro-batches can be added.
        """
        rows = features.float().flatten(0, -2)
        far = (rows - self.vectors[codes.flatten()]).square().sum(1, keepdim=True)
        rows = torch.cat([rows, torch.ones_like(far), far], 1)
        rows = rows if rows.device.type == "mps" else rows.double()  # mps has no float64
        return rows.new_zeros(len(self.vectors), rows.shape[1]).index_add_(0, codes.flatten(), rows)

    @torch.no_grad()
    def move(self, tally: Tensor, finite: Tensor | None = None) -> None:
        """Move every code towards the mean of its vectors in a step; `tally` is the tally of the whole step.

        If `finite`, a bool scalar on the device, is false, nothing changes. Nothing here waits for an accelerator.
        """
        sums, numbers, far = tally.split([self.vectors.shape[1], 1, 1], dim=1)
        decay = self.decay * (self.updates > 0).to(tally.dtype)
        new = (1 - decay).to(self.counts.dtype)
        total = decay * self.counts[:, None] * self.vectors + (1 - decay) * sums.to(self.vectors.dtype)
        counts = self.counts.lerp(numbers[:, 0].to(self.counts.dtype), new)
        used = counts > torch.finfo(counts.dtype).tiny
        vectors = torch.where(used[:, None], total / counts[:, None], self.vectors)
        vectors, counts = self._revived(vectors, counts, (far.sum() / (numbers.sum() * self.vectors.shape[1])).sqrt())
        finite = torch.ones_like(used[0]) if finite is None else finite
        for buffer, moved in ((self.vectors, vectors), (self.counts, counts), (self.updates, self.updates + 1)):
            buffer.copy_(torch.where(finite, moved, buffer))

    def _revived(self, vectors: Tensor, counts: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return them with each unused code next to a much used one, at a distance of about `spread` in every feature.

        The least used code goes to the most used one, the next to the next, and the two share their count.
        """
        order, codes = counts.argsort(stable=True), len(counts)
        unused = (counts < UNUSED * counts.mean()).sum()
        if unused.device.type == "cpu" and not unused:
            return vectors, counts
        place = torch.arange(codes, device=counts.device)
        moves = place < unused
        parents = order[codes - 1 - place % (codes - unused).clamp(min=1)]
        children = counts.new_zeros(codes).index_add_(0, parents, moves.to(counts.dtype))
        shares = counts / (1 + children)
        near = vectors[parents] + spread * self._noise(unused)
        vectors = vectors.index_copy(0, order, torch.where(moves[:, None], near, vectors[order]))
        return vectors, counts.index_copy(0, order, torch.where(moves, shares[parents], shares[order]))

    def _noise(self, rows: Tensor) -> Tensor:
        """Return standard normal numbers [codes, features], a function of `updates`. Only `rows` rows will be used."""
        if rows.device.type != "cpu":  # a fixed table, of which each update takes the rows from another place on
            starts = torch.arange(len(self.normal), device=self.normal.device) + NEXT * self.updates
            return self.normal[starts % len(self.normal)]
        generator = torch.Generator().manual_seed(int(self.updates))
        drawn = torch.randn(int(rows), self.vectors.shape[1], generator=generator)
        return F.pad(drawn, (0, 0, 0, len(self.vectors) - len(drawn)))
