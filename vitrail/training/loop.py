"""`fit(run)`: training, read top to bottom. Read this second, after `vitrail.model.vit`.

The loop knows only `objective(batch)`; everything else that happens in a step has a name, and its own file.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch

from vitrail import world
from vitrail.data.item import Listed
from vitrail.data.sources.open import open_data
from vitrail.model.process import prepare_process
from vitrail.objective.base import Batch
from vitrail.training.batch_size import explaining_memory
from vitrail.training.batches import endless, evaluation_loader, training_loader
from vitrail.training.checkpoints.resume import resumed_run
from vitrail.training.checkpoints.saving import Checkpoints
from vitrail.training.checkpoints.state import Result, TrainingState, identity
from vitrail.training.folder import RunFolder
from vitrail.training.guard import FiniteGuard, Interrupted, Signals, Stop, run_lock
from vitrail.training.objectives import build_objective
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer, clip_, set_learning_rate
from vitrail.training.optim.progressive import Sizes
from vitrail.training.optim.tune import tune
from vitrail.training.plan import Plan
from vitrail.training.processes.group import explaining_lost_processes
from vitrail.training.processes.parallel import distribute
from vitrail.training.progress import Progress
from vitrail.training.record import (
    record_batch,
    record_end,
    record_memory,
    record_resume,
    record_spike,
    record_start,
    record_unreadable,
    recorded_result,
)
from vitrail.training.recovery import MicroBatches
from vitrail.training.resolve import build_model, resolve
from vitrail.training.run import Run
from vitrail.training.spikes import Spikes
from vitrail.training.step import backward, seed_step
from vitrail.training.validation.self_supervised import build_validation
from vitrail.training.validation.validation import describe


def fit(run: Run, *, resume: Path | str | None = None) -> Result:
    """Train as `run` says, in a new run folder, or go on in the folder `resume`.

    Everything goes to the folder and, as progress, to stderr. A resumed run continues at the exact step, and on
    a CPU ends with the same bits as one that was never interrupted; with a `time_limit` it cannot promise that.
    A run that is over is not run again: its result is returned, with a message how to extend it.

    Raises UsageError and DataError before anything is written; CheckpointError where `resume` holds no valid
    checkpoint, or one of another run; TrainingError where training cannot go on; Interrupted after SIGTERM or
    Ctrl-C, once the state is saved.
    """
    # 1. The data, and every decision that the run leaves open
    folder = None if resume is None else RunFolder.open(resume)
    run, start = (run, run.weights) if folder is None else resumed_run(run, folder)
    splits = open_data(run.data, seed=run.seed, labels=run.supervised)
    names = splits.class_names
    resolved = resolve(run, splits.train, names, start)

    # 2. The network, and what it is to learn
    prepare_process()
    torch.manual_seed(run.seed)
    model = build_model(resolved)
    tuned = tune(model, run, resolved.decisions)
    objective = build_objective(resolved, model, len(names))
    objective.to(resolved.device).train()
    run = resolved.with_micro_batches(objective)
    assert run.batch_size and run.accumulate  # decided by now
    network = distribute(objective, run)
    optimizer = build_optimizer(objective, run.optim)

    # 3. Batches, durations in steps, and the second set of weights
    loader = training_loader(run, splits.train)
    held_out = None if splits.validation is None else evaluation_loader(run, splits.validation)
    plan = Plan.of(run, len(loader))
    sized = Sizes(run.progressive, resolved.config)
    average = Averager(model if run.supervised else objective, run.average, start=plan.average_start)
    about = identity(run, resolved.config, names, splits.fingerprint) | objective.identity()
    state = TrainingState(objective, optimizer, average, about, base=tuned.base)

    validation = build_validation(*network.seen(average), held_out, resolved.card(names), run, tuned.base, splits.train)

    # 4. The run folder: a new one, or where an earlier process left off
    folder = folder or RunFolder.create(run.out, run.name)
    progress = Progress(plan.total, run.batch_size, resolved.device)
    guard, spikes = FiniteGuard(objective, run.max_nonfinite), Spikes()
    micro_batches = MicroBatches(objective, guard, run, partial(record_memory, folder, run, progress.say))
    with (
        run_lock(folder.path),
        Signals() as signals,
        closing(folder),
        closing(loader),
        closing(validation),
        progress,
        explaining_memory(run, lambda: micro_batches.parts),
        Checkpoints(folder, run.keep, progress.say) as checkpoints,
        explaining_lost_processes(run, checkpoints),
    ):
        if resume is None:
            notes = record_start(folder, run, resolved.decisions, splits, tuned) or []
        else:
            checkpoints.restore(state)
            if state.is_over(run) and (result := recorded_result(folder)):
                return result
            notes = record_resume(folder, run, state.status.step, tuned) or []
        status = state.status
        folder.open_board(status.step)
        progress.announce(folder.path, resolved.decisions, notes)
        began = time.monotonic() - status.elapsed
        unreadable = partial(record_unreadable, folder, status, progress.say)
        batches = endless(loader, status.step, max_bad=0.0 if run.data.strict else run.data.max_bad, tell=unreadable)

        # 5. Steps, and between them evaluations and checkpoints
        while True:
            step = status.step
            network.at(plan.moment(step, status.elapsed))
            over = plan.over(step, status.elapsed)
            if status.evaluated < step and (over or plan.evaluates(step)):
                with suppress(Stop):
                    progress.say(f"step {step}: {describe(validation(status, folder, signals.check))}")
                progress.reset()
            if run.early_stop and status.stale >= run.early_stop:
                over = over or "early stop"
            if (signum := signals.requested()) or over or plan.saves(step):
                state.mark(over, run)
                checkpoints.save(state, wait=bool(over or signum))
                validation.save_last(status, folder)
            if signum:
                raise Interrupted.after(signum, folder.path, step, checkpoints.saved)
            if over:
                break

            guard.before_step()
            seed_step(run.seed, step, world.rank())
            rate = plan.learning_rate(step, status.elapsed)
            set_learning_rate(optimizer, rate, plan.weight_decay(step, status.elapsed))
            batch = sized(next(batches), plan.growth(step, status.elapsed))
            if step == 0:
                record_batch(folder, objective.prepare(batch, step=0), names)
            compute = partial(backward, objective, batch, step=step, autocast=resolved.autocast, network=network)
            outcome = micro_batches(compute, step)
            norm = float(clip_(objective.parameters(), run.optim.clip))
            if guard.finite(outcome.loss, norm):
                optimizer.step()
                average.update(step)
                objective.after_step()
            else:
                images = _names(splits.train, batch)
                folder.log("skipped", step, loss=outcome.loss, norm=norm, images=images)
                progress.say(guard.skip(step, outcome.loss, norm, images))
            optimizer.zero_grad(set_to_none=True)
            if times := spikes.times(outcome.loss):
                record_spike(folder, progress.say, step, outcome.loss, times, _names(splits.train, batch))

            status.step += 1
            status.elapsed = max(world.gather(time.monotonic() - began))
            progress.update(status.step, outcome, rate, loader.wait_seconds, plan.left(status.elapsed))
            if plan.logs(status.step):
                folder.log("train", status.step, epoch=status.step / len(loader), **progress.numbers())

        # 6. The best model on the test images, if there are any to spare, and the result
        validation.sign(folder)
        try:
            test = validation.test(splits, folder, signals.check)
        except Stop as stop:
            raise Interrupted.after(stop.signum, folder.path, status.step, checkpoints.saved) from None
        result = Result.of(status, folder.path, len(loader), test)
        record_end(folder, result)
        return result


def _names(source: Listed, batch: Batch) -> list[str]:
    return [source.id(index) for index in batch.index.tolist()]
