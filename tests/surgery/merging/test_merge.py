"""``vitrail.merge`` and its handle: options, figures, errors, images."""

import json
import warnings

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitrail
from tests.fakes import ToyViT
from tests.surgery.models import ALL, FEW, distance, flops_that_run, main_output, run
from vitrail.errors import (
    AlreadyApplied,
    BrokenPass,
    InvalidOption,
    NotApplied,
    SaturatedWarning,
    UnsupportedInput,
    UnsupportedModel,
)

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


@pytest.fixture
def model() -> nn.Module:
    return VisionTransformer(**SMALL).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


def snapshot(model: nn.Module) -> list[tuple[type, set[str]]]:
    return [(type(part), set(vars(part))) for part in model.modules()]


# -- the handle ---------------------------------------------------------------------------------------------------


def test_figures_of_a_published_model():
    model = timm.create_model("vit_base_patch16_224").eval()
    merging = vitrail.merge(model, r=15)
    assert merging.layout.num_tokens == 197
    assert merging.tokens_per_layer() == [197 - 15 * (i + 1) for i in range(12)]
    assert merging.flops(merged=False) / 1e9 == pytest.approx(17.6, abs=0.1)
    merging.remove()
    decreasing = vitrail.merge(model, r=16, schedule="decreasing")
    assert decreasing.r == [32, 29, 26, 23, 20, 17, 14, 11, 8, 5, 2, 0]
    assert decreasing.tokens_per_layer()[-1] == 10


@pytest.mark.parametrize(
    "name", [*FEW, "timm-class-odd", "timm-glu", "timm-wide-heads", "eva-grouped-heads", "hf-dinov2-head"]
)
@pytest.mark.parametrize("r", [0, 3])
def test_flops_are_those_that_torch_counts(name, r):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32, batch=1)
    merging = vitrail.merge(model, r=r)
    counted = flops_that_run(lambda: run(model, images, case))
    # what torch counts in addition: pooling by attention, the coordinates of rotary positions
    assert merging.flops(case.size) == pytest.approx(counted / 2, rel=0.01)


def test_budget_is_solved_again_for_every_size():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, dynamic_img_size=True).eval()
    full = {size: vitrail.merge(model, r=0).flops(size) for size in [224]}
    vitrail.Merging.of(model).remove()
    merging = vitrail.merge(model, gflops=0.7 * full[224] / 1e9)
    for size in (224, 256, (192, 288)):
        assert merging.flops(size) <= 0.7 * full[224]
        assert merging.flops(size) > 0.66 * full[224]
    assert merging.tokens_per_layer(256)[-1] < merging.tokens_per_layer(224)[-1]
    merging.remove()
    keep = vitrail.merge(model, keep=0.5)
    assert keep.tokens_per_layer(224)[-1] == 1 + 98
    assert keep.tokens_per_layer((192, 288))[-1] == 1 + 108
    with keep.track() as trace:
        model(torch.randn(1, 3, 192, 288))
    assert trace.sizes.shape[1] == 1 + 108
    assert trace.layout.grid == (1, 12, 18)


def test_r_can_be_changed_between_calls(model, images):
    merging = vitrail.merge(model, r=2)
    first = model(images)
    merging.r = [1, 0, 3]
    assert merging.r == [1, 0, 3]
    assert merging.tokens_per_layer() == [16, 16, 13]
    assert distance(model(images), first) > 1e-4
    merging.r = 2
    assert torch.equal(model(images), first)
    with pytest.raises(InvalidOption):
        merging.r = -1
    assert merging.r == [2, 2, 2]
    merging.remove()
    with pytest.raises(NotApplied):
        merging.r = 1


def test_a_changed_number_keeps_its_schedule(model):
    merging = vitrail.merge(model, r=1, schedule="decreasing")
    assert merging.r == [2, 1, 0]
    merging.r = 2
    assert merging.r == [4, 2, 0]
    assert merging.config["schedule"] == "decreasing"


@pytest.mark.parametrize("r", [np.int64(2), torch.tensor(2), (2, 2, 2), np.array([2, 2, 2]), torch.tensor([2, 2, 2])])
def test_numbers_of_other_libraries_count(model, r):
    assert vitrail.merge(model, r=r).r == [2, 2, 2]


def test_figures_follow_a_change_of_input_size(model):
    merging = vitrail.merge(model, r=2)
    model.set_input_size((64, 32))
    assert merging.layout.grid == (1, 8, 4)
    assert merging.tokens_per_layer() == [31, 29, 27]
    assert model(torch.randn(1, 3, 64, 32)).shape == (1, 5)


@pytest.mark.parametrize("size", [64.0, "big", (32, 32, 32), 64])
def test_sizes_that_the_model_cannot_take_are_errors(model, size):
    with pytest.raises(InvalidOption, match="size"):
        vitrail.merge(model, r=2).flops(size)


def test_blocks_dropped_after_merging_are_noticed(model, images):
    vitrail.merge(model, r=2)
    model.blocks = model.blocks[:2]
    with pytest.raises(BrokenPass, match="3 blocks were merged and the model now has 2"):
        model(images)


def test_unmerge_takes_merged_tokens_only(model, images):
    merging = vitrail.merge(model, r=2)
    with merging.track() as trace:
        full = model.forward_features(images)
    with pytest.raises(InvalidOption, match=r"\(2, 11, channels\); got \(2, 17, 32\) \(those are full length already"):
        trace.unmerge(full)
    for wrong in (full[0], full[:1, :11], full[:, 1:11]):
        with pytest.raises(InvalidOption, match="unmerge takes the merged tokens"):
            trace.unmerge(wrong)


def test_hooks_on_attention_warn_that_they_do_not_run(model, images):
    merging = vitrail.merge(model, r=0)
    model.blocks[1].attn.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(vitrail.errors.VitrailWarning, match="hooks on Attention do not run while the model is merged"):
        model(images)
    model(images)
    merging.remove()


def test_a_forward_replaced_on_the_object_is_refused(model):
    model.blocks[1].attn.forward = lambda x, **_: x
    before = snapshot(model)
    with pytest.raises(UnsupportedModel, match="the forward of a Attention was replaced on the object"):
        vitrail.merge(model, r=2)
    assert snapshot(model) == before


def test_blocks_wrapped_before_merging_raise_with_advice(model):
    model.blocks[0] = torch.compile(model.blocks[0])
    with pytest.raises(UnsupportedModel, match="merge before wrapping"):
        vitrail.merge(model, r=2)


def test_a_model_without_its_blocks(model):
    del model.blocks
    with pytest.raises(UnsupportedModel, match="has no blocks"):
        vitrail.merge(model, r=2)


@pytest.mark.parametrize(
    "options",
    [
        {"r": 3},
        {"r": [1, 2, 3], "order": "original"},
        {"keep": 0.5, "schedule": "decreasing", "proportional": False},
        {"gflops": 0.0006, "schedule": 0.25, "unmerge": False},
        {"r": 2, "protect": [True] * 4 + [False] * 12},
    ],
)
def test_config_gives_the_same_merging_again(model, images, options):
    merging = vitrail.merge(model, **options)
    wanted, config = model(images), json.loads(json.dumps(merging.config))
    merging.remove()
    again = vitrail.merge(model, **config)
    assert torch.equal(model(images), wanted)
    assert again.config == merging.config


def test_merged_tokens_on_request(model, images):
    full = vitrail.merge(model, r=3)
    with full.track() as trace:
        features = model.forward_features(images)
    full.remove()
    vitrail.merge(model, r=3, unmerge=False)
    merged = model.forward_features(images)
    assert merged.shape[1] == 17 - 9
    torch.testing.assert_close(trace.unmerge(merged), features)
    shapes = [y.shape[1] for y in model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)]
    assert shapes == [13, 10, 7]
    for as_grid in (
        lambda: model.forward_intermediates(images),
        lambda: model.get_intermediate_layers(images, reshape=True),
    ):
        with pytest.raises(UnsupportedInput, match="feature maps need every patch at its place"):
            as_grid()


def test_merging_twice_and_tracking_after_removal_are_errors(model):
    merging = vitrail.merge(model, r=2)
    with pytest.raises(AlreadyApplied, match=r"Merging\.of\(model\)\.remove"):
        vitrail.merge(model, r=3)
    merging.remove()
    with pytest.raises(NotApplied, match="was removed"):
        merging.track()
    assert "r=2" in repr(merging)


def test_a_wrapped_model_is_found_inside(model, images):
    whole = nn.Sequential(model, nn.Softmax(-1))
    merging = vitrail.merge(whole, r=2)
    assert merging.tokens_per_layer() == [15, 13, 11]
    merged = whole(images)
    merging.remove()
    assert distance(merged, whole(images)) > 1e-5


def test_nothing_is_tracked_outside(model, images):
    merging = vitrail.merge(model, r=2)
    with merging.track() as trace, pytest.raises(NotApplied, match="nothing was tracked"):
        trace.groups  # noqa: B018
    with merging.track() as trace:
        model(images)
        model(images[:1])
    model(images)
    assert [p.batch for p in trace.passes] == [2, 1]
    assert trace.groups.shape == (1, 16)


# -- requested and possible merges --------------------------------------------------------------------------------


def test_more_merges_than_pairs_are_reported_once(model, images):
    with pytest.warns(SaturatedWarning, match=r"60 merges were requested and 14 are possible with 16 patches"):
        merging = vitrail.merge(model, r=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images)
        model(images)
    assert merging.r == [8, 4, 2]


def test_a_budget_that_needs_no_merging_warns(model):
    with pytest.warns(SaturatedWarning, match="nothing merges"):
        assert vitrail.merge(model, gflops=100).r == [0, 0, 0]


def test_protected_patches_never_merge(model, images):
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[3, 4, 9]] = True
    for order in ("paper", "original"):
        with vitrail.merge(model, r=3, protect=mask, order=order) as merging:
            with merging.track() as trace:
                model(images)
            sizes = trace.sizes.gather(1, trace.groups)
            assert torch.equal(sizes[:, mask], torch.ones(2, 3))
            assert bool((sizes[:, ~mask] > 1).any())


def test_keep_is_a_share_of_all_patches_and_refused_where_too_many_are_protected(model):
    mask = torch.zeros(16, dtype=torch.bool)
    mask[:4] = True
    assert sum(vitrail.merge(model, keep=0.5, protect=mask).r) == 8
    vitrail.Merging.of(model).remove()
    with pytest.raises(InvalidOption, match=r"below 16, 16 of them protected; .* keep=1"):
        vitrail.merge(model, keep=0.3, protect=torch.ones(16, dtype=torch.bool))
    mask[:12] = True
    with pytest.raises(InvalidOption, match=r"would leave 5 of 16 .* below 13, 12 of them protected"):
        vitrail.merge(model, keep=0.3, protect=mask)
    assert vitrail.merge(model, keep=1.0, protect=torch.ones(16, dtype=torch.bool)).r == [0, 0, 0]


def test_a_mask_per_image_belongs_to_its_batch(model, images):
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :8], mask[1, 8:] = True, True
    merging = vitrail.merge(model, r=2, protect=mask)
    with merging.track() as trace:
        model(images)
    sizes = trace.sizes.gather(1, trace.groups)
    assert torch.equal(sizes[mask], torch.ones(16))
    with pytest.raises(UnsupportedInput, match=r"masks for 2 .*this batch has 3"):
        model(torch.randn(3, 3, 32, 32))


def test_a_mask_may_have_the_shape_of_the_grid_and_is_copied(model, images):
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0] = True
    merging = vitrail.merge(model, r=2, protect=mask)
    first = model(images)
    mask[:] = True
    assert torch.equal(model(images), first)
    assert merging.config["protect"] == [[True] * 4 + [False] * 12]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": -1}, "got -1"),
        ({"r": 1.5}, "1.5"),
        ({"r": [1, 2]}, "the model has 3 layers, the list 2"),
        ({"keep": 1.2}, "got 1.2"),
        ({"keep": -0.1}, "got -0.1"),
        ({"keep": 0.01, "r": 2}, "got r and keep"),
        ({}, "none of them"),
        ({"gflops": 1e-9}, "cannot be reached"),
        ({"keep": 0.1, "schedule": "nowhere"}, "schedule is one of"),
        ({"r": 2, "order": "random"}, "order is 'paper' or 'original'"),
        ({"r": 2, "proportional": 1}, "proportional.*True or False"),
        ({"r": 2, "unmerge": "no"}, "unmerge.*True or False"),
        ({"r": 2, "protect": torch.zeros(15, dtype=torch.bool)}, "16 patches.*shape \\(15,\\)"),
        ({"r": 2, "protect": torch.zeros(16)}, "float32"),
        ({"r": 2, "protect": "corner"}, "protect is"),
    ],
)
def test_bad_options_leave_the_model_untouched(model, options, message):
    before = snapshot(model)
    with pytest.raises(InvalidOption, match=message):
        vitrail.merge(model, **options)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Sequential(),
        lambda: VisionTransformer(**{**SMALL, "depth": 0}),
        lambda: timm.create_model("resnet10t"),
        lambda: nn.ModuleList([VisionTransformer(**SMALL), VisionTransformer(**SMALL)]),
        lambda: VisionTransformer(**SMALL, device="meta"),
    ],
    ids=[
        "linear",
        "empty",
        "no-blocks",
        "resnet",
        "two",
        "meta",
    ],
)
def test_unsupported_models_are_named_and_left_untouched(build):
    model = build()
    before = snapshot(model)
    with pytest.raises(UnsupportedModel) as error:
        vitrail.merge(model, r=2)
    assert snapshot(model) == before
    assert len(str(error.value)) > 40


def test_a_block_with_a_custom_forward_is_refused(model):
    class Special(type(model.blocks[1])):
        def forward(self, x, **_):
            return x

    model.blocks[1].__class__ = Special
    before = snapshot(model)
    with pytest.raises(UnsupportedModel, match="blocks of class Special"):
        vitrail.merge(model, r=2)
    assert snapshot(model) == before


def test_not_a_model():
    with pytest.raises(UnsupportedModel, match="got str"):
        vitrail.merge("vit_base_patch16_224", r=2)


def test_masks_are_refused_only_where_tokens_merge(model, images):
    mask = torch.zeros(17, 17)
    plain = model(images, attn_mask=mask)
    with vitrail.merge(model, r=0):
        torch.testing.assert_close(model(images, attn_mask=mask), plain)
    with vitrail.merge(model, r=2), pytest.raises(UnsupportedInput, match="without a mask"):
        model(images, attn_mask=mask)


def test_patch_dropout_in_training(images):
    model = VisionTransformer(**SMALL, patch_drop_rate=0.25).train()
    merging = vitrail.merge(model, r=2)
    with merging.track() as trace:
        model(images).sum().backward()
    assert trace.layout.num_patches == 12
    assert trace.sizes.shape[1] == 13 - 6


# -- another library ----------------------------------------------------------------------------------------------


def test_a_new_library_is_one_file_and_one_entry(toy: ToyViT):
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    plain = toy(images)
    with vitrail.merge(toy, r=0):
        assert torch.equal(toy(images), plain)
    with vitrail.merge(toy, r=3) as merging:
        with merging.track() as trace:
            merged = toy(images)
        assert trace.sizes.shape == (2, 8)
        assert distance(merged, plain) > 1e-3
    assert torch.equal(toy(images), plain)


def test_the_toy_is_unknown_without_its_adapter():
    with pytest.raises(UnsupportedModel, match=r"ToyViT is not a supported model.*timm VisionTransformer"):
        vitrail.merge(ToyViT(), r=2)


# -- images -----------------------------------------------------------------------------------------------------


def test_draw_keeps_the_resolution_of_the_image(model):
    pixels = np.zeros((90, 140, 3), np.uint8)
    pixels[:, 70:] = (250, 40, 30)
    merging = vitrail.merge(model, r=4)
    model.train()
    painted = merging.draw(Image.fromarray(pixels))
    assert model.training
    assert [image.size for image in painted] == [(140, 90)]
    assert np.asarray(painted[0]).std() > 10
    assert len(merging.draw([Image.fromarray(pixels), Image.new("L", (40, 40), 128)])) == 2
    arrays = (pixels, pixels / 255, torch.from_numpy(pixels).permute(2, 0, 1))
    assert all(np.array_equal(merging.draw(array)[0], painted[0]) for array in arrays)


def test_draw_refuses_other_objects(model, tmp_path):
    merging = vitrail.merge(model, r=2)
    for wrong in (None, [None], 5):
        with pytest.raises(InvalidOption, match="expected PIL images, paths of image files, arrays"):
            merging.draw(wrong)
    for wrong in (torch.zeros(1, 3, 8, 8), np.zeros((8, 8, 5)), np.full((8, 8, 3), 2.0)):
        with pytest.raises(vitrail.errors.ImageError, match="image 0: not an image; expected"):
            merging.draw(wrong)
    with pytest.raises(InvalidOption, match="no images"):
        merging.draw([])
    with pytest.raises(vitrail.errors.ImageError):
        merging.draw(tmp_path / "missing.png")


def test_main_output_of_transformers_is_a_tensor():
    case = ALL["hf-vit-head"]
    assert main_output(case.model()(case.images())).shape == (2, 5)


def test_keep_and_gflops_can_be_changed() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4).eval()
    with vitrail.merge(model, keep=0.8) as merging:
        assert merging.keep == 0.8
        merging.keep = 0.5
        assert merging.tokens_per_layer()[-1] == 1 + 98
        budget = 0.8 * merging.flops(merged=False) / 1e9
        merging.gflops = budget
        assert merging.keep is None
        assert merging.flops() / 1e9 <= budget < merging.flops(merged=False) / 1e9
        with pytest.raises(InvalidOption, match="keep"):
            merging.keep = 2
        assert merging.gflops == budget
