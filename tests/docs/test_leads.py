"""The three objectives of benchmarks.ablation that are no part of vitrail do what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import vitrail
from benchmarks.leads import AlternatingFlips, GrowingBatch, PatchDropout
from vitrail.objective.base import Moment, RunFacts

IMAGES, LABELS = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8), torch.tensor([0, 1, 2, 0, 1, 2])
BATCH = SimpleNamespace(images=IMAGES, labels=LABELS, index=torch.arange(10, 16))


def network() -> Any:
    torch.manual_seed(0)
    return vitrail.create("Ti/4", width=24, depth=2, heads=2, mlp_dim=24, image_size=16, classes=3, pool="gap")


def test_patch_dropout_computes_other_patches_in_each_step_and_all_patches_without_it() -> None:
    model = network()
    objective = PatchDropout(kept=0.5, smoothing=0.1).build(model, RunFacts(seed=3, classes=3))
    first, second = (objective.prepare(BATCH, step=step).precomputed for step in (1, 2))
    assert first is not None and second is not None and first.shape == (6, 8) and not torch.equal(first, second)
    assert all(len(set(row.tolist())) == 8 for row in first)
    seen: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    loss, count, _ = objective(BATCH, step=1)
    every = PatchDropout(kept=1.0).build(model, RunFacts(seed=3, classes=3))
    plain = vitrail.Supervised().build(model, RunFacts(seed=3, classes=3))
    torch.testing.assert_close(every(BATCH, step=1)[0], plain(BATCH, step=1)[0])
    assert (seen, count) == ([8, 16, 16], 6) and bool(loss.isfinite())


def test_alternating_flips_mirror_each_image_in_every_second_epoch() -> None:
    objective = AlternatingFlips().build(network(), RunFacts(classes=3))
    objective.at(Moment(per_epoch=10))
    mirrored = torch.stack(
        [(objective.prepare(BATCH, step=step).images == IMAGES.flip(3)).flatten(1).all(1) for step in (5, 9, 10, 25)]
    )
    even = torch.tensor([True, False] * 3)
    assert torch.equal(mirrored, torch.stack([even, even, ~even, even]))


def test_a_growing_batch_learns_from_more_of_its_images_as_the_run_goes_on() -> None:
    model, images, labels, index = network(), IMAGES.repeat(4, 1, 1, 1), LABELS.repeat(4), torch.arange(24)
    objective = GrowingBatch(start=0.5, smoothing=0.1).build(model, RunFacts(classes=3))
    plain = vitrail.Supervised(smoothing=0.1).build(model, RunFacts(classes=3))
    for done, count in ((0.0, 12), (0.1, 12), (0.5, 18), (0.7, 21), (1.0, 24)):
        objective.at(Moment(done))
        loss, learned, metrics = objective(SimpleNamespace(images=images, labels=labels, index=index), step=1)
        first = SimpleNamespace(images=images[:count], labels=labels[:count], index=index[:count])
        expected, _, right = plain(first, step=1)
        torch.testing.assert_close(loss, expected)
        assert (learned, metrics["top1"]) == (count, right["top1"])
