"""Recordings equal what every supported model computes, with its own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image
from torch import Tensor, nn

import vitrail
from tests.fakes import ToyViT
from tests.merging.test_custom_methods import Threshold
from tests.surgery.models import ALL, distance, leaving, run
from vitrail.adapters import find
from vitrail.data import open_dataset, read_image, to_tensor
from vitrail.errors import (
    BrokenPass,
    ImageError,
    InvalidOption,
    UnsupportedInput,
    UnsupportedModel,
    VitrailWarning,
)
from vitrail.models import ViT, ViTConfig
from vitrail.surgery.recording import stream


class Attended:
    """Stores the arguments of PyTorch's attention function, as an independent reference for q, k and v."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.original = F.scaled_dot_product_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **options: Any) -> Tensor:
        scale = options.get("scale") or q.shape[-1] ** -0.5
        if k.shape[1] != q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * scale
        if attn_mask is not None:
            scores = scores + attn_mask
        self.calls.append((q, k, v, scores.softmax(-1)))
        return self.original(q, k, v, attn_mask, *args, **options)


def attended_in(model: nn.Module, images: Tensor, **call: Any) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    attended = Attended()
    # with gradients: without them, nn.MultiheadAttention runs a kernel of its own
    with mock.patch.object(F, "scaled_dot_product_attention", attended):
        model(images, **call)
    return [tuple(value.detach() for value in values) for values in attended.calls]  # type: ignore[misc]


SEVERAL = ("timm-several-things", "timm-differential")
"""Models whose blocks call attention several times."""


@pytest.mark.parametrize("name", [name for name in ALL if name not in SEVERAL])
def test_recording_equals_what_the_model_computes(name: str) -> None:
    model, images = ALL[name].model(), ALL[name].images()
    layout = find(model).adapter.layout(find(model).trunk, ALL[name].size)
    everyone = range(layout.num_tokens)
    call = ALL[name].call
    found = vitrail.record(model, images, ("tokens", "norms", "v", "attention"), queries=everyone, call=call)
    assert found.layout == layout
    assert len(found) == len(images)
    assert found.queries == tuple(everyone)
    for layer, out in enumerate(leaving(model, images, **call)):
        assert torch.equal(found.tokens[layer], out)
        assert distance(found.norms[layer], out.float().norm(dim=-1)) == 0
    calls = attended_in(model, images, **call)[: len(found.layers)]  # a pooling head may attend once more
    for layer, (_, _, v, attention) in enumerate(calls):
        values = found.v[layer].repeat_interleave(v.shape[1] // found.v[layer].shape[1], 1)
        assert distance(values, v) < 1e-12
        assert distance(found.attention[layer], attention) < 1e-9


@pytest.mark.parametrize(
    "name", ["timm-registers", "timm-map", "hf-deit-head", "hf-registers-head", "eva-dinov3", "clip-siglip"]
)
def test_some_rows_of_some_layers(name: str) -> None:
    model, images = ALL[name].model(), ALL[name].images()
    layout = find(model).adapter.layout(find(model).trunk, ALL[name].size)
    everyone = vitrail.record(model, images, "attention", queries=range(layout.num_tokens))
    queries = [0, -1]
    few = vitrail.record(model, images, "attention", layers=[-1], queries=queries)
    last = everyone.layers[-1]
    assert list(few.attention) == [last]
    assert distance(few.attention[last], everyone.attention[last][:, :, queries]) < 1e-9


def test_attention_equals_eager_transformers() -> None:
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    model = hf.ViTModel(config).eval()
    images = torch.randn(2, 3, 32, 32)
    found = vitrail.record(model, images, ("attention", "tokens", "mlp"), queries="class")
    model.set_attn_implementation("eager")
    eager = model(images, output_attentions=True, output_hidden_states=True)
    for layer, rows in found.attention.items():
        assert torch.allclose(rows, eager.attentions[layer][:, :, :1], atol=1e-6)
        assert torch.allclose(found.tokens[layer], eager.hidden_states[layer + 1], atol=1e-5)


def test_attention_and_neurons_equal_unfused_timm() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    found = vitrail.record(model, images, ("attention", "mlp", "embedding"), queries=["class", 5])
    maps, neurons = [], []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
        block.mlp.act.register_forward_hook(lambda _, __, out: neurons.append(out))
    model(images)
    for layer in found.layers:
        assert torch.allclose(found.attention[layer], maps[layer][:, :, [0, 5]], atol=1e-6)
        assert torch.allclose(found.mlp[layer], neurons[layer], atol=1e-5)
    assert found.embedding is not None
    assert torch.allclose(found.embedding, model.patch_embed(images), atol=1e-6)


@pytest.mark.parametrize("name", ["timm-registers", "eva-dinov3", "beit-both", "hf-deit-head"])
@pytest.mark.parametrize("proportional", [True, False])
def test_merged_model_shows_every_position_its_token(name: str, proportional: bool) -> None:
    model, images = ALL[name].model(), ALL[name].images()
    plain = vitrail.record(model, images, ("tokens", "attention", "k"))
    with vitrail.merge(model, r=2, proportional=proportional) as merging:
        found = vitrail.record(model, images, ("tokens", "attention", "k", "norms"))
        calls = attended_in(model, images)
        with merging.track() as trace:
            out = run(model, images, ALL[name])
        lengths = merging.tokens_per_layer(ALL[name].size)
    assert out.shape
    for layer, rows in found.attention.items():
        assert rows.shape == plain.attention[layer].shape
        assert torch.allclose(rows.sum(-1), torch.ones(()).to(rows))
        before = calls[layer][3]
        assert before.shape[-1] == ([found.layout.num_tokens, *lengths])[layer]
        # as much as the merged tokens get, whatever their members share
        special = found.layout.num_special
        assert distance(rows[..., :special], before[:, :, :special, :special]) < 1e-9
        assert found.tokens[layer].shape == plain.tokens[layer].shape
    last = found.tokens[found.layers[-1]]
    groups = trace.groups
    for image in range(len(images)):
        tokens = last[image, found.layout.num_special :]
        for group in groups[image].unique():
            members = tokens[groups[image] == group]
            assert torch.equal(members, members[:1].expand_as(members))


@pytest.mark.parametrize("name", ["timm-registers", "eva-dinov3", "beit-both", "hf-deit-head"])
def test_row_of_a_patch_is_that_of_its_merged_token(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    with vitrail.merge(model, r=2):
        found = vitrail.record(model, images, "attention", queries="patch")
        calls = attended_in(model, images)
    last, special = found.layers[-1], found.layout.num_special
    rows, before = found.attention[last], calls[last][3]
    assert rows.shape[2] == found.layout.num_patches > before.shape[2] - special
    for image in range(len(images)):
        every = before[image, :, special:, :special]  # what merged tokens give to special ones, which never merge
        for place in range(found.layout.num_patches):
            apart = (every - rows[image, :, place, :special].unsqueeze(1)).abs().amax((0, 2))
            assert float(apart.min()) < 1e-9


def test_nothing_of_the_model_changes(toy: ToyViT) -> None:
    toy.train()
    toy.blocks[1].eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    modes = [part.training for part in toy.modules()]
    vitrail.record(toy, images, ("tokens", "attention", "mlp", "q", "k", "v", "embedding", "norms"))
    assert modes == [part.training for part in toy.modules()]
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in toy.modules())


def test_hooks_are_removed_after_an_error(toy: ToyViT) -> None:
    with pytest.raises(UnsupportedInput):
        vitrail.record(toy, torch.randn(1, 5, 16, 16, dtype=torch.float64), "attention")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in toy.modules())


def test_large_sets_come_in_batches(toy: ToyViT) -> None:
    images = torch.randn(7, 3, 16, 16, dtype=torch.float64)
    whole = vitrail.record(toy, images, ("tokens", "embedding"))
    parts = vitrail.record(toy, images, ("tokens", "embedding"), batch_size=3)
    loader = vitrail.record(toy, [(images[:2], "labels"), (images[2:], "labels")], ("tokens", "embedding"))
    for other in (parts, loader):
        assert all(torch.allclose(whole.tokens[layer], other.tokens[layer]) for layer in whole.layers)
        assert torch.allclose(whole.embedding, other.embedding)  # type: ignore[arg-type]
    assert [len(one) for one in stream(toy, images, "norms", batch_size=3)] == [3, 3, 1]


def test_files_are_preprocessed(toy: ToyViT, tmp_path: Path) -> None:
    for number in range(3):
        Image.effect_noise((20, 24), 40 + number).convert("RGB").save(tmp_path / f"{number}.png")
    expects = find(toy).adapter.input_spec(toy)
    prepared = to_tensor([read_image(path) for path in sorted(tmp_path.iterdir())], expects)
    expected = vitrail.record(toy, prepared, "norms").norms[2]
    for given in (tmp_path, str(tmp_path), sorted(tmp_path.iterdir()), open_dataset(tmp_path)):
        assert torch.allclose(vitrail.record(toy, given, "norms", batch_size=2).norms[2], expected)
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.warns(VitrailWarning, match=r"1 image that could not be read.*broken\.png"):
        assert len(vitrail.record(toy, tmp_path, "norms")) == 3


def test_dtype(toy: ToyViT) -> None:
    found = vitrail.record(toy, torch.randn(2, 3, 16, 16), ("tokens", "q"), dtype=torch.float16, device="cpu")
    assert found.tokens[0].dtype == found.q[2].dtype == torch.float16


def test_only_requested_activations_are_kept(toy: ToyViT) -> None:
    found = vitrail.record(toy, torch.randn(2, 3, 16, 16), "k", layers=1)
    assert list(found.k) == [1]
    assert found.embedding is None
    assert not any((found.tokens, found.norms, found.q, found.v, found.attention, found.mlp))


def test_compiled_blocks_are_recorded_without_recompilation() -> None:
    model = ViT(ViTConfig(image_size=16, patch_size=4, width=24, depth=3, heads=2, num_classes=3)).eval()
    images = torch.randn(2, 3, 16, 16)
    plain = vitrail.record(model, images, ("tokens", "attention"))
    compiled: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    for block in model.blocks:
        block.compile(backend=count)
    with torch.no_grad():
        model(images)
        assert compiled
        before = len(compiled)
        found = vitrail.record(model, images, ("tokens", "attention"))
        model(images)
    assert len(compiled) == before
    assert all(torch.equal(found.tokens[layer], plain.tokens[layer]) for layer in range(3))
    assert all(torch.equal(found.attention[layer], plain.attention[layer]) for layer in range(3))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "what": ({"what": "magic"}, InvalidOption, "what is one or more of"),
    "nothing": ({"what": ()}, InvalidOption, "what is one or more of"),
    "layer": ({"layers": 3}, InvalidOption, "layers are integers from -3 to 2"),
    "no layers": ({"layers": []}, InvalidOption, "layers are integers"),
    "role": ({"what": "attention", "queries": "king"}, InvalidOption, "tokens are roles"),
    "position": ({"what": "attention", "queries": 17}, InvalidOption, "positions below 17"),
    "empty role": ({"what": "attention", "queries": "register"}, InvalidOption, "no such token"),
    "no what": ({"what": None}, InvalidOption, "what=None"),
    "half a layer": ({"layers": 1.5}, InvalidOption, "layers=1.5"),
    "yes as a layer": ({"layers": True}, InvalidOption, "layers=True"),
    "half a position": ({"what": "attention", "queries": 3.5}, InvalidOption, "tokens are roles"),
    "batch size in words": ({"batch_size": "2"}, InvalidOption, "batch_size="),
    "dtype in words": ({"dtype": "half"}, InvalidOption, "dtype"),
    "whole numbers": ({"dtype": torch.int8}, InvalidOption, "floating point"),
    "batch size": ({"batch_size": 0}, InvalidOption, "batch_size="),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_options_are_refused(toy: ToyViT, wrong: str) -> None:
    options, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        vitrail.record(toy, torch.randn(1, 3, 16, 16), **options)


def test_bad_images_are_refused(toy: ToyViT) -> None:
    with pytest.raises(UnsupportedInput, match="got a tensor of"):
        vitrail.record(toy, torch.randn(3, 16, 16))
    with pytest.raises(UnsupportedInput, match="got a tensor of"):
        vitrail.record(toy, torch.randn(1, 3, 2, 16, 16))
    with pytest.raises(UnsupportedInput, match="no images"):
        vitrail.record(toy, [])
    with pytest.raises(ImageError, match=r"cat\.jpg: there is no such file"):
        vitrail.record(toy, ["cat.jpg"])
    with pytest.raises(ImageError, match="photos: there is no such file"):
        vitrail.record(toy, "photos")
    with pytest.raises(UnsupportedInput, match="got NoneType"):
        vitrail.record(toy, None)
    with pytest.raises(UnsupportedInput, match="must be floating point"):
        vitrail.record(toy, torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UnsupportedInput, match="several sizes"):
        vitrail.record(toy, [torch.randn(1, 3, 16, 16), torch.randn(1, 3, 32, 16)])
    with pytest.raises(UnsupportedModel):
        vitrail.record(nn.Linear(3, 3), torch.randn(1, 3, 16, 16))


def test_a_single_block_is_refused(toy: ToyViT) -> None:
    from vitrail.surgery.hooks import watch

    with watch(toy, ("tokens",)).hooked(), pytest.raises(BrokenPass, match="call the model"):
        toy.blocks[0](torch.randn(1, 17, 16, dtype=torch.float64))


def test_videos() -> None:
    model = ViT(
        ViTConfig(image_size=(4, 16, 16), patch_size=(2, 4, 4), width=24, depth=3, heads=2, num_classes=3)
    ).eval()
    videos = torch.randn(3, 3, 6, 16, 8)
    found = vitrail.record(model, videos, ("embedding", "tokens", "attention"), queries=["class", -1], batch_size=2)
    assert found.layout.grid == (3, 4, 2)
    assert found.queries == (0, 24)
    assert torch.allclose(found.embedding, model.patch_embed(videos), atol=1e-6)  # type: ignore[arg-type]
    for layer, out in enumerate(leaving(model, videos)):
        assert torch.allclose(found.tokens[layer], out, atol=1e-5)
    batches = vitrail.record(model, [(videos[:1], "labels"), (videos[1:], "labels")])
    assert torch.allclose(batches.tokens[1], found.tokens[1], atol=1e-5)
    with vitrail.merge(model, r=2):
        assert vitrail.record(model, videos).tokens[1].shape == (3, 25, 24)
    for wrong in (videos[:, :, 0], [videos[:, :, 0]]):
        with pytest.raises(UnsupportedInput, match=r"videos \(B, C, T, H, W\)"):
            vitrail.record(model, wrong)


@pytest.mark.parametrize("method", ["prune", "random", Threshold(0.0)], ids=["prune", "random", "threshold"])
def test_attention_rows_sum_to_one_whatever_merges(method: Any) -> None:
    case = ALL["timm-registers"]
    model, images = case.model(), case.images()
    with vitrail.merge(model, r=3, method=method):
        found = vitrail.record(model, images, "attention")
    for rows in found.attention.values():
        assert torch.allclose(rows.sum(-1), torch.ones(()).to(rows))


def test_attention_before_which_tokens_merge_is_refused() -> None:
    case = ALL["timm-registers"]
    model, images = case.model(), case.images()
    method = vitrail.ToMe()
    method.place = "before"
    with vitrail.merge(model, r=3, method=method):
        assert vitrail.record(model, images, "tokens").tokens[0].shape[1] == vitrail.count(model).tokens
        with pytest.raises(InvalidOption, match="before attention"):
            vitrail.record(model, images, "attention")


def test_norms_at_the_entry_are_those_of_patches_with_their_positions() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=32, num_heads=2).eval()
    images = torch.randn(3, 3, 64, 64)
    expected = (model.patch_embed(images) + model.pos_embed[:, 1:]).norm(dim=-1)
    found = vitrail.record(model, images, ["entry", "tokens"], batch_size=2)
    torch.testing.assert_close(found.entry, expected)
    with vitrail.merge(model, r=4):
        torch.testing.assert_close(vitrail.record(model, images, "entry").entry, expected)
    assert vitrail.record(model, images, "norms").entry is None


def test_attention_of_a_class_attention_stage() -> None:
    model = vitrail.create_model("cait_xxs24", image_size=32, depth=2, width=48, heads=1, layer_scale=0.1).eval()
    images = torch.randn(3, 3, 32, 32)
    seen: list[Tensor] = []
    hooks = [
        block.attn.register_forward_hook(lambda part, args, _: seen.append(part.weights(*args)))
        for block in model.blocks_token_only
    ]
    found = vitrail.record(model, images, ["attention"])
    for hook in hooks:
        hook.remove()
    assert list(found.class_attention) == [0, 1]
    for layer, expected in enumerate(seen):
        torch.testing.assert_close(found.class_attention[layer], expected)
        torch.testing.assert_close(expected.sum(-1), torch.ones(3, 1, 1))
    assert found.class_attention[0].shape == (3, 1, 1, 1 + 4)
    assert found.attention[0].shape == (3, 1, 0, 4)  # no special token is in the blocks
    parts = vitrail.record(model, images, ["attention"], batch_size=2).class_attention
    torch.testing.assert_close(parts[1], found.class_attention[1])
    everything = vitrail.record(model, images, ["attention"], queries="all")
    assert everything.attention[1].shape == (3, 1, 4, 4)


def test_all_queries() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2).eval()
    images = torch.randn(2, 3, 32, 32)
    found = vitrail.record(model, images, "attention", queries="all")
    rows = vitrail.record(model, images, "attention", queries=range(5))
    assert found.queries == (0, 1, 2, 3, 4)
    assert torch.equal(found.attention[1], rows.attention[1])
