"""A hub on 127.0.0.1: one repository, served as the real one does, with the faults a test asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/tiny-vit"


@dataclass
class FakeHub:
    """What is served and what was asked for. Files named in `lfs` have a sha256, the others a git checksum."""

    files: dict[str, bytes] = field(default_factory=dict)
    lfs: set[str] = field(default_factory=set)
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    refuse: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer."""
    refuse_files: tuple[int, str] | None = None
    """The same for the files alone."""
    break_once: set[str] = field(default_factory=set)
    """Files whose first transfer ends in the middle."""
    tampered: set[str] = field(default_factory=set)
    """Files that arrive with another byte than their checksum is of."""
    together: Barrier = field(default_factory=lambda: Barrier(1))
    """Who asks what a repository holds waits here for the others."""
    page: str | None = None
    """Answered to everything in place of JSON."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header) of every request for the repository."""
    committed: dict[str, bytes] = field(default_factory=dict)
    """What was pushed."""
    endpoint: str = ""

    def transfers(self, name: str) -> list[str | None]:
        """Range headers of the transfers of a file."""
        return [range_ for method, path, range_ in self.asked if method == "GET" and path.endswith(f"/{name}")]

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def git_sha(self, name: str) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.files[name]) + self.files[name]).hexdigest()

    def etag(self, name: str) -> str:
        return self.sha256(name) if name in self.lfs else self.git_sha(name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body does not wait until the client has acknowledged the head
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if self.hub.refuse:
            return self._refused(*self.hub.refuse)
        if path == "/api/repos/create":
            return self._json({"url": f"{self.hub.endpoint}/{REPOSITORY}"})
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    self.hub.committed[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            url = f"{self.hub.endpoint}/{REPOSITORY}/commit/{COMMIT}"
            return self._json({"success": True, "commitUrl": url, "commitOid": COMMIT})
        return self._json({"warnings": [], "errors": []})

    def _get(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if path.startswith("/api/") and not path.startswith("/api/models/"):
            return self._refused(404, "")  # what the library asks for by itself
        hub.asked.append((self.command, path, self.headers.get("Range")))
        if hub.page is not None:
            return self._send(200, hub.page.encode(), {"Content-Type": "text/html"})
        if hub.refuse:
            return self._refused(*hub.refuse)
        if match := re.fullmatch(rf"/api/models/{REPOSITORY}/(revision|tree)/([^/]+)", path):
            if match[2] not in hub.revisions:
                return self._refused(404, "RevisionNotFound")
            with suppress(BrokenBarrierError):
                hub.together.wait(20)
            return self._json(self._info() if match[1] == "revision" else self._tree())
        if match := re.fullmatch(rf"/{REPOSITORY}/resolve/([^/]+)/(.+)", path):
            if hub.refuse_files:
                return self._refused(*hub.refuse_files)
            return self._file(match[2]) if match[2] in hub.files else self._refused(404, "EntryNotFound")
        return self._refused(404, "RepoNotFound")

    def _info(self) -> dict[str, Any]:
        hub = self.hub
        siblings: list[dict[str, Any]] = []
        for name, content in hub.files.items():
            entry = {"rfilename": name, "size": len(content), "blobId": hub.git_sha(name)}
            if name in hub.lfs:
                entry["lfs"] = {"size": len(content), "sha256": hub.sha256(name), "pointerSize": 134}
            siblings.append(entry)
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        hub = self.hub
        conversions: list[dict[str, Any]] = []
        for name, content in hub.files.items():
            entry = {"type": "file", "path": name, "size": len(content), "oid": hub.git_sha(name)}
            if name in hub.lfs:
                entry["lfs"] = {"oid": hub.sha256(name), "size": len(content), "pointerSize": 134}
            conversions.append(entry)
        return conversions

    def _file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.etag(name)}"', "Accept-Ranges": "bytes"}
        if name in hub.tampered:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        if self.command == "GET" and name in hub.break_once:
            hub.break_once.remove(name)
            self._send(206 if start else 200, rest, headers, cut=len(rest) // 2)
            return
        self._send(206 if start else 200, rest, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refused(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
            self.wfile.flush()
        if cut is not None:
            self.close_connection = True


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Within the block the hub answers at `hub.endpoint`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path, *, offline: bool = False) -> None:
    """Point huggingface_hub, which reads the environment when it is imported, at a hub and a cache."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()  # its connections are to an earlier server
