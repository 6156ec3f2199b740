"""The loss of queries, against transformers' EoMT on copied tensors and points."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eomt_peer import eomt, ours
from painted import paint
from torch import Tensor
from transformers.models.eomt.modeling_eomt import EomtLoss

import vitrail
from vitrail.data.settings import IGNORED
from vitrail.errors import UsageError
from vitrail.model.queries import QueryOutputs
from vitrail.model.variants import ViTConfig
from vitrail.model.vit import ViT
from vitrail.objective import queries as loss
from vitrail.objective.base import Moment
from vitrail.training.run import Model

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TRUTH = torch.randint(0, 4, (3, 8, 8), generator=torch.Generator().manual_seed(1)).repeat_interleave(4, 1)
TRUTH = TRUTH.repeat_interleave(4, 2)
TRUTH[1][TRUTH[1] == 2] = 3  # a class that one image lacks
POINTS = 100
PLACES = torch.rand(3 * POINTS, 2, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """All random points, theirs and ours, are the first ones of `PLACES`."""
    real = torch.rand

    def theirs(*shape: int, **options: Any) -> Tensor:
        return PLACES[: shape[1]].expand(shape[0], -1, -1).clone() if shape[-1:] == (2,) else real(*shape, **options)

    monkeypatch.setattr(torch, "rand", theirs)
    monkeypatch.setattr(loss, "_draw", lambda _, counts, points, __: PLACES[:points].expand(sum(counts), -1, -1))


def as_labels(truth: Tensor) -> dict[str, list[Tensor]]:
    """Masks and classes as transformers takes them."""
    classes = [each.unique() for each in truth]
    masks = [(each == found[:, None, None]).float() for each, found in zip(truth, classes, strict=True)]
    return dict(mask_labels=masks, class_labels=classes)


def mean_loss(answers: list[QueryOutputs], truth: Tensor) -> Tensor:
    masks = loss.Masks(truth.byte())
    each = torch.full((len(truth),), len(masks.masks) / len(truth))
    queries = answers[0].classes.shape[1]
    found = [
        loss.combined(*loss.query_losses(one, masks, POINTS, [torch.Generator()] * 3), each, queries) for one in answers
    ]
    return torch.stack(found).sum(0).mean()


def test_loss_and_gradients_of_transformers_eomt(same_points: None) -> None:
    """With masked attention in all of the last blocks, and the answers before each of them in the loss."""
    peer = eomt(train_num_points=POINTS).train()
    model = ours(peer)
    expected = peer(IMAGES, **as_labels(TRUTH)).loss
    found = mean_loss(model.head.ask(model, IMAGES, torch.ones(3, 2, 5, dtype=torch.bool)), TRUTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    head = model.head
    expected.backward()
    found.backward()
    pairs = [
        (head.tokens.grad[0], peer.query.weight.grad),  # type: ignore[index]
        (head.mask[0].weight.grad, peer.mask_head.fc1.weight.grad),
        (head.classify.bias.grad, peer.class_predictor.bias.grad),
        (model.stem.weight.grad, peer.embeddings.patch_embeddings.projection.weight.grad),
    ]
    for our, their in pairs:
        assert (our - their).norm() < 1e-3 * their.norm()


def random_answers(queries: int) -> QueryOutputs:
    generator = torch.Generator().manual_seed(3)
    return QueryOutputs(
        torch.randn(3, queries, 5, generator=generator), torch.randn(3, queries, 8, 8, generator=generator) * 3
    )


@pytest.mark.parametrize("queries", [4, 9])
def test_matching_of_transformers_eomt(same_points: None, queries: int) -> None:
    """Each class goes to the query with the smallest costs together; nothing else of the loss decides it."""
    answers = random_answers(queries)
    matcher = EomtLoss(eomt(train_num_points=POINTS).config, {}).matcher
    expected = matcher(answers.masks, answers.classes, *as_labels(TRUTH).values())
    found = loss.match(answers.classes, answers.masks, loss.Masks(TRUTH.byte()), POINTS, [torch.Generator()] * 3)
    assert torch.equal(found[0], torch.cat([query for query, _ in expected]))
    assert found[1].tolist() == [
        row + begin for (_, rows), begin in zip(expected, (0, 4, 7), strict=True) for row in rows.tolist()
    ]


def test_fewer_queries_than_classes(same_points: None) -> None:
    """The best classes are matched, and the others teach nothing."""
    answers, masks = random_answers(2), loss.Masks(TRUTH.byte())
    queries, rows = loss.match(*answers, masks, POINTS, [torch.Generator()] * 3)
    assert masks.images[rows].tolist() == [0, 0, 1, 1, 2, 2] and queries.tolist() == [0, 1] * 3
    of_masks, of_classes = loss.query_losses(answers, masks, POINTS, [torch.Generator()] * 3)
    assert of_masks.isfinite().all() and of_classes.isfinite().all()


def test_ignored_pixels_have_no_influence() -> None:
    """What the network says of pixels that do not count changes no loss, and an image without others has no masks."""
    truth = TRUTH.clone()
    truth[0, :, 16:], truth[2] = IGNORED, IGNORED
    masks = loss.Masks(truth.byte())
    assert masks.counts == [4, 3, 0]

    def losses(answers: QueryOutputs) -> Tensor:
        return torch.stack(
            loss.query_losses(answers, masks, POINTS, [torch.Generator().manual_seed(i) for i in range(3)])
        )

    answers = random_answers(6)
    other = answers.masks.clone()
    other[0, :, :, 5:], other[2] = 2 - other[0, :, :, 5:], 0  # the cells beside the border reach over it
    before, after = losses(answers), losses(QueryOutputs(answers.classes, other))
    assert torch.equal(before, after) and before[0, 2] == 0 and (before[1] > 0).all()


def test_images_have_points_of_their_own() -> None:
    """The losses of an image do not depend on the images beside it in a batch."""
    answers, truth = random_answers(6), TRUTH

    def losses(rows: list[int]) -> Tensor:
        chosen = QueryOutputs(answers.classes[rows], answers.masks[rows])
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return torch.stack(loss.query_losses(chosen, loss.Masks(truth[rows].byte()), POINTS, generators))

    torch.testing.assert_close(losses([0, 1, 2])[:, [1, 2]], losses([1, 2]))


def test_masked_attention_ends_block_after_block() -> None:
    """EoMT's settings for ADE20K: 39,120 steps, of which the last 6,520 have no masked attention."""
    begins, ends, total = (6520, 13040, 19560, 26080), (13040, 19560, 26080, 32600), 39_120
    for step in range(0, total + 1, 326):
        for block, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            part = min(max((step - begin) / (end - begin), 0), 1)
            assert loss.masked_share(step / total, block, 4) == pytest.approx((1 - part) ** 0.9, abs=1e-9)


SMALL = ViTConfig.of(
    width=16, depth=2, heads=2, mlp_dim=16, patch=8, image_size=(32, 32), classes=4, segmentation="queries", queries=5,
    query_blocks=1, drop_path=0.0,
)  # fmt: skip


def objective(done: float = 0.3) -> loss.QueryObjective:
    """Masked attention at this moment is on for a part of the queries."""
    torch.manual_seed(0)
    found = loss.QueryObjective(ViT(SMALL), 0)
    found.at(Moment(done=done, total=10))
    return found


def batch(rows: list[int]) -> Any:
    return SimpleNamespace(images=IMAGES[rows], labels=TRUTH[rows].byte(), index=torch.tensor(rows))


def test_micro_batches_have_the_loss_of_the_whole_step() -> None:
    """An image has points and masked queries of its own, and the weights of its losses are those of the whole step."""
    trained = objective()
    truth = TRUTH.clone()
    truth[2] = 1  # so that the images have different numbers of masks
    given = SimpleNamespace(images=IMAGES, labels=truth.byte(), index=torch.arange(3))
    whole = trained.before_step(trained.prepare(given, step=7), 2)
    expected, count, _ = trained.loss(whole)
    found = [trained.loss(part)[0] for part in whole.split(2)]
    assert count == 3
    torch.testing.assert_close(sum(found), expected, rtol=1e-5, atol=0)
    alone = [trained.loss(trained.prepare(given, step=7).split(3)[row])[0] for row in range(3)]
    assert abs(sum(each.item() for each in alone) - expected.item()) > 0.1  # as in an evaluation


def test_noise_is_a_function_of_seed_step_and_image() -> None:
    trained = objective()

    def losses(rows: list[int], step: int) -> list[float]:
        return [trained.loss(each)[0].item() for each in trained.prepare(batch(rows), step=step).split(len(rows))]

    assert losses([0, 1], 3) == losses([1, 0], 3)[::-1]
    assert losses([0], 3) != losses([0], 4)


@pytest.mark.parametrize(("done", "masked"), [(0.0, True), (1.0, False)])
def test_attention_is_masked_at_the_start_and_not_at_the_end(done: float, masked: bool, monkeypatch: Any) -> None:
    trained, seen = objective(done), []
    ask = trained.model.head.ask
    monkeypatch.setattr(trained.model.head, "ask", lambda *given: seen.append(given[2]) or ask(*given))
    trained.loss(trained.prepare(batch([0, 1]), step=0))
    assert seen[0].all() if masked else not seen[0].any()


def test_queries_of_another_head_are_refused(tmp_path: Path) -> None:
    data = paint(tmp_path / "data", {"train": 2, "val": 1})
    with pytest.raises(UsageError, match=r"vit.queries is for --vit.segmentation queries, and the head is linear"):
        vitrail.train(data, model="Ti/4", vit=Model(segmentation="linear", queries=6), image_size=32, epochs=1)


@pytest.mark.train
def test_queries_learn_what_they_are_shown(tmp_path: Path) -> None:
    """32 steps tell squares from discs and the ground; the ground everywhere would have an mIoU below 30 %."""
    data = paint(tmp_path / "data", {"train": 32, "val": 8})
    result = vitrail.train(
        data, model="Ti/4", vit=Model(width=48, depth=2, heads=3, mlp_dim=96, segmentation="queries", queries=6),
        image_size=32, epochs=16, evaluate_every="100 %", batch_size=16, lr=4e-3, out=tmp_path / "runs", workers=0,
        device="cpu",
    )  # fmt: skip
    assert result.best["miou"] > 0.6
