"""The server: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.web.models import picture, png, small_vit, views_of
from vitrail.web.cache import Cache

pytest.importorskip("fastapi")
testclient = pytest.importorskip("fastapi.testclient")

from vitrail.web.server import MAX_UPLOAD, create_app  # noqa: E402

SETTING = {"method": "tome", "by": "r", "value": 5, "schedule": "constant"}


@pytest.fixture(scope="module")
def cache() -> Cache:
    return Cache(2**20)


@pytest.fixture(scope="module")
def client(cache: Cache) -> Iterator[Any]:
    app = create_app([views_of(small_vit(), "one", cache), views_of(small_vit(2, 64, 1), "two", cache)], cache)
    with testclient.TestClient(app, base_url="http://127.0.0.1:8765") as made:
        yield made


def upload(client: Any, data: bytes, model: str = "one") -> Any:
    return client.post("/api/image", params={"model": model}, content=data)


def test_two_models_one_image(client: Any) -> None:
    models = client.get("/api/models").json()["models"]
    assert models == [{"name": name, "modality": "image"} for name in ("one", "two")]
    assert client.post("/api/model", json={"model": "two"}).json()["layers"] == 2
    image = upload(client, png(picture((48, 40)))).json()
    for name, layers in (("one", 3), ("two", 2)):
        given = {"model": name, "image": image["image"], "setting": SETTING}
        found = client.post("/api/view/result", json=given).json()
        assert found["tokens"] == [68 - 5 * (layer + 1) for layer in range(layers)]
        for view, more in (("attention", {"query": 3}), ("tokens", {}), ("similar", {"query": 9}), ("step", {})):
            assert client.post(f"/api/view/{view}", json={**given, "layer": 1, **more}).json()["layer"] == 1
    preview = client.post("/api/preview", json={"model": "one", **image}).json()
    assert Image.open(io.BytesIO(base64.b64decode(preview["url"].partition(",")[2]))).size == (48, 40)


def test_errors_are_answered_in_words(client: Any) -> None:
    image = upload(client, png(picture())).json()["image"]
    good = {"model": "one", "image": image, "setting": SETTING, "layer": 0, "query": 0}
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("result", {"model": "three"}, "this server has one, two"),
        ("result", {"image": "f" * 64}, "gone:"),
        ("result", {"image": 7}, "gone:"),
        ("result", {"setting": {"method": "../x"}}, "known method"),
        ("attention", {"layer": 3}, "layer is a whole number from 0 to 2"),
        ("attention", {"query": True}, "query is a whole number from 0 to 67"),
        ("model", {}, "views are result"),
        ("__class__", {}, "views are result"),
        ("registers", {}, "no artifacts"),
    ]
    for view, change, words in wrong:
        answer = client.post(f"/api/view/{view}", json={**good, **change})
        assert answer.status_code == 400
        assert words in answer.json()["error"]
    assert upload(client, png(picture()), model="three").json()["error"].startswith("this server has")
    for body in (b"", b"[]", b"{", b"[" * 9_000, b'{"model": 1}', b"x" * 20_000):
        assert client.post("/api/view/result", content=body).status_code == 400


def bomb() -> bytes:
    """Return a PNG of 400 megapixels in half a megabyte."""
    side = 20_000

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(side // 8 + 1)) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"just text, named .png", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
        (png(picture((200, 200)))[:900], "damaged or cut off"),
        (bomb(), "too large"),
        (b"\0" * (MAX_UPLOAD + 1), "20 MiB"),
    ],
    ids=["empty", "text", "eps", "cut", "bomb", "long"],
)
def test_hostile_files_are_refused(client: Any, cache: Cache, data: bytes, words: str) -> None:
    kept = len(cache)
    answer = upload(client, data)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert len(cache) == kept


def test_no_path_of_the_machine_is_readable(client: Any) -> None:
    assert client.get("/").text.startswith("<!doctype html>")
    assert client.get("/app.js").headers["content-type"].startswith("text/javascript")
    paths = ["/etc/passwd", "/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/page/app.js"]
    for path in [
        *paths,
        "/vendor/LICENSE",
        "/samples/../app.py",
        "/api/preview/..%2f..%2fetc%2fpasswd",
        "/docs",
        "/openapi.json",
    ]:
        answer = client.get(path)
        assert answer.status_code in (400, 404)
        assert "root:" not in answer.text


def test_headers_forbid_inline_scripts_and_other_sites(client: Any) -> None:
    for answer in (client.get("/"), client.get("/app.js"), client.get("/nothing"), upload(client, b"")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert "onclick" not in page
    assert "<style" not in page
    assert "style=" not in page


def test_other_sites_and_names_are_refused(client: Any) -> None:
    ask = {"headers": {"origin": "http://evil.example"}}
    assert client.post("/api/model", json={"model": "one"}, **ask).status_code == 403
    assert (
        client.post("/api/model", json={"model": "one"}, headers={"origin": "http://127.0.0.1:8765"}).status_code == 200
    )
    for origin in ("null", "", "http://[", "http://127.0.0.1:9", "http://127.0.0.1:8765.evil.example"):
        assert client.get("/api/models", headers={"origin": origin}).status_code == 403
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[", "x@localhost"):
        assert client.get("/api/models", headers={"host": host}).status_code == 403
    for host in ("localhost", "localhost:9", "127.0.0.1", "[::1]:8765"):
        assert client.get("/api/models", headers={"host": host}).status_code == 200


def test_memory_does_not_grow_with_images(client: Any, cache: Cache) -> None:
    first = upload(client, png(picture(seed=99))).json()["image"]
    for seed in range(15):
        image = upload(client, png(picture((500, 400), seed))).json()["image"]
        given = {"model": "one", "image": image, "setting": {**SETTING, "value": seed % 3}}
        assert client.post("/api/view/result", json=given).status_code == 200
        assert cache.bytes <= cache.max_bytes
    gone = client.post("/api/view/result", json={"model": "one", "image": first, "setting": SETTING})
    assert gone.json()["error"].startswith("gone:")
    again = upload(client, png(picture(seed=99))).json()["image"]
    assert again == first
