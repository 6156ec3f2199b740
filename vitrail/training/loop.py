"""`fit(run)`: training, read top to bottom. Read this second, after `vitrail.model.vit`.

The loop knows batches, steps and the moments between them. What a step does is in `vitrail.training.step`, what a run
needs before its first step in `vitrail.training.assemble`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.data.roles import Splits
from vitrail.device import command_seconds, float32_products
from vitrail.objective.settings import ObjectiveSettings
from vitrail.training.assemble import set_up
from vitrail.training.batch_size import explaining_memory
from vitrail.training.checkpoints.state import Checkpoints, resumed_run
from vitrail.training.folder import RunFolder
from vitrail.training.guard import (
    FiniteGuard,
    Interrupted,
    Signals,
    Stop,
    explaining_lost_processes,
    garbage_in_turns,
    run_lock,
)
from vitrail.training.new_rows import begin_classifier
from vitrail.training.optim.optimizer import HALVINGS
from vitrail.training.progress import Progress
from vitrail.training.python_objects import Losses, PythonObjects
from vitrail.training.record import RunRecorder
from vitrail.training.result import Result, recorded_result
from vitrail.training.run import Run
from vitrail.training.step import TrainingStep
from vitrail.training.time_limit import Clock, ThreadCount


def fit(
    run: Run,
    *,
    resume: Path | str | None = None,
    splits: Splits | None = None,
    objective: ObjectiveSettings | Losses | None = None,
    model: nn.Module | None = None,
    data: Any = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
    on_evaluate: Callable[[int, dict[str, float]], None] | None = None,
    asked: Mapping[str, str] | None = None,
    began: float | None = None,
) -> Result:
    """Train `run` in a new run folder, or resume it in the folder `resume`. Return the result.

    splits: The data of the run, if they are open already. objective, model, data: Objects in place of the settings of
    `run`: a function (logits, targets) -> losses, any network images -> logits, and a data set of torch's kind or a
    mapping of splits to such data sets (`vitrail.training.python_objects`). Settings of objective and data are
    possible, too. on_log: Called with each line of metrics.jsonl. on_evaluate: Called with step and numbers of each
    evaluation.
    asked: Settings of `run` that must be used as they are, by their dotted names -> who asks for them. For all others a
    value that the data do not allow, such as a batch larger than the training set, is replaced, with a message.
    began: The moment of `time.monotonic()` from which the time limit counts (default: the start of the command, and in
    other programs this call).

    Everything is written to the run folder; progress goes to stderr. A resumed run continues at the exact step. On a
    CPU it ends with the same bits as a run without interruption, unless there is a `time_limit`. A finished run is not
    trained again: its result is returned, with a message that says how to extend it.

    Raises UsageError and DataError before anything is written; CheckpointError if `resume` holds no valid checkpoint,
    or a checkpoint of another run; TrainingError if training cannot continue; Interrupted after SIGTERM or Ctrl-C, once
    the state is saved.
    """
    objects = PythonObjects(objective, model, data, on_log, on_evaluate, asked or {})
    with training(run, objects, resume=resume, splits=splits, began=began) as result:
        return result


@contextmanager
def training(
    run: Run,
    objects: PythonObjects,
    *,
    resume: Path | str | None = None,
    splits: Splits | None = None,
    began: float | None = None,
    reported: bool = False,
) -> Iterator[Result]:
    """Train `run` as `fit` does, and yield the result while the trackers are open. They close afterwards.

    reported: Whether the caller writes report.html then, which the trackers get. A time limit leaves time for it.
    """
    began = time.monotonic() - command_seconds() if began is None else began

    # 1. Data, network, objective, optimiser, loaders, durations, validation
    folder, run = None if resume is None else RunFolder.open(resume), objects.applied_to(run)
    RunFolder.check(Path(run.out), folder)
    run, start = (run, None) if folder is None else resumed_run(run, folder, objects)
    splits = (splits or objects.splits(run)).in_order([] if folder is None else folder.class_names())
    setup = set_up(run, splits, start, objects)
    run, timetable, state, validation = setup.run, setup.timetable, setup.state, setup.validation

    # 2. The run folder, and what guards the run
    folder = folder or RunFolder.create(run.out, run.name)
    folder.on_log = objects.on_log
    progress = Progress(run.batch_size or 0, setup.decision.device)
    guard = FiniteGuard(setup.objective, run.max_nonfinite + HALVINGS * (state.scale is not None))
    with (
        float32_products(run.precision),
        setup,
        run_lock(folder.path),
        Signals() as signals,
        garbage_in_turns() as collect,
        closing(folder),
        progress,
        explaining_memory(run, lambda: step.parts, lambda: step.again, folder.path),
        Checkpoints(folder, run.keep, progress.say) as checkpoints,
        explaining_lost_processes(folder.path, checkpoints.newest),
    ):
        clock = Clock(setup, began, reported=reported)
        recorder = RunRecorder(folder, setup, progress, guard, signals, clock)
        step = TrainingStep(
            run,
            setup.network,
            setup.optimizer,
            setup.average,
            guard,
            on_memory=recorder.out_of_memory,
            on_done=recorder,
            own=recorder.own_numbers,
            scale=state.scale,
        )
        if resume is None:
            recorder.start()
        else:
            checkpoints.restore(state)
            if state.is_over(run) and (result := recorded_result(folder)):
                yield result
                return
            recorder.resume()
        status, threads = state.status, ThreadCount.of(run, setup.decision.device, progress.say)
        for where in folder.track(run, status.step) or ():
            progress.say(where)
        if not status.step and (told := begin_classifier(setup, clock.left / 2, progress.say)):
            progress.say(told)
        if warning := clock.start():
            progress.say(warning)
        max_bad = 0.0 if run.data.strict else run.data.max_bad
        batches = setup.feed.batches(status, max_bad=max_bad, report=recorder.unreadable)

        # 3. Steps, and between them evaluations and checkpoints. On an accelerator a step's numbers are read during the
        # next step, so that no step waits for the device. What needs the state after a step settles the step first
        while True:
            number = status.step
            over, signum = timetable.over(number, status.elapsed), signals.agreed
            evaluates, saves = timetable.evaluates(number, status.elapsed), timetable.saves(number, status.elapsed)
            if signum or over or evaluates or saves:
                step.settle()
            # objectives have schedules of their own, such as the temperature of DINO's teacher
            setup.network.at(now := timetable.moment(number, status.elapsed))
            due = status.evaluated < number or not status.best
            if due and (over or evaluates):
                with suppress(Stop), clock.evaluation():
                    numbers = validation(status, folder, signals.check)
                    progress.say(f"step {number}: {validation.in_words(numbers)}")
                progress.reset()
                signum = signals.requested()
                if number == 0:  # that of a probe is no part of the schedule, whose warmup it would use up
                    clock.start()
            if run.early_stop and status.stale >= run.early_stop:  # evaluations in sequence that were not the best
                over = over or "early stop"
            if signum or over or saves:
                state.mark(over, run)
                checkpoints.save(state, wait=bool(over or signum), after=validation.until_written)
                validation.save_last(status, folder)
            if signum:
                raise Interrupted.after(signum, folder.path, number, checkpoints.saved)
            if over:
                break
            loaded, batch = next(batches)
            if number == 0:  # drawn at the size that images grow to, because a person is to recognise them
                recorder.first_batch(setup.objective.prepare(setup.resize(loaded, 1.0), step=0))
            rate = timetable.learning_rate(number, status.elapsed)
            with threads or nullcontext():
                step(batch, number, rate=rate, decay=timetable.weight_decay(number, status.elapsed), now=now.step)
            status.step += 1
            collect(status.step)

        # 4. The best model's calibration on the validation images, its numbers on the test images, and the result
        validation.written()
        try:
            confidence = validation.calibrated(folder, status, signals.check)
            if confidence is not None:
                progress.say(f"calibration: {confidence}")
            validation.sign(folder, confidence)
            test = validation.test(setup.splits, folder, signals.check)
            floors = validation.floors(setup.splits, status, test)
        except Stop as stop:
            raise Interrupted.after(stop.signum, folder.path, status.step, checkpoints.saved) from None
        result = Result.of(status, folder.path, timetable.per_epoch, test, floors)
        recorder.end(result)
        signals.restore()  # everything is saved: from now on a signal ends the process
        yield result.without({**folder.lost, **checkpoints.lost})
