"""DINO (Caron et al. 2021): a student answers for any crop of an image what its teacher answers for a large one.

The teacher is the student's moving average. Its answers, to the two global crops, are centred, which keeps one output
from winning everywhere, and sharpened by a low temperature, which keeps the outputs from becoming all alike. The
student's answers to all crops are compared with them by cross-entropy, except to the very crop the teacher saw. The
teacher is what is evaluated and kept.

The centre is a running mean of the answers or, by Sinkhorn-Knopp, found anew for the answers of each step
(`objective.dino.sinkhorn`). No centre depends on how a batch was cut. What needs a whole optimiser step waits for it
(`after_step`): the mean takes in the answers of all processes and micro-batches together, and the teacher follows the
student. Sinkhorn-Knopp needs all answers before the first loss (`before_step`): there the teacher sees the whole
batch, and its targets travel with the micro-batches.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail import world
from vitrail.errors import UsageError
from vitrail.model.resnet.network import ResNet
from vitrail.model.stems.patch import pixel_statistics
from vitrail.model.vit import ViT
from vitrail.objective.base import Moment, Prepared
from vitrail.objective.colours import need_pixels
from vitrail.objective.dino.crops import GLOBAL, crop_sizes, cut, draw_crops
from vitrail.objective.dino.pictures import attended, outlined, side_by_side, strongest
from vitrail.objective.dino.projection import Projection
from vitrail.objective.dino.recolour import recolour
from vitrail.objective.dino.sinkhorn import balancing_centre
from vitrail.objective.self_supervised import SelfSupervised, to_pixels
from vitrail.objective.settings import DINO


class DINOObjective(SelfSupervised):
    """See the module. The loss of an image is the mean over its pairs of a global crop and another crop.

    Metrics: "agreement", the share of these pairs for which teacher and student answer most strongly the same;
    "entropy" of the teacher's answers, 0 to 1, as a share of the largest there could be. A collapse shows as an
    entropy near 1, where answers say nothing, or as an agreement of 1 with a loss as low as the entropy.

    With Sinkhorn-Knopp a batch that has not been to `before_step`, as in an evaluation, is centred by the running mean
    of the centres found in training: so its loss does not depend on which images are evaluated together.

    `flip` mirrors half of the crops; `cubic` resamples by cubics, else linearly. Raises UsageError for settings out of
    range.
    """

    model: ViT | ResNet
    chosen_by_loss = False  # temperature, centre and teacher move: losses of two moments say little of each other

    def __init__(self, model: nn.Module, config: DINO, seed: int, *, flip: bool = True, cubic: bool = True) -> None:
        super().__init__(model)
        _check(config)
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
        scale, shift = pixel_statistics(model.config.mean, model.config.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)
        self.scale: Tensor
        self.shift: Tensor
        self._total: Tensor | None = None
        """Sum over this step of what the centre moves towards the mean of."""
        self._counted = 0

    @property
    def kept(self) -> nn.Module:
        """The teacher's network."""
        return self.teacher

    def train(self, mode: bool = True) -> DINOObjective:
        """As usual for the student; the teacher drops nothing, and takes running statistics from the student."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def at(self, moment: Moment) -> None:
        """See `Objective`; the last layer learns from here on, or not yet."""
        super().at(moment)
        self.head.last.frozen = moment.past(self.config.freeze_last_layer) < 1

    @property
    def temperature(self) -> float:
        """The teacher's, now: linear over the warmup."""
        first, last = self.config.teacher_temperature
        return first + (last - first) * self.moment.past(self.config.temperature_warmup)

    @property
    def momentum(self) -> float:
        """The teacher's, now: half a cosine to 1."""
        return 1 - (1 - self.config.teacher_momentum) * (1 + math.cos(math.pi * self.moment.done)) / 2

    @property
    def known_bytes(self) -> int:
        """See `Objective`."""
        return 4 * GLOBAL * self.config.outputs if self.config.centring == "sinkhorn" else 0

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Draw the crops: `targets` becomes float32 [batch, crops, columns] (`crops.draw_crops`)."""
        need_pixels(prepared.images, "a crop's change of colours")
        self._total, self._counted = None, 0  # a step begins, or begins again
        height, width = prepared.images.shape[-2:]
        drawn = draw_crops(self.seed, step, prepared.index.tolist(), (height, width), self.config, flip=self.flip)
        return replace(prepared, targets=torch.from_numpy(drawn).to(prepared.images.device))

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """Sinkhorn-Knopp: `known` becomes the targets, float32 [batch, 2, outputs], of the answers of all processes."""
        if self.config.centring != "sinkhorn":
            return prepared
        known = prepared.images.new_empty(len(prepared), GLOBAL, self.config.outputs, dtype=torch.float32)
        pieces = prepared.split(parts)
        rows = known.tensor_split(len(pieces))
        for piece, answers in zip(pieces, rows, strict=True):
            answers.copy_(self._taught(self._normalised(self._pictures(piece, near=True))))
        centre = balancing_centre([answers.flatten(0, 1) for answers in rows], self.temperature)
        for answers in rows:
            answers.copy_(self._sharpened(answers, centre))
        self._total, self._counted = centre, 1  # the same in all processes: so is its mean
        return replace(prepared, known=known)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        near, far = self.crops(prepared)
        target = self._target(near) if prepared.known is None else prepared.known
        logs = (self._learned(near, far) / self.config.student_temperature).log_softmax(-1)
        with torch.autocast(logs.device.type, enabled=False):  # bfloat16 would round the loss to 1 in 256
            crossed = -(target @ logs.transpose(1, 2))
        pairs = ~torch.eye(GLOBAL, logs.shape[1], dtype=torch.bool, device=logs.device)
        losses = crossed[:, pairs].mean(1)
        return losses.sum(), len(prepared), _metrics(target, logs.detach(), pairs)

    @torch.no_grad()
    def crops(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return what the networks are shown, normalised: global crops [batch, 2, 3, ..] and local ones."""
        near, far = (self._normalised(crops) for crops in self.pictures(prepared))
        return near, far

    def pictures(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Return the crops as pixels, float32 in 0..255: [batch, 2, 3, height, width], and the local ones' shape.

        Their sizes are `crops.crop_sizes`.
        """
        return self._pictures(prepared, near=True), self._pictures(prepared, near=False)

    def _pictures(self, prepared: Prepared, *, near: bool) -> Tensor:
        """The global crops, or else the local ones; see `pictures`."""
        patch = self.model.config.patch if isinstance(self.model, ViT) else 1
        height, width = prepared.images.shape[-2:]
        large, small = crop_sizes((height, width), self.model.config.image_size, patch, self.config)
        drawn = prepared.targets[:, :GLOBAL] if near else prepared.targets[:, GLOBAL:]
        crops = cut(prepared.images, drawn, large if near else small, cubic=self.cubic)
        return recolour(crops.flatten(0, 1), drawn.flatten(0, 1)).view_as(crops)

    def _normalised(self, pictures: Tensor) -> Tensor:
        return (pictures - 128) * self.scale + self.shift

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the centre towards that of this step's answers, and the teacher towards the student."""
        if self._total is None:
            return
        count = self._total.new_tensor([self._counted])
        total, number = world.sum_(torch.cat([self._total, count])).tensor_split([len(self._total)])
        self.centre.lerp_((total / number).to(self.centre.dtype), 1 - self.config.centre_momentum)
        self._total, self._counted = None, 0
        theirs, ours = (
            [world.local(parameter) for part in parts for parameter in part.parameters()]  # or this process's share
            for parts in ((self.teacher, self.teacher_head), (self.model, self.head))
        )
        torch._foreach_lerp_(theirs, ours, 1 - self.momentum)
        for kept, running in zip(self.teacher.buffers(), self.model.buffers(), strict=True):
            kept.copy_(running)

    @torch.no_grad()
    def show(self, prepared: Prepared) -> dict[str, Tensor]:
        """See `SelfSupervised`. The target is the teacher's output for the first crop, the prediction the mean of the
        student's for all other crops.
        """
        near, far = (to_pixels(crops) for crops in self.pictures(prepared))
        shown = self.crops(prepared)
        target = self._sharpened(self._taught(shown[0][:, :1]), self.centre)[:, 0]
        guess = (self._learned(*shown) / self.config.student_temperature).softmax(-1)[:, 1:].mean(1)
        whole = outlined(prepared.images, prepared.targets)
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
        """The teacher's answers [batch, crops, outputs] to crops [batch, crops, 3, height, width], in float32."""
        return self.teacher_head(self.teacher.features(near.flatten(0, 1))).unflatten(0, near.shape[:2])

    def _target(self, near: Tensor) -> Tensor:
        """Targets [batch, crops, outputs] by the running centre, which is told of these answers while training."""
        answers = self._taught(near)
        if self.training and self.config.centring == "mean":
            total = answers.sum((0, 1), dtype=torch.float32 if answers.device.type == "mps" else torch.float64)
            self._total = total if self._total is None else self._total + total
            self._counted += answers.shape[0] * answers.shape[1]
        return self._sharpened(answers, self.centre)

    def _sharpened(self, answers: Tensor, centre: Tensor) -> Tensor:
        return ((answers - centre) / self.temperature).softmax(-1)

    def _learned(self, near: Tensor, far: Tensor) -> Tensor:
        """The student's answers [batch, crops, outputs], in float32; crops of one size go through it together."""
        sizes = [crops for crops in (near, far) if crops.shape[1]]
        features = [self.model.features(crops.flatten(0, 1)) for crops in sizes]
        answers = self.head(torch.cat(features)).split([len(part) for part in features])
        return torch.cat([part.unflatten(0, of.shape[:2]) for part, of in zip(answers, sizes, strict=True)], dim=1)


def _metrics(target: Tensor, logs: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """Sums over examples; target [batch, 2, outputs] are probabilities, logs [batch, crops, outputs] logarithms."""
    same = target.argmax(-1)[:, :, None] == logs.argmax(-1)[:, None]
    entropy = torch.special.entr(target).sum(-1).mean(1) / math.log(target.shape[-1])
    return {"agreement": same[:, pairs].float().mean(1).sum(), "entropy": entropy.sum()}


def _check(config: DINO) -> None:
    limits = {
        "outputs": (config.outputs, config.outputs >= 2, "at least 2"),
        "hidden": (config.hidden, config.hidden >= 1, "at least 1"),
        "bottleneck": (config.bottleneck, config.bottleneck >= 1, "at least 1"),
        "view": (config.view, config.view >= 1, "at least 1"),
        "global_size": (config.global_size, 0 < config.global_size <= 1, "above 0 and at most 1"),
        "local_crops": (config.local_crops, config.local_crops >= 0, "0 or more"),
        "local_size": (config.local_size, 0 < config.local_size <= 1, "above 0 and at most 1"),
        "jitter": (config.jitter, 0 <= config.jitter <= 2.5, "from 0 to 2.5"),
        "blur": (config.blur, config.blur == 0 or config.blur >= 0.1, "0, or at least 0.1 pixels"),
        "student_temperature": (config.student_temperature, config.student_temperature > 0, "above 0"),
        "teacher_temperature": (config.teacher_temperature, min(config.teacher_temperature) > 0, "above 0, both"),
        "teacher_momentum": (config.teacher_momentum, 0 <= config.teacher_momentum <= 1, "from 0 to 1"),
        "centre_momentum": (config.centre_momentum, 0 <= config.centre_momentum <= 1, "from 0 to 1"),
    }
    for name in ("global_scale", "local_scale"):
        low, high = scale = getattr(config, name)
        limits[name] = (scale, 0 < low <= high <= 1, "(low, high) with 0 < low <= high <= 1")
    for name, (value, good, valid) in limits.items():
        if not good:
            raise UsageError(f"objective.{name} is {value}; it must be {valid}")
