"""`vitrail serve`: from the command line to the port and back."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from asgi_client import png
from served_models import resnet, saved
from server_process import ServerProcess, serving

from vitrail import cli
from vitrail.errors import UsageError
from vitrail.verbs.serve import serve
from vitrail.weights.load import load
from vitrail.weights.store import checksum

pytest.importorskip("uvicorn", reason="the server needs vitrail[serve]")
pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model") / "tiny")


def _predict(url: str) -> dict[str, object]:
    request = urllib.request.Request(f"{url}/v1/predict", png(), {"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"queue": 0}, "queue is 0"),
        ({"deadline": -1.0}, "deadline is -1"),
        ({"drain": 0}, "drain is 0"),
        ({"precision": "int4"}, "no precision is called 'int4'"),
        ({"port": 70_000}, "70000"),
    ],
)
def test_impossible_settings(settings: dict[str, object], message: str, model: Path) -> None:
    with pytest.raises(UsageError, match=message):
        serve(model, **settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no model is given"):
        serve()


def test_a_port_that_is_taken(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(model), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is used by another program" in capsys.readouterr().err


def test_nothing_to_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path / "none"), "--port", "0"]) == 1
    assert "there is nothing at" in capsys.readouterr().err


@pytest.mark.kill
def test_the_model_folder_changes_under_a_running_server(model: Path, tmp_path: Path) -> None:
    """The network is in memory: whatever happens to its files, the answers stay."""
    folder = tmp_path / "tiny"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    with serving(folder) as running:
        first = _predict(running.url) | {"seconds": 0}
        content = weights.read_bytes()
        changes: dict[str, Callable[[], object]] = {
            "overwritten in place": lambda: _overwrite(weights, bytes(len(content))),
            "cut": lambda: os.truncate(weights, 100),
            "replaced by another model": lambda: saved(folder, resnet()),
            "deleted": lambda: shutil.rmtree(folder),
            "a pipe": lambda: os.mkfifo(folder),
        }
        for change, apply in changes.items():
            apply()
            assert _predict(running.url) | {"seconds": 0} == first, change
            assert json.loads(_get(f"{running.url}/v1/models")), change
        assert running.process.poll() is None


def _overwrite(file: Path, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(content)


@pytest.mark.kill
def test_sigterm_finishes_the_request_that_is_inside(model: Path) -> None:
    with serving(model) as running:
        process = psutil.Process(running.process.pid)
        listening = {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        body = png()
        with _half_inside(running.url, body) as client:
            running.process.send_signal(signal.SIGTERM)
            while _takes_connections(int(running.url.rpartition(":")[2])):
                pass
            client.sendall(body[20:])
            answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200") and b'"model":"tiny"' in answer
        assert running.process.wait(30) in (-signal.SIGTERM, 143)


@pytest.mark.kill
def test_sigterm_does_not_wait_for_ever(model: Path) -> None:
    with serving(model, flags=("--drain=1",)) as running, _half_inside(running.url, png()):  # the rest never comes
        running.process.send_signal(signal.SIGTERM)
        # a body that does not arrive is given up after 15 seconds: it is the drain that has ended it
        assert running.process.wait(10) in (-signal.SIGTERM, 143)


@contextmanager
def _half_inside(url: str, body: bytes) -> Iterator[socket.socket]:
    """A connection with a request of which the server has the first 20 bytes of `body`."""
    port = int(url.rpartition(":")[2])
    head = f"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: image/png\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:20])
        while "vitrail_bodies_arriving 1.0\n" not in _get(f"{url}/metrics"):
            pass
        yield client


@pytest.mark.kill
def test_ctrl_c_ends_it_and_says_what_was_done(model: Path) -> None:
    with serving(model) as running:
        _predict(running.url)
        running.process.send_signal(signal.SIGINT)
        out, _ = running.process.communicate(timeout=30)
    assert running.process.returncode == 0
    assert out == f"{running.url}: 1 image answered\n"


@pytest.mark.kill
def test_sighup_loads_the_model_anew_and_every_line_is_json(tmp_path: Path) -> None:
    """Four clients ask all the time, over connections of their own, while the model is replaced three times."""
    folder = saved(tmp_path / "tiny")
    found: list[tuple[int, str]] = []
    with serving(folder, flags=("--log=json", "--keep-alive=0")) as running:
        end = threading.Event()
        clients = [threading.Thread(target=_ask_until, args=(running.url, end, found)) for _ in range(4)]
        for client in clients:
            client.start()
        sums = []
        for content in ("new", "cut", "newer"):
            if content == "cut":
                os.truncate(folder / "model.safetensors", 1000)
            else:
                saved(folder, seed=len(content))
                sums.append(checksum(load(folder).state_dict()))
            running.process.send_signal(signal.SIGHUP)
            result = "failed" if content == "cut" else "done"
            count = 2 if content == "newer" else 1
            while f'vitrail_reloads_total{{result="{result}"}} {count}.0' not in _get(f"{running.url}/metrics"):
                assert running.process.poll() is None
        end.set()
        for client in clients:
            client.join()
        assert _predict(running.url)["weights_sha256"] == sums[-1]
        running.process.send_signal(signal.SIGINT)
        out, err = running.process.communicate(timeout=30)
    assert {status for status, _ in found} == {200} and sums[0] in {name for _, name in found}
    lines = [json.loads(line) for line in (out + err).splitlines()]
    said = " ".join(line.get("message", "") for line in lines)
    for words in ("loading tiny anew", "replaced: tiny (sha256", "previous ones stay", "draining"):
        assert words in said
    assert lines[0]["images"] > len(found)


def _ask_until(url: str, end: threading.Event, found: list[tuple[int, str]]) -> None:
    while not end.is_set():
        request = urllib.request.Request(f"{url}/v1/predict", png(), {"Content-Type": "image/png"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["connection"] == "close"
            found.append((answer.status, json.load(answer)["weights_sha256"]))


@pytest.mark.processes
def test_an_error_before_the_server_starts_is_json_too(model: Path, tmp_path: Path) -> None:
    process = ServerProcess(["serve", str(tmp_path / "none"), "--port", "0", "--log", "json"])
    *_, last = map(json.loads, process.communicate(60)[1].splitlines())
    assert process.wait() == 1 and last["level"] == "error" and "there is nothing at" in last["message"]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.kill
def test_memory_is_flat_over_many_requests(model: Path) -> None:
    with serving(model) as running:
        process = psutil.Process(running.process.pid)
        sizes = []
        address = running.url.partition("//")[2]
        image = png(size=(256, 256))
        for _ in range(4):
            with closing(http.client.HTTPConnection(address, timeout=30)) as client:  # a new connection takes longer
                for _ in range(75):
                    client.request("POST", "/v1/predict", image, {"Content-Type": "image/png"})
                    answer = client.getresponse()
                    assert answer.status == 200 and answer.read()
            sizes.append(process.memory_info().rss)
        assert sizes[-1] - sizes[1] < 8 * 2**20  # 150 requests; the pixels of each would be 28 MB
