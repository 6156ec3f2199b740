"""What surrounds an answer: ids, the access log, origins, a prefix, who answered, counts by class, nothing of disks."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_client import call, form, png
from PIL import Image
from served_models import NAMES, saved
from test_app import PNG, Service, create_app, one

pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")

import vitrail
from vitrail.errors import UsageError
from vitrail.server.clients import Clients
from vitrail.server.limits import Limits
from vitrail.server.logs import JsonLines
from vitrail.server.metrics import COUNTED, NONE, OTHERS, SORTED, Metrics
from vitrail.server.served_model import ServedModel
from vitrail.version import __version__
from vitrail.weights.store import checksum, save_model
from vitrail.words import without_folders

SECRET = "/home/somebody/hospital/patients"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose card names folders of the machine that trained it."""
    folder = saved(tmp_path_factory.mktemp("served") / "vit")
    model = vitrail.load(folder)
    own = {"data": SECRET, "from": "~somebody/base", "parents": [{"data": f"{SECRET}.csv", "run": "a"}], "step": 3}
    save_model(folder, model, replace(model.card, provenance=own, source=f"vitrail, from {SECRET}/base.safetensors"))
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> list[ServedModel]:
    return [ServedModel("vit", vitrail.load(folder), "cpu", "float32")]


def ask(models: list[ServedModel], clients: Clients, *requests: tuple[Any, ...]) -> list[Any]:
    """The answers to requests (method, path, body, headers) of an application for these clients."""

    async def scenario() -> list[Any]:
        service = Service(models, Limits())
        app = create_app(service, clients)
        async with app.app.router.lifespan_context(app.app):
            while not service.ready:
                await asyncio.sleep(0)
            return [await call(app, method, path, body, headers=headers) for method, path, body, headers in requests]

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-7/a:b", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False), ("\xe9", False)],
)
def test_the_id_of_a_request_is_the_clients_if_it_is_printable(
    models: list[ServedModel], given: str, kept: bool
) -> None:
    wrong = one(models, "POST", "/v1/predict", b"words", headers={**PNG, "x-request-id": given})
    assert wrong.status == 415 and wrong.json["request_id"] == wrong.headers["x-request-id"]
    assert (wrong.json["request_id"] == given) is kept
    assert kept or re.fullmatch("[0-9a-f]{32}", wrong.json["request_id"])


def test_two_ids_are_none(models: list[ServedModel]) -> None:
    found = one(models, "GET", "/livez", headers={"x-request-id": "a"}, again=[("x-request-id", "b")])
    assert len(found.headers["x-request-id"]) == 32


def test_each_request_has_a_line_of_the_log(models: list[ServedModel], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vitrail")
    sent = {**PNG, "x-request-id": "mine"}
    found, *_ = ask(
        models, Clients(), ("POST", "/v1/predict", png(), sent), ("GET", "/livez", b"", {}), ("GET", "/a\nb", b"", {})
    )
    predicted, nothing = [record for record in caplog.records if record.name == "vitrail.access"]
    line = json.loads(JsonLines().format(predicted))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time")) and 0 < line.pop("ms") < 60_000
    assert line == {
        "level": "info", "message": "request", "client": "127.0.0.1", "method": "POST", "path": "/v1/predict",
        "status": 200, "bytes": len(found.body), "request_id": "mine", "model": "vit",
    }  # fmt: skip
    text = rf"\S+Z 127\.0\.0\.1 POST /v1/predict 200 {len(found.body)} B [\d.]+ ms mine vit"
    assert re.fullmatch(text, predicted.getMessage())
    assert "GET /a%0Ab 404" in nothing.getMessage()


def test_an_error_in_json_has_its_traceback_in_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "it %s", ("fails",), (ValueError, error, None))
    line = JsonLines().format(record)
    assert (
        "\n" not in line and json.loads(line)["message"] == "it fails" and "ValueError" in json.loads(line)["traceback"]
    )


PAGE = "https://app.example"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), PAGE, None),
        ((PAGE, "http://localhost:3000"), PAGE, PAGE),
        (("HTTP://LocalHost:3000/",), "http://localhost:3000", "http://localhost:3000"),
        ((PAGE,), "https://evil.example", None),
        ((PAGE,), "https://app.example.evil", None),
        (("*",), "https://evil.example", "*"),
    ],
)
def test_only_pages_of_allowed_origins_can_ask(
    models: list[ServedModel], origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    """As a browser does: the preflight first, then the request. Refusals can be read by allowed pages, too."""
    page = {"origin": origin, "sec-fetch-site": "cross-site"}
    before = {**page, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight, answer, wrong = ask(
        models,
        Clients(origins=origins),
        ("OPTIONS", "/v1/predict", b"", before),
        ("POST", "/v1/predict", png(), {**PNG, **page}),
        ("POST", "/v1/predict", b"words", {**PNG, **page}),
    )
    name = "access-control-allow-origin"
    assert [one.headers.get(name) for one in (preflight, answer, wrong)] == [allowed] * 3
    assert (preflight.status == 200, answer.status, wrong.status) == (
        (True, 200, 415) if allowed else (False, 403, 403)
    )
    assert not allowed or "POST" in preflight.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"origins": ("null",)}, "--allow-origin"),
        ({"origins": ("app.example",)}, "--allow-origin"),
        ({"origins": ("https://app.example/path",)}, "--allow-origin"),
        ({"origins": ("https://a@app.example",)}, "--allow-origin"),
        ({"root_path": "vit"}, "--root-path"),
        ({"root_path": "/a/../b"}, "--root-path"),
        ({"root_path": "/a?b"}, "--root-path"),
        ({"proxies": ("*",)}, "--forwarded-allow-ips"),
        ({"proxies": ("proxy.example",)}, "--forwarded-allow-ips"),
    ],
)
def test_impossible_clients(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Clients(**wrong)


def test_a_prefix_that_the_servers_own_addresses_have(models: list[ServedModel]) -> None:
    with pytest.raises(UsageError, match="own addresses"):
        create_app(Service(models, Limits()), Clients(root_path="/v1"))


@pytest.mark.parametrize("prefix", ["/vit", ""], ids=["the proxy leaves it", "the proxy removes it"])
def test_below_a_prefix(models: list[ServedModel], prefix: str) -> None:
    page, answer, described, redirect, nothing, metrics = ask(
        models,
        Clients(root_path="/vit/"),
        ("GET", f"{prefix}/", b"", {}),
        ("POST", f"{prefix}/v1/predict", png(), PNG),
        ("GET", f"{prefix}/openapi.json", b"", {}),
        ("GET", f"{prefix}/v1/models/", b"", {}),
        ("GET", f"{prefix}/nothing", b"", {}),
        ("GET", f"{prefix}/metrics", b"", {}),
    )
    assert (page.status, answer.status, described.json["servers"]) == (200, 200, [{"url": "/vit"}])
    assert not re.search(rb'(src|href)="/', page.body)
    assert (redirect.status, redirect.headers["location"]) == (307, "/vit/v1/models")
    assert "POST /vit/v1/predict" in nothing.json["error"]["message"]
    assert b'vitrail_requests_total{path="/v1/predict",status="200"} 1.0' in metrics.body


def test_the_prefix_without_its_slash_leads_to_the_page(models: list[ServedModel]) -> None:
    (found,) = ask(models, Clients(root_path="/vit"), ("GET", "/vit", b"", {}))
    assert (found.status, found.headers["location"]) == (307, "/vit/")


def test_answers_name_the_weights_and_the_version(models: list[ServedModel], folder: Path) -> None:
    expected = checksum(vitrail.load(folder).state_dict())
    requests = [("POST", f"/v1/{what}", png(), PNG) for what in ("predict", "embed", "attention")]
    *answers, listed, described = ask(
        models, Clients(), *requests, ("GET", "/v1/models", b"", {}), ("GET", "/openapi.json", b"", {})
    )
    assert {(one.json["weights_sha256"], one.json["version"]) for one in answers} == {(expected, __version__)}
    assert listed.json["models"][0]["weights_sha256"] == expected
    schema = described.json["components"]["schemas"]["ModelDescription"]
    assert schema["required"] == list(listed.json["models"][0])


def test_nothing_that_is_served_names_a_folder(models: list[ServedModel], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vitrail")
    paths = ("/v1/models", "/metrics", "/openapi.json", "/", "/readyz", "/nothing")
    found = ask(
        models,
        Clients(),
        *(("GET", path, b"", {}) for path in paths),
        *(("POST", f"/v1/{what}", png(), PNG) for what in ("predict", "embed", "attention")),
        ("POST", "/v1/predict", png()[:-30], PNG),
    )
    said = b"".join(one.body for one in found).decode() + caplog.text
    assert "somebody" not in said and "hospital" not in said
    card = found[0].json["models"][0]["card"]
    assert card["provenance"] == {
        "data": "patients", "from": "base", "parents": [{"data": "patients.csv", "run": "a"}], "step": 3
    }  # fmt: skip
    assert card["source"] == "vitrail, from base.safetensors"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/x/photos", "photos"),
        ("/data/x/photos/", "photos"),
        (r"C:\Users\me\photos", "photos"),
        (r"\\nas\share\photos", "photos"),
        ("~/photos", "photos"),
        ("of /data/a b and '/data/c/d.csv'", "of a b and 'd.csv'"),
        ("photos/train", "photos/train"),
        ("https://host.example/a/b", "https://host.example/a/b"),
        ("owner/name", "owner/name"),
        ("1/2 of images", "1/2 of images"),
    ],
)
def test_paths_become_their_last_part(text: str, expected: str) -> None:
    assert without_folders({"a": [text, 3, None]}) == {"a": [expected, 3, None]}


def test_predicted_classes_and_their_confidence_are_counted(models: list[ServedModel]) -> None:
    body, headers = form([("a.png", png(), "image/png"), ("b.txt", b"words", "text/plain")])
    answer, metrics = ask(models, Clients(), ("POST", "/v1/predict", body, headers), ("GET", "/metrics", b"", {}))
    best = answer.json["images"][0]["top"][0]
    lines = [line for line in metrics.body.decode().splitlines() if line.startswith("vitrail_predicted_total{")]
    assert len(lines) == 1 and lines[0].endswith(" 1.0") and NAMES.index(best["class"]) >= 0
    (total,) = [line for line in metrics.body.decode().splitlines() if line.startswith("vitrail_confidence_sum")]
    assert float(total.rsplit(" ", 1)[1]) == pytest.approx(best["probability"])


def test_photographs_of_phones_and_jpeg_xl_are_read_as_their_pixels_are(models: list[ServedModel]) -> None:
    heif, codecs = pytest.importorskip("pillow_heif"), pytest.importorskip("imagecodecs")
    pixels = np.asarray(Image.open(io.BytesIO(png())).convert("RGB"))
    file = io.BytesIO()
    heif.from_pillow(Image.fromarray(pixels)).save(file, quality=-1, chroma=444)
    jxl = codecs.jpegxl_encode(pixels, lossless=True)
    body, headers = form(
        [("a.png", png(), "image/png"), ("b.jxl", jxl, "image/jxl"), ("c.HEIC", file.getvalue(), "image/heic")]
    )
    (answer,) = ask(models, Clients(), ("POST", "/v1/predict", body, headers))
    stored, exact, near = (
        {one["class"]: one["probability"] for one in found["top"]} for found in answer.json["images"]
    )
    assert exact == pytest.approx(stored) and near == pytest.approx(stored, abs=0.02)


def test_a_network_of_many_classes_has_a_bounded_number_of_time_series() -> None:
    metrics = Metrics(lambda: 0, lambda: 0, lambda: True)
    for number in range(COUNTED + 20):
        metrics.predicted("m", f"c{number}", 0.5, [f"c{number}"])
    metrics.predicted("m", "c0", 0.2, [])
    lines = metrics.text().splitlines()
    assert sum(line.startswith("vitrail_predicted_total{") for line in lines) == COUNTED + 1  # and the others
    assert f'vitrail_predicted_total{{class="{OTHERS}",model="m"}} 21.0' in lines
    assert sum(line.startswith("vitrail_confidence_count") for line in lines) == SORTED + 1
    assert NONE not in metrics._named[("m", COUNTED)]
    assert 'vitrail_confidence_count{class="c0",model="m"} 2.0' in lines
