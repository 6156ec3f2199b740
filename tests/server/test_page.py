"""The page in a real browser: Debian's Chromium, driven by Playwright.

VITRAIL_SCREENSHOTS=FOLDER keeps pictures of it, light, dark and narrow.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from asgi_client import png
from PIL import Image
from served_models import HOSTILE, TINY, of_answers, of_pixels, resnet, saved
from server_process import Running, serving

from vitrail.model.variants import ViTConfig

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("fastapi", reason="the server needs vitrail[serve]")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="no chromium"), pytest.mark.browser]
expect = playwright.expect
expect.set_options(timeout=30_000)  # of a busy machine; what is there is seen at once

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
    coarse = ViTConfig.of(**{**TINY, "patch": 8, "depth": 1})
    single = saved(root / "vit"), saved(root / "resnet", resnet()), saved(root / "coarse", coarse)
    with serving(*single, of_answers(root / "answers"), of_pixels(root / "scenes")) as running:
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


def an_image_chosen_then_another(page: Any) -> None:
    choose(page, "first.png", png())
    expect(page.locator("#status")).to_contain_text("first.png: ")
    expect(page.locator(".model")).to_have_count(5)
    expect(page.locator(".model").nth(0).locator(".top li")).to_have_count(4)
    resnet_column = page.locator(".model").nth(1)  # it has no attention, but has seen something, too
    expect(resnet_column.locator("canvas:visible")).to_have_count(1)
    expect(resnet_column.locator(".crop")).to_have_attribute("aria-label", "What the network saw, 16 × 16 px")
    choose(page, "second.png", png((0, 0, 200)))
    expect(page.locator("#status")).to_contain_text("second.png: ")
    expect(page.locator("#name")).to_have_text("second.png")
    expect(page.locator(".model").nth(0).locator(".top li")).to_have_count(4)
    expect(page.locator(".model").nth(0).locator(".time")).to_contain_text("answered in")


def a_second_image_before_the_first_is_answered(page: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3000, 3000), (90, 0, 0)).save(file, "PNG")
    choose(page, "first.png", file.getvalue())
    choose(page, "second.png", png())
    expect(page.locator("#status")).to_contain_text("second.png: ")
    expect(page.locator("#status")).to_contain_text("%")
    expect(page.locator("#name")).to_have_text("second.png")
    expect(page.locator(".model[aria-busy=true]")).to_have_count(0)


def an_image_dropped_or_pasted(page: Any) -> None:
    for how in ("drop", "paste"):
        page.evaluate(DROP, [how, f"{how}.png", base64.b64encode(png()).decode()])
        expect(page.locator("#status")).to_contain_text(f"{how}.png: ")


def hostile_names_are_text(page: Any) -> None:
    name = "a\"'<img src=x onerror=alert(1)>é.png"
    choose(page, name, png())
    expect(page.locator("#status")).to_contain_text("%")
    assert HOSTILE in page.locator(".model").nth(0).locator(".class").all_text_contents()
    assert page.locator("#name").text_content() == name
    assert page.title() == "vitrail" and page.locator("main img").count() == 1


def a_bad_file_and_a_good_one_after_it(page: Any) -> None:
    choose(page, "words.png", b"only words")
    expect(page.locator("#status")).to_contain_text("not an image")
    expect(page.locator(".model").nth(0).locator(".top")).to_be_hidden()
    choose(page, "good.png", png())
    expect(page.locator("#status")).to_contain_text("good.png: ")
    expect(page.locator(".model").nth(0).locator(".bad")).to_be_hidden()


def large_images_are_taken_and_huge_ones_are_not(page: Any) -> None:
    for size, words in (((6000, 5000), "%"), ((20_000, 10_000), "pixels, more than")):  # 30 and 200 megapixels
        file = io.BytesIO()
        Image.new("1", size, 1).save(file, "PNG")
        choose(page, "large.png", file.getvalue())
        expect(page.locator("#status")).to_contain_text(words)


def several_answers_stand_below_their_names(page: Any) -> None:
    part = page.locator(".model").nth(3)
    expect(part.locator(".known")).to_have_text("Gives 3 answers: kind, tags, grams")
    choose(page, "a.png", png())
    expect(page.locator("#status")).to_contain_text("; tags: labels y (")
    expect(page.locator("#status")).to_contain_text("; grams ")
    expect(part.locator(".top li.named")).to_have_text(["kind", "tags"])
    expect(part.locator(".top li .class")).to_have_count(5)  # two classes, two labels, a number
    expect(part.locator(".top li.unlikely .class")).to_have_text(["x"])
    expect(part.locator(".top li .share").last).not_to_contain_text("%")
    assert "[object" not in part.locator(".card").text_content()


def the_class_of_each_pixel_covers_the_picture(page: Any) -> None:
    part = page.locator(".model").nth(4)
    file, picture = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (5, 10, 3), np.uint8)
    picture = picture.repeat(100, 0).repeat(100, 1)
    Image.fromarray(picture).save(file, "PNG")  # as wide as the canvas
    with page.expect_response(lambda response: "/v1/predict?model=scenes" in response.url) as answered:
        choose(page, "scene.png", file.getvalue())
    expect(page.locator("#status")).to_contain_text("scene.png: ")
    mask = answered.value.json()["images"][0]["mask"].partition(",")[2]
    colours = np.asarray(Image.open(io.BytesIO(base64.b64decode(mask))).convert("RGB"))
    assert len(np.unique(colours.reshape(-1, 3), axis=0)) > 1
    drawn = np.asarray(Image.open(io.BytesIO(pixels(part, "canvas.mask"))).convert("RGB"))
    assert np.abs(drawn - (0.4 * picture + 0.6 * colours)).max() < 2
    expect(part.locator(".sure")).to_have_text("The share of the picture that each class covers.")


def pixels(page: Any, selector: str) -> bytes:
    return base64.b64decode(page.locator(selector).first.evaluate("c => c.toDataURL()").partition(",")[2])


def a_patch_by_mouse_and_by_keyboard(page: Any) -> None:
    choose(page, "a.png", png())
    part = page.locator(".model").nth(0)
    canvas, about = part.locator("canvas.map"), part.locator(".about")
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.75, "y": box["height"] * 0.15})
    expect(about).to_contain_text("row 0, column 3")
    expect(part.locator("canvas.positions")).to_be_visible()
    other = page.locator(".model").nth(2)
    expect(other.locator(".about")).to_contain_text("row 0, column 1")  # the same place in two rows of two
    canvas.press("ArrowDown")
    expect(about).to_contain_text("row 1, column 3")
    part.locator(".head").select_option("1")
    expect(about).to_contain_text("Layer 1, head 1")
    part.locator(".layer").fill("0")
    expect(about).to_contain_text("Layer 0, head 1")
    part.get_by_label("all layers").check()
    expect(about).to_contain_text("Rollout")
    canvas.press("Escape")
    expect(part.locator("canvas.positions")).to_be_hidden()
    expect(other.locator("canvas.positions")).to_be_hidden()


def a_patch_chosen_before_a_slower_model_has_answered_is_chosen_there_too(page: Any) -> None:
    """So it is for the first picture, and for a second one."""
    for name in ("slow.png", "second.png"):
        a_slower_model_follows(page, name)


def a_slower_model_follows(page: Any, name: str) -> None:
    held: list[Any] = []
    page.route(
        lambda url: "/v1/attention?model=coarse" in url, lambda route: route.continue_() if held else held.append(route)
    )
    choose(page, name, png())
    quick, slow = page.locator(".model").nth(0), page.locator(".model").nth(2)
    expect(quick).to_have_attribute("aria-busy", "false")
    while not held:  # its request may be on its way still
        page.wait_for_timeout(10)
    canvas = quick.locator("canvas.map")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.75, "y": box["height"] * 0.15})
    expect(quick.locator(".about")).to_contain_text("row 0, column 3")
    expect(slow).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    expect(slow.locator(".about")).to_contain_text("row 0, column 1")
    expect(page.locator("#status")).to_contain_text(f"{name}:")
    expect(slow.locator(".bad")).to_be_hidden()
    page.unroute_all()


def without_a_tint_the_map_is_the_picture(page: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (200, 100), (10, 140, 60)).save(file, "PNG")
    choose(page, "green.png", file.getvalue())
    expect(page.locator("canvas.map").first).to_be_visible()
    page.locator(".opacity").first.fill("0")
    shown = Image.open(io.BytesIO(pixels(page, "canvas.map"))).convert("RGB")
    assert shown.size == (1000, 500)
    assert shown.getpixel((500, 250)) == (10, 140, 60)
    assert shown.getpixel((5, 250)) != (10, 140, 60)  # the network did not see the sides
    page.locator(".opacity").first.fill("100")
    assert Image.open(io.BytesIO(pixels(page, "canvas.map"))).convert("RGB").getpixel((500, 250)) != (10, 140, 60)


PICTURE = "document.querySelector('#picture')"


def a_picture_that_the_browser_cannot_show_is_shown_as_the_network_saw_it(page: Any) -> None:
    picture, file = Image.new("RGB", (40, 20), (10, 140, 60)), io.BytesIO()
    picture.save(file, "TIFF")
    jxl = imagecodecs.jpegxl_encode(np.asarray(picture), lossless=True)
    for name, data, kind in (("scan.tiff", file.getvalue(), "image/tiff"), ("photo.jxl", jxl, "image/jxl")):
        choose(page, name, data, kind)
        expect(page.locator("#status")).to_contain_text(f"{name}: ")
        expect(page.locator("canvas.map").first).to_be_visible()
        page.wait_for_function(f"{PICTURE}.naturalWidth || !{PICTURE}.checkVisibility()")
        if page.evaluate(f"{PICTURE}.naturalWidth"):
            assert kind == "image/jxl"  # newer browsers show it
            continue
        expect(page.locator("#picture")).to_be_hidden()
        page.locator(".opacity").first.fill("0")
        shown = Image.open(io.BytesIO(pixels(page, "canvas.map"))).convert("RGB")
        assert shown.size == (1000, 1000) and shown.getpixel((500, 500)) == (10, 140, 60)
    assert {".heic", ".jxl"} <= {*page.locator("#file").get_attribute("accept").split(",")}


def everything_is_reached_by_tab(page: Any) -> None:
    choose(page, "a.png", png())
    expect(page.locator("canvas.map").first).to_be_visible()
    page.locator("body").press("Tab")
    reached = []
    for _ in range(10):
        reached.append(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"INPUT unseen", "CANVAS map", "INPUT layer", "SELECT head", "INPUT opacity", "SUMMARY "} <= set(reached)


def light_dark_and_narrow(page: Any) -> None:
    folder = os.environ.get("VITRAIL_SCREENSHOTS")
    choose(page, "a.png", png())
    expect(page.locator("canvas.map").nth(0)).to_be_visible()
    page.locator("canvas.map").nth(0).click()
    expect(page.locator("canvas.positions").nth(1)).to_be_visible()
    backgrounds = []
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 320)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        path = folder and f"{folder}/page-{scheme}-{width}.png"
        page.screenshot(path=path or None, full_page=True)
    assert backgrounds[0] != backgrounds[1]


PARTS: dict[str, list[Callable[[Any], None]]] = {
    "files": [
        *(an_image_chosen_then_another, a_second_image_before_the_first_is_answered, an_image_dropped_or_pasted),
        *(hostile_names_are_text, a_bad_file_and_a_good_one_after_it, large_images_are_taken_and_huge_ones_are_not),
        *(several_answers_stand_below_their_names, the_class_of_each_pixel_covers_the_picture),
    ],
    "patches": [
        a_patch_by_mouse_and_by_keyboard,
        a_patch_chosen_before_a_slower_model_has_answered_is_chosen_there_too,
    ],
    "looks": [
        without_a_tint_the_map_is_the_picture,
        a_picture_that_the_browser_cannot_show_is_shown_as_the_network_saw_it,
        *(everything_is_reached_by_tab, light_dark_and_narrow),
    ],
}


@pytest.mark.parametrize("part", PARTS)
def test_what_somebody_does_on_the_page(part: str, page: Any, server: Running) -> None:
    for act in PARTS[part]:
        act(page)
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("Ready.")


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
