from __future__ import annotations

import pytest

from vitrail.errors import DecodeError
from vitrail.server.limits import Bodies, Gate, Refused, refuse_undecodable, sized
from vitrail.server.upload import check_media_type


def test_the_gate_lets_in_as_many_as_it_should_and_forgets_them() -> None:
    gate = Gate(3)
    with gate.hold(2):
        with pytest.raises(Refused), gate.hold(2):
            pass
        with gate.hold(1):
            assert gate.inside == 3
            with pytest.raises(Refused) as refused:
                gate.check()
            assert refused.value.status == 429 and (refused.value.retry_after or 0) >= 1
            assert refused.value.as_json()["retry_after"] == refused.value.retry_after
        assert gate.inside == 2
    assert gate.inside == 0


def test_places_are_given_back_after_an_error() -> None:
    gate = Gate(1)
    with pytest.raises(KeyError), gate.hold(1):
        raise KeyError
    assert gate.inside == 0


def test_retry_after_is_the_time_that_those_inside_take() -> None:
    gate = Gate(100)
    gate.answered(images=4, seconds=8.0)  # 2 s each
    with gate.hold(5):
        assert gate.retry_after() == 10
        gate.answered(images=1, seconds=7.6)  # a tenth of which counts: 2.56 s each
        assert gate.retry_after() == 13


def test_the_slowest_body_gives_way_when_there_are_too_many_bytes() -> None:
    bodies = Bodies(100)
    with bodies.hold(15) as slow, bodies.hold(15) as fast, bodies.hold(15) as done:
        slow.began -= 10
        fast.began -= 1
        done.began -= 100
        bodies.add(done, 20)
        done.arrived = True
        bodies.add(slow, 30)
        bodies.add(fast, 40)
        assert not slow.dropped
        with bodies.hold(15) as new:
            bodies.add(new, 15)
            assert [one.dropped for one in (slow, fast, done, new)] == [True, False, False, False]
            assert bodies.size == 75
    assert bodies.size == 0 and not bodies.inside


@pytest.mark.parametrize("kind", ["image/png", "IMAGE/JPEG; q=1", "application/octet-stream", ""])
def test_images_and_undeclared_bytes_pass(kind: str) -> None:
    check_media_type(kind, "the body")


@pytest.mark.parametrize("kind", ["text/html", "application/json", "video/mp4", "imagex/png"])
def test_other_types_do_not(kind: str) -> None:
    with pytest.raises(Refused, match="the body has media type") as refused:
        check_media_type(kind, "the body")
    assert refused.value.status == 415


@pytest.mark.parametrize(
    ("reason", "status"),
    [("not-an-image", 415), ("unsupported", 415), ("truncated", 422), ("too-many-pixels", 422), ("empty", 422)],
)
def test_the_status_follows_the_reason(reason: str, status: int) -> None:
    refused = refuse_undecodable(DecodeError("why", reason=reason))
    assert (refused.status, refused.as_json()) == (status, {"reason": reason, "message": "why"})


def test_a_server_is_sized_by_its_device_its_cores_and_its_memory() -> None:
    pixels, gib = 2**27, 2**30  # the largest image takes 2 GiB to read
    assert [sized("cpu", cores, 64 * gib, pixels)[:2] for cores in (2, 16)] == [(2, 8), (4, 8)]
    assert [sized("cuda", 16, free * gib, pixels)[:2] for free in (1, 16, 256)] == [(1, 64), (4, 64), (16, 64)]
    assert sized("cuda", 16, 16 * gib, pixels // 4)[0] == 16
