from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from vitrail.server.batching import Batcher, compute_isolated


class Doubler:
    """Doubles numbers, and keeps what came together; the first batch waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def compute(self, items: list[int]) -> list[Any]:
        self.batches.append(items)
        self.begun.set()
        assert self.go.wait(20)
        if 13 in items:
            raise ValueError("poison")
        return [RuntimeError("its own") if item == 7 else 2 * item for item in items]


async def _with(doubler: Doubler, numbers: list[int], size: int = 4) -> list[Any]:
    """Submit 0, and while that is computed the numbers; return all answers."""
    batcher = Batcher(size, lambda images, seconds: None)
    batcher.start()
    first = asyncio.ensure_future(batcher.submit(doubler.compute, 0))
    await asyncio.to_thread(doubler.begun.wait, 20)
    rest = [asyncio.ensure_future(batcher.submit(doubler.compute, number)) for number in numbers]
    await asyncio.sleep(0)
    doubler.go.set()
    answers = await asyncio.gather(first, *rest, return_exceptions=True)
    await batcher.stop()
    return answers


def test_what_arrived_meanwhile_is_one_batch() -> None:
    doubler = Doubler()
    assert asyncio.run(_with(doubler, [1, 2, 3, 4, 5])) == [0, 2, 4, 6, 8, 10]
    assert doubler.batches == [[0], [1, 2, 3, 4], [5]]


def test_one_bad_item_fails_alone() -> None:
    answers = asyncio.run(_with(Doubler(), [1, 13, 7, 2]))
    assert [answers[i] for i in (0, 1, 4)] == [0, 2, 4]
    assert isinstance(answers[2], ValueError) and isinstance(answers[3], RuntimeError)


def test_a_function_that_loses_items_is_an_error_for_each() -> None:
    assert compute_isolated(lambda items: items[1:], [1, 2])[0].args == ("0 answers for 1 items",)


def test_what_nobody_waits_for_is_not_computed() -> None:
    doubler = Doubler()

    async def scenario() -> None:
        batcher = Batcher(4, lambda images, seconds: None)
        batcher.start()
        first = asyncio.ensure_future(batcher.submit(doubler.compute, 0))
        await asyncio.to_thread(doubler.begun.wait, 20)
        dropped = asyncio.ensure_future(batcher.submit(doubler.compute, 1))
        kept = asyncio.ensure_future(batcher.submit(doubler.compute, 2))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.sleep(0)
        doubler.go.set()
        assert await asyncio.gather(first, kept) == [0, 4]
        await batcher.stop()

    asyncio.run(scenario())
    assert doubler.batches == [[0], [2]]


def test_different_functions_are_not_mixed_and_keep_their_turn() -> None:
    one, other = Doubler(), Doubler()
    other.go.set()

    async def scenario() -> list[int]:
        batcher = Batcher(8, lambda images, seconds: None)
        batcher.start()
        first = asyncio.ensure_future(batcher.submit(one.compute, 0))
        await asyncio.to_thread(one.begun.wait, 20)
        asked = [(one, 1), (other, 2), (one, 3), (other, 4)]
        rest = [asyncio.ensure_future(batcher.submit(who.compute, item)) for who, item in asked]
        await asyncio.sleep(0)
        one.go.set()
        answers = await asyncio.gather(first, *rest)
        await batcher.stop()
        return answers

    assert asyncio.run(scenario()) == [0, 2, 4, 6, 8]
    assert one.batches == [[0], [1, 3]] and other.batches == [[2, 4]]


def test_stopping_leaves_nobody_waiting() -> None:
    async def scenario() -> None:
        batcher = Batcher(4, lambda images, seconds: None)  # never started
        waiting = asyncio.ensure_future(batcher.submit(lambda items: items, 1))
        await asyncio.sleep(0)
        await batcher.stop()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scenario())
