"""Files with bytes changed at drawn places."""

from __future__ import annotations

from hypothesis import strategies as st

changes = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(["flip", "set", "cut", "insert", "repeat"]),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=6,
)


def changed(data: bytes, how: list[tuple[float, str, int]]) -> bytes:
    """Return `data` with bits flipped, bytes set, cut out, put in, or repeated."""
    content = bytearray(data)
    for share, kind, value in how:
        place = int(share * len(content))
        if not content:
            break
        if kind == "flip":
            content[place] ^= 1 << value % 8
        elif kind == "set":
            content[place] = value
        elif kind == "cut":
            del content[place : place + value]
        elif kind == "insert":
            content[place:place] = bytes([value]) * (value % 9)
        else:
            content[place:place] = content[place : place + value]
    return bytes(content)
