"""The HTTP interface, in this process: answers, refusals, and that one request never hurts another."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asgi_client import Answer, call, form, png
from PIL import Image
from served_models import NAMES, TINY, of_answers, of_numbers, of_pixels, resnet, saved, several

pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")
pytest.importorskip("python_multipart", reason="the server needs vitrail[serve]")

import vitrail
from vitrail.data.settings import Preprocess
from vitrail.inspection.maps import head_maps, patch_attention
from vitrail.inspection.positions import position_tiles
from vitrail.inspection.rollout import rollout
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.server.app import create_app
from vitrail.server.limits import Limits
from vitrail.server.served_model import ServedModel
from vitrail.server.service import Service
from vitrail.tasks.predict import predict_files
from vitrail.tasks.prediction import Prediction
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    saved(root / "vit")
    saved(root / "resnet", resnet())
    return root


@pytest.fixture(scope="module")
def models(folder: Path) -> list[ServedModel]:
    return [ServedModel(name, vitrail.load(folder / name), "cpu", "float32") for name in ("vit", "resnet")]


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Any]:
    """The application of a service, between start and end."""
    app = create_app(service)
    async with app.app.router.lifespan_context(app.app):
        yield app


def ask(models: list[ServedModel], scenario: Callable[[Any, Any], Coroutine[Any, Any, Any]], **limits: Any) -> Any:
    """Run `scenario(app, service)` on a fresh application."""

    async def run() -> Any:
        service = Service(models, Limits(**limits))
        async with running(service) as app:
            while not (service.ready or service.failure):
                await asyncio.sleep(0)
            found = await scenario(app, service)
            assert service.gate.inside == 0  # every place was given back
            return found

    return asyncio.run(run())


def one(models: list[ServedModel], *args: Any, limits: dict[str, Any] | None = None, **keywords: Any) -> Answer:
    """The answer to a single request."""
    return ask(models, lambda app, service: call(app, *args, **keywords), **(limits or {}))


@pytest.fixture
def stuck(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A first model that computes nothing until the second event is set; the first says that it has begun."""
    begun, go = threading.Event(), threading.Event()
    compute = models[0].predict

    def predict(images: torch.Tensor) -> torch.Tensor:
        if images.float().std() > 0:  # not the warm-up's
            begun.set()
            assert go.wait(20)
        return compute(images)

    monkeypatch.setattr(models[0], "predict", predict)
    yield begun, go
    go.set()


def test_the_same_numbers_as_vitrail_predict(models: list[ServedModel], folder: Path, tmp_path: Path) -> None:
    paths = []
    for i, kind in enumerate(("PNG", "JPEG", "BMP", "GIF")):
        paths.append(tmp_path / f"{i}.{kind.lower()}")
        pixels = np.random.default_rng(i).integers(0, 255, (30 + i, 41, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(paths[-1], kind)
    expected = list(predict_files(vitrail.load(folder / "vit"), paths, device="cpu", precision="float32", workers=0))
    body, headers = form([(path.name, path.read_bytes(), "image/x") for path in paths])
    together = one(models, "POST", "/v1/predict", body, headers=headers).json
    assert together["model"] == "vit" and together["seconds"] > 0
    assert [image["name"] for image in together["images"]] == [path.name for path in paths]
    for path, image, row in zip(paths, together["images"], expected, strict=True):
        alone = one(models, "POST", "/v1/predict", path.read_bytes(), headers=PNG).json["images"][0]
        assert isinstance(row, Prediction)
        for found in (image, alone):
            assert [best["class"] for best in found["top"]] == row.classes
            np.testing.assert_allclose([best["probability"] for best in found["top"]], row.probabilities, rtol=1e-4)


def test_a_network_for_more_classes_than_a_mask_can_hold_is_served(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(300)]
    config = ViTConfig.of(**{**TINY, "classes": len(names)})
    save_model(tmp_path, build(config), Card(config, names, Preprocess(config.image_size)))
    served = ServedModel("many", vitrail.load(tmp_path), "cpu", "float32")
    (image,) = one([served], "POST", "/v1/predict", png(), headers=PNG).json["images"]
    assert {best["class"] for best in image["top"]} <= {*names} and image["mask"] is None


def test_real_and_awkward_photographs_as_vitrail_predict_has_them(
    models: list[ServedModel], folder: Path, shared_data: Path
) -> None:
    awkward = shared_data / "awkward-images"
    paths = [awkward / "Landscape_7.jpg", awkward / "Channel_digital_image_CMYK_color.jpg"]
    rows = list(predict_files(vitrail.load(folder / "vit"), paths, device="cpu", precision="float32", workers=0))
    for path, row in zip(paths, rows, strict=True):
        limits = {"body": 50_000_000}
        found = one(models, "POST", "/v1/predict", path.read_bytes(), headers=PNG, limits=limits).json["images"][0]
        assert isinstance(row, Prediction) and [best["class"] for best in found["top"]] == row.classes
        np.testing.assert_allclose([best["probability"] for best in found["top"]], row.probabilities, rtol=1e-4)


def decoded(address: str) -> np.ndarray:
    """The pixels in a data address."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def test_another_model_and_how_many_classes(models: list[ServedModel]) -> None:
    found = one(models, "POST", "/v1/predict", png(), headers=PNG, query="model=resnet&top=2").json
    assert found["model"] == "resnet" and len(found["images"][0]["top"]) == 2
    assert sum(best["probability"] for best in found["images"][0]["top"]) <= 1
    assert found["images"][0]["crop"] is None
    found = one(models, "POST", "/v1/predict", png(), headers=PNG, query="model=resnet&crop=true").json
    np.testing.assert_array_equal(decoded(found["images"][0]["crop"]), models[1].prepare(png(), 10**6).pixels)
    assert one(models, "POST", "/v1/predict", png(), query="model=none").status == 404
    for query in ("top=0", "top=five"):
        refused = one(models, "POST", "/v1/predict", png(), query=query)
        assert (refused.status, refused.reason) == (422, "query")


def test_features_are_those_of_the_network(models: list[ServedModel], folder: Path) -> None:
    found = one(models, "POST", "/v1/embed", png(), headers=PNG).json
    prepared = models[0].prepare(png(), 10**6).pixels
    with torch.no_grad():
        expected = vitrail.load(folder / "vit").features(torch.from_numpy(prepared).permute(2, 0, 1)[None])[0]
    assert found["width"] == 16
    np.testing.assert_allclose(found["images"][0]["features"], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_attention_is_what_inspect_computes(models: list[ServedModel], folder: Path) -> None:
    model: Any = vitrail.load(folder / "vit")
    found = one(models, "POST", "/v1/attention", png(), headers=PNG, query="layer=0&head=1").json
    crop = decoded(found["crop"])
    np.testing.assert_array_equal(crop, models[0].prepare(png(), 10**6).pixels)
    images = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
    np.testing.assert_allclose(found["rollout"], rollout(model, images)[0], atol=1e-5)
    np.testing.assert_allclose(found["attention"], head_maps(model, images, 0, 1)[0].shares[0, 0], atol=1e-5)
    assert found["grid"] == [4, 4] and found["patch"] is None and found["positions"] is None
    assert found["picture"] == [20, 24]
    assert found["seen"]["left"] > 0 and found["seen"]["width"] < 24  # the sides are cut off

    found = one(models, "POST", "/v1/attention", png(), headers=PNG, query="row=1&column=2").json
    assert (found["layer"], found["head"], found["patch"]) == (1, None, [1, 2])
    expected = patch_attention(model, images, (1, 2))[0].shares[0].mean(0)
    np.testing.assert_allclose(found["attention"], expected, atol=1e-5)
    np.testing.assert_allclose(found["positions"], position_tiles(model).values[1, 2], atol=1e-5)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("layer=7", 422, "no layer 7"),
        ("head=9", 422, "no head 9"),
        ("row=9&column=0", 422, "no patch 9, 0"),
        ("row=1", 422, "give both"),
        ("model=resnet", 422, "not a ResNet"),
    ],
)
def test_what_cannot_be_shown_is_said(models: list[ServedModel], query: str, status: int, words: str) -> None:
    refused = one(models, "POST", "/v1/attention", png(), headers=PNG, query=query)
    assert refused.status == status and words in refused.json["error"]["message"]


def _wide() -> bytes:
    file = io.BytesIO()
    Image.new("1", (40_000, 5_000)).save(file, "PNG")  # 200 megapixels in a few kilobytes
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "kind", "status", "reason"),
    [
        (b"<html>", "text/html", 415, "media-type"),
        (b"<html>", "image/png", 415, "not-an-image"),
        (b"%PDF-1.7", "image/png", 415, "unsupported"),
        (b"", "image/png", 422, "empty"),
        (png()[:-30], "image/png", 422, "truncated"),
        (_wide(), "image/png", 422, "too-many-pixels"),
        (b"\0" * 20_001, "image/png", 413, "too-large"),
        ([b"\0" * 15_000] * 3, "image/png", 413, "too-large"),  # no length declared
        (b"torn", "multipart/form-data; boundary=x", 400, "form"),
        (b"torn", "multipart/form-data", 400, "form"),
        (form([])[0], form([])[1]["content-type"], 400, "no-image"),
    ],
)
def test_what_is_refused_and_why(models: list[ServedModel], body: Any, kind: str, status: int, reason: str) -> None:
    headers = {"content-type": kind} | ({"content-length": str(len(body))} if isinstance(body, bytes) else {})
    limits = {"body": 20_000 if status == 413 else 10_000_000}
    answer = one(models, "POST", "/v1/predict", body, headers=headers, limits=limits)
    assert (answer.status, answer.reason) == (status, reason)
    assert "Traceback" not in answer.body.decode() and "site-packages" not in answer.body.decode()


def test_one_bad_file_of_several_fails_alone(models: list[ServedModel]) -> None:
    files = [("a.png", png(), "image/png"), ("b.txt", b"words", "text/plain"), ("c.png", b"words", "image/png")]
    body, headers = form([*files, ('d"<b>é.png', png(), "image/png")])
    answer = one(models, "POST", "/v1/predict", body, headers=headers)
    assert answer.status == 200
    problems = [image["problem"] and image["problem"]["reason"] for image in answer.json["images"]]
    assert problems == [None, "media-type", "not-an-image", None]
    assert answer.json["images"][0]["top"] == answer.json["images"][3]["top"]
    body, headers = form([("a.png", png(), "image/png")] * 4)
    refused = one(models, "POST", "/v1/predict", body, headers=headers, limits={"images": 3})
    assert (refused.status, refused.reason) == (413, "too-many-images")


def test_an_image_that_breaks_the_network_fails_alone(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = models[0].predict

    def predict(images: torch.Tensor) -> torch.Tensor:
        if (images[:, 2].float().mean((1, 2)) > 200).any():
            raise RuntimeError("secret inside")
        logits = compute(images).clone()
        logits[images[:, 1].float().mean((1, 2)) > 200] = torch.nan
        return logits

    monkeypatch.setattr(models[0], "predict", predict)
    colours = [(200, 0, 0), (0, 0, 205), (0, 205, 0), (100, 0, 0)]
    body, headers = form([(f"{i}.png", png(colour), "image/png") for i, colour in enumerate(colours)])
    answer = one(models, "POST", "/v1/predict", body, headers=headers)
    reasons = [image["problem"] and image["problem"]["reason"] for image in answer.json["images"]]
    assert reasons == [None, "failed", "not-finite", None] and b"secret" not in answer.body
    assert one(models, "POST", "/v1/predict", png((0, 0, 205)), headers=PNG).status == 500


def test_a_full_queue_says_when_to_come_back(models: list[ServedModel], stuck: Any) -> None:
    begun, go = stuck

    async def scenario(app: Any, service: Any) -> tuple[list[Answer], list[Answer], Answer]:
        first = [asyncio.ensure_future(call(app, "POST", "/v1/predict", png(), headers=PNG)) for _ in range(4)]
        await asyncio.to_thread(begun.wait, 20)
        while service.gate.inside < 4:
            await asyncio.sleep(0)
        refused = await asyncio.gather(*(call(app, "POST", "/v1/predict", png(), headers=PNG) for _ in range(200)))
        live = await call(app, "GET", "/livez")
        go.set()
        return await asyncio.gather(*first), refused, live

    answered, refused, live = ask(models, scenario, queue=4)
    assert [answer.status for answer in answered] == [200] * 4 and live.status == 200
    assert [answer.status for answer in refused] == [429] * 200
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_the_deadline_and_a_client_that_leaves(models: list[ServedModel], stuck: Any) -> None:
    begun, go = stuck

    async def scenario(app: Any, service: Any) -> list[Answer]:
        leaves = asyncio.Event()
        gone = asyncio.ensure_future(call(app, "POST", "/v1/predict", png(), headers=PNG, leaves=leaves))
        await asyncio.to_thread(begun.wait, 20)
        leaves.set()
        first = await gone
        late = await call(app, "POST", "/v1/predict", png(), headers=PNG)
        go.set()
        return [first, late, await call(app, "POST", "/v1/predict", png(), headers=PNG)]

    assert [answer.status for answer in ask(models, scenario, deadline=0.5)][:2] == [499, 504]


def test_a_body_that_never_ends(models: list[ServedModel]) -> None:
    limits = {"receive": 0.05}
    slow = one(models, "POST", "/v1/predict", [b"\x89PNG"], headers=PNG, stalls=True, limits=limits)
    assert (slow.status, slow.reason, slow.headers["connection"]) == (408, "slow", "close")


def test_bodies_that_do_not_arrive_hold_no_place(models: list[ServedModel]) -> None:
    """70 clients announce an image and send nothing, or only its first bytes; the queue has 4 places."""

    async def scenario(app: Any, service: Any) -> Answer:
        begun = [
            asyncio.ensure_future(
                call(app, "POST", "/v1/predict", b"\x89PNG"[: 4 * (number % 2)], headers=PNG, stalls=True)
            )
            for number in range(70)
        ]
        while service.bodies.arriving < 70:
            await asyncio.sleep(0)
        answer = await call(app, "POST", "/v1/predict", png(), headers=PNG)
        for one in begun:
            one.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        assert not service.bodies.inside and service.bodies.size == 0
        return answer

    assert ask(models, scenario, queue=4).status == 200


def test_a_slow_body_gives_way_when_memory_is_needed(models: list[ServedModel]) -> None:
    async def scenario(app: Any, service: Any) -> tuple[Answer, Answer]:
        slow = asyncio.ensure_future(call(app, "POST", "/v1/predict", png()[:-9], headers=PNG, stalls=True))
        while not service.bodies.size:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return await call(app, "POST", "/v1/predict", png(), headers=PNG), await slow

    fast, slow = ask(models, scenario, queue=1, body=len(png()) + 9)
    assert fast.status == 200
    assert (slow.status, slow.reason, slow.headers["retry-after"]) == (408, "slow", "1")


def test_foreign_pages_and_names(models: list[ServedModel]) -> None:
    for headers, status in (
        ({"host": "evil.example"}, 400),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
    ):
        assert one(models, "POST", "/v1/predict", png(), headers={**PNG, **headers}).status == status
    assert one(models, "GET", "/", headers={"host": "evil.example"}).status == 400


@pytest.mark.parametrize("name", ["Host", "Origin", "Sec-Fetch-Site", "Content-Length", "Content-Type"])
def test_a_header_that_decides_is_sent_once(models: list[ServedModel], name: str) -> None:
    good = {
        "host": "127.0.0.1:8000",
        "origin": "http://127.0.0.1:8000",
        "sec-fetch-site": "same-origin",
        "content-length": str(len(png())),
        "content-type": "image/png",
    }
    bad = "evil.example" if name != "Content-Length" else "3"

    async def scenario(app: Any, service: Any) -> None:
        for first, second in ((good[name.lower()], bad), (bad, good[name.lower()]), (good[name.lower()],) * 2):
            headers = {**PNG, **good, name.lower(): first}
            answer = await call(app, "POST", "/v1/predict", png(), headers=headers, again=[(name.lower(), second)])
            assert (answer.status, answer.reason) == (400, "header")
            assert name.lower() in answer.json["error"]["message"]
        assert (await call(app, "POST", "/v1/predict", png(), headers=good)).status == 200

    ask(models, scenario)


NAMES_OF_HOSTS = [
    *(("host", host, 200) for host in ("LOCALHOST", "127.0.0.1:1", "[::1]", "[::1]:80", "localhost:")),
    *(("host", host, 400) for host in ("a:b@127.0.0.1", "@localhost", "localhost/evil", "localhost?a", "localhost#a")),
    *(("host", host, 400) for host in ("localhost:99999", "localhost:x", "[::1", "localhost, evil", "", "local\thost")),
    *(("origin", origin, 403) for origin in ("http://[::1", "null", "", "http://127.0.0.1:8000@evil", "//[")),
]


def test_malformed_names_are_refused(models: list[ServedModel]) -> None:
    async def scenario(app: Any, service: Any) -> dict[tuple[str, str], int]:
        return {
            (name, value): (await call(app, "POST", "/v1/predict", png(), headers={**PNG, name: value})).status
            for name, value, _ in NAMES_OF_HOSTS
        }

    assert ask(models, scenario) == {(name, value): status for name, value, status in NAMES_OF_HOSTS}


@pytest.mark.parametrize("charset", ["punycode", "idna", "rot13", "nothing", "utf-7"])
def test_a_form_in_any_charset_is_read_or_refused(models: list[ServedModel], charset: str) -> None:
    field = b'--edge\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n\xff-\xe9\r\n--edge--\r\n'
    headers = {"content-type": f"multipart/form-data; boundary=edge; charset={charset}"}
    answer = one(models, "POST", "/v1/predict", field, headers=headers)
    assert answer.status == 400 and answer.reason in ("form", "no-image")


@pytest.mark.parametrize(
    ("method", "path", "valid"),
    [
        ("GET", "/v1/predict", "POST"),
        ("PUT", "/v1/embed", "POST"),
        ("DELETE", "/v1/attention", "POST"),
        ("POST", "/v1/models", "GET"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(models: list[ServedModel], method: str, path: str, valid: str) -> None:
    """RFC 9110, 15.5.6: the response to a method that is not allowed has an Allow header with those that are."""
    answer = one(models, method, path)
    assert (answer.status, answer.headers["allow"]) == (405, valid)
    problem = answer.json["error"]
    assert problem["reason"] == "method" and problem["message"].startswith(f"{path} is valid with {valid} only")
    assert "\n" not in problem["message"]
    assert ("multipart/form-data" in problem["message"]) == (valid == "POST")


PATHS = ("/../pyproject.toml", "/page/../app.py", "/docs", "/redoc", "/page.py", "//etc/passwd")


@pytest.mark.parametrize("path", PATHS)
def test_there_are_no_other_files(models: list[ServedModel], path: str) -> None:
    answer = one(models, "GET", path)
    assert answer.status == 404 and answer.reason == "no-such-path" and len(answer.body) < 400
    assert "POST /v1/predict, /v1/embed, /v1/attention; GET /v1/models, " in answer.json["error"]["message"]


def test_the_page_may_load_nothing_from_elsewhere(models: list[ServedModel]) -> None:
    async def scenario(app: Any, service: Any) -> list[Answer]:
        return [await call(app, "GET", path) for path in ("/", "/page.css", "/page.js")]

    pages = ask(models, scenario)
    kinds = ("text/html", "text/css", "text/javascript")
    for page, kind in zip(pages, kinds, strict=True):
        assert page.status == 200 and page.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert b"http://" not in page.body and b"https://" not in page.body and b"innerHTML" not in page.body


def test_ready_live_and_counted(models: list[ServedModel]) -> None:
    async def scenario(app: Any, service: Any) -> dict[str, Answer]:
        await call(app, "POST", "/v1/predict", png(), headers=PNG)
        await call(app, "POST", "/v1/predict", b"words", headers=PNG)
        found = {path: await call(app, "GET", path) for path in ("/livez", "/readyz", "/metrics", "/v1/models")}
        service.draining = True
        found["draining"] = await call(app, "GET", "/readyz")
        found["late"] = await call(app, "POST", "/v1/predict", png(), headers=PNG)
        return found

    found = ask(models, scenario)
    statuses = {name: answer.status for name, answer in found.items()}
    assert statuses == {"/livez": 200, "/readyz": 200, "/metrics": 200, "/v1/models": 200, "draining": 503, "late": 503}
    lines = found["/metrics"].body.decode().splitlines()
    assert 'vitrail_requests_total{path="/v1/predict",status="200"} 1.0' in lines
    assert 'vitrail_requests_total{path="/v1/predict",status="415"} 1.0' in lines
    assert 'vitrail_images_total{model="vit"} 1.0' in lines
    assert 'vitrail_refused_total{reason="not-an-image"} 1.0' in lines
    described = found["/v1/models"].json["models"]
    assert [(one["name"], one["attention"], one["class_names"]) for one in described] == [
        ("vit", True, list(NAMES)),
        ("resnet", False, list(NAMES)),
    ]


def test_not_ready_before_it_is_warm_or_if_it_never_is(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(models[1], "warm", fails)

    async def scenario() -> list[Answer]:
        service = Service(models, Limits())
        async with running(service) as app:
            early = await call(app, "GET", "/readyz")
            while not service.failure:
                await asyncio.sleep(0)
            return [early, await call(app, "GET", "/readyz"), await call(app, "POST", "/v1/predict", png())]

    early, failed, refused = asyncio.run(scenario())
    assert (early.status, early.body) == (503, b"the networks are not ready yet\n")
    assert early.headers["retry-after"] == "1" and failed.headers["retry-after"] == "60"
    assert failed.status == refused.status == 503 and b"resnet fails on a grey image (RuntimeError)" in failed.body


def test_the_openapi_description_fits_the_answers(models: list[ServedModel]) -> None:
    described = one(models, "GET", "/openapi.json").json
    assert {"/v1/predict", "/v1/embed", "/v1/attention", "/v1/models", "/livez", "/readyz"} <= described["paths"].keys()
    post = described["paths"]["/v1/predict"]["post"]
    assert "multipart/form-data" in post["requestBody"]["content"]
    assert {"200", "400", "403", "413", "415", "422", "429", "503", "504"} <= post["responses"].keys()
    answer = one(models, "POST", "/v1/predict", png(), headers=PNG).json
    schema = described["components"]["schemas"]["Prediction"]
    assert set(schema["required"]) <= answer.keys() == schema["properties"].keys()
    json.dumps(described)


def test_an_unsure_image_is_none_of_the_classes(folder: Path, models: list[ServedModel]) -> None:
    usual = one(models, "POST", "/v1/predict", png(), headers=PNG).json["images"][0]
    assert usual["rejected"] is None
    for threshold, rejected in ((1.0, True), (0.0, False)):
        served = ServedModel("vit", vitrail.load(folder / "vit"), "cpu", "float32", reject=threshold)
        (image,) = one([served], "POST", "/v1/predict", png(), headers=PNG).json["images"]
        assert image["rejected"] is rejected and image["top"] == usual["top"]
        assert served.description.reject == threshold


def test_several_labels_come_as_a_list(tmp_path: Path, models: list[ServedModel]) -> None:
    served = ServedModel("labels", vitrail.load(several(tmp_path / "labels")), "cpu", "float32")
    answer = one([served], "POST", "/v1/predict", png(), headers=PNG).json
    (image,) = answer["images"]
    with torch.no_grad():
        logits = served.network(torch.from_numpy(served.prepare(png(), 10**6).pixels).permute(2, 0, 1)[None])[0]
    by_name = {name: share for name, share in zip(NAMES, logits.sigmoid().tolist(), strict=True)}
    assert {one["class"]: one["probability"] for one in image["top"]} == pytest.approx(by_name, abs=1e-5)
    assert [one["class"] for one in image["labels"]] == [NAMES[1]]
    assert image["labels"][0]["probability"] == pytest.approx(by_name[NAMES[1]], abs=1e-5)
    assert served.description.several_labels is True
    usual = one(models, "POST", "/v1/predict", png(), headers=PNG).json
    assert usual["images"][0]["labels"] is None


def test_several_answers_and_numbers_come_by_name(tmp_path: Path) -> None:
    served = ServedModel("answers", vitrail.load(of_answers(tmp_path / "answers")), "cpu", "float32")
    found = ask([served], lambda app, service: calls(app, "top=1", "/metrics", "/v1/models"))
    (image,) = found[0].json["images"]
    assert image["top"] == [] and image["labels"] is image["numbers"] is image["rejected"] is None
    with torch.no_grad():
        logits = served.network(torch.from_numpy(served.prepare(png(), 10**6).pixels).permute(2, 0, 1)[None])[0]
    kind, tags, grams = image["answers"].values()
    shares = (logits[:2] / 2).softmax(0)
    best = int(shares.argmax())
    assert kind["class"] == NAMES[best] and kind["probability"] == pytest.approx(shares[best].item(), abs=1e-5)
    assert len(kind["top"]) == 1  # as many as were asked for
    assert [label["class"] for label in tags["labels"]] == ["y"]
    assert tags["labels"][0]["probability"] == pytest.approx(logits[3].sigmoid().item(), abs=1e-5)
    assert grams == {"numbers": {"grams": pytest.approx(100 + 20 * logits[4].item(), rel=1e-5)}}
    counted = [line for line in found[1].body.decode().splitlines() if line.startswith("vitrail_predicted_total{")]
    assert len(counted) == 2 and any('class="tags: y",model="answers"} 1.0' in line for line in counted)
    assert [one["name"] for one in found[2].json["models"][0]["card"]["answers"]] == ["kind", "tags", "grams"]

    served = ServedModel("numbers", vitrail.load(of_numbers(tmp_path / "numbers")), "cpu", "float32")
    (image,) = one([served], "POST", "/v1/predict", png(), headers=PNG).json["images"]
    (row,) = predict_files(served.network, [picture(tmp_path)])
    assert isinstance(row, Prediction) and image["top"] == [] and image["answers"] is None
    assert image["numbers"] == pytest.approx(row.numbers) and [*image["numbers"]] == ["age", "grams"]


async def calls(app: Any, query: str, *others: str) -> list[Answer]:
    first = await call(app, "POST", "/v1/predict", png(), query=query, headers=PNG)
    return [first, *[await call(app, "GET", path) for path in others]]


def picture(folder: Path) -> Path:
    (folder / "image.png").write_bytes(png())
    return folder / "image.png"


@pytest.mark.parametrize(("head", "parts"), [("layers", ("linear",)), ("queries", ("classify", "mask.2"))])
def test_the_class_of_each_pixel_comes_as_a_mask(
    tmp_path: Path, models: list[ServedModel], head: str, parts: tuple[str, ...]
) -> None:
    """It is torch's own enlargement of the logits, and its areas are the shares of the classes."""
    served = ServedModel("scenes", vitrail.load(of_pixels(tmp_path, head, parts)), "cpu", "float32")
    file, picture = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    Image.fromarray(picture.repeat(4, 0).repeat(4, 1)).save(file, "PNG")
    (image,) = one([served], "POST", "/v1/predict", file.getvalue(), headers=PNG).json["images"]
    seen = served.prepare(file.getvalue(), 10**6)
    with torch.no_grad():
        logits = served.network(torch.from_numpy(seen.pixels).permute(2, 0, 1)[None])
    expected = torch.nn.functional.interpolate(logits, seen.size, mode="bilinear").argmax(1)[0].numpy()
    assert seen.size != served.card.config.image_size and len(np.unique(expected)) > 1
    mask = decoded(image["mask"])
    assert (mask == expected).mean() > 0.999
    colours = Image.open(io.BytesIO(base64.b64decode(image["mask"].partition(",")[2]))).convert("RGB")
    for area in (one for one in image["top"] if one["probability"]):
        row, column = np.argwhere(mask == NAMES.index(area["class"]))[0].tolist()
        assert bytes(colours.getpixel((column, row))).hex() == area["colour"].removeprefix("#")
    shares = {one["class"]: one["probability"] for one in image["top"]}
    assert shares == pytest.approx({name: (expected == row).mean() for row, name in enumerate(NAMES)}, abs=1e-3)
    usual = one(models, "POST", "/v1/predict", png(), headers=PNG).json
    assert usual["images"][0]["mask"] is None and "colour" not in usual["images"][0]["top"][0]
