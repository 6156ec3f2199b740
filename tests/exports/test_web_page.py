"""`vitrail export --to web`: the page in a real browser that reaches nothing but this machine, and its runtime's files.

The browser is Debian's Chromium, driven by Playwright. VITRAIL_SCREENSHOTS=FOLDER keeps a picture of the page.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from references import once
from small_models import made

import vitrail
from vitrail import cli
from vitrail.data.images.decode import decode
from vitrail.data.images.native import picture
from vitrail.data.images.ops import eval_transform
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Bands, Preprocess
from vitrail.errors import ExportError, UsageError
from vitrail.exports import web
from vitrail.exports.write import export_model
from vitrail.model.build import create
from vitrail.weights.card import Card
from vitrail.weights.confidence import Confidence
from vitrail.weights.save import save

pytest.importorskip("onnxruntime")
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
NAMES = [HOSTILE, "bee", "grün", "dog", "elk", "fox", "gnu"]
SHARES = 1e-5
"""Largest difference of a probability: both compute in float32, with sums in another order."""
CHROMIUM = shutil.which("chromium")
in_browser = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium"), pytest.mark.browser]


# networks and images


def network(preprocess: Preprocess, **changes: Any) -> Any:
    torch.manual_seed(1)
    small = dict(width=32, depth=2, heads=2, mlp_dim=64, classes=len(NAMES), native=preprocess.resize == "native")
    model: Any = create("Ti/8", image_size=preprocess.image_size, **small)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.card = replace(Card(model.config, list(NAMES), preprocess, confidence=Confidence(temperature=1.5)), **changes)
    return model.eval()


NETWORKS = {
    "cover": (Preprocess((32, 48), crop=0.8), {}),
    "squash": (Preprocess((40, 40), resize="squash-crop", crop=0.9, interpolation="bicubic"), {}),
    "pad": (
        Preprocess((48, 32), resize="pad", interpolation="bicubic", fill=(200, 10, 0)),
        {"thresholds": [0.99, 0.2, 0.5, 0.7, 0.01, 0.4, 0.6]},
    ),
    "native": (
        Preprocess((48, 48), resize="native", patch=8),
        {"scale": TargetScale(tuple(map(float, range(7))), (1.0, 20.0, 0.1, 1.0, 1.0, 1e3, 1.0)), "confidence": None},
    ),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Lossless pictures whose neighbouring pixels differ as much as pixels can, so that a wrong weight is seen."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    upright = Image.Exif()
    upright[0x0112] = 6  # a quarter turn

    def noise(*shape: int) -> np.ndarray:
        return random.integers(0, 256, shape, dtype=np.uint8)

    pictures: dict[str, tuple[Any, dict[str, Any]]] = {
        "rgb": (noise(150, 97, 3), {}),
        "alpha": (noise(61, 200, 4), {}),
        "gray": (noise(80, 80), {}),
        "gray-alpha": (noise(33, 90, 2), {}),
        "deep": (random.integers(0, 2**16, (70, 100)).astype(np.uint16), {}),
        "turned": (noise(50, 90, 3), {"exif": upright}),
        "long": (noise(10, 700, 3), {}),
        "small": (noise(5, 3, 3), {}),
    }
    for name, (pixels, how) in pictures.items():
        Image.fromarray(pixels).save(folder / f"{name}.png", **how)
    Image.fromarray(noise(64, 64, 3)).quantize(16).save(folder / "palette.png", transparency=3)
    return sorted(folder.iterdir())


# the browser

DROP = """([name, data]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type: "image/png" }));
  const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.querySelector("#drop").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def package() -> Path:
    """The runtime's package, downloaded once a session."""

    def download(place: Path) -> None:
        try:
            with urllib.request.urlopen(web.TARBALL, timeout=60) as response:
                content = response.read()
        except OSError as error:
            pytest.skip(f"{web.TARBALL} cannot be reached: {error}")
        (place / "package.tgz").write_bytes(content)

    return once("onnxruntime-web", download) / "package.tgz"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    playwright.expect.set_options(timeout=60_000)  # of a busy machine; what is there is seen at once
    away = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", away])
        yield found
        found.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """A folder that a plain web server shows, in a browser."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.page = browser.new_context().new_page()
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def status(self, text: str) -> None:
        from playwright.sync_api import expect

        expect(self.page.locator("#status")).to_contain_text(text)

    def choose(self, *paths: Path) -> None:
        self.page.set_input_files("#files", [str(path) for path in paths])
        self.status("1 image" if len(paths) == 1 else f"{len(paths)} images")

    def rows(self, number: int) -> list[tuple[str, float]]:
        """What the page says about an image."""
        lines = self.page.locator("article").nth(number).locator("li")
        names = lines.locator(".class").all_text_contents()
        return [(name, float(lines.locator(".value").nth(i).get_attribute("title"))) for i, name in enumerate(names)]

    def pixels(self, number: int) -> np.ndarray:
        """The picture of an image as the network sees it, uint8 [height, width, 3]."""
        height, width, values = (
            self.page.locator("canvas")
            .nth(number)
            .evaluate("c => [c.height, c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]")
        )
        return np.array(values, np.uint8).reshape(height, width, 4)[..., :3]


@pytest.fixture
def open_site(browser: Any) -> Iterator[Any]:
    sites: list[Site] = []

    def opened(folder: Path) -> Site:
        sites.append(Site(browser, folder))
        return sites[-1]

    yield opened
    for site in sites:
        site.page.context.close()
        site.server.shutdown()
        site.server.server_close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[*in_browser, pytest.mark.export]) for name in NETWORKS])
def test_the_page_answers_as_predict_does(
    name: str, images: list[Path], package: Path, open_site: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess, changes = NETWORKS[name]
    model = network(preprocess, **changes)
    save(model, tmp_path / "model")
    out = ["--out", str(tmp_path / "web"), "--vendor-from", str(package), "--json"]
    assert cli.main(["export", str(tmp_path / "model"), "--to", "web", *out]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["to"] == "web" and told["parity"]["relative"] < 1e-4
    assert {"index.html", "model.onnx", "card.json", web.WASM["file"]} <= told["files"].keys()
    site = open_site(tmp_path / "web")
    site.page.goto(site.url)
    site.status("Ready.")
    site.choose(*images)
    if folder := os.environ.get("VITRAIL_SCREENSHOTS"):
        site.page.screenshot(path=Path(folder) / f"web-{name}.png", full_page=True)
    expected = {row.path: row for row in vitrail.predict(tmp_path / "model", *images, precision="float32").rows}
    assert site.page.locator("figcaption").all_text_contents() == [path.name for path in images]
    transform = eval_transform(preprocess)
    for number, path in enumerate(images):
        seen = transform(decode(path.read_bytes()), np.random.default_rng(0))
        seen = picture(seen) if preprocess.resize == "native" else seen
        np.testing.assert_array_equal(site.pixels(number), seen, err_msg=path.name)
        row, found = expected[str(path)], site.rows(number)
        if row.numbers is not None:
            assert [target for target, _ in found] == list(row.numbers)
            np.testing.assert_allclose([value for _, value in found], list(row.numbers.values()), rtol=1e-4, atol=1e-4)
            continue
        shares = dict(zip(row.classes, row.probabilities, strict=True))
        if row.labels is not None:
            marked = [name.removeprefix("✓ ") for name, _ in found if name.startswith("✓ ")]
            assert marked == [label for label, _ in row.labels]
            shares |= dict(row.labels)
        answers = [(name.removeprefix("✓ "), share) for name, share in found]
        assert [name for name, _ in answers][:5] == row.classes
        assert {name for name, _ in answers} == set(shares)
        np.testing.assert_allclose([share for _, share in answers], [shares[name] for name, _ in answers], atol=SHARES)
    assert len({tuple(row.classes) + tuple((row.numbers or {}).values()) for row in expected.values()}) > 1
    assert [url for url in site.asked if not url.startswith((site.url, "blob:"))] == [] and site.errors == []
    assert site.page.title() == "Classify images" and site.page.locator("img").count() == 0  # names are text


@pytest.fixture(scope="module")
def vendored(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vendored") / "web"
    return export_model(network(*NETWORKS["cover"][:1]), folder, "web", vendor_from=package).folder


def browser_test(function: Any) -> Any:
    for mark in (*in_browser, pytest.mark.export):
        function = mark(function)
    return function


@browser_test
def test_an_unreadable_file_does_not_stop_the_others(
    images: list[Path], vendored: Path, open_site: Any, tmp_path: Path
) -> None:
    bad = tmp_path / "<b>bad<b>.png"
    bad.write_bytes(images[0].read_bytes()[:60])
    site = open_site(vendored)
    site.page.goto(site.url)
    site.status("Ready.")
    site.choose(images[0], bad, images[1])
    site.status("3 images, of which 1 failed.")
    (said,) = site.page.locator("article .bad").all_text_contents()
    assert said.startswith("<b>bad<b>.png: this browser cannot read it")
    assert site.page.locator("figcaption").all_text_contents() == [images[0].name, images[1].name]
    site.page.evaluate(DROP, ["dropped.png", b64encode(images[2].read_bytes()).decode()])  # replaces the others
    site.status("1 image classified.")
    assert site.page.locator("figcaption").all_text_contents() == ["dropped.png"] and site.errors == []


@browser_test
def test_without_a_web_server_the_page_says_what_to_do(vendored: Path, open_site: Any) -> None:
    site = open_site(vendored)
    site.page.goto((vendored / "index.html").as_uri())
    site.status("python -m http.server")


def cdn(files: dict[str, bytes], change: bytes) -> Any:
    def answer(route: Any) -> None:
        content = files[route.request.url.removeprefix(web.CDN)] + change
        route.fulfill(body=content, headers={"Access-Control-Allow-Origin": "*"})

    return answer


@browser_test
def test_the_runtime_of_the_cdn_must_be_the_pinned_one(package: Path, open_site: Any, tmp_path: Path) -> None:
    folder = export_model(network(NETWORKS["cover"][0]), tmp_path / "web", "web").folder
    assert not (folder / web.WASM["file"]).exists()
    files = web.runtime_files(package)
    for change, status in ((b"", "Ready."), (b" ", "is not the expected one")):
        site = open_site(folder)

        site.page.route(f"{web.CDN}*", cdn(files, change))
        site.page.goto(site.url)
        site.status(status)
        assert any(url.startswith(web.CDN) for url in site.asked)
    site = open_site(folder)
    site.page.goto(site.url)  # without a network
    site.status(f"{web.CDN}{web.SCRIPT['file']} cannot be loaded")


# its files


@pytest.fixture
def small_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up package with the same names, whose hashes are the expected ones."""
    place = tmp_path / "onnxruntime-web.tgz"
    with tarfile.open(place, "w:gz") as package:
        for file, content in ((web.SCRIPT, b"script"), (web.WASM, b"program")):
            monkeypatch.setitem(file, "integrity", web.integrity(content, "sha384"))
            member = tarfile.TarInfo(f"package/dist/{file['file']}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(web, "TARBALL_INTEGRITY", web.integrity(place.read_bytes(), "sha512"))
    return place


def test_the_integrity_is_that_of_the_standard() -> None:
    """The example of the W3C's "Subresource Integrity", section 3.1."""
    expected = "sha384-H8BRh8j48O9oYatfu5AZzq6A9RINhZO5H16dQZngK7T62em8MUt1FLm52t+eX6xO"
    assert web.integrity(b"alert('Hello, world.');", "sha384") == expected


def test_the_runtime_is_downloaded_or_read_from_a_tarball_or_a_folder(
    small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(small_package) as package:
        package.extractall(tmp_path, filter="data")
    monkeypatch.setattr(web, "urlopen", lambda url, timeout: small_package.open("rb"))
    for source in (None, small_package, tmp_path, tmp_path / "package", str(tmp_path / "package" / "dist")):
        found = web.runtime_files(source)
        assert (found[web.SCRIPT["file"]], found[web.WASM["file"]]) == (b"script", b"program")
        assert b"Copyright (c) Microsoft Corporation" in found[web.LICENCE]


def test_183_a_runtime_that_is_not_there_or_not_the_pinned_one(
    small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(url: str, timeout: float) -> Any:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(web, "urlopen", refuse)
    save(made(), tmp_path / "model")
    assert cli.main(["export", str(tmp_path / "model"), "--to", "web", "--out", str(tmp_path / "o"), "--vendor"]) == 1
    error = capsys.readouterr().err
    assert "Name or service not known" in error and web.TARBALL in error and "Traceback" not in error
    assert f"npm pack onnxruntime-web@{web.VERSION}" in error and "--vendor-from onnxruntime-web-" in error
    monkeypatch.setattr(web, "urlopen", lambda url, timeout: io.BytesIO(small_package.read_bytes() + b"!"))
    with pytest.raises(ExportError, match="the download is not the published package"):
        web.runtime_files(None)
    (tmp_path / "cut.tgz").write_bytes(small_package.read_bytes()[:60])
    (tmp_path / "other.tgz").write_bytes(b"no package")
    (tmp_path / "empty").mkdir()
    for name in ("cut.tgz", "other.tgz", "empty", "missing.tgz"):
        with pytest.raises(ExportError, match=rf"{name} has no usable onnxruntime-web .*npm pack"):
            web.runtime_files(tmp_path / name)
    whole, changed, refused = small_package.read_bytes(), tmp_path / "changed.tgz", 0
    for place in range(len(whole)):
        changed.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert web.runtime_files(changed)[web.WASM["file"]] == b"program"
        except ExportError:
            refused += 1
    assert refused > len(whole) / 2
    monkeypatch.setitem(web.WASM, "integrity", web.integrity(b"another version", "sha384"))
    with pytest.raises(ExportError, match=rf"wasm in .* is not that of onnxruntime-web {web.VERSION}.*npm pack"):
        web.runtime_files(small_package)
    assert not (tmp_path / "o").exists()


def test_184_what_no_page_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(NETWORKS["cover"][0])
    with pytest.raises(UsageError, match=r"a web page shows classes or numbers, not features.*--to onnx"):
        export_model(model, tmp_path / "out", "web", output="features")
    bands = Bands("16", (0.0,) * 3, (1.0,) * 3, (0.0,) * 3, (9.0,) * 3)
    model.card = replace(model.card, preprocess=replace(model.card.preprocess, bands=bands))
    with pytest.raises(UsageError, match=r"a web page reads RGB images.*--to onnx"):
        export_model(model, tmp_path / "out", "web")
    for how in ({"vendor": True}, {"vendor_from": tmp_path}):
        with pytest.raises(UsageError, match=r"this is a program for openvino: add --to web"):
            export_model(model, tmp_path / "out", "openvino", **how)
    (tmp_path / "model.onnx").write_bytes(b"12345678")
    monkeypatch.setattr(web, "MOST", 7)
    with pytest.raises(ExportError, match="more than a page has memory for"):
        web.Page({}).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
