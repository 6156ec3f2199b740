"""The configuration of docs/tasks/nginx.md, read from the page and run: nginx in front of a server."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from asgi_client import png
from served_models import saved
from server_process import ROOT, Running, serving

pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
pytestmark = [pytest.mark.skipif(NGINX is None, reason="nginx is not installed"), pytest.mark.processes]

PAGE = (ROOT / "docs/tasks/nginx.md").read_text()
MAIN = "daemon off; pid {0}/pid; error_log {0}/error.log; worker_processes 1; events {{}} http {{ access_log off;\n"
MAIN += "client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/f; uwsgi_temp_path {0}/u;\n"
MAIN += "scgi_temp_path {0}/s;\n{1}\n}}\n"


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """The server with the flags of the page, and the address of nginx with the configuration of the page."""
    root = tmp_path_factory.mktemp("nginx")
    command = re.search(r"^vitrail serve \S+ (.+)$", PAGE, re.M)
    block = re.search(r"```nginx\n(.+?)```", PAGE, re.S)
    assert command and block and NGINX
    with serving(saved(root / "tiny"), flags=tuple(command[1].split())) as running, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        text = block[1].replace("127.0.0.1:8000", running.url.split("/")[2])
        text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
        (root / "nginx.conf").write_text(MAIN.format(root, text))
        nginx = subprocess.Popen([NGINX, "-e", f"{root}/error.log", "-c", f"{root}/nginx.conf"])
        try:
            yield running, f"http://127.0.0.1:{port}"
        finally:
            nginx.terminate()
            nginx.wait(30)


def ask(address: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a request under the name of the page, from 127.0.0.2."""
    host, _, path = address.removeprefix("http://").partition("/")
    sent = {"Host": "example.org", "Content-Type": "image/png", **{k.replace("_", "-"): v for k, v in headers.items()}}
    until = time.monotonic() + 20
    while True:
        try:
            with closing(http.client.HTTPConnection(host, timeout=20, source_address=("127.0.0.2", 0))) as client:
                client.request("GET" if body is None else "POST", f"/{path}", body, sent)
                answer = client.getresponse()
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except ConnectionRefusedError:  # nginx does not listen yet
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.processes
def test_the_page_and_an_answer_below_the_prefix(proxied: tuple[Running, str]) -> None:
    _, url = proxied
    status, _, page = ask(f"{url}/vit/")
    assert status == 200
    for name in re.findall(rb'(?:src|href)="([^"]+)"', page):  # as a browser resolves them
        if name != b"metrics":
            assert ask(f"{url}/vit/{name.decode()}")[0] == 200, name
    status, headers, body = ask(f"{url}/vit/v1/predict", png(), Origin="http://example.org")
    assert status == 200 and json.loads(body)["model"] == "tiny"
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert ask(f"{url}/vit/metrics")[0] == 403


def test_redirects_stay_below_the_prefix(proxied: tuple[Running, str]) -> None:
    _, url = proxied
    for path, target in (("/vit", "/vit/"), ("/vit/v1/models/", "/vit/v1/models")):
        status, headers, _ = ask(url + path)
        assert status in (301, 307) and re.sub("^http://[^/]+", "", headers["location"]) == target


def test_what_is_too_large_and_what_comes_from_elsewhere(proxied: tuple[Running, str]) -> None:
    _, url = proxied
    assert ask(f"{url}/vit/v1/predict", bytes(11 * 2**20))[0] == 413
    assert ask(f"{url}/vit/v1/predict", png(), Origin="http://evil.example")[0] == 403
    assert ask(f"{url}/vit/livez", Host="evil.example")[0] == 400


def test_the_log_has_the_clients_address_and_the_id_of_nginx(proxied: tuple[Running, str]) -> None:
    running, url = proxied
    _, headers, _ = ask(f"{url}/vit/v1/embed", png(), X_Forwarded_For="203.0.113.7")
    assert running.process.stderr is not None
    for line in running.process.stderr:
        found = json.loads(line)
        if found.get("request_id") == headers["x-request-id"]:
            break
    # what the client claims is not believed
    assert (found["client"], found["path"], found["status"]) == ("127.0.0.2", "/vit/v1/embed", 200)
