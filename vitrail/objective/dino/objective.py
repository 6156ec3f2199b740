"""DINO (Caron et al. 2021): for any crop of an image, a student predicts its teacher's output for a large crop.

The teacher is the moving average of the student. Its outputs for the two global crops are centred, so that no output
dominates, and sharpened by a low temperature, so that the outputs do not become uniform. The loss is the cross-entropy
between them and the student's outputs for all other crops. The teacher is evaluated and saved.

The centre is a running mean of the outputs or, with Sinkhorn-Knopp, computed for each step (`objective.dino.sinkhorn`).
It does not depend on how a batch is cut into micro-batches: `after_step` updates the mean with the outputs of all
processes and micro-batches together, then the teacher. Sinkhorn-Knopp needs all outputs before the first loss, so
`before_step` runs the teacher on the whole batch, and the micro-batches carry its targets.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.data.images.pixels import pixels_of
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.objective.base import Moment, Prepared, Task
from vitrail.objective.dino.crops import BLUR, GLOBAL, crop_sizes, cut, draw_crops
from vitrail.objective.dino.pictures import attended, outlined, side_by_side, strongest
from vitrail.objective.dino.projection import Projection
from vitrail.objective.dino.recolour import blur, recolour
from vitrail.objective.dino.sinkhorn import balancing_centre
from vitrail.objective.self_supervised import SelfSupervised, to_pixels
from vitrail.objective.settings import DINO


class DINOObjective(SelfSupervised):
    """See the module. The loss of an image is the mean over its pairs of a global crop and another crop.

    Metrics: "agreement", the share of these pairs for which teacher and student have the same largest output;
    "entropy", that of the teacher's outputs as a share of the maximum, 0 to 1. A collapse shows as an entropy near 1
    (uniform outputs), or as an agreement of 1 with a loss as low as the entropy.

    With Sinkhorn-Knopp an evaluation uses the running mean of the centres of training, because `before_step` is not
    called. So its loss does not depend on which images are evaluated together.

    Crops of float32 images, which are normalised bands, are cut, mirrored and blurred. Their colours do not change,
    because the changes are made for the three bands of visible light.

    `flip` mirrors half of the crops; `cubic` resamples by cubic instead of linear interpolation. Raises UsageError for
    settings out of range.
    """

    model: ViT | ResNet
    chosen_by_loss = False  # temperature, centre and teacher change, so losses of different steps are not comparable

    def __init__(self, model: nn.Module, config: DINO, seed: int, *, flip: bool = True, cubic: bool = True) -> None:
        super().__init__(model)
        assert isinstance(model, ViT | ResNet)
        self.config = config
        self.seed = seed
        self.flip = flip
        self.cubic = cubic
        self.head = Projection(model.config.features, config)
        self.teacher = deepcopy(model).requires_grad_(False).eval()
        self.teacher_head = deepcopy(self.head).requires_grad_(False).eval()
        self.register_buffer("centre", torch.zeros(config.outputs))
        self.centre: Tensor
        self._total: Tensor | None = None
        """Sum of the teacher's outputs over this step; the centre moves towards their mean."""
        self._counted = 0

    @classmethod
    def of(cls, model: nn.Module, settings: DINO, task: Task) -> Self:
        """See `Objective`."""
        cubic = task.preprocess.interpolation == "bicubic"
        made = cls(model, settings, task.seed, flip=task.augment.flip, cubic=cubic)
        made.pixels = pixels_of(task.preprocess.bands)
        return made

    @property
    def evaluated(self) -> nn.Module:
        """Return the teacher's network."""
        return self.teacher

    def train(self, mode: bool = True) -> DINOObjective:
        """Set the mode of the student. The teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def at(self, moment: Moment) -> None:
        """See `Objective`. Freezes the last layer at the start of training."""
        super().at(moment)
        self.head.last.frozen = moment.past(self.config.freeze_last_layer) < 1

    @property
    def temperature(self) -> float:
        """The teacher's current temperature: it changes linearly during the warm-up."""
        first, last = self.config.teacher_temperature
        return first + (last - first) * self.moment.past(self.config.temperature_warmup)

    @property
    def momentum(self) -> float:
        """The teacher's current momentum: it grows to 1 along half a cosine."""
        return 1 - (1 - self.config.teacher_momentum) * (1 + math.cos(math.pi * self.moment.done)) / 2

    @property
    def precomputed_bytes(self) -> int:
        """See `Objective`."""
        return 4 * GLOBAL * self.config.outputs if self.config.centring == "sinkhorn" else 0

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the crops: `targets` becomes float32 [batch, crops, columns] (`crops.draw_crops`)."""
        self._total, self._counted = None, 0  # a step starts, or starts again
        height, width = prepared.images.shape[-2:]
        config = self.config if prepared.images.dtype == torch.uint8 else replace(self.config, jitter=0.0)
        drawn = draw_crops(self.seed, step, prepared.index.tolist(), (height, width), config, flip=self.flip)
        return replace(prepared, targets=torch.from_numpy(drawn).to(prepared.images.device))

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """With Sinkhorn-Knopp set `precomputed` to targets [batch, 2, outputs], balanced over all processes."""
        if self.config.centring != "sinkhorn":
            return prepared
        targets = prepared.images.new_empty(len(prepared), GLOBAL, self.config.outputs, dtype=torch.float32)
        pieces = prepared.split(parts)
        rows = targets.tensor_split(len(pieces))
        for piece, answers in zip(pieces, rows, strict=True):
            answers.copy_(self._taught(self._normalised(piece, self._pictures(piece, near=True))))
        centre = balancing_centre([answers.flatten(0, 1) for answers in rows], self.temperature)
        for answers in rows:
            answers.copy_(self._sharpened(answers, centre))
        self._total, self._counted = centre, 1  # equal in all processes, and so is its mean
        return replace(prepared, precomputed=targets)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        near, far = self.crops(prepared)
        target = self._target(near) if prepared.precomputed is None else prepared.precomputed
        logs = (self._learned(near, far) / self.config.student_temperature).log_softmax(-1)
        with torch.autocast(logs.device.type, enabled=False):  # bfloat16 would round the loss to 1 in 256
            crossed = -(target @ logs.transpose(1, 2))
        pairs = ~torch.eye(GLOBAL, logs.shape[1], dtype=torch.bool, device=logs.device)
        losses = crossed[:, pairs].mean(1)
        return losses.sum(), len(prepared), _metrics(target, logs.detach(), pairs)

    @torch.no_grad()
    def crops(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return the networks' inputs: normalised global crops [batch, 2, channels, height, width] and local crops."""
        near, far = (self._normalised(prepared, crops) for crops in self.pictures(prepared))
        return near, far

    def _normalised(self, prepared: Prepared, crops: Tensor) -> Tensor:
        return self.model.normalise(crops) if prepared.images.dtype == torch.uint8 else crops

    def pictures(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return the global and the local crops as pixels, float32 [batch, crops, channels, height, width].

        They are in 0..255, or normalised if the images are. Their sizes are given by `crops.crop_sizes`.
        """
        return self._pictures(prepared, near=True), self._pictures(prepared, near=False)

    def _pictures(self, prepared: Prepared, *, near: bool) -> Tensor:
        """Return the global crops (`near`) or the local ones; see `pictures`."""
        patch = self.model.config.patch if isinstance(self.model, ViT) else 1
        height, width = prepared.images.shape[-2:]
        large, small = crop_sizes((height, width), self.model.config.image_size, patch, self.config)
        drawn = prepared.targets[:, :GLOBAL] if near else prepared.targets[:, GLOBAL:]
        crops = cut(prepared.images, drawn, large if near else small, cubic=self.cubic)
        pictures, changes = crops.flatten(0, 1), drawn.flatten(0, 1)
        if prepared.images.dtype == torch.uint8:
            return recolour(pictures, changes).view_as(crops)
        with torch.autocast(pictures.device.type, enabled=False):
            return blur(pictures, changes[:, BLUR]).view_as(crops)

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the centre towards the mean of this step's outputs, and the teacher towards the student."""
        if self._total is None:
            return
        count = self._total.new_tensor([self._counted])
        total, number = world.sum_(torch.cat([self._total, count])).tensor_split([len(self._total)])
        self.centre.lerp_((total / number).to(self.centre.dtype), 1 - self.config.centre_momentum)
        self._total, self._counted = None, 0
        theirs, ours = (
            [
                world.local(parameter) for part in parts for parameter in part.parameters()
            ]  # with sharding, this process's part
            for parts in ((self.teacher, self.teacher_head), (self.model, self.head))
        )
        torch_private.foreach_lerp_(theirs, ours, 1 - self.momentum)
        for kept, running in zip(self.teacher.buffers(), self.model.buffers(), strict=True):
            kept.copy_(running)

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. The target is the teacher's output for the first crop, the prediction the mean of the
        student's for all other crops.
        """
        shows = to_pixels if prepared.images.dtype == torch.uint8 else self.as_pictures
        near, far = map(shows, self.pictures(prepared))
        shown = self.crops(prepared)
        target = self._sharpened(self._taught(shown[0][:, :1]), self.centre)[:, 0]
        guess = (self._learned(*shown) / self.config.student_temperature).softmax(-1)[:, 1:].mean(1)
        whole = outlined(self.as_pictures(prepared.images), prepared.targets)
        size = (whole.shape[-2], whole.shape[-1])
        pictures = {"input": whole}
        for number in range(GLOBAL):
            pictures[f"global crop {number + 1}"] = side_by_side(near[:, number : number + 1], size)
        if self.config.local_crops:
            pictures["local crops"] = side_by_side(far, size)
        if isinstance(self.teacher, ViT) and self.teacher.config.block != "axial":
            pictures["teacher's attention"] = attended(self.teacher, shown[0][:, 0], near[:, 0], size)
        pictures["prediction"], pictures["target"] = strongest(target, guess, size)
        return pictures

    @torch.no_grad()
    def _taught(self, near: Tensor) -> Tensor:
        """Return the teacher's outputs, float32 [batch, crops, outputs], for crops [batch, crops, channels, h, w]."""
        return self.teacher_head(self.teacher.features(near.flatten(0, 1))).unflatten(0, near.shape[:2])

    def _target(self, near: Tensor) -> Tensor:
        """Return targets [batch, crops, outputs] by the running centre. In training, add to this step's sum."""
        answers = self._taught(near)
        if self.training and self.config.centring == "mean":
            total = answers.sum((0, 1), dtype=torch.float32 if answers.device.type == "mps" else torch.float64)
            self._total = total if self._total is None else self._total + total
            self._counted += answers.shape[0] * answers.shape[1]
        return self._sharpened(answers, self.centre)

    def _sharpened(self, answers: Tensor, centre: Tensor) -> Tensor:
        return ((answers - centre) / self.temperature).softmax(-1)

    def _learned(self, near: Tensor, far: Tensor) -> Tensor:
        """Return the student's outputs, float32 [batch, crops, outputs]. Crops of the same size are one batch."""
        sizes = [crops for crops in (near, far) if crops.shape[1]]
        features = [self.model.features(crops.flatten(0, 1)) for crops in sizes]
        answers = self.head(torch.cat(features)).split([len(part) for part in features])
        return torch.cat([part.unflatten(0, of.shape[:2]) for part, of in zip(answers, sizes, strict=True)], dim=1)


def _metrics(target: Tensor, logs: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """Return sums over examples for probabilities target [batch, 2, outputs] and logs [batch, crops, outputs]."""
    same = target.argmax(-1)[:, :, None] == logs.argmax(-1)[:, None]
    entropy = torch.special.entr(target).sum(-1).mean(1) / math.log(target.shape[-1])
    return {"agreement": same[:, pairs].float().mean(1).sum(), "entropy": entropy.sum()}
