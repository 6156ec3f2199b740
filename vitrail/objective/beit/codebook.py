"""A codebook replaces each vector by its nearest code, the mean of its vectors (van den Oord et al. 2017, A.1).

Codes get no gradients: each moves to the moving average of the vectors that it is nearest to. A code with hardly any
vectors moves next to a code with many, and they share these. This depends only on the averages, so it is the same in
all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNUSED = 0.05
"""A code is unused if it has less than this share of the vectors that the average code has."""


class Codebook(nn.Module):
    """`vectors` [codes, features] and `counts` [codes]: moving averages of the number of vectors per code."""

    vectors: Tensor
    counts: Tensor
    updates: Tensor

    def __init__(self, codes: int, features: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("vectors", torch.randn(codes, features))
        self.register_buffer("counts", torch.zeros(codes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def nearest(self, found: Tensor) -> Tensor:
        """Return the codes, int64 [...], nearest to vectors [..., features], in float32 whatever their precision."""
        with torch.autocast(found.device.type, enabled=False):
            rows = found.float().flatten(0, -2)
            distances = torch.addmm(self.vectors.square().sum(1), rows, self.vectors.T, alpha=-2)
            return distances.argmin(1).view(found.shape[:-1])

    @property
    def use(self) -> Tensor:
        """The perplexity of the codes divided by their number: 1 if all codes have equally many vectors."""
        shares = self.counts / self.counts.sum().clamp(min=torch.finfo(self.counts.dtype).tiny)
        return torch.special.entr(shares).sum().exp() / len(shares)

    @torch.no_grad()
    def tally(self, found: Tensor, codes: Tensor) -> Tensor:
        """Return the input of `move` [codes, features + 2]: sum of vectors, number, sum of squared distances per code.

        found: [..., features]; codes: the nearest code of each. The tallies of micro-batches can be added.
        """
        rows = found.float().flatten(0, -2)
        far = (rows - self.vectors[codes.flatten()]).square().sum(1, keepdim=True)
        rows = torch.cat([rows, torch.ones_like(far), far], 1)
        rows = rows if rows.device.type == "mps" else rows.double()  # mps has no float64
        return rows.new_zeros(len(self.vectors), rows.shape[1]).index_add_(0, codes.flatten(), rows)

    @torch.no_grad()
    def move(self, tally: Tensor) -> None:
        """Move every code towards the mean of its vectors in a step; `tally` is the tally of the whole step."""
        sums, numbers, far = tally.split([self.vectors.shape[1], 1, 1], dim=1)
        decay = self.decay if self.updates else 0.0
        total = decay * self.counts[:, None] * self.vectors + (1 - decay) * sums.to(self.vectors.dtype)
        self.counts.lerp_(numbers[:, 0].to(self.counts.dtype), 1 - decay)
        used = self.counts > torch.finfo(self.counts.dtype).tiny
        self.vectors[used] = total[used] / self.counts[used, None]
        self._revive(float((far.sum() / (numbers.sum() * self.vectors.shape[1])).sqrt()))
        self.updates += 1

    def _revive(self, spread: float) -> None:
        """Move each unused code next to a much used one, at a distance of about `spread` in every feature."""
        order = self.counts.argsort(stable=True)
        unused = int((self.counts < UNUSED * self.counts.mean()).sum())
        if not unused:
            return
        dead, parents = order[:unused], order[unused:].flip(0)
        parents = parents.repeat(-(-unused // len(parents)))[:unused]
        generator = torch.Generator().manual_seed(int(self.updates))
        noise = torch.randn(unused, self.vectors.shape[1], generator=generator).to(self.vectors)
        self.vectors[dead] = self.vectors[parents] + spread * noise
        shares = self.counts / (1 + torch.bincount(parents, minlength=len(self.counts)))
        self.counts[parents] = shares[parents]
        self.counts[dead] = shares[parents]
