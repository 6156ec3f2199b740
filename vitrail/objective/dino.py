"""DINO (Caron et al. 2021): for any crop of an image, a student predicts its teacher's output for a large crop.

The teacher is the moving average of the student. Its outputs for the two global crops are centred, so that no output
dominates, and sharpened by a low temperature, so that the outputs do not become uniform. The loss is the cross-entropy
between them and the student's outputs for all other crops. The teacher is evaluated and saved.

The centre is a running mean of the outputs or, with Sinkhorn-Knopp, computed for each step (`balancing_centre`). It
does not depend on how a batch is cut into micro-batches: `after_step` updates the mean with the outputs of all
processes and micro-batches together, then the teacher. Sinkhorn-Knopp needs all outputs before the first loss, so
`before_step` runs the teacher on the whole batch, and the micro-batches carry its targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import torch_private, world
from vitrail.data.images.geometry import Size
from vitrail.data.images.pixels import pixels_of
from vitrail.model.layers import dense, dense_after_gelu, linear, new_linear
from vitrail.model.record import attention_maps
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.objective.base import Moment, Prepared, RunFacts
from vitrail.objective.crops import (
    BLUR,
    GLOBAL,
    HEIGHT,
    LEFT,
    ORDER,
    ORDERS,
    TOP,
    WIDTH,
    blur,
    crop_sizes,
    cut,
    draw_crops,
    recolour,
)
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
        crops = GLOBAL + config.local_crops
        pairs = [crops * near + crop for near in range(GLOBAL) for crop in range(crops) if near != crop]
        self.register_buffer("pairs", torch.tensor(pairs), persistent=False)
        self.pairs: Tensor
        """Places of the pairs of a global crop and another crop among all [2, crops] pairs."""
        self._total: Tensor | None = None
        """[outputs + 1]: sum of the teacher's outputs over this step, and their number; the centre moves towards their
        mean."""

    @classmethod
    def of(cls, model: nn.Module, settings: DINO, task: RunFacts) -> Self:
        """See `Objective`."""
        cubic = task.preprocess.interpolation == "bicubic"
        made = cls(model, settings, task.seed, flip=task.augment.flip, cubic=cubic)
        made.pixels = pixels_of(task.preprocess.bands)
        return made

    @property
    def evaluated(self) -> nn.Module:
        """Return the teacher's network."""
        return self.teacher

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student. The teacher stays in evaluation mode."""
        super().train(mode)
        for part in self._frozen():
            part.eval()
        return self

    def _frozen(self) -> list[nn.Module]:
        """Return the networks and heads that do not learn: first those that follow `_learning`."""
        return [self.teacher, self.teacher_head]

    def _learning(self) -> list[nn.Module]:
        """Return the network and the heads that learn."""
        return [self.model, self.head]

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
        height, width = prepared.images.shape[-2:]
        config = self.config if prepared.images.dtype == torch.uint8 else replace(self.config, jitter=0.0)
        drawn = draw_crops(self.seed, step, prepared.index.tolist(), (height, width), config, flip=self.flip)
        order = int(drawn[0, 0, ORDER]) if len(drawn) else 0
        return replace(prepared, targets=torch.from_numpy(drawn), numbers=(order,))

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """With Sinkhorn-Knopp set `precomputed` to targets [batch, 2, outputs], balanced over all processes."""
        self._total = None  # a step starts, or starts again
        if self.config.centring != "sinkhorn":
            return prepared
        targets = prepared.images.new_empty(len(prepared), GLOBAL, self.config.outputs, dtype=torch.float32)
        pieces = prepared.split(parts)
        rows = targets.tensor_split(len(pieces))
        for piece, answers in zip(pieces, rows, strict=True):
            answers.copy_(self._taught(self._normalised(piece, self._pictures(piece, near=True))))
        self._total = self._balance(rows, self.centre)
        return replace(prepared, precomputed=targets)

    def _balance(self, rows: Sequence[Tensor], centre: Tensor, counted: Sequence[Tensor] = ()) -> Tensor:
        """Make targets of the teacher's outputs in all `rows`, in place, and return their `_total`.

        centre: The running one of such outputs; counted: See `balancing_centre`.
        """
        if self.config.centring == "sinkhorn":
            centre = balancing_centre(rows, self.temperature, counted=counted)
            total = with_count(centre, 1)  # equal in all processes, and so is its mean
        else:
            counted = counted or [row.new_ones(row.shape[:-1], dtype=torch.bool) for row in rows]
            sums = [_sum(row * one[..., None]) for row, one in zip(rows, counted, strict=True)]
            total = torch.cat([torch.stack(sums).sum(0), torch.stack([one.sum() for one in counted]).sum()[None]])
        for answers in rows:
            answers.copy_(self._sharpened(answers, centre))
        return total

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        near, far = self.crops(prepared)
        target = self._target(near) if prepared.precomputed is None else prepared.precomputed
        losses, metrics = self._compared(target, self._learned(near, far))
        return losses.sum(), len(prepared), metrics

    def _compared(self, target: Tensor, answers: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each image [batch], and the metrics, which are sums.

        target: [batch, 2, outputs]: the teacher's; answers: [batch, crops, outputs]: the student's.
        """
        logs = (answers / self.config.student_temperature).log_softmax(-1)
        with torch.autocast(logs.device.type, enabled=False):  # bfloat16 would round the loss to 1 in 256
            crossed = -(target @ logs.transpose(1, 2))
        same = target.argmax(-1)[:, :, None] == logs.detach().argmax(-1)[:, None]
        entropy = torch.special.entr(target).sum(-1).mean(1) / math.log(target.shape[-1])
        metrics = {"agreement": same.flatten(1)[:, self.pairs].float().mean(1).sum(), "entropy": entropy.sum()}
        return crossed.flatten(1)[:, self.pairs].mean(1), metrics

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

    def _sizes(self, images: Tensor) -> tuple[Size, Size]:
        """Return height and width in pixels of the global and of the local crops."""
        patch = self.model.config.patch if isinstance(self.model, ViT) else 1
        height, width = images.shape[-2:]
        return crop_sizes((height, width), self.model.config.image_size, patch, self.config)

    def _pictures(self, prepared: Prepared, *, near: bool) -> Tensor:
        """Return the global crops (`near`) or the local ones; see `pictures`."""
        large, small = self._sizes(prepared.images)
        drawn = prepared.targets[:, :GLOBAL] if near else prepared.targets[:, GLOBAL:]
        crops = cut(prepared.images, drawn, large if near else small, cubic=self.cubic)
        pictures, changes = crops.flatten(0, 1), drawn.flatten(0, 1)
        if prepared.images.dtype == torch.uint8:
            return recolour(pictures, changes, ORDERS[prepared.numbers[0]]).view_as(crops)
        with torch.autocast(pictures.device.type, enabled=False):
            return blur(pictures, changes[:, BLUR]).view_as(crops)

    @torch.no_grad()
    def after_step(self, finite: Tensor) -> None:
        """Move the centre towards the mean of this step's outputs, and the teacher towards the student."""
        if self._total is None:
            return
        self._move(self.centre, self._total, finite)
        self._total, learning = None, self._learning()
        theirs, ours = (  # with sharding, this process's part
            [world.local_part(parameter) for part in parts for parameter in part.parameters()]
            for parts in (self._frozen()[: len(learning)], learning)
        )
        torch_private.foreach_lerp_if_(finite, theirs, ours, 1 - self.momentum)
        kept, running = (list(network.buffers()) for network in (self.teacher, self.model))
        torch_private.foreach_copy_(kept, running)

    def _move(self, centre: Tensor, total: Tensor, finite: Tensor) -> None:
        """Move a running centre towards the mean of this step; `total` is its `_total`."""
        sums = world.sum_(total)
        moved = centre.lerp((sums[:-1] / sums[-1]).to(centre.dtype), 1 - self.config.centre_momentum)
        centre.copy_(torch.where(finite, moved, centre))

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
        whole = outline_crops(self.as_pictures(prepared.images), prepared.targets)
        size = (whole.shape[-2], whole.shape[-1])
        pictures = {"input": whole}
        for number in range(GLOBAL):
            pictures[f"global crop {number + 1}"] = crop_sheet(near[:, number : number + 1], size)
        if self.config.local_crops:
            pictures["local crops"] = crop_sheet(far, size)
        if isinstance(self.teacher, ViT) and self.teacher.config.block != "axial":
            pictures["teacher's attention"] = attention_picture(self.teacher, shown[0][:, 0], near[:, 0], size)
        pictures["prediction"], pictures["target"] = output_bars(target, guess, size)
        return pictures

    @torch.no_grad()
    def _taught(self, near: Tensor) -> Tensor:
        """Return the teacher's outputs, float32 [batch, crops, outputs], for crops [batch, crops, channels, h, w]."""
        return self.teacher_head(self.teacher.features(near.flatten(0, 1))).unflatten(0, near.shape[:2])

    def _target(self, near: Tensor) -> Tensor:
        """Return targets [batch, crops, outputs] by the running centre. In training, add to this step's sum."""
        answers = self._taught(near)
        if self.training and self.config.centring == "mean":
            total = with_count(_sum(answers), answers.shape[0] * answers.shape[1])
            self._total = total if self._total is None else self._total + total
        return self._sharpened(answers, self.centre)

    def _sharpened(self, answers: Tensor, centre: Tensor) -> Tensor:
        return ((answers - centre) / self.temperature).softmax(-1)

    def _learned(self, near: Tensor, far: Tensor) -> Tensor:
        """Return the student's outputs, float32 [batch, crops, outputs]. Crops of the same size are one batch."""
        sizes = [crops for crops in (near, far) if crops.shape[1]]
        return self._answers(
            [self.model.features(crops.flatten(0, 1)).unflatten(0, crops.shape[:2]) for crops in sizes]
        )

    def _answers(self, features: list[Tensor]) -> Tensor:
        """Return the head's outputs [batch, crops, outputs] for features [batch, crops, features] of each size."""
        answers = self.head(torch.cat([part.flatten(0, 1) for part in features]))
        cut = answers.split([part.shape[:2].numel() for part in features])
        return torch.cat([part.unflatten(0, of.shape[:2]) for part, of in zip(cut, features, strict=True)], dim=1)


EPSILON = 1e-12
"""Minimum length by which a vector is divided."""


class WeightNormed(nn.Module):
    """A dense layer without bias. Its rows are `gain` times the direction of `weight` (Salimans & Kingma 2016).

    weight [outputs, inputs]; gain [outputs] starts at 1 and is trained only with `learns_gain`.
    """

    def __init__(self, inputs: int, outputs: int, *, learns_gain: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.gain = nn.Parameter(torch.ones(outputs), requires_grad=learns_gain)
        self.frozen = False
        """If True, the weight gets no gradient and the optimiser does not change it."""
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]"""
        # cosines are divided by a temperature of 0.04, so their third digit matters, which bfloat16 does not have
        with torch.autocast(features.device.type, enabled=False):
            weight = F.normalize(self.weight, dim=1, eps=EPSILON) * self.gain[:, None]
            return linear(features, weight.detach() if self.frozen else weight)


class Projection(nn.Module):
    """Features -> outputs: three dense layers with GELU between them, L2 normalisation, then a weight-normed layer.

    It is DINO's projection head (Caron et al. 2021, section 3.1 and appendix C).
    """

    def __init__(self, inputs: int, config: DINO) -> None:
        super().__init__()
        self.first = new_linear(inputs, config.hidden)
        self.second = new_linear(config.hidden, config.hidden)
        self.third = new_linear(config.hidden, config.bottleneck)
        self.last = WeightNormed(config.bottleneck, config.outputs, learns_gain=not config.norm_last_layer)
        for layer in (self.first, self.second, self.third):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs], in float32."""
        hidden = dense_after_gelu(self.third, dense_after_gelu(self.second, dense(self.first, features)))
        return self.last(F.normalize(hidden.float(), dim=-1, eps=EPSILON)).float()


ROUNDS = 3
"""Number of rounds of Sinkhorn-Knopp."""


def _sum(answers: Tensor) -> Tensor:
    """[..., outputs] -> [outputs], in float64 where the device has it."""
    return answers.flatten(0, -2).sum(0, dtype=torch.float32 if answers.device.type == "mps" else torch.float64)


def with_count(total: Tensor, count: float) -> Tensor:
    """Return [outputs + 1]: a sum over outputs, and how many there were."""
    return torch.cat([total, total.new_full((1,), count)])


def balancing_centre(
    outputs: Sequence[Tensor], temperature: float, rounds: int = ROUNDS, counted: Sequence[Tensor] = ()
) -> Tensor:
    """Return the centre [outputs] that gives all outputs equal shares, over the rows of all processes together.

    This is Sinkhorn-Knopp (Caron et al. 2020, SwAV, section 3 and appendix). Q = exp(outputs / temperature) has a row
    for each crop of the whole step. Its columns and rows are scaled alternately: each column is divided by its sum,
    then each row by its sum. DINOv2 (Oquab et al. 2023, section 4) uses the rows after three rounds as DINO's targets.
    Scaling a column is the same as subtracting a number from its outputs,

        Q[i, j] / column[j] = exp((outputs[i, j] - temperature * log column[j]) / temperature),

    and scaling the rows is a softmax. So the result is given by one vector, the centre: the targets are
    softmax((outputs - centre) / temperature). Common factors of Q, such as SwAV's 1 / number of outputs, cancel in a
    row.

    outputs: this process's rows in parts [..., outputs], at least one row. Temporary memory is that of one part.
    counted: For each part bool [...], whether a row counts; by default all do. All processes must call the function.
    Nothing overflows or vanishes: the largest value of each column is subtracted first, so each column has an element
    of 1. Scaling the column leaves at least 1 / rows of it, and scaling the row at least 1 / (rows * outputs), so every
    later sum is at least that.
    """
    rows = tuple(range(outputs[0].ndim - 1))

    def counting(part: int, values: Tensor, other: float) -> Tensor:
        return torch.where(counted[part][..., None], values, other) if counted else values

    largest = [counting(number, part, -math.inf).amax(rows) for number, part in enumerate(outputs)]
    centre = world.max_(torch.stack(largest).amax(0))
    for number in range(rounds):
        shares = torch.zeros_like(centre)
        for place, part in enumerate(outputs):
            logits = (part - centre) / temperature
            shares += counting(place, logits.softmax(-1) if number else logits.exp(), 0.0).sum(rows)
        centre = centre + temperature * world.sum_(shares).log()
    return centre


SMALLEST = 112
"""Minimum length of a picture's shorter side in pixels. Smaller images are enlarged, so that outlines stay visible."""
LARGE = ((255, 140, 0), (255, 220, 0))
"""Outlines of the global crops."""
SMALL = (0, 210, 255)
"""Outlines of the local crops."""
TEACHER, STUDENT = (30, 90, 160), (200, 90, 30)
"""Colours of the bars."""
BARS = 12
"""Number of outputs to draw: the teacher's largest."""
DIM = 0.2
"""Brightness of a picture, as a share of its own, where the attention is 0."""


def outline_crops(images: Tensor, drawn: Tensor) -> Tensor:
    """Return uint8 `images`, enlarged, with an outline for each crop in `drawn` [batch, crops, columns]."""
    times = math.ceil(SMALLEST / min(images.shape[-2:]))
    large = images.repeat_interleave(times, -2).repeat_interleave(times, -1)
    height, width = large.shape[-2:]
    thick = max(round(min(height, width) / 100), 1)
    for picture, boxes in zip(large, drawn.tolist(), strict=True):
        for number, box in reversed(list(enumerate(boxes))):
            colour = picture.new_tensor(LARGE[number] if number < GLOBAL else SMALL)[:, None, None]
            top, left = round(box[TOP] * height), round(box[LEFT] * width)
            bottom, right = round((box[TOP] + box[HEIGHT]) * height), round((box[LEFT] + box[WIDTH]) * width)
            picture[:, top : top + thick, left:right] = colour
            picture[:, max(bottom - thick, 0) : bottom, left:right] = colour
            picture[:, top:bottom, left : left + thick] = colour
            picture[:, top:bottom, max(right - thick, 0) : right] = colour
    return large


def crop_sheet(crops: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [batch, crops, 3, h, w] -> [batch, 3, *size]: all crops of an image on a square grid."""
    across = math.ceil(math.sqrt(crops.shape[1]))
    sheet = torch.full((len(crops), 3, *size), 255, dtype=torch.uint8, device=crops.device)
    height, width = size[0] // across, size[1] // across
    gap = 2 if across > 1 else 0
    for number, crop in enumerate(crops.unbind(1)):
        row, column = divmod(number, across)
        fitted = resize_picture(crop, (height - gap, width - gap))
        top, left = row * height, column * width
        sheet[..., top : top + height - gap, left : left + width - gap] = fitted
    return sheet


def attention_picture(teacher: ViT, shown: Tensor, pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 `pictures` of `size`, bright where the last layer attends to. `shown` are the normalised pictures.

    The attention is the class token's to the patches, or without a class token the mean over all patches. It is
    averaged over the heads.
    """
    maps = attention_maps(teacher, shown, layers=[-1])[0].maps.mean(1)
    front = teacher.config.prefix
    asking = maps[:, :1] if teacher.config.has_class_token else maps[:, front:]
    heat = asking[:, :, front:].mean(1)
    heat = (heat / heat.amax(1, keepdim=True)).unflatten(1, teacher.grid(shown))[:, None]
    heat = F.interpolate(heat, size=size, mode="nearest")
    return to_pixels(resize_picture(pictures, size).float() * (DIM + (1 - DIM) * heat))


def output_bars(target: Tensor, guess: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (prediction, target) as bar charts, uint8 [batch, 3, *size].

    target, guess: probabilities [batch, outputs] of the teacher and the student. The bars are the teacher's largest
    outputs in descending order. All bars of an image have the same scale.
    """
    theirs, places = target.topk(min(BARS, target.shape[1]), dim=1)
    ours = guess.gather(1, places)
    scale = torch.maximum(theirs.amax(1), ours.amax(1))[:, None]
    return _bars(ours / scale, STUDENT, size), _bars(theirs / scale, TEACHER, size)


def resize_picture(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [batch, 3, h, w] -> [batch, 3, *size]: nearest pixels to enlarge, antialiased to shrink."""
    grows = size[0] >= pictures.shape[-2]
    how = {"mode": "nearest"} if grows else {"mode": "bilinear", "antialias": True}
    return to_pixels(F.interpolate(pictures.float(), size=size, **how))  # type: ignore[arg-type]


def _bars(shares: Tensor, colour: tuple[int, int, int], size: tuple[int, int]) -> Tensor:
    """[batch, bars] in 0..1 -> bars that rise from the bottom, uint8 [batch, 3, *size]."""
    height, width = size
    places = torch.arange(width, device=shares.device) * shares.shape[1]
    bar = (places // width).clamp(max=shares.shape[1] - 1)
    gap = places % width >= width * 0.8
    level = (height - torch.arange(height, device=shares.device))[:, None] / height
    filled = (shares[:, None, bar] >= level) & ~gap
    ink = torch.tensor(colour, dtype=torch.uint8, device=shares.device)[:, None, None]
    return torch.where(filled[:, None], ink, torch.tensor(246, dtype=torch.uint8, device=shares.device))
