"""A client of an ASGI application in this process: bodies in any pieces, at any time, and leaving early."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

HOST = {"host": "127.0.0.1:8000"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return self.json["error"]["reason"]


async def call(
    app: Any,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    query: str = "",
    headers: dict[str, str] | None = None,
    again: Sequence[tuple[str, str]] = (),
    stalls: bool = False,
    leaves: asyncio.Event | None = None,
) -> Answer:
    """One request; `again`: headers that come after the others.

    `stalls`: the last piece never comes; `leaves`: the client goes when this is set."""
    pieces = [body] if isinstance(body, bytes) else list(body)
    pending = [
        {"type": "http.request", "body": piece, "more_body": stalls or i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]
    sent: list[Any] = []
    done = asyncio.Event()

    async def receive() -> Any:
        if pending:
            return pending.pop(0)
        await (leaves or done).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(k.encode(), v.encode("latin-1")) for k, v in [*{**HOST, **(headers or {})}.items(), *again]],
        "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    done.set()
    start = sent[0]
    found = {k.decode().lower(): v.decode("latin-1") for k, v in start["headers"]}
    return Answer(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def png(colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (24, 20)) -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(sum(colour))
    pixels = rng.integers(0, 50, (size[1], size[0], 3), dtype=np.uint8) + np.array(colour, np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def form(files: Sequence[tuple[str, bytes, str]]) -> tuple[bytes, dict[str, str]]:
    """(name, content, media type) of each file -> a multipart body and its header."""
    parts = [
        b'--edge\r\nContent-Disposition: form-data; name="image"; filename="'
        + name.encode()
        + b'"\r\nContent-Type: '
        + kind.encode()
        + b"\r\n\r\n"
        + content
        + b"\r\n"
        for name, content, kind in files
    ]
    return b"".join(parts) + b"--edge--\r\n", {"content-type": "multipart/form-data; boundary=edge"}
