"""Clips and sounds: what the page paints on, what is read, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.data.media_files import tone, write_clip, write_sound
from tests.web.models import png, small_media_vit, small_vit, views_of
from vitrail.errors import InvalidOption, MediaError
from vitrail.web import media
from vitrail.web.cache import Cache
from vitrail.web.media import MEDIA, preview
from vitrail.web.model_views import ModelViews, Setting
from vitrail.web.samples import samples_of, save_sample

pytest.importorskip("av")
pytest.importorskip("soundfile")


@pytest.fixture(scope="module", params=["video", "audio"])
def views(request: pytest.FixtureRequest) -> ModelViews:
    return views_of(small_media_vit(request.param), request.param)


def decoded(shown: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(shown["url"].partition(",")[2])))


def gif(colors: list[tuple[int, int, int]]) -> bytes:
    frames, file = [Image.new("RGB", (40, 40), color) for color in colors], io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=100)
    return file.getvalue()


def test_every_view_has_the_grid_of_the_medium(views: ModelViews) -> None:
    one, setting = samples_of(views.name)[0], Setting("tome", "r", 6)
    batch, grid = views.batch(views.medium.read(one.data)), views.layout.grid
    assert views.info()["grid"] == list(grid) == ([4, 4, 4] if views.name == "video" else [1, 4, 8])
    result = views.result("sample", batch, setting)
    with torch.no_grad(), vitrail.merge(views.model, r=6) as merging, merging.track() as trace:
        views.model(batch)
    assert result["groups"][-1] == trace.groups[0].tolist()
    assert result["flops"] == {"before": merging.flops(views.spec.size, merged=False), "after": int(trace.flops[0])}
    tokens = views.tokens("sample", batch, setting, 1)
    assert len(tokens["norms"]) == 1 + len(tokens["colors"]) == views.layout.num_tokens
    assert tokens["threshold"]["images"] == len(samples_of(views.name))
    for found in (
        views.attention("sample", batch, setting, 2, 9)["rows"][0],
        views.step("sample", batch, setting, 1)["groups"],
    ):
        assert len(found) == views.layout.num_tokens


def test_a_frame_stands_for_each_step_of_the_grid() -> None:
    views = views_of(small_media_vit("video"))
    colors = [(0, 0, 20 + 25 * number) for number in range(8)]
    shown = preview(MEDIA["video"].read(gif(colors)), views.spec, views.layout)
    sheet = np.asarray(decoded(shown))
    assert sheet.shape == (160, 40, 3)
    assert [int(sheet[40 * step + 20, 20, 2]) for step in range(4)] == pytest.approx([45, 95, 145, 195], abs=4)
    assert shown["times"] == pytest.approx([0.1, 0.3, 0.5, 0.7])


def test_a_tone_is_bright_at_its_tick(tmp_path: Path) -> None:
    views = views_of(small_media_vit("audio"))
    sound = MEDIA["audio"].read(write_sound(tmp_path / "tone.wav", tone(1000, 1.0)).read_bytes())
    shown = preview(sound, views.spec, views.layout)
    image = np.asarray(decoded(shown).convert("L"), dtype=float)
    brightest = 1 - (image.mean(1).argmax() + 0.5) / len(image)
    share = {text: share for share, text in shown["y"]}["1 kHz"]
    assert brightest == pytest.approx(share, abs=1 / 32)
    assert shown["x"][0] == (0, "0.0 s")


def test_clips_of_too_many_pixels_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = write_clip(tmp_path / "clip.mp4", count=12, size=(32, 48)).read_bytes()
    monkeypatch.setattr(media, "CLIP_PIXELS", 12 * 32 * 48)
    assert MEDIA["video"].read(clip).timeline().count == 12
    monkeypatch.setattr(media, "CLIP_PIXELS", 12 * 32 * 48 - 1)
    with pytest.raises(MediaError, match="12 frames of 48 × 32"):
        MEDIA["video"].read(clip)


def test_samples_are_readable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for modality, medium in MEDIA.items():
        for one in samples_of(modality):
            medium.read(Path(save_sample(one.name)).read_bytes())
            assert Image.open(io.BytesIO(one.small)).size[0] >= 100
    with pytest.raises(InvalidOption, match="church"):
        save_sample("../secret")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from vitrail.web.server import create_app

    cache = Cache()
    models = [
        views_of(small_vit(2), "image", cache),
        *(views_of(small_media_vit(name), name, cache) for name in ("video", "audio")),
    ]
    with TestClient(create_app(models, cache), base_url="http://127.0.0.1:8765") as made:
        yield made


def post(client: Any, model: str, data: bytes) -> Any:
    return client.post("/api/image", params={"model": model}, content=data)


def test_one_file_is_an_image_or_a_clip_by_the_model_that_takes_it(client: Any) -> None:
    data = gif([(200, 0, 0), (0, 0, 200)])
    image = post(client, "image", data).json()["image"]
    given = {"image": image, "setting": Setting("tome", "r", 2).__dict__}
    assert client.post("/api/view/result", json={"model": "video", **given}).json()["error"].startswith("gone:")
    assert post(client, "video", data).json()["image"] == image
    patches = [
        len(client.post("/api/view/result", json={"model": name, **given}).json()["groups"][-1])
        for name in ("image", "video")
    ]
    assert patches == [64, 64]
    assert client.post("/api/preview", json={"model": "image", "image": image}).json().keys() == {"url"}
    assert len(client.post("/api/preview", json={"model": "video", "image": image}).json()["times"]) == 4


def test_samples_are_those_of_the_models(client: Any) -> None:
    found = client.get("/api/models").json()
    assert {one["modality"] for one in found["samples"]} == {"image", "video", "audio"}
    for one in found["samples"]:
        assert client.get(f"/{one['file']}").status_code == client.get(f"/{one['thumbnail']}").status_code == 200


def test_hostile_clips_and_sounds_are_refused(client: Any, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4").read_bytes()
    sound = write_sound(tmp_path / "tone.wav", tone(500)).read_bytes()
    playlist = b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n"
    wrong = {
        "video": [b"", b"text", playlist, clip[:300], sound, b"ffconcat version 1.0\nfile /etc/passwd"],
        "audio": [b"", b"text", sound[:20], clip],
    }
    for model, files in wrong.items():
        for data in files:
            answer = post(client, model, data)
            assert (answer.status_code, answer.json()["kind"]) == (400, "MediaError"), data[:20]
    assert post(client, "audio", png(Image.new("RGB", (9, 9)))).status_code == 400
