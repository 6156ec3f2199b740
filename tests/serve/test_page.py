"""The page in a real browser: Debian's Chromium, driven by Playwright.

VITRAIL_SCREENSHOTS=FOLDER keeps pictures of it, light, dark and narrow.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi_client import png
from PIL import Image
from served_models import HOSTILE, resnet, saved
from server_process import Running, serving

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium"), pytest.mark.slow]
expect = playwright.expect

DROP = """([kind, name, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "drop"
    ? new DragEvent("drop", { dataTransfer: transfer, ...options })
    : new ClipboardEvent("paste", { clipboardData: transfer, ...options });
  document.querySelector("#drop").dispatchEvent(event);
}"""
REFUSALS = "Failed to load resource: the server responded with a status of 4"
"""Chromium itself writes this for every refused request; nothing a page does can prevent it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("models")
    with serving(saved(root / "vit"), saved(root / "resnet", resnet())) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """The page, opened; on leaving, nothing may have gone wrong or elsewhere."""
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("Ready.")
    yield page
    context.close()
    assert [error for error in errors if not error.startswith(REFUSALS)] == []
    assert [url for url in asked if not url.startswith((server.url, "blob:", "data:"))] == []


def choose(page: Any, name: str, content: bytes, kind: str = "image/png") -> None:
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": content})


def test_an_image_chosen_then_another(page: Any) -> None:
    choose(page, "first.png", png())
    expect(page.locator("#status")).to_contain_text("first.png: ")
    expect(page.locator(".model")).to_have_count(2)
    expect(page.locator(".model").nth(0).locator(".top li")).to_have_count(4)
    expect(page.locator(".model").nth(1).locator("canvas.map")).to_be_hidden()  # a ResNet has no attention
    choose(page, "second.png", png((0, 0, 200)))
    expect(page.locator("#status")).to_contain_text("second.png: ")
    expect(page.locator("#name")).to_have_text("second.png")
    expect(page.locator(".model").nth(0).locator(".top li")).to_have_count(4)
    expect(page.locator(".model").nth(0).locator(".time")).to_contain_text("ms")


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_an_image_dropped_or_pasted(page: Any, how: str) -> None:
    page.evaluate(DROP, [how, "dropped.png", base64.b64encode(png()).decode()])
    expect(page.locator("#status")).to_contain_text("dropped.png: ")


def test_hostile_names_are_text(page: Any) -> None:
    name = "a\"'<img src=x onerror=alert(1)>é.png"
    choose(page, name, png())
    expect(page.locator("#status")).to_contain_text("%")
    assert HOSTILE in page.locator(".model").nth(0).locator(".class").all_text_contents()
    assert page.locator("#name").text_content() == name
    assert page.title() == "vitrail" and page.locator("main img").count() == 1


def test_a_bad_file_and_a_good_one_after_it(page: Any) -> None:
    choose(page, "words.png", b"only words")
    expect(page.locator("#status")).to_contain_text("not an image")
    expect(page.locator(".model").nth(0).locator(".top")).to_be_hidden()
    choose(page, "good.png", png())
    expect(page.locator("#status")).to_contain_text("good.png: ")
    expect(page.locator(".model").nth(0).locator(".bad")).to_be_hidden()


@pytest.mark.parametrize(("size", "words"), [((6000, 5000), "%"), ((20_000, 10_000), "pixels, more than")])
def test_30_megapixels_are_taken_and_200_are_not(page: Any, size: tuple[int, int], words: str) -> None:
    file = io.BytesIO()
    Image.new("L", size, 90).save(file, "PNG")
    choose(page, "large.png", file.getvalue())
    expect(page.locator("#status")).to_contain_text(words, timeout=30_000)


def test_a_patch_by_mouse_and_by_keyboard(page: Any) -> None:
    choose(page, "a.png", png())
    part = page.locator(".model").nth(0)
    canvas = part.locator("canvas.map")
    expect(canvas).to_be_visible()
    before = canvas.evaluate("c => c.toDataURL()")
    part.get_by_label("Opacity").fill("0")
    assert canvas.evaluate("c => c.toDataURL()") != before
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.1})
    expect(part.locator(".about")).to_contain_text("row 0, column 3")
    expect(part.locator("canvas.positions")).to_be_visible()
    canvas.press("ArrowDown")
    expect(part.locator(".about")).to_contain_text("row 1, column 3")
    part.get_by_label("Head", exact=True).select_option("1")
    expect(part.locator(".about")).to_contain_text("Layer 1, head 1")
    canvas.press("Escape")
    expect(part.locator(".about")).to_contain_text("what the classifier reads")
    expect(part.locator("canvas.positions")).to_be_hidden()


def test_everything_is_reached_by_tab(page: Any) -> None:
    choose(page, "a.png", png())
    expect(page.locator("canvas.map").nth(0)).to_be_visible()
    page.locator("body").press("Tab")
    reached = []
    for _ in range(12):
        reached.append(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"INPUT ", "CANVAS map", "SELECT ", "SUMMARY "} <= set(reached)


def test_light_dark_and_narrow(page: Any, tmp_path: Path) -> None:
    folder = Path(os.environ.get("VITRAIL_SCREENSHOTS", tmp_path))
    choose(page, "a.png", png())
    expect(page.locator("canvas.map").nth(0)).to_be_visible()
    page.locator("canvas.map").nth(0).click()
    backgrounds = []
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 320)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.screenshot(path=folder / f"page-{scheme}-{width}.png", full_page=True)
    assert backgrounds[0] != backgrounds[1]


def test_the_server_stops_in_mid_request(browser: Any, tmp_path: Path) -> None:
    with serving(saved(tmp_path / "vit")) as running:
        page = browser.new_page()
        page.goto(running.url)
        expect(page.locator("#status")).to_have_text("Ready.")

        def killed(route: Any) -> None:
            running.process.kill()
            running.process.wait()
            route.continue_()

        page.route("**/v1/predict*", killed)
        choose(page, "a.png", png())
        expect(page.locator("#status")).to_contain_text("The server does not answer")
        page.close()
