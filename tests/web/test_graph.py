"""The graph of a static page merges and answers as the library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.web.models import small_vit
from vitrail.errors import ExportError
from vitrail.web.graph import IMAGE, MERGES, PER_LAYER, build_graph

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def model() -> vitrail.ViT:
    return small_vit().half().float()  # the file keeps half precision


@pytest.fixture(scope="module")
def graph(model: vitrail.ViT) -> Any:
    return build_graph(model)


@pytest.fixture(scope="module")
def session(graph: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("merges", [(0, 0, 0), (1, 1, 1), (9, 9, 9), (32, 16, 8), (0, 5, 0), (0, 0, 7), (6, 0, 11)])
def test_merges_like_the_library(
    model: vitrail.ViT, session: onnxruntime.InferenceSession, merges: tuple[int, ...]
) -> None:
    """Logits of all heads, groups, sizes, and the queries, keys and tokens of each layer."""
    image = torch.randn(1, 3, 32, 32)
    names = [output.name for output in session.get_outputs()]
    given = {IMAGE: image.numpy(), MERGES: np.array(merges)}
    found = dict(zip(names, session.run(names, given), strict=True))
    with torch.no_grad(), vitrail.merge(model, r=list(merges)) as merging, merging.track() as trace:
        output = model.forward_output(image)
        recorded = vitrail.record(model, image, ("tokens", "q", "k"))
    expected = {"logits": output.logits, **{f"logits.{name}": one for name, one in output.by_role.items()}}
    assert expected.keys() == {name for name in names if name.startswith("logits")}
    for name, one in expected.items():
        np.testing.assert_allclose(found[name], one.numpy(), atol=1e-4)
    groups = trace.latest.assignment.target.numpy()
    np.testing.assert_array_equal(found["groups"], groups)
    np.testing.assert_array_equal(found["size.2"], trace.sizes.numpy())
    composed = np.arange(68)
    for layer, kept in enumerate(68 - np.cumsum(merges)):
        entered = composed
        composed = found[f"target.{layer}"][0][composed]
        assert found[f"tokens.{layer}"].shape[1] == kept
        np.testing.assert_allclose(found[f"tokens.{layer}"][0][composed], recorded.tokens[layer][0], atol=1e-4)
        np.testing.assert_allclose(found[f"q.{layer}"][0][:, entered], recorded.q[layer][0], atol=1e-4)
        np.testing.assert_allclose(found[f"k.{layer}"][0][:, entered], recorded.k[layer][0], atol=1e-4)


def test_values_that_merge_are_those_behind_attention(
    model: vitrail.ViT, session: onnxruntime.InferenceSession
) -> None:
    """The mean of the values by groups, through the MLP, is what leaves the layer."""
    names = ["attended.1", "target.1", "size.0", "tokens.1"]
    given = {IMAGE: torch.randn(1, 3, 32, 32).numpy(), MERGES: np.array([8, 8, 0])}
    attended, target, size, tokens = (torch.from_numpy(one)[0] for one in session.run(names, given))
    sums, total = torch.zeros(len(tokens), attended.shape[1]), torch.zeros(len(tokens))
    for index, place in enumerate(target.tolist()):
        sums[place] += size[index] * attended[index]
        total[place] += size[index]
    block = model.blocks[1]
    merged = sums / total[:, None]
    with torch.no_grad():
        torch.testing.assert_close(merged + block.mlp(block.norm2(merged)), tokens, atol=1e-4, rtol=1e-4)


def test_too_many_merges_are_cut_as_tome_cuts_them(session: onnxruntime.InferenceSession) -> None:
    (groups,) = session.run(["groups"], {IMAGE: np.zeros((1, 3, 32, 32), np.float32), MERGES: np.array([99, 0, 0])})
    assert len(np.unique(groups)) == 4 + 32


def test_weights_are_stored_once_in_half_precision(model: vitrail.ViT, graph: Any) -> None:
    assert [output.name for output in graph.graph.output if output.name.endswith(".0")] == [
        f"{name}.0" for name in PER_LAYER
    ]
    weights = sum(value.numel() for value in model.parameters())
    assert 2 * weights < graph.ByteSize() < 2 * weights + 60_000


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"position": "rotary"}, "rotary"),
        ({"class_attention": 1}, "tokens enter"),
        ({"talking_heads": True}, "not the usual one"),
    ],
)
def test_other_models_are_refused(options: dict[str, object], why: str) -> None:
    if "class_attention" in options:
        options = {**options, "tokens": [vitrail.TokenSpec("cls", vitrail.Role.CLASS, enters=-1, position=False)]}
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "num_classes": 2}
    model = vitrail.create_model("vit_tiny_patch16", **sizes, **options).eval()
    with pytest.raises(ExportError, match=why):
        build_graph(model)
