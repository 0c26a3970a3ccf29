"""``export``: files are complete or absent, and invalid arguments are rejected."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.export.models import EXAMPLES
from vitrail.errors import InvalidOption, UnsupportedModel, VitrailError
from vitrail.export import ExportError, export, formats

FOUR = torch.randn(1, 4)


@pytest.fixture
def linear() -> nn.Module:
    return nn.Linear(4, 2).eval()


def need_onnx() -> Any:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="exporting to ONNX needs it")
    return pytest.importorskip("onnxruntime", reason="what was exported runs in it")


def test_existing_file_is_replaced(linear: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    result = export(linear, str(path), example=FOUR)
    assert (result.path, result.tokens, result.input) == (path, None, ("batch", 4))
    assert torch.equal(torch.export.load(path).module()(FOUR), linear(FOUR))
    assert list(tmp_path.iterdir()) == [path]


def test_large_weights_are_in_a_second_file(linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = need_onnx()
    monkeypatch.setattr(formats, "MAX_ONNX_BYTES", 0)
    path = tmp_path / "model.onnx"
    result = export(linear, path, example=FOUR)
    assert result.files == (path, tmp_path / "model.onnx.data")
    assert set(tmp_path.iterdir()) == set(result.files)
    (got,) = runtime.InferenceSession(path).run(None, {"images": FOUR.numpy()})
    assert torch.allclose(torch.from_numpy(got), linear(FOUR), atol=1e-6)


def test_dtype_converts_a_copy(linear: nn.Module, tmp_path: Path) -> None:
    result = export(linear, tmp_path / "model.pt2", example=FOUR, dtype=torch.bfloat16)
    assert (result.dtype, result.tolerance) == (torch.bfloat16, 3e-2)
    assert torch.export.load(result.path).module()(FOUR.bfloat16()).dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32


def test_compiled_model(linear: nn.Module, tmp_path: Path) -> None:
    export(torch.compile(linear, backend="eager"), tmp_path / "model.pt2", example=FOUR)
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(FOUR), linear(FOUR))


def test_full_disk_leaves_nothing(linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match=r"model\.pt2 could not be written \(No space left on device\)"):
        export(linear, tmp_path / "model.pt2", example=FOUR)
    assert not list(tmp_path.iterdir())


def test_unwritable_directory(linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(ExportError, match=r"could not be written \(Permission denied\)"):
        export(linear, tmp_path / "model.pt2", example=FOUR)


@pytest.mark.parametrize("interrupted", ["torch.export.export", "torch.export.save", "torch.export.load"])
def test_interrupt_leaves_nothing(
    interrupted: str, linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    monkeypatch.setattr(interrupted, stop)
    with pytest.raises(KeyboardInterrupt):
        export(linear, path, example=FOUR)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(missing: str, linear: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ExportError, match=rf"needs {missing}; .*vitrail\[export\]"):
        export(linear, tmp_path / "model.onnx", example=FOUR)


INVALID: dict[str, tuple[str, dict[str, Any], type[VitrailError], str]] = {
    "unknown format": ("a.onnx", {"format": "tflite"}, InvalidOption, "'onnx' or 'pt2'; got 'tflite'"),
    "unknown ending": ("a.bin", {}, InvalidOption, r"ends in \.onnx or \.pt2"),
    "another ending": ("a.onnx", {"format": "pt2"}, InvalidOption, r"ends in \.pt2"),
    "no such folder": ("no/a.pt2", {}, ExportError, "could not be written"),
    "a folder": ("folder.pt2", {}, ExportError, "is a directory"),
    "batch of none": ("a.pt2", {"batch": 0}, InvalidOption, "at least 1; got 0"),
    "batch is a word": ("a.pt2", {"batch": "many"}, InvalidOption, "'dynamic'"),
    "opset of another format": ("a.pt2", {"opset": 20}, InvalidOption, "leave it out"),
    "precision unknown": ("a.pt2", {"dtype": torch.int8}, InvalidOption, "dtype is torch.int8"),
    "tolerance of nothing": ("a.pt2", {"tolerance": 0}, InvalidOption, "above 0; got 0"),
    "example is a list": ("a.pt2", {"example": [1.0]}, InvalidOption, "expected a tensor"),
    "example is whole numbers": ("a.pt2", {"example": torch.ones(1, 4).long()}, InvalidOption, "torch.int64"),
    "example is empty": ("a.pt2", {"example": torch.ones(0, 4)}, InvalidOption, r"\(0, 4\)"),
    "example does not fit": ("a.pt2", {"example": torch.ones(1, 5)}, ExportError, r"fails for .*\(2, 5\)"),
    "no example": ("a.pt2", {"example": None}, ExportError, "pass example="),
    "opset too old": ("a.onnx", {"opset": 17}, InvalidOption, "from 18 to 22; got 17"),
    "opset too new": ("a.onnx", {"opset": 99}, InvalidOption, "got 99"),
    "ONNX in float64": ("a.onnx", {"dtype": torch.float64}, ExportError, "float32 or float16"),
    "ONNX in bfloat16": ("a.onnx", {"dtype": torch.bfloat16}, ExportError, "does not run bfloat16"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments(case: str, linear: nn.Module, tmp_path: Path) -> None:
    name, options, kind, message = INVALID[case]
    if name.endswith(".onnx"):
        need_onnx()
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(kind, match=message):
        export(linear, tmp_path / name, **{"example": FOUR, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["folder.pt2"]


def test_unsupported_models(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with pytest.raises(UnsupportedModel, match="got str"):
        export("model", path)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"training mode.*model\.eval\(\)"):
        export(nn.Linear(4, 2), path, example=FOUR)
    with pytest.raises(UnsupportedModel, match="meta device"):
        export(nn.Linear(4, 2, device="meta").eval(), path, example=FOUR)
    with pytest.raises(InvalidOption, match=r"dtype is torch\.float8_e4m3fn; expected one of"):
        export(nn.Linear(4, 2).to(torch.float8_e4m3fn).eval(), path, example=FOUR)

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match=r"cannot trace this Branches \("):
        export(Branches().eval(), path, example=FOUR)

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(2, 4)

    with pytest.raises(ExportError, match="batch=N"):
        export(One().eval(), path, example=torch.ones(2, 4))
    assert not list(tmp_path.iterdir())


def test_protect(tmp_path: Path) -> None:
    example = EXAMPLES["timm class token"]
    model, path = example.make().eval(), tmp_path / "model.pt2"
    mask = torch.zeros(16, dtype=torch.bool)
    mask[3] = True
    with vitrail.merge(model, r=3, protect=mask, order="original"), pytest.raises(ExportError, match="order='paper'"):
        export(model, path)
    masks = torch.stack([mask, mask.flip(0)])
    with vitrail.merge(model, r=1, protect=masks), pytest.raises(ExportError, match="masks for 2 images"):
        export(model, path)
    with vitrail.merge(model, r=2, protect=mask):
        assert export(model, path).tokens == [15, 13]


@pytest.mark.parametrize("merged", [False, True])
def test_heads_of_added_tokens_are_outputs(merged: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = vitrail.create_model("vit_tiny_patch16", image_size=64, depth=2, width=32, heads=2, num_classes=3).eval()
    added = vitrail.add_tokens(model, registers=2, tasks={"breed": 5})
    added.open(0.0)
    if merged:
        vitrail.merge(model, r=3)
    result = export(model, tmp_path / "model.pt2")
    assert result.tokens == ([14, 11] if merged else None)
    images = torch.randn(2, 3, 64, 64)
    found, wanted = torch.export.load(result.path).module()(images), added(images)
    assert list(result.outputs) == list(found) == ["output", "breed"]
    torch.testing.assert_close(found["output"], wanted.logits)
    torch.testing.assert_close(found["breed"], wanted.by_role["breed"])
