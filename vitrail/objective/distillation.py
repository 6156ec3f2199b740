"""Learning from labels and from a teacher: a trained network whose outputs the student learns to repeat.

The teacher sees the very pixels of the student, after all augmentation and mixing ("Knowledge distillation: A good
teacher is patient and consistent", Beyer et al. 2022), resized to its own input and normalised with its own statistics.
Without augmentation its outputs are computed once for each image and kept in a file (`TeacherAnswers`). The loss of an
image is (1 - weight) x the loss of its label + weight x one of these terms, with the student's logits s and the
teacher's t:

* soft: T^2 KL(softmax(t / T) || softmax(s / T)), with the temperature T (Hinton et al. 2015; DeiT, Eq. 2)
* hard: cross-entropy with the teacher's best class (DeiT, Eq. 3)
* features: a linear layer takes the student's pooled features to the teacher's width. cosine: 1 - their cosine; mse:
  the mean squared difference after each has mean 0 and variance 1 over its values.

A teacher that knows only some of the classes, such as the network that others are added to, teaches how these compare
with each other: soft and hard are then of their logits alone ("Learning without forgetting", Li and Hoiem 2016).

A network with a distillation token (DeiT's) learns the labels with its head and the teacher with the token's head.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.device import to_device
from vitrail.disk import writing
from vitrail.errors import UsageError, WriteError
from vitrail.model.layers import dense, new_linear
from vitrail.model.resnet import ResNet
from vitrail.model.vit import ViT
from vitrail.objective.base import ImageBatch, Prepared, RunFacts
from vitrail.objective.masks import VALIDATION
from vitrail.objective.settings import Distill, Supervised
from vitrail.objective.supervised import SupervisedObjective


@dataclass(frozen=True)
class Teacher:
    """A trained network, in evaluation mode and on the student's device."""

    network: ViT | ResNet
    fingerprint: str
    """Hash of its weight files."""
    columns: Sequence[Sequence[int]] | None = None
    """For each class of the data, the places of the teacher's outputs that mean it: none for a class that the teacher
    does not know, several if it tells parts of the class apart; None if both have the same classes in one order."""
    answers: TeacherAnswers | None = None
    """Its outputs for images that are the same in every epoch; None if they are not."""

    @torch.no_grad()
    def __call__(self, images: Tensor, *, features: bool) -> Tensor:
        """Return logits [batch, known classes], or features [batch, width], float32, of images of any size.

        images: uint8, or float32 bands that are normalised as the teacher's.
        """
        size = self.network.config.image_size
        if tuple(images.shape[-2:]) != size:
            resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True)
            images = resized if images.is_floating_point() else resized.round().clamp(0, 255).to(torch.uint8)
        if features:
            return self.network.features(images).float()
        logits = self.network(images).float()
        if self.columns is None:
            return logits
        if self._places.shape[1] == 1:
            return logits[:, self._places[:, 0]]
        # the probability of a class is the sum of those of its parts
        return F.pad(logits, (0, 1), value=-torch.inf)[:, self._places].logsumexp(2)

    @cached_property
    def _places(self) -> Tensor:
        """`columns` of the known classes on the device, [known classes, most outputs]; -1 where there are fewer."""
        known = [list(places) for places in self.columns or () if places]
        most = max(map(len, known))
        return self._on_device([places + [-1] * (most - len(places)) for places in known])

    @property
    def outputs(self) -> int:
        """Number of the classes of the data that the teacher knows."""
        return self.network.config.classes if self.columns is None else sum(map(bool, self.columns))

    @cached_property
    def known(self) -> Tensor | None:
        """int64: the classes of the data that the teacher knows, on the device; None for all."""
        if self.columns is None or all(self.columns):
            return None
        return self._on_device([number for number, places in enumerate(self.columns) if places])

    def _on_device(self, numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, device=next(self.network.parameters()).device)


class DistillationObjective(SupervisedObjective):
    """`SupervisedObjective` with a teacher; see the file. Raises UsageError for a network without features."""

    def __init__(
        self, model: nn.Module, config: Supervised, task: RunFacts, distill: Distill, teacher: Teacher
    ) -> None:
        super().__init__(model, config, task.augment, task.classes, task.seed, task.class_counts)
        self.distill = distill
        self._teacher = (teacher,)  # in a tuple, so that it is neither trained nor saved
        self.projection: nn.Linear | None = None
        if distill.kind == "features":
            if not isinstance(model, ViT | ResNet):
                raise UsageError("distill.kind features needs the features of a network of vitrail; use soft or hard")
            self.projection = new_linear(model.config.features, teacher.network.config.features)

    def identity(self) -> dict[str, str]:
        """See `Objective`."""
        return {"teacher": self._teacher[0].fingerprint}

    @property
    def precomputed_bytes(self) -> int:
        """See `Objective`."""
        config = self._teacher[0].network.config
        return 4 * (config.classes if self.projection is None else config.features)

    def prepare(self, batch: ImageBatch, *, step: int) -> Prepared:
        """See `Objective`. Kept outputs come with the batch, because reading its pixels back waits for the device."""
        prepared, answers = super().prepare(batch, step=step), self._teacher[0].answers
        known = None if answers is None or step == VALIDATION else answers.known(batch.images, batch.index)
        return prepared if known is None else replace(prepared, precomputed=to_device(known, prepared.images.device))

    def before_step(self, prepared: Prepared, parts: int) -> Prepared:
        """See `Objective`: ask the teacher about all images of the step, unless all answers are known."""
        if prepared.precomputed is not None:
            return prepared

        def ask(images: Tensor) -> Tensor:
            return torch.cat([self._taught(part) for part in images.tensor_split(min(parts, len(images)))])

        answers, images = self._teacher[0].answers, prepared.images
        taught = ask(images) if answers is None else answers(images, prepared.index, ask)
        return replace(prepared, precomputed=taught)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        taught = self._taught(prepared.images) if prepared.precomputed is None else prepared.precomputed
        logits, pupil, features = self._outputs(prepared.images)
        from_labels = self.of_labels(logits, prepared)
        term = self._term(pupil, features, taught)
        losses = (1 - self.distill.weight) * from_labels + self.distill.weight * term
        right = self.right(logits if pupil is logits else logits + pupil, prepared)
        return losses.sum(), len(prepared), {"top1": right}

    def _taught(self, images: Tensor) -> Tensor:
        return self._teacher[0](images, features=self.projection is not None)

    def _outputs(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the logits that learn the labels, those that learn from the teacher, and the features, if known."""
        model: Any = self.model
        if not isinstance(model, ViT | ResNet):
            logits = model(images)
            return logits, logits, None
        features = model.features(images)
        if isinstance(model, ViT) and model.head is not None and model.head_dist is not None:
            own, pupil = features.chunk(2, dim=-1)
            return dense(model.head, own), dense(model.head_dist, pupil), features
        logits = model.classify(features) if isinstance(model, ViT) else model.head(features)  # type: ignore[misc]
        return logits, logits, features

    def _term(self, pupil: Tensor, features: Tensor | None, taught: Tensor) -> Tensor:
        """Return the loss of each image [batch] that comes from the teacher, in float32."""
        if self.projection is not None:
            assert features is not None
            projected = dense(self.projection, features).float()
            if self.distill.features == "cosine":
                return 1 - F.cosine_similarity(projected, taught, dim=-1)
            width = taught.shape[-1:]
            return (F.layer_norm(projected, width) - F.layer_norm(taught, width)).square().mean(-1)
        pupil = pupil.to(torch.promote_types(pupil.dtype, torch.float32))
        pupil = pupil if self._teacher[0].known is None else pupil[:, self._teacher[0].known]
        if self.distill.kind == "hard":
            return F.cross_entropy(pupil, taught.argmax(-1), reduction="none")
        temperature = self.distill.temperature
        theirs, ours = (taught / temperature).log_softmax(-1), (pupil / temperature).log_softmax(-1)
        return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1)


log = logging.getLogger("vitrail")

CHECKSUM = 8
"""Bytes of a checksum."""
ADVICE = "They are computed in every step. Set VITRAIL_CACHE to a folder that can be written to keep them"


@dataclass
class TeacherAnswers:
    """What a teacher says of images that come in every epoch with the same pixels, kept in a file.

    Each image has a row: a checksum of its pixels and of the values, then the values. A row that was written only in
    part, or for other pixels, is not used but written again. So several processes and later runs may share a file.
    The file is made with the first row. If it cannot be used, a warning says so, and from then on nothing is kept.
    """

    path: Path
    width: int
    """Number of values of an image."""
    _lost: bool = field(default=False, init=False)

    def __call__(self, images: Tensor, index: Tensor, ask: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the values of each image, float32 [batch, width]: its row, or else what `ask(images)` returns.

        images: [batch, ...], as the teacher gets them. index: int64 [batch], the number of each image's row.
        """
        if self._lost:
            return ask(images)
        numbers, pixels = index.tolist(), _pixels(images)
        rows = self._read(numbers, pixels)
        if missing := [place for place, row in enumerate(rows) if row is None]:
            for place, values in zip(missing, ask(images[missing]).cpu().numpy(), strict=True):
                rows[place] = values
            if not self._lost:
                self._write([(numbers[place], pixels[place], rows[place].tobytes()) for place in missing])  # type: ignore[union-attr]
        return torch.from_numpy(np.stack([row for row in rows if row is not None])).to(images.device)

    def known(self, images: Tensor, index: Tensor) -> Tensor | None:
        """Return the rows of these images, or None unless all are there. Arguments and result are on the CPU."""
        rows = [] if self._lost else self._read(index.tolist(), _pixels(images))
        values = [row for row in rows if row is not None]
        return torch.from_numpy(np.stack(values)) if len(values) == len(index) else None

    def _read(self, numbers: list[int], pixels: list[bytes]) -> list[np.ndarray | None]:
        size = CHECKSUM + 4 * self.width
        known: list[np.ndarray | None] = [None] * len(numbers)
        with self._using():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("rb", buffering=0) as file:
                for place, (number, image) in enumerate(zip(numbers, pixels, strict=True)):
                    file.seek(number * size)
                    row = file.read(size)
                    if row[:CHECKSUM] == _checksum(image, row[CHECKSUM:]):
                        known[place] = np.frombuffer(row[CHECKSUM:], np.float32)
        return known

    def _write(self, rows: list[tuple[int, bytes, bytes]]) -> None:
        with self._using(), self.path.open("r+b", buffering=0) as file:
            for number, image, values in rows:
                row = _checksum(image, values) + values
                file.seek(number * len(row))
                file.write(row)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Context of work on the file; an error of the system ends the keeping instead of the run."""
        try:
            with writing(self.path, task=f"keep the teacher's outputs in {self.path}", advice=ADVICE):
                yield
        except WriteError as error:
            log.warning("%s", error)
            self._lost = True


def _pixels(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images.cpu()]


def _checksum(pixels: bytes, values: bytes) -> bytes:
    digest = hashlib.blake2b(pixels, digest_size=CHECKSUM)
    digest.update(values)
    return digest.digest()
