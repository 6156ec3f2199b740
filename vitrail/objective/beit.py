"""BEiT (Bao et al. 2022): predict the visual tokens of blocks of masked patches. A tokenizer gives the visual tokens.

A learned [mask] embedding replaces the masked patch embeddings before the position embeddings are added. The encoder
processes all patches, and a linear classifier predicts the code of each masked one. The recipe's network has LayerScale
and relative positions, as BEiT's has. The tokenizer is trained on the user's images, as the follow-up's is on
ImageNet-1k (section 5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import dense, zero_linear
from vitrail.objective.base import Prepared, RunFacts
from vitrail.objective.masks import blocks, hide_before_stem, patch_mask
from vitrail.objective.self_supervised import MaskedObjective, classification_losses
from vitrail.objective.settings import BEiT
from vitrail.objective.tokenizer import ImageTokenizer, load_tokenizer

MASK_NAMES = ("mask_token", "beit.embeddings.mask_token", "embeddings.mask_token")
"""Names of the [mask] embedding in BEiT's own files and in those of transformers."""


class BEiTObjective(MaskedObjective):
    """See the module. The loss of an image is the mean cross-entropy over its masked patches.

    Metrics: "code", the share of correctly predicted codes. The tokenizer is frozen and not part of the state. Raises
    UsageError for a network in which patches cannot be masked, or with another patch size than the tokenizer.
    """

    def __init__(self, model: nn.Module, config: BEiT, seed: int, tokenizer: ImageTokenizer) -> None:
        super().__init__(model, config, seed)
        self.config = config
        patch = self.model.config.patch
        if tokenizer.patch != patch:
            raise UsageError(
                f"the tokenizer gives a token to each patch of {tokenizer.patch} pixels, and the network's patch is "
                f"{patch}: train a tokenizer for it (--recipe tokenizer --vit.patch {patch})"
            )
        self._tokenizer = (tokenizer,)  # in a tuple: it is neither trained nor saved
        self.mask = nn.Parameter(torch.empty(self.model.config.width))
        nn.init.trunc_normal_(self.mask, std=0.02)
        self.predict = zero_linear(self.model.config.width, tokenizer.config.codes)

    @classmethod
    def of(cls, model: nn.Module, settings: BEiT, task: RunFacts) -> Self:
        """See `Objective`."""
        return cls(model, settings, task.seed, load_tokenizer(settings.tokenizer))

    @property
    def tokenizer(self) -> ImageTokenizer:
        """The frozen tokenizer, on the device of the network."""
        return self._tokenizer[0].to(self.mask.device)

    def identity(self) -> dict[str, str]:
        """Return the tokenizer's SHA-256: a resumed run must predict the tokens of the same tokenizer."""
        digest = hashlib.sha256()
        for tensor in self._tokenizer[0].state_dict().values():
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return {"tokenizer": digest.hexdigest()}

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the masked patches: `targets` becomes int64 [batch, masked], raster numbers."""
        grid = self.model.grid(prepared.images)
        masked = blocks(self.seed, step, prepared.index.tolist(), grid, self.config)
        places = masked.nonzero()[1].reshape(len(masked), -1)
        return replace(prepared, targets=torch.from_numpy(places))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        wanted = self._codes(prepared.images).gather(1, prepared.targets)
        losses, correct = classification_losses(self.outputs(prepared), wanted)
        return losses.sum(), len(prepared), {"code": correct.sum()}

    def outputs(self, prepared: Prepared) -> Tensor:
        """Return the logits of the codes of the masked patches, float32 [batch, masked, codes]."""
        images, places = prepared.images, prepared.targets
        grid = self.model.grid(images)
        masked = patch_mask(places, grid[0] * grid[1])
        shown = hide_before_stem(self.model, images, masked, after_stem=self.config.mask_after_stem)
        patches = self.model.patches(shown)
        patches = torch.where(masked[..., None], self.mask.to(patches.dtype), patches)
        return dense(self.predict, self.encode_at(places, patches, images)).float()

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. Codes are drawn as the tokenizer decodes them."""
        images, grid = prepared.images, self.model.grid(prepared.images)
        hidden = patch_mask(prepared.targets, grid[0] * grid[1])
        target = self._codes(images)
        guess = target.scatter(1, prepared.targets, self.outputs(prepared).argmax(-1))
        prediction, target = (self.tokenizer.pictures(codes, grid) for codes in (guess, target))
        return self.pictures(images, hidden, prediction, target)

    def load_mask(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Load the [mask] embedding from the tensors of a published BEiT. Returns sentences that say what was loaded.

        The classifier is not loaded: it predicts the codes of another tokenizer, DALL-E's.
        """
        for name in MASK_NAMES:
            if name in tensors and tensors[name].numel() == self.mask.numel():
                with torch.no_grad():
                    self.mask.copy_(tensors[name].flatten())
                return [f"[mask] embedding: {name} of the pretrained weights", "classifier of codes: initialised"]
        return ["[mask] embedding and classifier of codes: initialised, because the pretrained weights have none"]

    def _codes(self, images: Tensor) -> Tensor:
        # codes are the targets: they must not depend on the precision of training
        with torch.autocast(images.device.type, enabled=False):
            return self.tokenizer.codes(images)
