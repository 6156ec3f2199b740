"""Vectors -> the nearest of a set of codes, which are means of what they stand for (van den Oord et al. 2017, A.1).

The codes learn by no gradient: each moves to the moving average of the vectors it is nearest to. One that stands for
hardly any is put beside one that stands for many, so that both halve its share; this is a function of the averages
alone, and so the same in all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

UNUSED = 0.05
"""A code is unused that stands for less than this share of what an average one stands for."""


class Codebook(nn.Module):
    """`vectors` [codes, features] and `counts` [codes]: moving averages of how many vectors each stands for."""

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
        """The perplexity of the codes as a share of their number: 1 where all stand for equally many."""
        shares = self.counts / self.counts.sum().clamp(min=torch.finfo(self.counts.dtype).tiny)
        return torch.special.entr(shares).sum().exp() / len(shares)

    @torch.no_grad()
    def tally(self, found: Tensor, codes: Tensor) -> Tensor:
        """Return what `move` is to know, [codes, features + 2]: sums of vectors, numbers, sums of squared distances.

        found: [..., features]; codes: their nearest. Tallies of the parts of a batch add up to that of the batch.
        """
        rows = found.float().flatten(0, -2)
        far = (rows - self.vectors[codes.flatten()]).square().sum(1, keepdim=True)
        told = torch.cat([rows, torch.ones_like(far), far], 1)
        told = told if told.device.type == "mps" else told.double()  # which has none
        return told.new_zeros(len(self.vectors), told.shape[1]).index_add_(0, codes.flatten(), told)

    @torch.no_grad()
    def move(self, tally: Tensor) -> None:
        """Move every code towards the mean of what it stood for in a step; `tally` is of all of that step."""
        sums, numbers, far = tally.split([self.vectors.shape[1], 1, 1], dim=1)
        decay = self.decay if self.updates else 0.0
        total = decay * self.counts[:, None] * self.vectors + (1 - decay) * sums.to(self.vectors.dtype)
        self.counts.lerp_(numbers[:, 0].to(self.counts.dtype), 1 - decay)
        seen = self.counts > torch.finfo(self.counts.dtype).tiny
        self.vectors[seen] = total[seen] / self.counts[seen, None]
        self._revive(float((far.sum() / (numbers.sum() * self.vectors.shape[1])).sqrt()))
        self.updates += 1

    def _revive(self, spread: float) -> None:
        """Put each unused code beside a much used one, at a distance of about `spread` in every feature."""
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
