"""`fit(run)`: training, read top to bottom. Read this second, after `vitrail.model.vit`.

The loop knows batches, steps and the moments between them. What a step does is in `vitrail.training.step`, what a run
needs before its first step in `vitrail.training.setup`.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from vitrail import world
from vitrail.data.sources.open import Splits, open_data
from vitrail.device import fast_float32
from vitrail.training.batch_size import explaining_memory
from vitrail.training.batches import endless
from vitrail.training.checkpoints.resume import resumed_run
from vitrail.training.checkpoints.saving import Checkpoints
from vitrail.training.checkpoints.state import Result
from vitrail.training.folder import RunFolder
from vitrail.training.guard import FiniteGuard, Interrupted, Signals, Stop, run_lock
from vitrail.training.processes.group import explaining_lost_processes
from vitrail.training.progress import Progress
from vitrail.training.record import (
    StepRecord,
    record_batch,
    record_end,
    record_memory,
    record_resume,
    record_start,
    record_unreadable,
    recorded_result,
)
from vitrail.training.run import Run
from vitrail.training.setup import set_up
from vitrail.training.step import TrainingStep
from vitrail.training.validation.validation import describe


@fast_float32()
def fit(run: Run, *, resume: Path | str | None = None, splits: Splits | None = None) -> Result:
    """Train `run` in a new run folder, or resume it in the folder `resume`. Return the result.

    splits: The data of the run, if they are open already. Everything is written to the run folder; progress goes to
    stderr. A resumed run continues at the exact step. On a CPU it ends with the same bits as a run without
    interruption, unless there is a `time_limit`. A finished run is not trained again: its result is returned, with a
    message that says how to extend it.

    Raises UsageError and DataError before anything is written; CheckpointError if `resume` holds no valid checkpoint,
    or a checkpoint of another run; TrainingError if training cannot continue; Interrupted after SIGTERM or Ctrl-C, once
    the state is saved.
    """
    # 1. Data, network, objective, optimiser, loaders, durations, validation
    folder = None if resume is None else RunFolder.open(resume)
    run, start = (run, None) if folder is None else resumed_run(run, folder)
    setup = set_up(run, splits or open_data(run.data, seed=run.seed, labels=run.supervised), start)
    run, splits, plan, state, validation = setup.run, setup.splits, setup.plan, setup.state, setup.validation
    decisions, tuned = setup.resolved.decisions, setup.tuned

    # 2. The run folder, and what guards the run
    folder = folder or RunFolder.create(run.out, run.name)
    progress = Progress(plan.total, run.batch_size or 0, setup.resolved.device)
    guard = FiniteGuard(setup.objective, run.max_nonfinite)
    with (
        setup,
        run_lock(folder.path),
        Signals() as signals,
        closing(folder),
        progress,
        explaining_memory(run, lambda: step.parts),
        Checkpoints(folder, run.keep, progress.say) as checkpoints,
        explaining_lost_processes(run, checkpoints),
    ):
        record = StepRecord(folder, setup, progress, guard, signals)
        step = TrainingStep(
            run,
            setup.network,
            setup.optimizer,
            setup.average,
            guard,
            on_memory=partial(record_memory, folder, run, progress.say),
            on_done=record,
            own=lambda: {"elapsed": world.is_main() * (time.monotonic() - began), **signals.flags()},
        )
        if resume is None:
            notes = record_start(folder, run, decisions, splits, tuned) or []
        else:
            checkpoints.restore(state)
            if state.is_over(run) and (result := recorded_result(folder)):
                return result
            notes = record_resume(folder, run, state.status.step, tuned) or []
        status = state.status
        folder.open_board(status.step)
        progress.announce(folder.path, decisions, notes)
        began = time.monotonic() - status.elapsed
        unreadable = partial(record_unreadable, folder, status, progress.say)
        max_bad = 0.0 if run.data.strict else run.data.max_bad
        batches = endless(setup.loader, status.step, max_bad=max_bad, tell=unreadable)

        # 3. Steps, and between them evaluations and checkpoints
        while True:
            number = status.step
            over, signum = plan.over(number, status.elapsed), signals.agreed
            if signum or over or plan.evaluates(number) or plan.saves(number):
                step.settle()
            setup.network.at(plan.moment(number, status.elapsed))
            if status.evaluated < number and (over or plan.evaluates(number)):
                with suppress(Stop):
                    progress.say(f"step {number}: {describe(validation(status, folder, signals.check))}")
                progress.reset()
                signum = signals.requested()
            if run.early_stop and status.stale >= run.early_stop:
                over = over or "early stop"
            if signum or over or plan.saves(number):
                state.mark(over, run)
                checkpoints.save(state, wait=bool(over or signum))
                validation.save_last(status, folder)
            if signum:
                raise Interrupted.after(signum, folder.path, number, checkpoints.saved)
            if over:
                break
            batch = setup.sized(next(batches), plan.growth(number, status.elapsed))
            if number == 0:
                record_batch(folder, setup.objective.prepare(batch, step=0), splits.class_names)
            rate = plan.learning_rate(number, status.elapsed)
            step(batch, number, rate=rate, decay=plan.weight_decay(number, status.elapsed))
            status.step += 1

        # 4. The best model on the test images, if there are any, and the result
        validation.sign(folder)
        try:
            test = validation.test(splits, folder, signals.check)
        except Stop as stop:
            raise Interrupted.after(stop.signum, folder.path, status.step, checkpoints.saved) from None
        result = Result.of(status, folder.path, plan.per_epoch, test)
        record_end(folder, result)
        return result
