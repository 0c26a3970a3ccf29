"""Hostile files wherever a file is read: bombs, nesting, damage, links in circles, names of all kinds."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.report.models import inspect, planted, random_images
from vitrail.cli import app
from vitrail.data import decode, open_dataset, read_image
from vitrail.errors import ImageError, ReportError, VitrailError
from vitrail.report import Report, compare
from vitrail.training.config import read_value, read_yaml


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or the error of ours that it raises; any other is raised."""
    try:
        return function(*arguments)
    except VitrailError as error:
        return error


def image(path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "PNG")
    return path


# Images


def test_deep_images_are_scaled_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (37, 29), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    monkeypatch.setattr(decode, "_ROWS", 100)  # three rows at a time
    expected = np.rint(values.astype(np.float64) * (255 / 65535)).astype(np.uint8)
    assert np.array_equal(np.asarray(read_image(tmp_path / "deep.png"))[..., 0], expected)


@pytest.mark.parametrize(("mode", "side"), [("RGBA", 10_001), ("I;16", 20_000), ("L", 30_000), ("1", 30_000)])
def test_bombs_are_refused_by_their_header(mode: str, side: int, tmp_path: Path) -> None:
    import struct
    import zlib

    kind = {"1": (1, 0), "L": (8, 0), "I;16": (16, 0), "RGBA": (8, 6)}[mode]

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, *kind, 0, 0, 0))
    file = tmp_path / "bomb.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b""))
    started = time.perf_counter()
    with pytest.raises(ImageError, match=r"megapixels|once decoded|exceeds limit"):
        read_image(file)
    assert time.perf_counter() - started < 2


def test_large_images_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LARGE", 100)
    with decode._decoding:
        assert not decode._decoding.acquire(blocking=False)
    file = image(tmp_path / "a.png")
    held: list[bool] = []
    real = decode._to_8_bits
    monkeypatch.setattr(decode, "_to_8_bits", lambda one: (held.append(decode._decoding.locked()), real(one))[1])
    read_image(file)
    assert held[0] is True
    assert not decode._decoding.locked()


@pytest.mark.parametrize("tail", [b"<script>alert(1)</script>", b"PK\x03\x04" + bytes(100), bytes(10_000)])
def test_polyglots_are_the_image_that_they_begin_with(tail: bytes, tmp_path: Path) -> None:
    file = image(tmp_path / "a.png")
    before = np.asarray(read_image(file))
    file.write_bytes(file.read_bytes() + tail)
    assert np.array_equal(np.asarray(read_image(file)), before)


def test_damaged_images_are_one_error(tmp_path: Path) -> None:
    """Cut off anywhere, or with changed bytes: an image, or an ``ImageError``."""
    draw, refused = random.Random(0), 0
    for ending in ("png", "jpg", "gif", "bmp", "tiff", "webp"):
        Image.open(image(tmp_path / "a.png")).convert("RGB").save(tmp_path / f"b.{ending}")
        good = (tmp_path / f"b.{ending}").read_bytes()
        for _ in range(25):
            data = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.5 else good)
            for _ in range(draw.randrange(4)):
                if data:
                    data[draw.randrange(len(data))] = draw.randrange(256)
            file = tmp_path / f"c.{ending}"
            file.write_bytes(bytes(data))
            try:
                assert read_image(file).mode == "RGB"
            except ImageError:
                refused += 1
    assert refused > 30


# Names and links


def test_links_in_circles_and_odd_names_are_read_or_skipped(tmp_path: Path) -> None:
    names = ["[red].png", "<b>x.png", "esc\x1b[31m.png", "line\nbreak.png", "x" * 244 + ".png", "%s.png", "ü.png"]
    for name in names:
        image(tmp_path / name)
    image(Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe.png")))
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "circle").symlink_to(tmp_path)
    dataset = open_dataset(tmp_path, labels=None)
    assert len(dataset) == len(names) + 2
    assert all(name.encode("utf-8") and name.isprintable() for name in dataset.names)
    found = [outcome(dataset.read, index) for index in range(len(dataset))]
    refused = [str(one) for one in found if isinstance(one, VitrailError)]
    assert len(refused) == 1
    assert "loop.png" in refused[0]
    assert [one.image.size for one in found if not isinstance(one, VitrailError)] == [(24, 24)] * (len(names) + 1)


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "a\0b", "/proc/self/mem", "/dev/zero", "", ".", "~nobody/x"])
def test_paths_that_no_file_has_are_one_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitrailError):
        open_dataset(path).read(0)
    with pytest.raises(VitrailError):
        read_image(path)
    with pytest.raises(VitrailError):
        Report.load(path)
    with pytest.raises(VitrailError):
        read_yaml(path)


@pytest.mark.slow
def test_a_folder_of_many_files_is_listed(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for each in range(1000):
            (folder / f"{each}.png").touch()
    started = time.perf_counter()
    assert len(open_dataset(tmp_path)) == 100_000
    assert time.perf_counter() - started < 120


# Configurations

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "&a [*a]",
        "a: &a\n  <<: *a\n",
        "[" * 100_000,
        "{a: " * 5000,
        "x: " + "y" * 2_000_000,
        "!!python/object/apply:os.mkdir [ran]",
        "a: !!binary x\n",
        "\x00",
        "a: " + "9" * 10_000,
        "? {a: 1}\n: 2",
        "2024-99-99: 1",
        "a: 0o9",
    ],
)
def test_yaml_bombs_are_refused_at_once(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    started = time.perf_counter()
    for found in (outcome(read_yaml, tmp_path / "a.yaml"), outcome(read_value, text)):
        assert not isinstance(found, VitrailError) or len(str(found)) < 1000
    assert time.perf_counter() - started < 5
    assert not (tmp_path / "ran").exists()
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "a.yaml")])
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "ran").exists()


# Reports

JUNK = (None, 5, -1.5, "x", [], {}, [1, "a"], {"a": {}}, True, 10**30)


def damaged(values: Any, draw: random.Random) -> Any:
    """The same values with one of them replaced or left out, anywhere."""
    values = copy.deepcopy(values)
    place: Any = values
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.75:
            place = place[key]
            continue
        if draw.random() < 0.3:
            del place[key]
        else:
            place[key] = draw.choice(JUNK)
        return values


def test_damaged_reports_are_one_error(tmp_path: Path) -> None:
    report, draw, refused = inspect(planted(), random_images()), random.Random(0), 0
    file, good = tmp_path / "r.json", json.loads(report.to_json())
    file.write_text(json.dumps(good))
    whole = Report.load(file)
    for _ in range(int(os.environ.get("VITRAIL_DAMAGED", "40"))):
        file.write_text(json.dumps(damaged(good, draw)))
        loaded = outcome(Report.load, file)
        if isinstance(loaded, VitrailError):
            assert isinstance(loaded, ReportError)
            refused += 1
            continue
        loaded.to_html()
        compare(loaded, whole).to_html()
        compare(whole, loaded).to_html()
    assert refused > 5
