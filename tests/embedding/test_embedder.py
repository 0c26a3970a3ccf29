"""Embedder: the tokens that libraries return themselves, of every library, merged or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.embedding.models import small_vit
from tests.runtime.cuda_graphs.graphs import Pool, pools
from tests.surgery.models import ALL
from vitrail.adapters import find
from vitrail.embedding import Embedder, Predictor
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.tokens import Role

__all__ = ["pools"]


def timm_features(model: Any, x: Tensor) -> Tensor:
    return model.forward_features(x)


def last_hidden_state(model: Any, x: Tensor) -> Tensor:
    return find(model).trunk(x).last_hidden_state


def torchvision_features(model: Any, x: Tensor) -> Tensor:
    tokens = model._process_input(x)
    return model.encoder(torch.cat([model.class_token.expand(len(x), -1, -1), tokens], 1))


ORACLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "timm-registers": timm_features,
    "eva-eva02": timm_features,
    "beit-own": timm_features,
    "hf-deit-head": last_hidden_state,
    "hf-registers-head": last_hidden_state,
    "torchvision-vit": torchvision_features,
}


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
@pytest.mark.parametrize("name", ORACLES)
def test_tokens_are_those_of_the_library(name: str, merged: bool) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    if merged:
        vitrail.merge(model, r=2)
    found = find(model)
    layout = found.adapter.layout_in(found.trunk, -1)
    with torch.no_grad():
        tokens = ORACLES[name](model, images)
    wanted = [one for one in ("class", "mean", "patches") if one != "class" or layout.indices(Role.CLASS)]
    columns = Embedder(model, wanted, dtype="float32")(images)
    np.testing.assert_allclose(columns["patches"], tokens[:, layout.patches], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(columns["mean"], tokens[:, layout.patches].mean(1), rtol=1e-4, atol=1e-5)
    if "class" in wanted:
        np.testing.assert_allclose(columns["class"], tokens[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged"])
def test_patches_of_hierarchical_models(merged: bool) -> None:
    import timm
    import torchvision

    small: dict[str, Any] = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **small)
    sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 24, "depths": [1, 2], "num_heads": [1, 2]}
    other = torchvision.models.SwinTransformer(window_size=[7, 7], stochastic_depth_prob=0.0, **sizes)
    for model in (swin.eval(), other.eval()):
        if merged:
            vitrail.merge(model, r=2)
        images = torch.randn(1, 3, 224, 224)
        with torch.no_grad():
            tokens = model.forward_features(images) if model is swin else model.norm(model.features(images))
            tokens = tokens.flatten(1, 2)
        columns = Embedder(model, "patches,mean", dtype="float32")(images)
        np.testing.assert_allclose(columns["patches"], tokens, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(columns["mean"], tokens.mean(1), rtol=1e-3, atol=1e-4)


def test_class_token_of_clip_is_its_pooled_output() -> None:
    case = ALL["clip-projection"]
    model, images = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        expected = find(model).trunk(images).pooler_output
    np.testing.assert_allclose(
        Embedder(model, "class", dtype="float32")(images)["class"], expected, rtol=1e-4, atol=1e-5
    )


def test_class_token_of_class_attention() -> None:
    model = small_vit(class_depth=1) if "class_depth" in vitrail.ViTConfig.__dataclass_fields__ else small_vit()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        output = model.forward_output(images)
    layout = model.layout()
    columns = Embedder(model, "class,mean", dtype="float32")(images)
    np.testing.assert_allclose(
        columns["class"], output.features[:, layout.indices(Role.CLASS)[0]], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(columns["mean"], output.features[:, layout.patches].mean(1), rtol=1e-4, atol=1e-5)


def test_blocks_inside_are_what_record_returns() -> None:
    case = ALL["timm-registers"]
    model, images = case.model(torch.float32), case.images(torch.float32)
    recording = vitrail.record(model, images, "tokens")
    columns = Embedder(model, ["patches@0", "class@-2", "mean@1", "output"], dtype="float32")(images)
    depth = len(find(model).blocks)
    assert list(columns) == ["patches_0", f"class_{depth - 2}", "mean_1", "output"]
    patches = recording.layout.patches
    np.testing.assert_array_equal(columns["patches_0"], recording.tokens[0][:, patches])
    np.testing.assert_array_equal(columns[f"class_{depth - 2}"], recording.tokens[depth - 2][:, 0])
    np.testing.assert_allclose(columns["mean_1"], recording.tokens[1][:, patches].mean(1), rtol=1e-5)
    np.testing.assert_array_equal(columns["output"], model(images).detach())


def test_default_column_dtypes_and_bytes() -> None:
    model = small_vit()
    whole, half = Embedder(model, dtype="float32"), Embedder(model)
    images = torch.randint(0, 255, (4, 3, 16, 16), dtype=torch.uint8)
    assert [column.name for column in whole.columns] == ["class"]
    assert half(images)["class"].dtype == np.float16
    np.testing.assert_array_equal(half(images)["class"], whole(images)["class"].astype(np.float16))
    normalized = vitrail.adapters.input_spec(model).normalize(images)
    np.testing.assert_array_equal(whole(images)["class"], whole(normalized)["class"])
    assert Embedder(small_vit(), precision="bfloat16").settings["precision"] == "bfloat16"


def test_model_without_a_class_token() -> None:
    case = ALL["clip-siglip"]
    model = case.model(torch.float32)
    assert [column.name for column in Embedder(model).columns] == ["mean"]
    with pytest.raises(InvalidOption, match="no class token"):
        Embedder(model, "class")


@pytest.mark.parametrize("tokens", ["cls", "mean@7", "class@x", "output@1", "mean,mean"])
def test_tokens_that_are_none(tokens: str) -> None:
    with pytest.raises(InvalidOption, match="tokens="):
        Embedder(small_vit(), tokens)


def test_values_that_float16_does_not_hold() -> None:
    model = small_vit()
    with torch.no_grad():
        model.norm.weight.fill_(1e6)
    images = torch.randn(2, 3, 16, 16)
    with pytest.raises(UnsupportedInput, match="float32"):
        Embedder(model)(images)
    assert np.isfinite(Embedder(model, dtype="float32")(images)["class"]).all()


def test_other_shapes_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match="shape"):
        Embedder(ALL["torchvision-vit"].model(torch.float32))(torch.randn(1, 3, 17, 17))


def test_predictions_are_the_largest_probabilities() -> None:
    model = small_vit()
    images = torch.randn(6, 3, 16, 16)
    shares = model(images).detach().softmax(1)
    found = Predictor(model, 3, classes=["a", "b", "c", "d", "e"])(images)
    for row, share in enumerate(shares):
        best = sorted(range(5), key=lambda place: -float(share[place]))[:3]
        assert [found[f"class_{place}"][row] for place in (1, 2, 3)] == ["abcde"[place] for place in best]
        expected = [float(share[place]) for place in best]
        assert [found[f"probability_{place}"][row] for place in (1, 2, 3)] == pytest.approx(expected)
    assert Predictor(model, 9).columns[-1].name == "probability_5"
    assert set(Predictor(model, 1)(images)["class_1"]) <= set("01234")
    with pytest.raises(InvalidOption, match="3 class names"):
        Predictor(model, classes=["a", "b", "c"])
    with pytest.raises(UnsupportedModel, match="no classes"):
        Predictor(ALL["clip-siglip"].model(torch.float32))


@pytest.mark.usefixtures("pools")
def test_features_run_from_graphs() -> None:
    for change in (lambda model: None, lambda model: vitrail.merge(model, r=2)):
        model = small_vit()
        change(model)
        options: dict[str, Any] = {"tokens": "class,mean,patches@0", "dtype": "float32"}
        plain, recorded = Embedder(model, **options), Embedder(model, **options, batch=4)
        before = Pool.replays()
        for count in (4, 3, 9):
            images = torch.randn(count, 3, 16, 16)
            expected, found = plain(images), recorded(images)
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert Pool.replays() - before == 1 + 1 + 3


@pytest.mark.usefixtures("pools")
def test_features_whose_length_depends_on_the_image_run_plainly() -> None:
    model = small_vit()
    vitrail.merge(model, method={"name": "threshold"})
    images = torch.randn(3, 3, 16, 16)
    found = Embedder(model, dtype="float32", batch=4)(images)
    np.testing.assert_allclose(found["class"], Embedder(model, dtype="float32")(images)["class"])


def test_names_of_published_classes() -> None:
    import timm
    import transformers

    vit = timm.create_model("vit_tiny_patch16_224", depth=1)
    images = torch.randn(1, 3, 224, 224)
    best = int(vit.eval()(images).argmax())
    assert Predictor(vit, 1)(images)["class_1"][0] == timm.data.ImageNetInfo().index_to_description(best)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=16, patch_size=4, id2label={0: "cat", 1: "dog"}, **sizes)
    model: nn.Module = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(3, 3, 16, 16)
    assert list(Predictor(model, 1)(images)["class_1"]) == [
        ("cat", "dog")[place] for place in model(images).logits.argmax(1).tolist()
    ]
