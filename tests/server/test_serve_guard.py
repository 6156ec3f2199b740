from __future__ import annotations

import pytest

from vitrail.server.clients import Clients, Hosts


@pytest.mark.parametrize(
    ("bound", "header", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example:8000", False),
        ("127.0.0.1", "192.168.0.7", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[::1", False),
        ("0.0.0.0", "192.168.0.7:8000", True),
        ("0.0.0.0", "evil.example", False),
        ("127.0.0.1", "proxy.example", True),
    ],
)
def test_only_this_servers_names_pass(bound: str, header: str, allowed: bool) -> None:
    assert Hosts(bound, ["Proxy.example"]).allow(header) is allowed


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),  # curl
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "http://127.0.0.1:9000"}, True),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
    ],
)
def test_a_page_from_elsewhere_is_recognised(headers: dict[str, str], expected: bool) -> None:
    assert Clients().foreign({"host": "127.0.0.1:8000", **headers}) is expected
