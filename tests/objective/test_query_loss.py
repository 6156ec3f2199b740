"""The loss of queries, against transformers' EoMT on copied tensors and points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eomt_peer import eomt, ours
from torch import Tensor
from transformers.models.eomt.modeling_eomt import EomtLoss

from vitrail.data.settings import IGNORED
from vitrail.model.queries import Answers
from vitrail.objective import queries as loss

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


def mean_loss(answers: list[Answers], truth: Tensor) -> Tensor:
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


def random_answers(queries: int) -> Answers:
    generator = torch.Generator().manual_seed(3)
    return Answers(
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

    def losses(answers: Answers) -> Tensor:
        return torch.stack(
            loss.query_losses(answers, masks, POINTS, [torch.Generator().manual_seed(i) for i in range(3)])
        )

    answers = random_answers(6)
    other = answers.masks.clone()
    other[0, :, :, 5:], other[2] = 2 - other[0, :, :, 5:], 0  # the cells beside the border reach over it
    before, after = losses(answers), losses(Answers(answers.classes, other))
    assert torch.equal(before, after) and before[0, 2] == 0 and (before[1] > 0).all()


def test_images_have_points_of_their_own() -> None:
    """The losses of an image do not depend on the images beside it in a batch."""
    answers, truth = random_answers(6), TRUTH

    def losses(rows: list[int]) -> Tensor:
        chosen = Answers(answers.classes[rows], answers.masks[rows])
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
