"""Exported models equal the models, in ONNX Runtime and as programs, for any batch size."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.export.models import EXAMPLES, random_images
from tests.extras import always
from tests.surgery.models import ALL
from vitrail.adapters import input_spec
from vitrail.export import ExportResult, _export, export
from vitrail.export._trace import PlainModel, trace
from vitrail.export.formats import METADATA


def check_result(result: ExportResult, name: str, path: Path) -> None:
    example = EXAMPLES[name]
    assert result.path == path
    assert result.files == (path,)
    assert result.bytes == path.stat().st_size
    assert result.tokens == example.tokens
    assert result.input == ("batch", 3, 32, 32)
    assert result.outputs == example.outputs
    assert [comparison.batch for comparison in result.comparisons] == [1, 3]
    assert all(comparison.max_rel <= 1e-4 == result.tolerance for comparison in result.comparisons)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def check_outputs(got: dict[str, Any], wanted: Any, name: str) -> None:
    wanted = {"output": wanted} if isinstance(wanted, Tensor) else dict(wanted)
    assert list(got) == list(wanted) == list(EXAMPLES[name].outputs)
    for key, want in wanted.items():
        have = torch.as_tensor(got[key])
        assert have.shape == want.shape
        assert (have - want).abs().max() <= 1e-4 * want.abs().max()


def has_no_local_paths(path: Path) -> bool:
    content = path.read_bytes()
    return not any(text.encode() in content for text in ("site-packages", str(Path(__file__).parents[2]), 'File "'))


@pytest.fixture(scope="module")
def programs() -> Iterator[None]:
    """Trace each model once for both formats: tracing is slow."""
    made: dict[nn.Module, torch.export.ExportedProgram] = {}

    def once(plain: PlainModel, *rest: Any) -> torch.export.ExportedProgram:
        if plain.model not in made:
            made[plain.model] = trace(plain, *rest)
        return made[plain.model]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_export, "trace", once)
        yield


ALIKE = {"timm class token", "timm registers", "timm SigLIP", "transformers DeiT", "transformers ViT"}
"""Examples that add no code path."""


@pytest.fixture(scope="module", params=always(EXAMPLES.keys() - ALIKE, EXAMPLES))
def merged(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, EXAMPLES[request.param].merged()


@pytest.mark.usefixtures("programs")
def test_pt2(merged: tuple[str, nn.Module], tmp_path: Path) -> None:
    (name, model), path = merged, tmp_path / "model.pt2"
    result = export(model, path)
    check_result(result, name, path)
    assert (result.format, result.opset) == ("pt2", None)

    extra = {METADATA: ""}
    program = torch.export.load(path, extra_files=extra).module()
    for count in (1, 2, 5):
        images = random_images(count)
        with torch.no_grad():
            got = program(images)
            names = list(result.outputs)
            check_outputs({names[0]: got} if isinstance(got, Tensor) else got, model(images), name)
    notes = json.loads(extra[METADATA])
    assert notes["merging"] == vitrail.Merging.of(model).config
    assert notes["shape"] == ["batch", 3, 32, 32]
    assert has_no_local_paths(path)


@pytest.mark.usefixtures("programs")
def test_onnx(merged: tuple[str, nn.Module], tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="exporting to ONNX needs it")
    runtime = pytest.importorskip("onnxruntime", reason="what was exported runs in it")
    (name, model), path = merged, tmp_path / "model.onnx"
    result = export(model, path)
    check_result(result, name, path)
    assert (result.format, result.opset) == ("onnx", 20)

    session = runtime.InferenceSession(path)
    assert [entry.name for entry in session.get_inputs()] == ["images"]
    assert session.get_inputs()[0].shape == list(result.input)
    shapes = {entry.name: tuple(entry.shape) for entry in session.get_outputs()}
    assert shapes == result.outputs
    for count in (1, 2, 5):
        images = random_images(count)
        got = dict(zip(shapes, session.run(list(shapes), {"images": images.numpy()}), strict=True))
        with torch.no_grad():
            check_outputs(got, model(images), name)

    notes = json.loads(session.get_modelmeta().custom_metadata_map["vitrail"])
    assert notes["merging"] == vitrail.Merging.of(model).config
    assert notes["tokens"] == result.tokens
    spec = input_spec(model)
    assert (notes["mean"], notes["std"], notes["dtype"]) == (list(spec.mean), list(spec.std), "float32")
    assert notes["classes"] == {}
    assert has_no_local_paths(path)
    assert operators(path).isdisjoint({"If", "Loop", "Scan"})


def operators(path: Path) -> set[str]:
    """Return the operators of a file, those inside of functions and branches included."""
    onnx = import_module("onnx")
    model = onnx.load(path)
    graphs = [model.graph, *model.functions]
    found: set[str] = set()
    while graphs:
        for node in graphs.pop().node:
            found.add(node.op_type)
            graphs += [one.g for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]
    return found


def test_class_names_of_several_columns_are_those_of_their_outputs(tmp_path: Path) -> None:
    tokens = [vitrail.TokenSpec("cls", "class"), vitrail.TokenSpec("color", "task", classes=2)]
    config = vitrail.ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, num_classes=3, tokens=tokens)
    model = vitrail.ViT(config).eval()
    names = {"breed": ["a", "b", "c"], "color": ["red", "blue"]}
    model._vitrail_labels = {"classes": names}
    extra = {METADATA: ""}
    torch.export.load(export(model, tmp_path / "model.pt2").path, extra_files=extra)
    notes = json.loads(extra[METADATA])
    breeds, colors = names.values()
    assert notes["classes"] == {"logits": breeds, "cls": breeds, "color": colors}
    assert "merging" not in notes


def test_model_is_unchanged(tmp_path: Path) -> None:
    model = EXAMPLES["transformers ViT"].merged()
    merging, images = vitrail.Merging.of(model), random_images(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(images).logits
        export(model, tmp_path / "half.pt2", dtype=torch.float16, batch=2)
        assert (model(images).logits == wanted).all()
    assert merging.is_active
    assert all((value == before[key]).all() for key, value in model.state_dict().items())
    assert not any(part._forward_pre_hooks for part in model.modules())
    merging.remove()


def test_unmerged_model_with_fixed_batch(tmp_path: Path) -> None:
    model = EXAMPLES["transformers ViT"].merged()
    vitrail.Merging.of(model).remove()
    result = export(model, tmp_path / "model.pt2", batch=2, example=random_images(1))
    assert (result.tokens, result.batch, result.input) == (None, 2, (2, 3, 32, 32))
    assert [comparison.batch for comparison in result.comparisons] == [2]
    program = torch.export.load(result.path).module()
    with torch.no_grad():
        assert torch.allclose(program(random_images(2)), model(random_images(2)).logits, atol=1e-5)
        with pytest.raises(Exception, match="2"):
            program(random_images(3))


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "dtype"), [(18, "float32"), (22, "float32"), (20, "float16")])
def test_onnx_opsets_and_dtypes(opset: int, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting to ONNX needs it")
    pytest.importorskip("onnxruntime", reason="what was exported runs in it")
    model = vitrail.load_model("timm:vit_tiny_patch16_224", pretrained=False)
    vitrail.merge(model, r=8)
    result = export(model, tmp_path / "model.onnx", opset=opset, dtype=getattr(torch, dtype))
    assert result.opset == opset
    assert result.tokens == list(range(189, 93, -8))
    assert result.dtype == getattr(torch, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in ALL.items() if not case.call])
def test_onnx_of_all_adapters(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="exporting to ONNX needs it")
    pytest.importorskip("onnxruntime", reason="what was exported runs in it")
    model, images = ALL[name].model(torch.float32), ALL[name].images(torch.float32)
    vitrail.merge(model, r=3)
    result = export(model, tmp_path / "model.onnx", example=images)
    assert max(comparison.max_rel for comparison in result.comparisons) < 1e-5
