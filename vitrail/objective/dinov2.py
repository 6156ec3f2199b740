"""DINOv2 and DINOv3 (Oquab et al. 2023, Siméoni et al. 2025): DINO, masked patches, KoLeo, and Gram anchoring.

The loss of an image is a weighted sum of four (`vitrail.objective.dino` has the first, the crops and the teacher):

* DINO: the student's outputs for any crop against the teacher's for another global crop.
* iBOT (Zhou et al. 2022): the patches of one of the two global crops are masked for the student, which predicts the
  teacher's outputs for them. The mean over the masked patches of a crop, and over both crops, of which one has none.
* KoLeo (Sablayrolles et al. 2019): minus the logarithm of the distance between the features of a global crop and the
  most similar other ones in the step, summed over the two crops. So features spread out.
* Gram anchoring (DINOv3): the mean squared difference between the cosine similarities of all pairs of patches in a
  global crop and those in a frozen network, the `anchor`: the loaded weights or, with `gram_refresh`, the teacher of an
  earlier step. Training to tell images apart makes features of patches worse after a while, and this keeps them.

"Features" are what the classifier would get: the class token or, in a network without one, the mean of the patches.

What differs from the published code: KoLeo's neighbours are sought in the whole step, not among the images of one GPU,
so that they do not depend on the machine. The masked crop and its share of patches are drawn for each image
(`masks.one_crop_masked`). The anchor sees the crops of the student, not larger ones without changes of colour. Patches
are masked after the stem, which is the same only for stems that do not mix patches. A BatchNorm, which the published
networks lack, keeps the statistics of the weights, because crops have others than the images that features are for.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.errors import UsageError
from vitrail.model.vit import ViT
from vitrail.objective.base import Moment, Prepared
from vitrail.objective.crops import GLOBAL, ORDER
from vitrail.objective.dino import DINOObjective, Projection, crop_sheet
from vitrail.objective.masks import hidden_count, one_crop_masked, require_maskable, tokens_at
from vitrail.objective.self_supervised import hatch_patches, to_pixels
from vitrail.objective.settings import DINOv2


class Known(NamedTuple):
    """What depends on all images of a step: columns of `Prepared.precomputed`."""

    images: Tensor
    """[batch, 2, outputs]: the teacher's targets for the global crops."""
    pull: Tensor
    """[batch, 2, features]: the gradient of the KoLeo loss."""
    koleo: Tensor
    """[batch]: the KoLeo loss."""
    patches: Tensor
    """[batch, masked, outputs]: the teacher's targets for the masked patches."""


class DINOv2Objective(DINOObjective):
    """See the module. The metrics of DINO, and the four losses without their weights.

    The student's features are computed twice for the KoLeo loss if a step has several micro-batches or processes: at
    first all of them without gradients, to find the neighbours and the gradient at each feature. In an evaluation there
    is no KoLeo loss, because it depends on which images are evaluated together. Raises UsageError for a network in
    which patches cannot be masked, and for settings that contradict each other.
    """

    model: ViT
    teacher: ViT
    config: DINOv2

    def __init__(self, model: nn.Module, config: DINOv2, seed: int, *, flip: bool = True, cubic: bool = True) -> None:
        network = require_maskable(model, config.kind, after_stem=True)
        super().__init__(network, config, seed, flip=flip, cubic=cubic)
        width, separate = network.config.width, config.patch_head == "separate"
        if not separate and network.config.features != width:
            raise UsageError(
                f"objective.patch_head shared: the network has {network.config.features} features of an image and "
                f"{width} of a patch, so that both cannot have the same head: use separate"
            )
        self.mask = nn.Parameter(torch.zeros(width))  # as DINOv2 begins
        self.patch_head = Projection(width, config) if separate else None
        self.teacher_patch_head = deepcopy(self.patch_head)
        self.anchor = deepcopy(network) if config.gram_weight else None
        for part in self._frozen():
            part.requires_grad_(False).eval()
        self.register_buffer("patch_centre", torch.zeros(config.outputs))
        self.patch_centre: Tensor
        self.register_buffer("refreshes", torch.zeros((), dtype=torch.int64))
        self.refreshes: Tensor
        """How often the anchor has become the teacher."""
        self._patch_total: Tensor | None = None
        self._alone = False
        """Whether a step is one micro-batch of one process."""

    def _frozen(self) -> list[nn.Module]:
        return [*super()._frozen(), *(part for part in (self.teacher_patch_head, self.anchor) if part is not None)]

    def _learning(self) -> list[nn.Module]:
        return [*super()._learning(), *([] if self.patch_head is None else [self.patch_head])]

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student, whose BatchNorms keep their statistics."""
        super().train(mode)
        for part in self.model.modules():
            if isinstance(part, torch_private.BatchNorm):
                part.eval()
        return self

    def at(self, moment: Moment) -> None:
        """See `Objective`. Refreshes the anchor."""
        before = self._refreshes_at(self.moment)
        super().at(moment)
        if self.patch_head is not None:
            self.patch_head.last.frozen = self.head.last.frozen
        number = self._refreshes_at(moment)
        if self.anchor is None or number == before or number <= int(self.refreshes):
            return
        self.refreshes.fill_(number)
        with torch.no_grad():
            kept, newer = (
                [world.local_part(value) for value in (*network.parameters(), *network.buffers())]
                for network in (self.anchor, self.teacher)
            )
            torch_private.foreach_copy_(kept, newer)

    def _refreshes_at(self, moment: Moment) -> int:
        every = self.config.gram_refresh
        return 0 if every is None else int(moment.step // max(moment.steps(every), 1))

    @property
    def precomputed_bytes(self) -> int:
        """See `Objective`."""
        rows, columns = self.model.config.grid
        masked = hidden_count(rows * columns, self.config.mask_shares[1])
        return 4 * (self._first_columns()[-1] + masked * self.config.outputs)

    def _first_columns(self) -> list[int]:
        """Return where the columns of `Known` end that do not depend on the size of the images."""
        images = GLOBAL * self.config.outputs
        pull = images + GLOBAL * self.model.config.features
        return [images, pull, pull + 1]

    def _columns(self, values: Tensor) -> Known:
        images, pull, koleo, patches = values.tensor_split(self._first_columns(), dim=1)
        outputs = self.config.outputs
        return Known(
            images.unflatten(1, (GLOBAL, outputs)),
            pull.unflatten(1, (GLOBAL, -1)),
            koleo[:, 0],
            patches.unflatten(1, (-1, outputs)),
        )

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw crops and masks: `targets` becomes float32 [batch, crops, columns + patches of a global crop].

        After the columns of `crops.draw_crops` stands 1 for each masked patch.
        """
        drawn = super().draw(prepared, step)
        (height, width), _ = self._sizes(prepared.images)
        grid = height // self.model.config.patch, width // self.model.config.patch
        masks = one_crop_masked(self.seed, step, prepared.index.tolist(), grid, self.config.mask_shares)
        columns = torch.zeros(*drawn.targets.shape[:2], grid[0] * grid[1])
        columns[:, :GLOBAL] = torch.from_numpy(masks)
        return replace(drawn, targets=torch.cat([drawn.targets, columns], dim=-1))

    def _masked(self, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masks bool [batch, 2, patches], and `places` [batch, masked] with bool `counted` of that shape.

        Places are numbers among the patches of both crops, those of masked ones first, as many for every image. Of
        images with fewer masked patches the others are not `counted`.
        """
        masks = prepared.targets[:, :GLOBAL, ORDER + 1 :] > 0
        hidden, most = masks.flatten(1), hidden_count(masks.shape[-1], self.config.mask_shares[1])
        places = hidden.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return masks, places, hidden.gather(1, places)

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Set `precomputed` to the columns of `Known`, which depend on all images of all processes."""
        pieces = prepared.split(parts)
        self._alone = len(pieces) == 1 and not world.active()
        masked = [self._masked(piece) for piece in pieces]
        columns = self._first_columns()[-1] + masked[0][1].shape[1] * self.config.outputs
        values = prepared.images.new_zeros(len(prepared), columns, dtype=torch.float32)
        rows = [self._columns(part) for part in values.tensor_split(len(pieces))]
        for piece, (_, places, _), row in zip(pieces, masked, rows, strict=True):
            near = self._normalised(piece, self._pictures(piece, near=True))
            of_images, of_patches = self._both_taught(near, places)
            row.images.copy_(of_images)
            row.patches.copy_(of_patches)
        counted = [one for _, _, one in masked]
        self._total = self._balance([row.images for row in rows], self.centre)
        self._patch_total = self._balance([row.patches for row in rows], self.patch_centre, counted)
        if self.config.koleo_weight and not self._alone:
            known, (pull, losses) = self._columns(values), self._pull(pieces)
            known.pull.copy_(pull)
            known.koleo.copy_(losses)
        return replace(prepared, precomputed=values)

    def _pull(self, pieces: list[Prepared]) -> tuple[Tensor, Tensor]:
        """Return the gradient of the KoLeo loss of all processes [batch, 2, features], and the losses [batch]."""
        self.model.eval()  # nothing is drawn
        near = ((piece, self._normalised(piece, self._pictures(piece, near=True))) for piece in pieces)
        found = torch.cat(
            [self._encoded(self.model, crops, self._masked(piece)[0])[0].float() for piece, crops in near]
        )
        self.train()
        first = world.rank() * len(found)
        everyone = world.joined(found).requires_grad_()
        with torch.enable_grad():
            losses = koleo_losses(everyone)
            (pull,) = torch.autograd.grad(losses.sum(), everyone)
        return pull[first : first + len(found)], losses.detach()[first : first + len(found)]

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        config, (near, far) = self.config, self.crops(prepared)
        masks, places, counted = self._masked(prepared)
        if prepared.precomputed is not None:
            known = self._columns(prepared.precomputed)
            targets = known.images, known.patches
        else:
            images, patches = self._both_taught(near, places)
            targets = self._sharpened(images, self.centre), self._sharpened(patches, self.patch_centre)
        features, tokens = self._encoded(self.model, near, masks)
        far = far.flatten(0, 1)
        small = [self.model.features(far).unflatten(0, (len(near), -1))] if len(far) else []
        of_images, metrics = self._compared(targets[0], self._answers([features, *small]))
        losses = {"DINO loss": (1.0, of_images)}
        if config.patch_weight:
            of_patches = self._patch_losses(targets[1], tokens_at(tokens, places), counted)
            losses["iBOT loss"] = config.patch_weight, of_patches
        if config.koleo_weight and prepared.precomputed is not None:
            spread = koleo_losses(features) if self._alone else known.koleo + _with_gradient(features, known.pull)
            losses["KoLeo loss"] = config.koleo_weight, spread
        if self.anchor is not None and self.moment.past(config.gram_start) >= 1:
            with torch.no_grad():
                anchored = self._encoded(self.anchor, near)[1]
            of_crops = gram_losses(*(each.unflatten(1, (GLOBAL, -1)) for each in (tokens, anchored)))
            losses["Gram loss"] = config.gram_weight, of_crops.mean(1)
        total = torch.stack([weight * each for weight, each in losses.values()]).sum()
        return total, len(prepared), metrics | {name: each.detach().sum() for name, (_, each) in losses.items()}

    def _encoded(self, network: ViT, near: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return features [batch, 2, features] and patch tokens [batch, 2 * patches, width] of global crops.

        Masked patches are replaced by the [mask] embedding in front of the positions.
        """
        crops = near.flatten(0, 1)
        patches, grid = network.patches(crops), network.grid(crops)
        if masks is not None:
            patches = torch.where(masks.flatten(0, 1)[..., None], self.mask.to(patches.dtype), patches)
        tokens = network.encode(network.place(patches, grid), grid)
        normal = tokens if network.config.origin.final_norm == "tokens" else network.norm(tokens)
        both = network.summary(tokens), normal[:, network.config.prefix :]
        features, grids = (each.unflatten(0, near.shape[:2]) for each in both)
        return features, grids.flatten(1, 2)

    @torch.no_grad()
    def _both_taught(self, near: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's outputs, float32 [batch, 2, outputs] for crops and [batch, n, outputs] at `places`."""
        features, tokens = self._encoded(self.teacher, near)
        head = self.teacher_head if self.teacher_patch_head is None else self.teacher_patch_head
        return self.teacher_head(features), head(tokens_at(tokens, places))

    def _patch_losses(self, target: Tensor, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the iBOT loss of each image [batch], from targets and tokens of the masked patches."""
        head = self.head if self.patch_head is None else self.patch_head
        logs = (head(tokens) / self.config.student_temperature).log_softmax(-1)
        shares = counted / (GLOBAL * counted.sum(1, keepdim=True))
        return -((target * logs).sum(-1) * shares).sum(1)

    @torch.no_grad()
    def after_step(self, finite: Tensor) -> None:
        """See `DINOObjective`; the centre of the patches moves, too."""
        super().after_step(finite)
        if self._patch_total is not None:
            self._move(self.patch_centre, self._patch_total, finite)
            self._patch_total = None

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `DINOObjective`. A hatch marks the masked patches of the global crops."""
        shown, masks = super().show(prepared), self._masked(prepared)[0]
        near = (to_pixels if prepared.images.dtype == torch.uint8 else self.as_pictures)(self.pictures(prepared)[0])
        size = shown["input"].shape[-2:]
        for number in range(GLOBAL):
            hatched = hatch_patches(near[:, number], masks[:, number], self.model.config.patch)
            shown[f"global crop {number + 1}"] = crop_sheet(hatched[:, None], (size[0], size[1]))
        return shown


def _with_gradient(values: Tensor, gradient: Tensor) -> Tensor:
    """Return zeros [batch] whose gradient with respect to values [batch, ...] is `gradient`."""
    product = (values.float() * gradient).flatten(1).sum(1)
    return product - product.detach()


NEAREST = 1e-4
"""Distances below this one count as this one: equal images have no direction in which they could part."""


def koleo_losses(features: Tensor) -> Tensor:
    """[images, crops, features] -> [images]: minus the logarithm of the distance to the most similar other image.

    Features have length 1. An image is compared with the same crop of the others, and the result is the sum over crops.
    """
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.float(), dim=-1, eps=1e-8).transpose(0, 1)
        alike = unit.detach() @ unit.detach().mT
        alike.diagonal(dim1=1, dim2=2).fill_(-1)
        other = tokens_at(unit, alike.argmax(-1))
        return -F.pairwise_distance(unit, other, eps=1e-8).clamp(min=NEAREST).log().sum(0)


def gram_losses(tokens: Tensor, anchored: Tensor) -> Tensor:
    """[..., patches, width] twice -> [...]: the mean squared difference of the cosine similarities of all pairs."""
    with torch.autocast(tokens.device.type, enabled=False):
        units = (F.normalize(each.float(), dim=-1) for each in (tokens, anchored))
        ours, theirs = (unit @ unit.mT for unit in units)
        return (ours - theirs).square().mean((-2, -1))
