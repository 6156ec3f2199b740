"""Raw requests from a grammar, over a socket, to a real server: it refuses what is wrong and never fails itself."""

from __future__ import annotations

import os
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn", reason="the server needs vitrail[serve]")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from asgi_client import png
from served_models import saved
from server_process import Running, serving

pytestmark = pytest.mark.fuzz

EXAMPLES = int(os.environ.get("VITRAIL_TEST_EXAMPLES", "60"))
QUIETLY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
IMAGE = png()

odd = st.binary(max_size=20)
methods = st.sampled_from(
    [b"GET", b"POST", b"POST", b"POST", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PUT", b"get"]
)
values = st.sampled_from([b"-1", b"0", b"1", b"1000", b"1001", b"nan", b"1e3", b"9" * 30, b"", b"%00", b"%ff", b"true"])
names = st.sampled_from([b"top", b"model", b"crop", b"layer", b"head", b"row", b"column"])
queries = st.lists(st.tuples(names, values).map(b"=".join), max_size=3).map(b"&".join)
paths = st.sampled_from(
    [b"/v1/predict", b"/v1/embed", b"/v1/attention", b"/livez", b"/", b"*", b"/%2e%2e/x", b"/%c0%ae"]
)
targets = st.builds(lambda path, query: path + b"?" + query, paths, queries) | odd.map(lambda text: b"/" + text)
hosts = st.sampled_from(
    [b"localhost", b"127.0.0.1:1", b"[::1]", b"[::1", b"a@localhost", b"evil", b"", b"localhost:99999"]
)
headers = st.one_of(
    hosts.map(lambda host: b"Host: " + host),
    st.sampled_from([b"http://[::1", b"http://evil", b"null"]).map(lambda origin: b"Origin: " + origin),
    st.sampled_from([b"0", b"3", b"-1", b"+3", b"0x3", b"9" * 40, b"3, 3"]).map(
        lambda size: b"Content-Length: " + size
    ),
    st.sampled_from([b"chunked", b"gzip", b"identity", b"chunked, chunked"]).map(lambda t: b"Transfer-Encoding: " + t),
    st.sampled_from(
        [b"image/png", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=e"]
    ).map(lambda kind: b"Content-Type: " + kind),
    st.sampled_from([b"Expect: 100-continue", b"Upgrade: websocket", b"Range: bytes=0-9", b" folded", b"X : y"]),
    odd.map(lambda text: b"X: " + text),
    st.integers(0, 20_000).map(lambda size: b"X: " + b"a" * size),
)
part = b'--e\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + IMAGE + b"\r\n"
bodies = st.one_of(
    st.sampled_from(
        [b"", IMAGE, IMAGE[:40], part, part + b"--e--\r\n", part * 2 + b"--e--", b"--e\r\n" * 50, b"[" * 9000]
    ),
    st.sampled_from([b"3\r\nabc\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\n", b"f" * 20 + b"\r\n", b"0;a=b\r\nHost: x\r\n\r\n"]),
    odd,
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is mostly well-formed."""
    lines = draw(st.lists(headers, max_size=3))
    body = draw(bodies)
    if draw(st.integers(0, 3)):
        lines = [b"Host: localhost", *lines]
    if draw(st.integers(0, 3)):
        lines = [*lines, b"Content-Length: %d" % len(body)]
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b""]))
    first = b" ".join([draw(methods), draw(targets), version])
    return b"\r\n".join([first, *lines, b"", b""]) + body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny network."""
    with serving(saved(tmp_path_factory.mktemp("served") / "tiny")) as running:
        yield running


def said(address: tuple[str, int], request: bytes) -> list[int]:
    """Return the statuses of everything that the server sends until it closes the connection."""
    answer = b""
    with socket.create_connection(address, timeout=60) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                answer += piece
        except (ConnectionError, BrokenPipeError):
            pass  # it closes at once when a head is malformed
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]


@QUIETLY
@given(sent=st.lists(requests(), min_size=1, max_size=2))
def test_48_no_request_makes_the_server_fail(server: Running, sent: list[bytes]) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    statuses = said((host, int(port)), b"".join(sent))
    assert all(status < 500 for status in statuses), statuses
    assert server.process.poll() is None
    with urllib.request.urlopen(f"{server.url}/readyz", timeout=60) as answer:
        assert answer.status == 200
