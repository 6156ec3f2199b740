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

import torch
from torch import Tensor, nn

from vitrail.errors import UsageError
from vitrail.model.layers import Linear
from vitrail.model.vit import ViT
from vitrail.objective.base import Prepared
from vitrail.objective.beit.tokenizer import ImageTokenizer
from vitrail.objective.masks import blocks, check_share
from vitrail.objective.self_supervised import SelfSupervised, classification_losses, hatched, where_hidden
from vitrail.objective.settings import BEiT
from vitrail.objective.stems import at, encoded, flags, into_stem, need_maskable

MASK_NAMES = ("mask_token", "beit.embeddings.mask_token", "embeddings.mask_token")
"""Names of the [mask] embedding in BEiT's own files and in those of transformers."""


class BEiTObjective(SelfSupervised):
    """See the module. The loss of an image is the mean cross-entropy over its masked patches.

    Metrics: "code", the share of correctly predicted codes. The tokenizer is frozen and not part of the state. Raises
    UsageError for a network in which patches cannot be masked, or with another patch size than the tokenizer.
    """

    model: ViT

    def __init__(self, model: nn.Module, config: BEiT, seed: int, tokenizer: ImageTokenizer) -> None:
        model = need_maskable(model, config.kind, after_stem=config.mask_after_stem)
        super().__init__(model)
        check_share("ratio", config.ratio)
        if config.smallest_block < 1 or not 0 < config.aspect <= 1:
            raise UsageError(
                f"objective.smallest_block is {config.smallest_block} and objective.aspect {config.aspect}: a block "
                "has at least 1 patch, and the smallest height over width is above 0 and at most 1"
            )
        if tokenizer.patch != model.config.patch:
            raise UsageError(
                f"the tokenizer gives a token to each patch of {tokenizer.patch} pixels, and the network's patch is "
                f"{model.config.patch}: train a tokenizer for it (--recipe tokenizer --vit.patch {model.config.patch})"
            )
        self.config = config
        self.seed = seed
        self._tokenizer = (tokenizer,)  # in a tuple: it is neither trained nor saved
        self.mask = nn.Parameter(torch.empty(model.config.width))
        nn.init.trunc_normal_(self.mask, std=0.02)
        self.predict = Linear(model.config.width, tokenizer.config.codes)
        nn.init.zeros_(self.predict.weight)
        nn.init.zeros_(self.predict.bias)

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
        places = torch.from_numpy(masked).nonzero()[:, 1].view(len(masked), -1)
        return replace(prepared, targets=places.to(prepared.images.device))

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        wanted = self._codes(prepared.images).gather(1, prepared.targets)
        losses, correct = classification_losses(self.outputs(prepared), wanted)
        return losses.sum(), len(prepared), {"code": correct.sum()}

    def outputs(self, prepared: Prepared) -> Tensor:
        """Return the logits of the codes of the masked patches, float32 [batch, masked, codes]."""
        images, places = prepared.images, prepared.targets
        grid = self.model.grid(images)
        masked = flags(places, grid[0] * grid[1])
        patches = self.model.patches(into_stem(self.model, images, masked, after_stem=self.config.mask_after_stem))
        patches = torch.where(masked[..., None], self.mask.to(patches.dtype), patches)
        found = encoded(self.model, self.model.place(patches, grid), grid)[:, self.model.config.prefix :]
        return self.predict(at(found, places)).float()

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. Codes are drawn as the tokenizer decodes them."""
        images, patch = prepared.images, self.model.config.patch
        grid = self.model.grid(images)
        hidden = flags(prepared.targets, grid[0] * grid[1])
        target = self._codes(images)
        guess = target.scatter(1, prepared.targets, self.outputs(prepared).argmax(-1))
        return {
            "input": images,
            "mask": hatched(images, hidden, patch),
            "prediction": where_hidden(images, hidden, self.tokenizer.pictures(guess, grid), patch),
            "target": where_hidden(images, hidden, self.tokenizer.pictures(target, grid), patch),
        }

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
