"""What to do next: suggestions with commands, drawn from the results of a run.

Each rule looks at one thing and gives a reason with its numbers. The page shows the first three, in the order of the
rules: what is unfinished, then what usually gains most. docs/numbers/advice.md has an example for each rule, in which
following it helped.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from vitrail.data.check import ADJUSTED, EVERY_CLASS, IMBALANCED, fairness_flags, imbalance
from vitrail.data.images.whole import CUT_OFF
from vitrail.data.settings import as_flags
from vitrail.evaluation.answers import AnswerResults
from vitrail.evaluation.classify import Classification
from vitrail.evaluation.pixel_scores import PixelResults
from vitrail.objective.settings import DINOv2, Segmentation, SeveralAnswers, Supervised, Tokenizer
from vitrail.ranges import height_width
from vitrail.reports.run_record import RunRecord
from vitrail.reports.tables import most_confused
from vitrail.tasks.classes import OLD
from vitrail.training.run import Run

MOST = 3
"""Maximum number of suggestions on a page."""
FEW_IMAGES = 20_000
"""Number of training images below which pretrained weights gain most (paper, section 4.3)."""
SMALLEST = 32
"""Side in pixels from which pretrained weights help."""
PHOTOGRAPHS = 96
"""Side in pixels below which the recipe finetune-small is for images of this size."""
FEW_PASSES = 20
"""Number of passes over the images below which training from scratch has hardly begun; DeiT takes 300."""
TIME = "--time-limit"
FORGOTTEN = 0.02
"""Loss of accuracy on the classes that a network knew from which their images are missed."""
WORSE = 0.02
"""Loss of kNN accuracy from which features that learned on without labels are called worse."""
BEHIND = 0.7
"""Share of the best answer's score up to which another answer is far behind."""
RISEN = 0.01
"""Rise of the mIoU in the last quarter of a run from which a longer one is suggested."""
CERTAIN = 0.9
"""Probability of a wrong class from which the label of an image is looked at."""


@dataclass(frozen=True)
class Suggestion:
    """One thing to do."""

    reason: str
    """What was seen, with its numbers, and what follows."""
    command: str | None = None
    improves: bool = True
    """Whether the network would be better; else it is used, or looked into."""


def advises(record: RunRecord) -> bool:
    """Return whether a suggestion says how the network may become better."""
    return any(one.improves for one in suggestions(record, None))


def suggestions(record: RunRecord, image_size: int | None) -> list[Suggestion]:
    """Return at most three suggestions for a classifier with one label per image, or one for a pretrained network.

    There are none for a classifier without an evaluation, and one for several answers of which one is much worse.

    image_size: Shorter side of the network's input in pixels, if the network could be loaded.
    """
    if record.self_supervised:
        return _after_pretraining(record, image_size or 0)
    if isinstance(record.results, AnswerResults):
        return _weakest_answer(record, record.results)
    if record.run is not None and isinstance(record.run.objective, Segmentation):
        return _of_masks(_Ran(record, record.run, image_size or 0))
    if record.evaluation is None or record.run is None or not isinstance(record.run.objective, Supervised):
        return []
    seen = _Seen(record, record.run, image_size or 0, record.evaluation)
    right = (record.result.get("test") or {}).get("top1", record.evaluation.top1)
    found = (rule(seen) for rule in (PERFECT if right == 1 else RULES) if rule is not _use or not record.shortfall)
    return [one for one in found if one is not None][:MOST]


def _after_pretraining(record: RunRecord, image_size: int) -> list[Suggestion]:
    """Return how to go on after learning without labels; nothing for a run that has not ended or is a tokenizer."""
    if not record.result or record.run is None or isinstance(record.run.objective, Tokenizer):
        return []
    _, neighbours = record.curve("knn", having="knn")
    if isinstance(record.run.objective, DINOv2) and len(neighbours) > 1 and neighbours[-1] < neighbours[0] - WORSE:
        reason = (
            f"The features have become worse: by neighbours {neighbours[0]:.1%} of the validation images were right at "
            f"the start, and {neighbours[-1]:.1%} are now. Learn on with a lower rate, or keep the weights."
        )
        again = f"vitrail train --config {shlex.quote(str(record.folder))}/config.yaml"
        return [Suggestion(reason, f"{again} --lr {record.run.optim.lr / 4:g}")]
    recipe = " --recipe finetune-small" if 0 < image_size < PHOTOGRAPHS else ""
    reason = "The network has learned without labels, so it has no classes yet. Fine-tune it on images with labels."
    return [Suggestion(reason, f"vitrail finetune labelled/ --from {shlex.quote(str(record.folder))}{recipe}")]


def _weakest_answer(record: RunRecord, results: AnswerResults) -> list[Suggestion]:
    """Return what to do about an answer that is far behind the others; nothing if none is."""
    scores = {name: max(float(getattr(part, part.headline)), 0.0) for name, part in results.parts.items()}
    worst = min(scores, key=lambda name: scores[name])
    if len(scores) < 2 or scores[worst] > BEHIND * max(scores.values()) or record.run is None:
        return []
    objective = record.run.objective
    weights = objective.answer_weights if isinstance(objective, SeveralAnswers) else ()
    values = {name: value for name, _, value in (text.rpartition("=") for text in weights)}
    values[worst] = f"{3 * float(values.get(worst, 1)):g}"
    words = " ".join(shlex.quote(f"{name}={value}") for name, value in values.items())
    return [
        Suggestion(
            f"Of the {len(scores)} answers, {worst!r} is far behind the others ({results.parts[worst].in_words()}). "
            "Give it more weight in the loss. If it stays behind, train a network for it alone and compare.",
            f"vitrail train --config {shlex.quote(str(record.folder))}/config.yaml --objective.answer-weights {words}",
        )
    ]


def _of_masks(ran: _Ran) -> list[Suggestion]:
    """Return what to do with a network for the class of each pixel; nothing for a run that has not ended."""
    results = ran.record.results
    if not ran.record.result or not isinstance(results, PixelResults):
        return []
    size = height_width(ran.run.image_size or ran.image_size)
    wanted = " ".join(str(2 * side) for side in (size if size[0] != size[1] else size[:1]))
    _, scores = ran.record.curve("miou", having="miou")
    failed, rising = results.pixel_accuracy <= results.largest_share, _last_quarter(scores)
    reason, found = "", []
    if failed:
        reason = f"The network is not better than one that always says the most frequent class: {results.in_words()}."
    elif rising and rising[1] - rising[0] > RISEN:
        reason = _still_rising("The mIoU", *rising)
    if reason:
        found.append(Suggestion(f"{reason} Train twice as long.", ran.twice_as_long()))
    found.append(
        Suggestion(
            f"The network sees {ran.image_size} pixels of the shorter side. With more pixels masks are finer, and a "
            "step takes about four times as long.",
            ran.again(f"--image-size {wanted}"),
        )
    )
    if not failed:
        command = f"vitrail predict {ran.folder} photos/ --out masks/"
        found.append(Suggestion("The network writes a mask for each new image.", command, improves=False))
    return found


@dataclass(frozen=True)
class _Ran:
    record: RunRecord
    run: Run
    image_size: int

    @property
    def folder(self) -> str:
        """The run folder, as a word of a command."""
        return shlex.quote(str(self.record.folder))

    @property
    def data(self) -> str:
        """The data set, as a word of a command."""
        return shlex.quote(self.run.data.path)

    @property
    def reading(self) -> str:
        """The flags that open the data set as the run did, after a blank; "" if it needs none."""
        return "".join(f" {shlex.quote(word)}" for word in as_flags(self.run.data))

    def again(self, flags: str) -> str:
        """Return the command that repeats the run with other flags."""
        return f"vitrail train --config {self.folder}/config.yaml {flags}"

    def within(self, minutes: float) -> str:
        """Return the command that repeats the run with another time limit.

        It is the command as it was typed, so all that the time decided, such as the image size, is decided again.
        config.yaml holds these decisions, too, so it is used only for a run that no command line of vitrail started.
        """
        try:
            words = shlex.split(self.record.facts.get("command") or "")
        except ValueError:  # somebody has edited run.json
            words = []
        verbs = [place for place, word in enumerate(words) if word in ("train", "finetune")]
        resumed = any(word.partition("=")[0] == "--resume" for word in words)
        if resumed or not verbs or Path(words[verbs[0] - 1]).name not in ("vitrail", "vitrail.exe"):
            return self.again(f"{TIME} {minutes:g}")
        kept = ["vitrail"]
        for before, word in pairwise(words[verbs[0] - 1 :]):
            if TIME not in (word.partition("=")[0].replace("_", "-"), before.replace("_", "-")):
                kept.append(word)
        return shlex.join([*kept, TIME, f"{minutes:g}"])

    def twice_as_long(self) -> str:
        """Return the command that repeats the run for twice the time or duration, whichever ended it."""
        limit, length = self.run.time_limit, self.run.duration
        if limit is not None and (length is None or self.record.result.get("ended") == "time limit"):
            return self.within(2 * limit)
        assert length is not None  # only a time limit takes its place
        more = "" if limit is None else f" {TIME} {2 * limit:g}"  # it is not to end the longer run
        return self.again(f"--duration '{replace(length, value=2 * length.value)}'{more}")


@dataclass(frozen=True)
class _Seen(_Ran):
    evaluation: Classification


def _unfinished(seen: _Seen) -> Suggestion | None:
    if seen.record.result:
        return None
    reason = "The run has not ended. It continues at the step where it stopped."
    return Suggestion(reason, f"vitrail train --resume {seen.folder}")


def _pretrained(seen: _Seen) -> Suggestion | None:
    """A network from scratch is not better than a floor, or has few images of the size of photographs."""
    images = seen.record.data_facts.get("images", {}).get("train") or math.inf
    if seen.run.weights or seen.image_size < SMALLEST or (images >= FEW_IMAGES and not seen.record.shortfall):
        return None
    on = "" if images == math.inf else f" on {images:,} images"
    return Suggestion(
        f"{_not_enough(seen)}The network was trained from scratch{on}. Weights that have seen many photographs before "
        "learn more from the same images.",
        f"vitrail finetune {seen.data}{seen.reading}",
    )


def _whole_images(seen: _Seen) -> Suggestion | None:
    """Training has warned that much of the images is cut off."""
    notes = seen.record.data_facts.get("notes") or []
    if not (found := next((note for note in notes if CUT_OFF in str(note)), None)):
        return None
    return Suggestion(
        f"{str(found).removeprefix('warning: ').split(' (')[0]}. Show the network all of them: with the proportions of "
        "the images, and the rest filled.",
        seen.again("--preprocess.resize pad"),
    )


def _not_enough(seen: _Seen) -> str:
    """Return a sentence about a floor that the network does not exceed; "" if it exceeds all."""
    return f"The network {seen.record.shortfall}. " if seen.record.shortfall else ""


def _overfitting(seen: _Seen) -> Suggestion | None:
    """The loss on the validation images has risen by a tenth since its minimum, while the accuracy has not risen."""
    _, losses = seen.record.curve("nll", having="nll")
    _, accuracy = seen.record.curve("top1", having="nll")
    if len(losses) < 4 or losses[-1] < 1.1 * losses.min() or accuracy[-1] > accuracy[losses.argmin()]:
        return None
    return Suggestion(
        f"The validation loss has risen from {losses.min():.3f} to {losses[-1]:.3f}: the network has begun to learn "
        "the training images by heart. The report is about the best weights, from before that. More images help; "
        "a longer training does not. This command draws how training changes your images, and what --augment.also "
        "could add. Add what leaves your labels right.",
        f"vitrail data augment --config {seen.folder}/config.yaml",
    )


def _longer(seen: _Seen) -> Suggestion | None:
    """Accuracy was still rising, or a network from scratch has seen each image only a few times."""
    run, passes = seen.run, seen.record.result.get("epochs") or math.inf
    if _overfitting(seen):
        return None
    if rise := _rise(seen):
        reason = _still_rising("Accuracy", *rise)
    elif not run.weights and passes < FEW_PASSES:
        reason = f"The network was trained from scratch and saw each image only {passes:.2g} times."
    elif seen.record.shortfall:
        reason = _not_enough(seen).rstrip()
    else:
        return None
    return Suggestion(f"{reason} Train twice as long.", seen.twice_as_long())


def _rise(seen: _Seen) -> tuple[float, float] | None:
    """Return the accuracies at three quarters and at the end, if the end is ahead by more than its standard error."""
    _, accuracy = seen.record.curve("top1", having="nll")
    if seen.record.result.get("ended") == "early stop" or not (found := _last_quarter(accuracy)):
        return None
    before, last = found
    return found if last - before > math.sqrt(last * (1 - last) / seen.evaluation.count) else None


def _still_rising(what: str, before: float, last: float) -> str:
    return f"{what} was still rising at the end: from {before:.1%} to {last:.1%} in the last quarter."


def _last_quarter(scores: np.ndarray) -> tuple[float, float] | None:
    """Return a score at three quarters and at the end; None if the end is not the best, or there are too few."""
    if len(scores) < 4 or scores[-1] < scores.max():
        return None
    return float(scores[: -(len(scores) // 4)][-1]), float(scores[-1])


def _rare_classes(seen: _Seen) -> Suggestion | None:
    evaluation, objective = seen.evaluation, seen.run.objective
    assert isinstance(objective, Supervised)
    behind = evaluation.top1 - evaluation.balanced_accuracy
    if imbalance(evaluation.class_count) < IMBALANCED or behind < 0.02:
        return None
    images = seen.record.data_facts.get("images", {}).get("train") or 0
    helping = fairness_flags(images, seen.record.result.get("steps") or 0, objective.loss)
    if helping != ADJUSTED and seen.run.metric.name in EVERY_CLASS:
        return None
    return Suggestion(
        "Rare classes fail more often than frequent ones: the mean accuracy of the classes, "
        f"{evaluation.balanced_accuracy:.1%}, is {100 * behind:.1f} points below the accuracy of the images.",
        seen.again(helping),
    )


def _labels(seen: _Seen) -> Suggestion | None:
    """At least three mistakes, and a tenth of them, were made with great confidence."""
    evaluation = seen.evaluation
    wrong = evaluation.known & ~evaluation.correct & (evaluation.top[:, 0] >= 0)
    certain = int((evaluation.probability[wrong, 0] >= CERTAIN).sum())
    if certain < 3 or certain < 0.1 * wrong.sum():
        return None
    return Suggestion(
        f"{certain} of the {int(wrong.sum())} wrong predictions were made with a probability of at least "
        f"{CERTAIN:.0%}. Look at the worst mistakes below: the labels of some may be wrong, or images may show two "
        "classes. This command writes all predictions to tables.",
        f"vitrail evaluate {seen.folder} {seen.data} --out predictions/",
    )


def _one_pair(seen: _Seen) -> Suggestion | None:
    """One confusion makes up a quarter of at least eight mistakes of a network for more than two classes."""
    confusions, wrong = most_confused(seen.evaluation), int((~seen.evaluation.correct & seen.evaluation.known).sum())
    if len(seen.evaluation.class_names) < 3 or wrong < 8 or confusions[0].images < 0.25 * wrong:
        return None
    first = confusions[0]
    pair = shlex.quote(f"{first.true}={first.predicted}")
    return Suggestion(
        f"{first.images} of the {wrong} mistakes are images of {first.true!r} that are taken for "
        f"{first.predicted!r}. Look at images of both. If even you cannot tell them apart, make them one class.",
        f"vitrail finetune {seen.data} --from {seen.folder} --classes merge {pair}{seen.reading}",
    )


def _forgotten(seen: _Seen) -> Suggestion | None:
    """A network that got new classes gets fewer images of the old ones right, which had no training images."""
    before, best = ((seen.record.result.get(name) or {}).get(OLD, 0.0) for name in ("before", "best"))
    if before - best < FORGOTTEN:
        return None
    return Suggestion(
        f"Images of the classes that the network knew before are right less often than then: {best:.1%}, before "
        f"{before:.1%}. Put some training images of these classes beside the new ones, and repeat the run.",
        f"vitrail finetune BOTH/ --from {shlex.quote(seen.run.weights or '')} --classes add",
    )


def _several(seen: _Seen) -> Suggestion | None:
    """A fine-tuned network that exceeds its floors."""
    rate = seen.run.optim.lr
    if not seen.run.weights or seen.record.shortfall or not rate:
        return None
    return Suggestion(
        "Fine-tune once or twice more with another learning rate: the mean of several runs is often a little better "
        f"than the best one. Measure it: vitrail evaluate {seen.folder} OTHER-RUN. Or make one network of the runs: "
        f"vitrail weights average {seen.folder} OTHER-RUN --out soup/.",
        seen.again(f"--optim.lr {rate / 2:g}"),
    )


def _use(seen: _Seen) -> Suggestion | None:
    command = f"vitrail predict {seen.folder} new-photos/ --out classes.csv"
    return Suggestion("Name the classes of new images.", command, improves=False)


def _look(seen: _Seen) -> Suggestion | None:
    reason = "Look inside: what the filters and positions have learned."
    return Suggestion(reason, f"vitrail inspect {seen.folder}", improves=False)


Rule = Callable[[_Seen], Suggestion | None]
IMPROVING: tuple[Rule, ...] = (
    *(_unfinished, _forgotten, _pretrained, _whole_images, _overfitting, _longer, _rare_classes, _labels, _one_pair),
)
RULES: tuple[Rule, ...] = (*IMPROVING, _several, _use, _look)
PERFECT: tuple[Rule, ...] = (_unfinished, _use, _look)
"""The rules for a network that makes no mistake: nothing can be improved."""
