"""The page in a real browser: Debian's chromium, driven by Playwright. Skipped where one of them is missing."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import pytest
import torch
from PIL import Image

import vitrail
from tests.web.models import picture, png, save, small_media_vit, small_vit, views_of
from tests.web.test_server import bomb
from vitrail.data import read_image
from vitrail.data.sample_files import drawings
from vitrail.web.cache import Cache
from vitrail.web.model_views import ModelViews, Setting
from vitrail.web.samples import samples_of

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn")
pytest.importorskip("fastapi")

from vitrail.web.server import create_app  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
WAIT = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def serving(*models: ModelViews, cache: Cache) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(models, cache), log_level="error", lifespan="off"))
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def views() -> tuple[ModelViews, ModelViews]:
    cache = Cache()
    other = small_vit(2, 64, 1)
    return views_of(small_vit(), "one", cache), views_of(other, "two", cache)


@pytest.fixture(scope="module")
def address(views: tuple[ModelViews, ModelViews]) -> Iterator[str]:
    with serving(*views, cache=views[0].cache) as found:
        yield found


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the page in a session of its own; errors of scripts fail the test."""
    contexts, errors = [], []

    def start(choice: str = "", at: str = address, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        page.goto(at + (f"#{choice}" if choice else ""))
        page.wait_for_selector("canvas[data-shown]", timeout=WAIT)
        return page

    yield start
    for context in contexts:
        context.close()
    assert errors == []


def shown(page: Any, what: str = "explore") -> Any:
    return json.loads(page.get_attribute(f"#panel-{what} canvas.painting", "data-shown"))


def choose(page: Any, slider: str, position: int) -> None:
    page.evaluate(
        """([id, at]) => {
          const one = document.getElementById(id);
          one.value = at;
          one.dispatchEvent(new Event("input"));
        }""",
        [slider, position],
    )


def until(page: Any, script: str) -> None:
    """Wait until an expression is true; the page's policy forbids Playwright's own way, which evaluates text in it."""
    end = time.monotonic() + WAIT / 1e3
    while not page.evaluate(script):
        assert time.monotonic() < end, script
        page.wait_for_timeout(50)


def pixels(page: Any, canvas: str) -> str:
    found: str = page.evaluate("id => document.querySelector(id).toDataURL()", canvas)
    return found


def test_slider_repaints_and_a_click_selects_a_patch(
    opened: Callable[..., Any], views: tuple[ModelViews, ModelViews]
) -> None:
    page = opened("image=church&value=0")
    before = pixels(page, "#panel-explore canvas.painting")
    choose(page, "amount", 9)
    until(page, "document.querySelector('#panel-explore canvas.painting').dataset.shown.includes('\"value\":9')")
    assert pixels(page, "#panel-explore canvas.painting") != before
    expected = views[0].result("test", views[0].batch(read_image(drawings()["church"])), Setting("tome", "r", 9))
    assert f"{expected['tokens'][-1]} of 68" in page.inner_text(".numbers")
    assert expected["heads"][0]["top"][0]["class"] in page.inner_text(".verdict")

    box = page.locator("#stage").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 5.5 / 8, box["y"] + box["height"] * 2.5 / 8)
    assert page.inner_text("#patch").startswith("Patch in row 2, column 5")
    assert page.input_value("#token") == str(4 + 2 * 8 + 5)
    page.get_by_role("radio", name="Attention").click()
    until(page, "document.querySelector('#panel-explore canvas.painting').dataset.values")
    page.wait_for_timeout(200)
    assert "query=25" in page.url
    assert "value=9" in page.url


@pytest.mark.slow
def test_uploads_and_hostile_files(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened()
    name = "<img src=x onerror=alert(1)>.png"
    page.set_input_files("#upload", {"name": name, "mimeType": "image/png", "buffer": png(picture((300, 100)))})
    until(page, "document.getElementById('status').textContent.includes('is open')")
    until(page, "document.querySelector('#panel-explore canvas.painting').width === 768")
    assert name in page.inner_text("#status")
    assert page.locator("img[onerror]").count() == 0
    for data, words in ((b"this is text", "not an image"), (bomb(), "too large"), (b"", "empty")):
        page.set_input_files("#upload", {"name": "photo.png", "mimeType": "image/png", "buffer": data})
        until(page, f"document.getElementById('alert').textContent.includes({json.dumps(words)})")
        assert shown(page)[0] == "glass"  # the image before is still there
    choose(page, "amount", 3)
    until(page, "document.querySelector('#panel-explore canvas.painting').dataset.shown.includes('\"value\":3')")


@pytest.mark.slow
def test_compare_two_models(opened: Callable[..., Any]) -> None:
    page = opened("image=parachute&tab=compare&value=4")
    until(page, "document.getElementById('compare-summary').textContent.includes('Left')")
    assert "Left 56 tokens, right 68" in page.inner_text("#compare-summary")
    page.select_option("#panel-compare section:last-child select >> nth=0", "two")
    choose(page, "amount2", 10)
    until(page, "document.getElementById('compare-summary').textContent.includes('right 48')")
    assert page.locator("h2", has_text="Right: two").count() == 1


def test_a_link_with_unknown_choices_opens_the_defaults(opened: Callable[..., Any]) -> None:
    page = opened(
        "image=../secret&tab=x&paint=__proto__&by=constructor&value=-7&head=-1&stage=99&registers=maybe&layer=9"
    )
    assert shown(page)[0] == "glass"
    assert shown(page)[1] == {"method": "tome", "by": "r", "value": 16, "schedule": "constant"}
    assert shown(page)[2] == 2
    assert "no sample of the name" in page.inner_text("#status")
    assert not page.is_visible("#alert")


def test_each_question_has_its_answer(opened: Callable[..., Any]) -> None:
    pytest.importorskip("soundfile")
    views = views_of(vitrail.load_model("vitrail:audio").eval(), "vitrail:audio")
    with serving(views, cache=views.cache) as address:
        page = opened("image=nine", address)
        until(page, "document.querySelectorAll('.verdict').length === 2")
        digit, speaker = page.locator(".verdict").all_inner_texts()
        assert digit.split("\n")[0] == "digit"
        assert "Still 9" in digit
        assert speaker.split("\n")[0] == "speaker"
        assert "Still lucas" in speaker
        assert shown(page)[1]["value"] == 10  # three quarters of the most that it can merge
        page.click("#tab-compare")
        until(page, "document.getElementById('compare-summary').textContent.includes('both answer 9, lucas')")


@pytest.fixture(scope="module")
def media() -> Iterator[tuple[str, ModelViews, ModelViews]]:
    """Return the address of a page with models of images, clips and sounds, and the views of the latter two."""
    pytest.importorskip("av")
    pytest.importorskip("soundfile")
    cache = Cache()
    clips, sounds = (views_of(small_media_vit(name), name, cache) for name in ("video", "audio"))
    with serving(views_of(small_vit(2), "image", cache), clips, sounds, cache=cache) as found:
        yield found, clips, sounds


def test_clips_and_sounds(opened: Callable[..., Any], media: tuple[str, ModelViews, ModelViews]) -> None:
    address, clips, sounds = media
    page = opened("model=video&image=blue-disc-left&value=8&query=6", address)
    expected = clips.result("disc", clips.batch(clips.medium.read(sample("blue-disc-left"))), Setting("tome", "r", 8))
    assert f"{expected['tokens'][-1]} of 65" in page.inner_text(".numbers")
    assert page.inner_text("#patch").startswith("Patch in frame 0 (0.25 s), row 1, column 1")
    frames: dict[int, set[int]] = {}
    for patch, group in enumerate(expected["groups"][-1]):
        frames.setdefault(group, set()).add(patch // 16)
    through = sum(len(one) > 1 for one in frames.values())
    assert f"Groups in several frames: {through};" in page.inner_text(".legend")
    page.focus("#stage")
    page.keyboard.press("PageDown")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#patch").startswith("Patch in frame 1 (0.75 s), row 1, column 2")
    box = page.locator("#stage").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.99, box["y"] + box["height"] * 0.97)
    assert page.inner_text("#patch").startswith("Patch in frame 3 (1.88 s), row 3, column 3")
    page.select_option("#model", "audio")
    until(page, "document.getElementById('status').textContent === 'nine is open.'")
    until(page, "document.querySelectorAll('#samples button').length === 3")
    assert page.get_attribute("#player audio", "aria-label") == "Play nine"
    until(page, "document.getElementById('patch').textContent.startsWith('Patch in row 3 from below, column 7')")
    page.focus("#stage")
    page.keyboard.press("ArrowUp")  # rows rise with the frequency, and the last is on top
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#patch").startswith("Patch in row 2 from below, column 7")
    expected = sounds.result("nine", sounds.batch(sounds.medium.read(sample("nine"))), Setting("tome", "r", 7))
    until(page, f"document.querySelector('.numbers').textContent.includes('{expected['tokens'][-1]} of 33')")


def sample(name: str) -> bytes:
    return next(one.data for modality in ("video", "audio") for one in samples_of(modality) if one.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("image=church&value=9&layer=1", ""),
        ("image=church&value=9&paint=attention&head=1&query=30&layer=2", "weights"),
        ("image=coffee&by=keep&value=0.5&schedule=decreasing&paint=similar&query=20", "cosines"),
        ("image=coffee&method=kmeans&value=5&paint=norms&layer=1", "norms"),
        ("image=church&paint=pca&value=3", "colors"),
        ("image=church&value=6&tab=step&layer=1", "cosines"),
        ("image=church&value=6&tab=compare&model2=other&value2=2", ""),
    ],
)
def test_the_lines_of_python_compute_what_is_shown(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, name: str
) -> None:
    """Run them, and compare their values with the page's."""
    saved = [f"vitrail:{save(small_vit(seed=seed), tmp_path / str(seed))}" for seed in (0, 1)]
    cache = Cache()
    views = [views_of(vitrail.load_model(one).eval(), one, cache) for one in saved]
    with serving(*views, cache=cache) as address:
        page = opened(choice.replace("other", quote(saved[1])), address)
        until(page, "!document.getElementById('python').hidden || document.getElementById('show-python').click()")
        page.wait_for_timeout(1000)
        code = page.inner_text("#python code")
        with page.expect_download() as download:
            page.click("#save-json")
        shown = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
        with page.expect_download() as download:
            page.click("#save-png")
        with Image.open(download.value.path()) as picture_of_it:
            assert picture_of_it.width == (768 if "compare" not in choice else 2 * 768 + 16)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code, found)
    file = read_image(found["file"])
    if name == "":
        pictures = sorted(path.stem for path in tmp_path.glob("*.png") if path.stem != "church")
        assert pictures == (["left", "right"] if "left" in shown else ["glass"])
    if "left" in shown:
        assert [len(set(shown[side]["groups"][-1])) for side in ("left", "right")] == [64 - 18, 64 - 6]
    elif name == "":
        with found["merging"].track() as trace, torch.no_grad():
            found["model"](views[0].batch(file))
        assert partition(trace.groups[0].tolist()) == partition(shown["result"]["groups"][1])
    elif name == "cosines" and "step" in shown:
        cosines, groups = found[name], shown["step"]["groups"]
        pair = shown["step"]["pairs"][0]
        assert float(cosines[groups.index(pair["a"]), groups.index(pair["b"])]) == pytest.approx(
            pair["cosine"], abs=1e-3
        )
    else:
        expected = {
            "weights": lambda: shown["shown"]["rows"][1],
            "cosines": lambda: shown["shown"]["cosines"],
            "norms": lambda: shown["shown"]["norms"],
            "colors": lambda: shown["shown"]["colors"],
        }[name]()
        torch.testing.assert_close(
            found[name].reshape(torch.tensor(expected).shape), torch.tensor(expected), atol=1e-3, rtol=1e-3
        )


@pytest.mark.slow
def test_registers_of_a_link_and_their_lines_of_python(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in which two neurons make artifacts, and an image that has them."""
    pytest.importorskip("timm")
    from tests.surgery.test_registers import planted

    with torch.no_grad():
        model, images = planted()
    bright = (images[0].movedim(0, -1).clamp(-1, 1) * 127.5 + 127.5).byte().numpy()
    Image.fromarray(bright).save(tmp_path / "bright.png")
    with serving(views_of(model.float(), "planted"), cache=Cache()) as address:
        page = opened("value=1&registers=on", address)
        page.set_input_files("#upload", tmp_path / "bright.png")
        until(page, "document.getElementById('status').textContent === 'bright.png is open.'")
        page.wait_for_timeout(2000)
        with page.expect_download() as download:
            page.click("#save-json")
        shown = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["registers"]
        page.click("#show-python")
        code = page.inner_text("#python code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vitrail, "load_model", lambda name: model)
    found: dict[str, Any] = {}
    exec(code, found)
    assert max(shown["before"]) > 20 * max(shown["after"])
    assert found["with_registers"][-16:].tolist() == pytest.approx(shown["after"], rel=1e-3)


def partition(groups: list[int]) -> set[tuple[int, ...]]:
    return {tuple(index for index, other in enumerate(groups) if other == one) for one in groups}


@pytest.mark.slow
def test_two_sessions_at_once(opened: Callable[..., Any], views: tuple[ModelViews, ModelViews]) -> None:
    pages = [opened("image=church&value=2"), opened("image=golf-ball&value=11&model=two")]
    for turn in range(1, 6):
        choose(pages[0], "amount", 2 + turn)
        choose(pages[1], "amount", 11 - turn)
    for page, model, name, r in ((pages[0], views[0], "church", 7), (pages[1], views[1], "golf-ball", 6)):
        until(page, f"document.querySelector('#panel-explore canvas.painting').dataset.shown.includes('\"value\":{r}')")
        expected = model.result(name, model.batch(read_image(drawings()[name])), Setting("tome", "r", r))
        assert f"{expected['tokens'][-1]} of 68" in page.inner_text(".numbers")


@pytest.mark.slow
def test_step_by_step_by_keyboard(opened: Callable[..., Any]) -> None:
    page = opened("image=church&value=6")
    page.focus("#tab-explore")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('#step-stage').dataset.shown")
    titles = []
    page.focus("#step-next")
    for _ in range(5):
        page.wait_for_timeout(150)
        titles.append(page.inner_text("#panel-step h2"))
        page.keyboard.press("Enter")
    assert titles[0].startswith("Layer 2: 56 tokens enter")
    assert titles[1] == "Every second token is a source"
    assert "looks for a partner" in titles[2]
    assert titles[3] == "The 6 best pairs merge"
    assert titles[4] == "56 − 6 = 50 tokens leave"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_labeled(opened: Callable[..., Any], scheme: str) -> None:
    page = opened("image=church", viewport={"width": 400, "height": 800}, color_scheme=scheme)
    for tab in ("explore", "step", "compare"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, select, [role=img]")]
              .filter((one) => one.checkVisibility())
              .filter((one) => !(one.ariaLabel || one.textContent.trim() || one.labels?.[0]?.textContent.trim()))
              .map((one) => one.outerHTML)"""
        )
        assert nameless == []
    page.click("#tab-explore")
    page.focus("#stage")
    for key in ("ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    assert page.inner_text("#patch").startswith("Patch in row 3, column 5")
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, color[4:-1].split(","))) < 150) == (scheme == "dark")


@contextmanager
def plain_files(folder: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


ASK = """async ([image, views]) => {
  const { openBackend } = await import(location.pathname + "backend.js");
  const backend = await openBackend();
  const { models } = await backend.models();
  const file = await (await fetch(image)).blob();
  const uploaded = await backend.upload(file);
  const found = [];
  for (const [view, given] of views)
    found.push(await backend.view(view, { model: models[0], image: uploaded.image, ...given }));
  return found;
}"""


@pytest.mark.slow
def test_a_static_page_answers_like_the_server(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Below a path of a plain web server; every view, number by number."""
    from vitrail.web.static import write_static

    model = small_vit().half().float()  # its file keeps half precision
    views = views_of(model)
    write_static(views, tmp_path / "some" / "path")
    batch = views.batch(read_image(drawings()["church"]))
    settings = [Setting("tome", "r", 7), Setting("tome", "keep", 0.5, "decreasing"), Setting("tome", "r", 0)]
    asked: list[tuple[str, dict[str, Any]]] = []
    for setting in settings:
        asked += [
            ("result", {"setting": setting}),
            ("attention", {"setting": setting, "layer": 2, "query": 40}),
            ("attention", {"setting": setting, "layer": 0, "query": 0}),
            ("tokens", {"setting": setting, "layer": 1}),
            ("similar", {"setting": setting, "layer": 2, "query": 33}),
            ("step", {"setting": setting, "layer": 1}),
        ]
    with plain_files(tmp_path) as root:
        page = opened("image=church&value=7", root + "some/path/")
        plain = [(view, {**given, "setting": given["setting"].__dict__}) for view, given in asked]
        answers = page.evaluate(ASK, ["samples/church.png", plain])
        assert "in this browser" in page.inner_text("#where")
    for (view, given), answer in zip(asked, answers, strict=True):
        expected = getattr(views, view)("image", batch, **given)
        assert same(answer, expected, f"{view} {given}")


def same(found: Any, expected: Any, where: str) -> bool:
    """Compare plain data: numbers within rounding, everything else exactly; times are left out."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        return all(same(found[key], expected[key], f"{where}.{key}") for key in expected if key != "seconds")
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        return all(same(one, other, where) for one, other in zip(found, expected, strict=True))
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=5e-3), where
    else:
        assert found == expected, where
    return True


@pytest.mark.slow
def test_images_reach_the_model_as_pillow_resizes_them(opened: Callable[..., Any], address: str) -> None:
    page = opened()
    for size in ((301, 77), (20, 30), (64, 64)):
        image, spec = picture(size), {"size": [32, 48], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.5]}
        found = page.evaluate(
            """async ([bytes, spec]) => {
              const { decode, toInput } = await import("./pixels.js");
              return Array.from(toInput(await decode(new Blob([new Uint8Array(bytes)])), spec));
            }""",
            [list(png(image)), spec],
        )
        from vitrail.data import InputSpec, to_tensor

        expected = to_tensor([image], InputSpec((32, 48), tuple(spec["mean"]), tuple(spec["std"])))
        torch.testing.assert_close(torch.tensor(found).view(1, 3, 32, 48), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_move_of_the_slider_takes_under_300_ms(opened: Callable[..., Any]) -> None:
    """With vitrail:tiny, from the event to the painted canvas, as soon as all positions are computed."""
    torch.set_num_threads(2)
    with serving(views_of(vitrail.load_model("vitrail:tiny").eval(), "vitrail:tiny"), cache=Cache()) as address:
        page = opened("image=church&value=8", address)
        until(page, "document.querySelector('#panel-explore canvas.painting').dataset.ahead")
        times = page.evaluate(
            """async () => {
              const slider = document.getElementById("amount");
              const canvas = document.querySelector("#panel-explore canvas.painting");
              const times = [];
              for (const at of [0, 21, 4, 17, 9, 12, 1, 20]) {
                const start = performance.now();
                slider.value = at;
                slider.dispatchEvent(new Event("input"));
                while (!canvas.dataset.shown.includes(`"value":${at},`)) await new Promise(requestAnimationFrame);
                await new Promise(requestAnimationFrame);
                times.push(performance.now() - start);
                await new Promise((resolve) => setTimeout(resolve, 400));
              }
              return times;
            }"""
        )
    assert median(times) < 300, times
