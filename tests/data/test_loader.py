from __future__ import annotations

import gc
import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.images.ops import eval_transform, train_transform
from vitrail.data.item import Item
from vitrail.data.loading.loader import Batch, Loader
from vitrail.data.loading.order import EpochOrder
from vitrail.data.loading.prefetch import ThreadPool, ordered
from vitrail.data.settings import Augment, Preprocess
from vitrail.errors import DataError, DecodeError, UsageError

SIDE = 4


class Numbered:
    """Image i is filled with i; the images in `broken` cannot be decoded."""

    def __init__(self, count: int, broken: frozenset[int] = frozenset()) -> None:
        self.count = count
        self.broken = broken
        self.class_names = ["even", "odd"]
        self.labels = np.arange(count) % 2
        self.sizes = np.zeros(count, dtype=np.int64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def id(self, index: int) -> str:
        return f"image-{index}"

    def __getitem__(self, index: int) -> Item:
        self.read.append(index)
        if index in self.broken:
            return Item(b"not an image", index % 2, self.id(index))
        return Item(np.full((SIDE, SIDE, 3), index % 256, np.uint8), index % 2, self.id(index))


def noisy(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The image in one channel and random numbers in the others."""
    result = random.integers(0, 256, image.shape, dtype=np.uint8)
    result[..., 0] = image[..., 0]
    return result


def loader(source, **options) -> Loader:
    return Loader(source, **({"transform": noisy, "image_size": SIDE, "batch_size": 5} | options))


def run(source, epoch: int = 0, start: int = 0, **options) -> list[Batch]:
    one = loader(source, **options)
    try:
        return list(one.epoch(epoch, start))
    finally:
        one.close()


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and torch.equal(a.index, b.index)
        for a, b in zip(left, right, strict=True)
    )


def indices(batches: list[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.index.tolist()]


def test_a_batch_is_what_it_says() -> None:
    (batch, *_) = run(Numbered(23), shuffle=False)
    assert batch.images.shape == (5, 3, SIDE, SIDE) and batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.index.tolist() == [0, 1, 2, 3, 4] and batch.labels.tolist() == [0, 1, 0, 1, 0]
    assert batch.index.dtype == batch.labels.dtype == torch.int64
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("cache", [False, True])
def test_any_number_of_threads_gives_the_same_bits(workers: int, cache: bool) -> None:
    for epoch in (0, 1):
        assert equal(run(Numbered(41), epoch), run(Numbered(41), epoch, workers=workers, cache=cache))


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 9),
    start=st.integers(0, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_an_epoch_can_begin_at_any_batch(count: int, batch: int, start: int, shuffle: bool, drop_last: bool) -> None:
    options = {"batch_size": batch, "shuffle": shuffle, "drop_last": drop_last}
    source = Numbered(count)
    rest = run(source, 3, start, **options)
    assert equal(rest, run(Numbered(count), 3, **options)[start:])
    assert source.read == indices(rest)  # nothing before it was read


def test_order_and_augmentation_change_with_seed_and_epoch() -> None:
    runs = [run(Numbered(40), epoch, seed=seed) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    orders = [indices(batches) for batches in runs]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    # the same image is augmented differently in another epoch
    first, second = (
        {int(i): image for batch in batches for i, image in zip(batch.index, batch.images, strict=True)}
        for batches in runs[:2]
    )
    assert all(not torch.equal(first[index], second[index]) for index in first)


def test_shuffling_is_fair() -> None:
    """Each image is in each place equally often: chi-square of 600 epochs of 6 images."""
    order = EpochOrder(6, 1, shuffle=True, drop_last=True)
    table = np.zeros((6, 6))
    for epoch in range(600):
        table[np.arange(6), order.permutation(0, epoch)] += 1
    statistic = ((table - 100) ** 2 / 100).sum()
    assert statistic < 52.6  # the 99.9 % point of chi-square with 25 degrees of freedom


# processes


@given(count=st.integers(1, 60), batch=st.integers(1, 7), world=st.integers(1, 5))
def test_evaluation_covers_every_image_once_over_all_ranks(count: int, batch: int, world: int) -> None:
    seen = [
        indices(run(Numbered(count), batch_size=batch, shuffle=False, drop_last=False, rank=rank, world=world))
        for rank in range(world)
    ]
    assert sorted(index for one in seen for index in one) == list(range(count))


@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    repeats=st.integers(1, 3),
)
def test_training_takes_equal_steps_in_all_ranks(
    count: int, batch: int, world: int, drop_last: bool, repeats: int
) -> None:
    options = {"batch_size": batch, "drop_last": drop_last, "world": world, "repeats": repeats}
    ranks = [run(Numbered(count), rank=rank, **options) for rank in range(world)]
    shapes = [[len(one.labels) for one in batches] for batches in ranks]
    assert all(shape == shapes[0] for shape in shapes) and shapes[0] and min(shapes[0]) > 0
    assert len(loader(Numbered(count), rank=world - 1, **options)) == len(shapes[0])
    total = sum(map(sum, shapes))
    if drop_last and count >= batch * world:
        assert total == count - count % (batch * world)
    if not drop_last:
        assert count <= total < count + world
    if repeats == 1 and count >= world:
        seen = [index for batches in ranks for index in indices(batches)]
        assert len(seen) - len(set(seen)) <= world - 1  # only what wraps around is shown twice


def test_the_batch_of_all_processes_does_not_depend_on_their_number() -> None:
    one = run(Numbered(40), batch_size=8)
    two = [run(Numbered(40), batch_size=4, rank=rank, world=2) for rank in range(2)]
    for step, whole in enumerate(one):
        joined = {
            int(index): image
            for rank in range(2)
            for index, image in zip(two[rank][step].index, two[rank][step].images, strict=True)
        }
        assert joined.keys() == set(whole.index.tolist())
        for index, image in zip(whole.index.tolist(), whole.images, strict=True):
            assert torch.equal(image, joined[index])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_set_smaller_than_a_batch_makes_one_batch(count: int) -> None:
    batches = run(Numbered(count), batch_size=32)
    assert [len(batch.labels) for batch in batches] == [count]
    assert len(loader(Numbered(count), batch_size=32)) == 1


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(DataError, match="no images"):
        loader(Numbered(0))


def test_repeated_augmentation_shows_copies_side_by_side_each_on_its_own() -> None:
    batches = run(Numbered(24), batch_size=6, repeats=3)
    assert len(batches) == 4  # an epoch stays as long
    for batch in batches:
        groups = batch.index.view(2, 3)
        assert (groups == groups[:, :1]).all() and groups[0, 0] != groups[1, 0]
        for copies in batch.images.reshape(2, 3, 3, SIDE, SIDE):
            assert len({copy.numpy().tobytes() for copy in copies}) == 3
    assert len(set(indices(batches))) == 8


# images that cannot be read


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_leaves_bad_images_out_and_lists_them(workers: int) -> None:
    broken = frozenset({0, 3, 4, 5, 6, 7, 8, 9})
    one = loader(Numbered(12, broken), shuffle=False, drop_last=False, workers=workers)
    batches = list(one.epoch(0))
    assert indices(batches) == [1, 2, 10, 11]
    assert one.bad == [(f"image-{index}", "not-an-image") for index in sorted(broken)]
    for batch in batches:
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
    list(one.epoch(1))
    assert len(one.bad) == len(broken)  # each is listed once
    one.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_training_takes_the_next_image_of_the_order(workers: int) -> None:
    order = indices(run(Numbered(20)))
    broken = frozenset({order[3], order[4], order[19]})
    one = loader(Numbered(20, broken), workers=workers)
    batches = list(one.epoch(0))
    expected = list(order)
    expected[3] = expected[4] = order[5]
    expected[19] = order[0]
    assert indices(batches) == expected
    assert [len(batch.labels) for batch in batches] == [5] * 4
    # the stand-in is another view of that image, not the same picture twice
    shown = [image for batch in batches for image in batch.images]
    assert len({shown[place].numpy().tobytes() for place in (3, 4, 5)}) == 3
    assert {name for name, _ in one.bad} == {f"image-{index}" for index in broken}
    one.close()
    assert equal(batches, run(Numbered(20, broken)))


def test_too_many_bad_images_end_training() -> None:
    with pytest.raises(DataError, match=r"none of .* images can be read \(\d+ not-an-image\)"):
        run(Numbered(8, frozenset(range(8))))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_image_that_takes_too_much_memory_is_listed(shuffle: bool) -> None:
    """In reading and in the transform; training takes the next image."""

    def greedy(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if image[0, 0, 0] == 5:
            raise MemoryError
        return image

    class Large(Numbered):
        def __getitem__(self, index: int) -> Item:
            if index == 3:
                raise MemoryError
            return super().__getitem__(index)

    one = loader(Large(10), transform=greedy, shuffle=shuffle, drop_last=shuffle)
    found = indices(list(one.epoch(0)))
    assert sorted(one.bad) == [("image-3", "out-of-memory"), ("image-5", "out-of-memory")]
    assert not {3, 5} & {*found} and len(found) == (10 if shuffle else 8)
    one.close()


# threads


class Failing(Numbered):
    def __getitem__(self, index: int) -> Item:
        if index == 7:
            raise RuntimeError("the cable is out")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_thread_reaches_the_caller_with_the_image(workers: int) -> None:
    one = loader(Failing(40), shuffle=False, workers=workers)
    with pytest.raises(DataError, match=r"image image-7.*the cable is out"):
        list(one.epoch(0))
    one.close()

    def broken(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
        raise ValueError("bad crop")

    with pytest.raises(DataError, match=r"image image-0 could not be transformed.*bad crop"):
        run(Numbered(4), transform=broken, shuffle=False, workers=workers)
    with pytest.raises(DataError, match=r"image image-0 became \(2, 4, 3\), expected \(4, 4, 3\)"):
        run(Numbered(4), transform=lambda image, random: image[:2], shuffle=False, workers=workers)


def test_a_read_that_hangs_is_named_and_not_waited_for() -> None:
    gate, ended = threading.Event(), list[int]()

    class Hanging(Numbered):
        def __getitem__(self, index: int) -> Item:
            if index == 8:
                gate.wait(60)
                ended.append(index)
            return super().__getitem__(index)

    one = loader(Hanging(40), shuffle=False, workers=2, timeout=0.2)
    batches = one.epoch(0)
    assert next(batches).index.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"reading image image-8 \(index 8\) has taken more than 0\.2 s"):
        next(batches)
    assert ended == []  # it was not waited for
    gate.set()
    one.close()


def test_a_slow_disk_is_not_a_hung_one() -> None:
    class Slow(Numbered):
        def __getitem__(self, index: int) -> Item:
            time.sleep(0.1)
            return super().__getitem__(index)

    # a part takes longer than the patience, but every image comes within it
    assert len(run(Slow(6), batch_size=6, workers=1, timeout=0.5)) == 1


@pytest.mark.full_size
def test_threads_end_with_close_and_with_the_loader() -> None:
    before = threading.active_count()
    one = loader(Numbered(100), workers=3)
    batches = one.epoch(0)
    next(batches)
    assert threading.active_count() == before + 3
    one.close()
    one.close()
    assert threading.active_count() == before
    two = loader(Numbered(100), workers=3)
    next(two.epoch(0))
    del two
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_abandoned_epoch_stops_reading() -> None:
    source = Numbered(1_000)
    one = loader(source, workers=2, batch_size=5)
    batches = one.epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    time.sleep(0.05)
    assert len(source.read) <= 5 * 6  # the first, three ahead, and what was under way
    assert len(list(one.epoch(1))) == 200
    one.close()


def test_batches_belong_to_the_caller() -> None:
    one = loader(Numbered(60), workers=2)
    batches = list(one.epoch(0))
    kept = [batch.images.clone() for batch in batches]
    for batch in one.epoch(1):
        batch.images.zero_()
    assert all(torch.equal(batch.images, copy) for batch, copy in zip(batches, kept, strict=True))
    one.close()


def test_waiting_is_counted() -> None:
    class Slow(Numbered):
        def __getitem__(self, index: int) -> Item:
            time.sleep(0.02)
            return super().__getitem__(index)

    one, began = loader(Slow(15)), time.perf_counter()
    list(one.epoch(0))
    assert 0.3 <= one.wait_seconds <= time.perf_counter() - began
    ahead = loader(Slow(15), workers=1)
    for _ in ahead.epoch(0):
        time.sleep(0.15)  # in which the five images of the next batch are read
    assert ahead.wait_seconds < one.wait_seconds
    ahead.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_no_more_than_asked_for_are_begun(workers: int) -> None:
    begun: list[int] = []

    def slow(number: int) -> int:
        begun.append(number)
        time.sleep(0.003 * (number % 3))
        return number * number

    pool = ThreadPool(workers)
    squares = ordered(pool, slow, iter(range(50)), ahead=4)
    for number in range(50):
        assert next(squares) == number * number
        assert len(begun) <= number + 5
    assert next(squares, None) is None
    pool.close()


def test_a_timeout_raised_by_the_work_itself_is_not_taken_for_a_hang() -> None:
    def fails(number: int) -> int:
        raise TimeoutError("server said so")

    pool = ThreadPool(1)
    with pytest.raises(TimeoutError, match="server said so"):
        next(ordered(pool, fails, [1], ahead=1, timeout=5, hung=lambda _: DataError("hung")))
    pool.close()


# memory


class Files:
    """PNG files in memory, counted as they are read; every fifth has another size."""

    class_names = ("a", "b")

    def __init__(self, count: int, same: bool) -> None:
        self.reads = 0
        self.labels = np.arange(count) % 2
        self.sizes = np.zeros(count, dtype=np.int64)
        self.files = []
        for index in range(count):
            side = 10 if same or index % 5 else 12
            noise = np.random.default_rng(index).integers(0, 256, (side, side, 3), dtype=np.uint8)
            stream = io.BytesIO()
            Image.fromarray(noise).save(stream, "PNG")
            self.files.append(stream.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        self.reads += 1
        return Item(self.files[index], index % 2, self.id(index))

    def id(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("native", [False, True])
def test_kept_images_are_read_once_and_give_the_same_bits(same: bool, workers: int, native: bool) -> None:
    augment = Augment(crop="pad" if same and not native else "inception", pad=2)
    squashed = Preprocess(image_size=(8, 8), resize="squash")
    preprocess = Preprocess(image_size=(16, 16), resize="native", patch=4) if native else squashed
    transform = train_transform(augment, preprocess)
    options = {"transform": transform, "image_size": preprocess.size, "batch_size": 6, "drop_last": False}
    source = Files(23, same)
    one = loader(source, cache=True, workers=workers, **options)
    plain = loader(Files(23, same), **options)
    for epoch in range(3):
        assert equal(list(one.epoch(epoch)), list(plain.epoch(epoch)))
    assert source.reads == 23
    one.close()


def test_real_photographs(shared_data: Path) -> None:
    from vitrail.data.sources.open import open_data

    splits = open_data(str(shared_data / "flowers12"))
    preprocess = Preprocess(image_size=(32, 48))
    options = {"transform": eval_transform(preprocess), "image_size": (32, 48), "batch_size": 64}
    one = loader(splits.test, shuffle=False, drop_last=False, workers=2, **options)
    labels: list[int] = []
    for batch in one.epoch(0):
        assert batch.images.shape[1:] == (3, 32, 48)
        labels += batch.labels.tolist()
    assert labels == splits.test.labels.tolist() and not one.bad
    one.close()


def test_an_unreadable_file_is_named_by_its_path(tmp_path: Path) -> None:
    from vitrail.data.sources.open import open_split

    for name in ("a/1.png", "b/1.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (SIDE, SIDE)).save(tmp_path / name)
    source = open_split(tmp_path)
    (tmp_path / "a/1.png").unlink()
    with pytest.raises(DecodeError):
        source[0]
    one = loader(source, shuffle=False, drop_last=False)
    assert indices(list(one.epoch(0))) == [1]
    assert one.bad == [("a/1.png", "unreadable")]


# neighbours that stay together


@given(
    runs=st.integers(1, 6), size=st.integers(1, 5), repeats=st.integers(1, 3), extra=st.integers(0, 40),
    world=st.sampled_from([1, 2, 3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_runs_of_neighbours_are_an_order_of_all_images(
    runs: int, size: int, repeats: int, extra: int, world: int, seed: int
) -> None:
    batch = runs * world * size * repeats  # of all processes
    count = 2 * batch // repeats + extra
    order = EpochOrder(count, batch // world, shuffle=True, drop_last=True, repeats=repeats, world=world, together=size)
    permutation = order.permutation(seed, 0)
    assert sorted(permutation[place] for place in range(count)) == list(range(count))


@given(size=st.integers(2, 6), lanes=st.sampled_from([4, 8]), extra=st.integers(0, 30), seed=st.integers(0, 99))
def test_a_process_gets_whole_runs_and_batches_do_not_depend_on_how_many_there_are(
    size: int, lanes: int, extra: int, seed: int
) -> None:
    whole, count = size * lanes, 3 * size * lanes + extra
    seen: dict[int, list[list[int]]] = {}
    for world in (1, 2, 4):
        seen[world] = [[] for _ in range(count // whole)]
        for rank in range(world):
            order = EpochOrder(
                count, whole // world, shuffle=True, drop_last=True, rank=rank, world=world, together=size
            )
            permutation = order.permutation(seed, 1)
            assert len(order) == count // whole
            for number in range(len(order)):
                mine = [order.image(permutation, place)[0] for place in order.positions(number).tolist()]
                if number < count // size * size // whole:
                    # as many breaks between neighbours as there are runs, but for the one run around the end
                    breaks = sum((image + 1) % count not in mine for image in mine)
                    assert breaks <= lanes // world
                seen[world][number] += mine
    assert all(
        sorted(one) == sorted(two) == sorted(four)
        for one, two, four in zip(seen[1], seen[2], seen[4], strict=True)
    )  # fmt: skip


def test_runs_begin_elsewhere_in_another_epoch() -> None:
    order = EpochOrder(400, 80, shuffle=True, drop_last=True, together=8)
    begins = set()
    for epoch in range(8):
        permutation = order.permutation(0, epoch)
        runs = [sorted(order.image(permutation, p)[0] for p in range(lane, 80, 10)) for lane in range(10)]
        whole = [run for run in runs if run[-1] - run[0] == 7]
        assert len(whole) >= 9  # all but the one around the end
        begins.add(whole[0][0] % 8)
    assert len(begins) > 1


def test_a_batch_that_is_not_whole_runs_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 10 images must hold a whole number of runs of 4"):
        loader(Numbered(40), batch_size=5, world=2, together=4)
    with pytest.raises(UsageError, match="each shown 2 times"):
        loader(Numbered(40), batch_size=4, repeats=2, together=4)
