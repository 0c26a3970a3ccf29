"""Promises for models whose attention runs inside windows."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import SamConfig, SamModel, SwinBackbone, SwinConfig

import vitrail
from tests.parity.models.cases import require
from tests.parity.models.windowed import CASES, sam, timm_swin
from tests.surgery.models import distance, main_output, trunk_blocks
from vitrail.adapters import find
from vitrail.adapters.windows import Windows
from vitrail.errors import BrokenPass, InvalidOption, SaturatedWarning, UnsupportedInput, UnsupportedModel
from vitrail.merging import ToMe

everywhere = pytest.mark.parametrize("name", CASES)
FEW = ("swin-padded", "torchvision", "hf-swin", "sam", "hiera", "sam2")
somewhere = pytest.mark.parametrize("name", FEW)


@pytest.fixture(autouse=True)
def _saturation() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedWarning)
        yield


def small(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    return CASES[name].model(dtype), CASES[name].images(dtype)


def run(model: nn.Module, images: Tensor) -> Tensor:
    return main_output(model(images))


@everywhere
@torch.no_grad()
def test_a_batch_equals_its_single_images(name: str) -> None:
    model, images = small(name, torch.float64)
    vitrail.merge(model, keep=0.7)
    together = run(model, images)
    assert distance(torch.cat([run(model, image[None]) for image in images]), together) < 1e-6


@everywhere
@torch.no_grad()
def test_costs_are_those_that_run(name: str) -> None:
    model, images = small(name)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as mode:
        model(images[:1])
    counted = vitrail.count(model, images)
    rest = mode.get_total_flops() / 2 - counted.flops
    assert abs(rest) <= 0.02 * counted.flops  # SAM 2 computes products that it does not use
    with vitrail.merge(model, keep=0.7) as merging:
        assert vitrail.count(model, images).flops < counted.flops
        with merging.track() as trace:
            model(images)
        size = CASES[name].size
        assert trace.flops.tolist() == [merging.flops(size)] * 2
        assert trace.tokens_per_layer.tolist() == [merging.tokens_per_layer(size)] * 2


@somewhere
@torch.no_grad()
def test_a_budget_is_met(name: str) -> None:
    model, _ = small(name)
    budget = 0.9 * vitrail.count(model).flops / 1e9
    with vitrail.merge(model, gflops=budget) as merging:
        assert 0.6 * budget < merging.flops() / 1e9 <= budget


@somewhere
@torch.no_grad()
def test_every_patch_has_a_group(name: str) -> None:
    model, images = small(name)
    with vitrail.merge(model, r=3) as merging, merging.track() as trace:
        model(images)
    assert len(trace.passes) == 1
    layout = find(model).adapter.layout(find(model).trunk, CASES[name].size)
    assert trace.layout == layout
    assert trace.groups.shape == (2, layout.num_patches)
    assert torch.equal(trace.sizes.sum(1), torch.full((2,), float(layout.num_patches)))
    for groups, sizes in zip(trace.groups, trace.sizes, strict=True):
        assert torch.equal(groups.bincount(minlength=len(sizes)).float(), sizes)


@torch.no_grad()
def test_groups_are_tokens_that_came_out_equal() -> None:
    model, images = small("sam", torch.float64)
    with vitrail.merge(model, r=(0, 3, 0)) as merging, merging.track() as trace:
        seen: list[Tensor] = []
        handle = trunk_blocks(model)[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(images)
        handle.remove()
    assert sum(one.shape[0] * one.shape[1] for one in seen) == 2 * merging.tokens_per_layer()[1]
    windows = [(row // 3, column // 3) for row in range(8) for column in range(8)]
    for groups in trace.groups.tolist():
        for group in set(groups):
            members = {windows[patch] for patch, own in enumerate(groups) if own == group}
            assert len(members) == 1


@somewhere
def test_copies_and_pickles_are_merged_models_of_their_own(name: str) -> None:
    model, images = small(name)
    plain = run(model, images)
    vitrail.merge(model, r=3)
    merged = run(model, images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, images), merged)
        vitrail.Merging.of(other).remove()
        assert torch.equal(run(other, images), plain)
        assert torch.equal(run(model, images), merged)


@torch.no_grad()
def test_two_threads_share_nothing() -> None:
    model, images = small("swin-padded")
    vitrail.merge(model, r=3)
    batches = [images, -2 * images]
    wanted, failures = [run(model, one) for one in batches], []

    def work(index: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                if not torch.equal(run(model, batches[index]), wanted[index]):
                    failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@torch.no_grad()
def test_a_shifted_block_compiles_as_one_graph() -> None:
    model, images = timm_swin(img_size=(32, 16), depths=(2,), num_heads=(1,)).eval(), torch.randn(2, 3, 32, 16)
    merging = vitrail.merge(model, r=(0, 4))
    wanted = run(model, images)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(run(compiled, images), wanted) < 1e-5
    with merging.track() as trace:
        assert distance(run(compiled, images), wanted) < 1e-5
    assert len(trace.passes) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@somewhere
@torch.no_grad()
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, images = small(name)
    model = model.to(dtype)
    vitrail.merge(model, r=3)
    merged = run(model, images.to(dtype))
    assert merged.dtype == dtype
    assert bool(merged.isfinite().all())


@torch.no_grad()
def test_hooks_see_tokens_and_a_lost_state_is_an_error() -> None:
    model, images = small("hiera")
    vitrail.merge(model, r=(2, 2, 0, 0, 0, 0, 0, 0))
    plain = run(model, images)
    handle = model.blocks[0].register_forward_hook(lambda _, __, out: out.clone())
    assert torch.equal(run(model, images), plain)
    handle.remove()
    with pytest.raises(BrokenPass, match="without the state"):
        model.blocks[1](torch.zeros(2, 248, model.blocks[1].dim))


@torch.no_grad()
def test_feature_maps_have_the_full_grid() -> None:
    model, images = small("swin")
    plain = [one.shape for one in model.forward_intermediates(images, intermediates_only=True)]
    with vitrail.merge(model, keep=0.6):
        maps = model.forward_intermediates(images, intermediates_only=True)
        assert [one.shape for one in maps] == plain == [(2, 16, 8, 8), (2, 32, 4, 4)]
        assert torch.equal(model.forward_head(model.norm(maps[-1].permute(0, 2, 3, 1))), model(images))

    model, images = small("hiera")
    plain_maps = model.forward_intermediates(images, intermediates_only=True, coarse=False)
    with vitrail.merge(model, r=3):
        maps = model.forward_intermediates(images, intermediates_only=True, coarse=False)
        assert [one.shape for one in maps] == [one.shape for one in plain_maps]
        assert torch.equal(model(images), model.forward_head(maps[-1].flatten(2).transpose(1, 2)))

    model, images = small("sam")
    plain_states = model(images, output_hidden_states=True).hidden_states
    with vitrail.merge(model, r=2):
        out = model(images, output_hidden_states=True)
        assert [one.shape for one in out.hidden_states] == [one.shape for one in plain_states]
        assert torch.equal(out.last_hidden_state, model(images).last_hidden_state)
        assert out.last_hidden_state.shape == (2, 8, 8, 8)


@torch.no_grad()
def test_backbones_get_the_full_grid() -> None:
    require("transformers", "5.9")  # before, a backbone is not made of the model
    config = SwinConfig(image_size=64, patch_size=4, window_size=3, embed_dim=16, depths=[2, 2], num_heads=[1, 2])
    config.out_features = ["stage1", "stage2"]
    model = SwinBackbone(config).eval()
    images = torch.randn(2, 3, 64, 64)
    plain = model(images).feature_maps
    with vitrail.merge(model, r=0):
        assert all(torch.equal(*pair) for pair in zip(model(images).feature_maps, plain, strict=True))
    with vitrail.merge(model, r=(0, 0, 0, 4)):
        merged = model(images).feature_maps
        assert [one.shape for one in merged] == [one.shape for one in plain]
        assert torch.equal(merged[0], plain[0])
        assert distance(merged[1], plain[1]) > 1e-3
        with pytest.raises(UnsupportedInput, match="larger"):
            model(images[:, :, :24, :24])


@torch.no_grad()
def test_segment_anything_as_a_whole() -> None:
    vision = {**sam().config.to_dict(), "num_pos_feats": 4}
    config = SamConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 8, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "mlp_dim": 16},
    )
    config.prompt_encoder_config.image_embedding_size = 8
    model, images = SamModel(config).eval(), torch.randn(1, 3, 64, 64)
    points = torch.tensor([[[[10.0, 20.0]]]])
    plain = model(pixel_values=images, input_points=points).pred_masks
    with vitrail.merge(model, keep=0.6):
        assert model(pixel_values=images, input_points=points).pred_masks.shape == plain.shape
    assert torch.equal(model(pixel_values=images, input_points=points).pred_masks, plain)


@somewhere
@torch.no_grad()
def test_recording(name: str) -> None:
    model, images = small(name, torch.float64)
    shapes = [tuple(one) for one in _grids(model, CASES[name].size)]
    plain = vitrail.record(model, images, ("tokens", "norms", "embedding"))
    for layer, (height, width) in enumerate(shapes):
        assert plain.tokens[layer].shape[:2] == (2, height * width)
        torch.testing.assert_close(plain.norms[layer], plain.tokens[layer].norm(dim=-1).float())
    with vitrail.merge(model, r=3):
        merged = vitrail.record(model, images, "tokens")
    assert [one.shape for one in merged.tokens.values()] == [one.shape for one in plain.tokens.values()]
    assert distance(merged.tokens[len(shapes) - 1], plain.tokens[len(shapes) - 1]) > 1e-4
    with vitrail.merge(model, r=0):
        assert torch.equal(vitrail.record(model, images, "tokens").tokens[0], plain.tokens[0])


def _grids(model: nn.Module, size: tuple[int, ...]) -> list[tuple[int, int]]:
    found = find(model)
    layouts = [found.adapter.layout_in(found.trunk, layer, size) for layer in range(len(found.blocks))]
    return [(one.grid[1], one.grid[2]) for one in layouts]


@torch.no_grad()
def test_tokens_are_recorded_row_by_row() -> None:
    model, images = small("hiera")
    maps = model.forward_intermediates(images, intermediates_only=True, coarse=False)
    with vitrail.merge(model, r=0):
        tokens = vitrail.record(model, images, "tokens").tokens
    for layer, one in enumerate(maps):
        assert torch.equal(tokens[layer], one.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("name", ["swin-padded", "sam"])
@torch.no_grad()
def test_attention_is_recorded_inside_windows(name: str) -> None:
    model, images = small(name, torch.float64)
    seen = vitrail.record(model, images, ("attention", "v", "tokens"), queries=[0, 13, 21])
    block, layer = trunk_blocks(model)[1], 1
    outputs: list[Tensor] = []
    handle = block.attn.proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(images)
    handle.remove()
    rows, values = seen.attention[layer], seen.v[layer]
    assert rows.shape[2:] == (3, values.shape[2])
    assert bool((rows.sum(-1) <= 1 + 1e-9).all())
    window = 16 if name == "swin-padded" else 9
    assert int((rows > 0).sum(-1).max()) <= window
    inside = rows[:, :, :1].sum(-1) > 1 - 1e-9  # a token that sees no padding: its output is the weighted values
    mixed = (rows[:, :, :1] @ values).transpose(1, 2).flatten(2)
    every = outputs[0].flatten(1, -2) if outputs[0].dim() > 3 else outputs[0].reshape(2, -1, outputs[0].shape[-1])
    nearest = (mixed.unsqueeze(2) - every.reshape(2, 1, -1, mixed.shape[2])).norm(dim=-1).amin(-1)
    assert bool(inside.all())
    assert float(nearest.max()) < 1e-9


@torch.no_grad()
def test_attention_is_recorded_of_queries_and_keys_mixed_on_the_grid() -> None:
    model, images = small("mvit", torch.float64)
    seen = vitrail.record(model, images, ("attention", "q", "v"), queries=[0])
    assert list(seen.attention) == [3, 4, 6]  # the others pool, and run as they are
    outputs: list[Tensor] = []
    handle = trunk_blocks(model)[3].attn.proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(images)
    handle.remove()
    attended = (seen.attention[3] @ seen.v[3] + seen.q[3][:, :, :1]).transpose(1, 2).flatten(2)
    assert torch.allclose(attended[:, 0], outputs[0][:, 0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["swin", "sam2"])
def test_reports_are_of_the_last_grid(name: str) -> None:
    model, images = small(name)
    report = vitrail.inspect(model, images.sigmoid().repeat(2, 1, 1, 1))
    grids = _grids(model, CASES[name].size)
    layers = [layer for layer, grid in enumerate(grids) if grid == grids[-1]]
    assert [one["layer"] for one in report.to_dict()["norms"]["per_layer"]] == layers


def test_unknown_variants_are_refused_and_untouched() -> None:
    model = timm_swin()

    class Other(type(model.layers[0].blocks[0].attn)):  # type: ignore[misc]
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x

    model.layers[0].blocks[0].attn.__class__ = Other
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(UnsupportedModel, match="attention of class Other"):
        vitrail.merge(model, r=1)
    assert [type(part) for part in model.modules()] == kinds


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"protect": torch.zeros(64, dtype=torch.bool)}, InvalidOption, "protect"),
        ({"unmerge": False}, InvalidOption, "unmerge=False"),
        ({"restore": "residual"}, InvalidOption, "restore"),
        ({"foresight": {"layer": 0}}, InvalidOption, "foresight"),
        ({"method": "evit"}, UnsupportedModel, "class token"),
        ({"method": "threshold"}, UnsupportedModel, "static"),
        ({"r": 2, "keep": 0.5}, InvalidOption, "exactly one"),
        ({"keep": 0.2, "r": None}, InvalidOption, "use at least"),
    ],
)
def test_what_windows_cannot_serve_is_refused_before_anything_changes(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    model, images = small("swin")
    plain, kinds = run(model, images), [type(part) for part in model.modules()]
    with pytest.raises(error, match=match):
        vitrail.merge(model, **{"r": 2, **options})
    assert [type(part) for part in model.modules()] == kinds
    assert torch.equal(run(model, images), plain)


def test_surgery_that_needs_tokens_seen_by_all_is_refused() -> None:
    model, images = small("swin")
    for surgery in (
        lambda: vitrail.add_tokens(model, registers=1),
        lambda: vitrail.test_time_registers(model, images),
        lambda: vitrail.look_ahead(model, images, by="received_attention"),
    ):
        with pytest.raises(UnsupportedModel, match="inside windows"):
            surgery()


@torch.no_grad()
@pytest.mark.parametrize("method", ["energy", "mlerp", "mctf", "grid", "kmeans", "agglomerative", "edges", "prune"])
def test_methods_serve_windows(method: str) -> None:
    model, images = small("swin", torch.float64)
    plain = run(model, images)
    with vitrail.merge(model, keep=0.5, method=method) as merging:
        merged = run(model, images)
        assert 0 < distance(merged, plain) < 1
        assert distance(torch.cat([run(model, image[None]) for image in images]), merged) < 1e-9
        assert merging.flops() < vitrail.count(model).flops_unmerged
    assert torch.equal(run(model, images), plain)


@torch.no_grad()
def test_merging_before_attention_saves_more() -> None:
    model, images = small("swin")
    costs = []
    for place in ("between", "before"):
        with vitrail.merge(model, keep=0.6, method=ToMe(features="tokens", place=place)) as merging:
            assert 0 < distance(run(model, images), run(timm_swin(), images)) < 50
            costs.append(merging.flops())
    assert costs[1] < costs[0]


@torch.no_grad()
def test_guides_reach_the_windows() -> None:
    class Guided(ToMe):
        def reduce(self, context: Any, r: Any) -> Any:
            seen.append((context.layer, context.guide["mine"]))
            return super().reduce(context, r)

    seen: list[tuple[int, Tensor]] = []
    model, images = small("swin")
    with vitrail.merge(model, r=8, method=Guided()) as merging, merging.guide(mine=torch.arange(64.0)):
        model(images)
    layers = {layer: torch.cat([own.flatten() for at, own in seen if at == layer]) for layer, _ in seen}
    for layer in (0, 1):
        assert layers[layer].sort().values.tolist() == sorted([*range(64)] * 2)
    means = [8 * (2 * i) + 2 * j + 4.5 for i in range(4) for j in range(4)]  # of 2 × 2 patches
    assert layers[2].sort().values.tolist() == sorted(means * 2)


def test_windows_of_every_kind_hold_every_token_once() -> None:
    for windows in (
        Windows((4, 3), (2, 1)),
        Windows((4, 3), (2, 1), pads_first=True),
        Windows((5, 5), (2, 2), small="unshifted"),
        Windows((7, 7), (3, 3), pads_first=True, small="shrunk"),
        Windows(),
    ):
        for grid in ((4, 3), (5, 7), (9, 4), (12, 12)):
            tiles = windows.tiles(grid)
            places = torch.cat([tile.places(torch.device("cpu")).flatten() for tile in tiles])
            assert places.sort().values.tolist() == list(range(grid[0] * grid[1]))
            _, size = windows.padded(grid)
            for tile in tiles:
                assert len(set(tile.cells())) == tile.tokens + tile.padding
                assert all(0 <= row < size[0] and 0 <= column < size[1] for row, column in tile.cells())


def test_settings_are_applied_again() -> None:
    model, images = small("swin")
    merging = vitrail.merge(model, keep=0.7, method={"name": "tome", "features": "tokens", "place": "before"})
    wanted, config = run(model, images), merging.config
    merging.remove()
    vitrail.merge(model, **config)
    assert torch.equal(run(model, images), wanted)


def test_drawings_cover_the_image() -> None:
    model, _ = small("swin")
    with vitrail.merge(model, r=4) as merging:
        drawn = merging.draw(torch.rand(3, 40, 60))
    assert drawn[0].size == (60, 40)


@torch.no_grad()
def test_other_sizes() -> None:
    model = timm_swin(strict_img_size=False).eval()
    vitrail.merge(model, keep=0.7)
    for size in ((32, 32), (48, 80), (36, 44)):
        assert run(model, torch.randn(1, 3, *size)).shape == (1, 5)


def test_changing_the_windows_after_merging_is_an_error() -> None:
    model = SwinTransformer(img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(2,), num_heads=(1,))
    vitrail.merge(model, r=2)
    model.layers[0].blocks[0].window_size = (2, 2)
    with pytest.raises(BrokenPass, match="windows of block 0 changed"):
        model(torch.randn(1, 3, 32, 32))
