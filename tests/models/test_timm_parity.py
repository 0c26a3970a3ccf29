"""``ViT`` equals timm with the same weights; parameters are redrawn so that every branch contributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import GluMlp, LayerNorm, RmsNorm, SwiGLUPacked
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn

import vitrail
from tests.parity.models.cases import redraw
from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.models import (
    MODELS,
    ViT,
    create_model,
    from_timm,
    load_timm_state_dict,
    timm_state_dict,
    to_timm,
)
from vitrail.models.registry import model_config
from vitrail.tokens import Role, TokenSpec

SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5,
}  # fmt: skip
DINOV2: dict[str, Any] = {"init_values": 1e-5, "mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 16 / 3}

CAITS = {
    "cait_xxs24": "cait_xxs24_224", "cait_xxs36": "cait_xxs36_224", "cait_xs24": "cait_xs24_384",
    "cait_s24": "cait_s24_224", "cait_s36": "cait_s36_384", "cait_m36": "cait_m36_384", "cait_m48": "cait_m48_448",
}  # fmt: skip


def vit(kind: type[nn.Module] = VisionTransformer, **options: Any) -> nn.Module:
    return kind(**{**SMALL, **options})


def named(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, **{**SMALL, **options})


def small_cait(name: str) -> nn.Module:
    """Return a small version of a published CaiT, with its number of heads."""
    heads = MODELS[name].heads
    return timm.create_model(CAITS[name], img_size=32, patch_size=8, embed_dim=4 * heads, depth=3, num_classes=5)


CASES: dict[str, Callable[[], nn.Module]] = {
    "class": vit,
    "base": partial(named, "vit_base_patch16_224"),
    "rectangle": partial(vit, img_size=(24, 40), patch_size=(8, 4), in_chans=1),
    "class-free": partial(vit, class_token=False, global_pool="avg"),
    "mean-of-patches-with-class": partial(vit, global_pool="avg"),
    "mean-normed-before": partial(vit, global_pool="avg", fc_norm=False, class_token=False),
    "reg4-gap": partial(named, "vit_medium_patch16_reg4_gap_256"),
    "registers-and-class": partial(vit, reg_tokens=4),
    "registers-not-embedded": partial(vit, reg_tokens=4, no_embed_class=True),
    "distilled": partial(named, "deit_small_distilled_patch16_224"),
    "deit": partial(named, "deit_tiny_patch16_224"),
    "deit3": partial(named, "deit3_small_patch16_224"),
    "dinov2": partial(named, "vit_small_patch14_reg4_dinov2", **DINOV2, num_classes=0),
    "dinov2-classes": partial(vit, **DINOV2, reg_tokens=2, no_embed_class=True, qk_norm=True),
    "dynamic": partial(vit, dynamic_img_size=True, reg_tokens=1),
    "qk-norm": partial(vit, qk_norm=True, norm_layer=partial(LayerNorm, eps=1e-5)),
    "no-biases": partial(vit, qkv_bias=False, proj_bias=False),
    "pre-norm": partial(vit, pre_norm=True),
    "no-final-norm": partial(vit, final_norm=False),
    "no-position": partial(vit, pos_embed="none"),
    "attention-pool": partial(vit, class_token=False, global_pool="map"),
    "odd-ratio": partial(vit, mlp_ratio=2.7),
    "head-free": partial(vit, num_classes=0),
    "distilled-head-free": partial(vit, VisionTransformerDistilled, num_classes=0),
    **{name: partial(small_cait, name) for name in CAITS},
    "cait-mean": partial(vit, Cait, init_values=1.0, global_pool="avg", depth_token_only=3, qkv_bias=False),
}


def drawn(case: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = CASES[case]().double()
    redraw(model, seed=sum(map(ord, case)))
    return model.to(dtype).eval()


def images(model: Any, dtype: torch.dtype = torch.float64, size: tuple[int, int] | None = None) -> Tensor:
    embed = model.patch_embed
    generator = torch.Generator().manual_seed(7)
    shape = (2, embed.proj.in_channels, *(size or embed.img_size))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def off(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_from_timm_gives_the_same_outputs(case: str, dtype: torch.dtype, tolerance: float) -> None:
    theirs = drawn(case, dtype)
    ours = from_timm(theirs)
    x = images(theirs, dtype)
    assert next(ours.parameters()).dtype == dtype
    assert not ours.training
    with torch.no_grad():
        assert off(ours.forward_features(x), theirs.forward_features(x)) < tolerance
        assert off(ours(x), theirs(x)) < tolerance
        assert off(ours.forward_head(ours.forward_features(x)), theirs(x)) < tolerance


@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_weight_and_the_output(case: str) -> None:
    theirs = drawn(case)
    back = to_timm(from_timm(theirs))
    assert type(back) is type(theirs)
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        assert off(back(images(theirs)), theirs(images(theirs))) < 1e-12


@pytest.mark.parametrize("case", ["class", "registers-and-class", "distilled", "dinov2-classes", "cait_xxs24"])
def test_gradients_are_the_same(case: str) -> None:
    theirs = drawn(case)
    ours = from_timm(theirs)
    x = images(theirs)
    for model in (theirs, ours):
        model(x).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for parameter in ours.parameters():
        parameter.data = parameter.grad  # so that the names can be translated
    rounding = 1e-14 * max(float(one.abs().max()) for one in wanted.values())  # all that there is for biases of keys
    for name, gradient in timm_state_dict(ours).items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=0, atol=1e-9 * float(wanted[name].abs().max()) + rounding
        )


@pytest.mark.parametrize("size", [(32, 32), (24, 56), (64, 64), (8, 16)])
@pytest.mark.parametrize("kind", [VisionTransformer, VisionTransformerDistilled])
def test_other_sizes_equal_dynamic_timm(kind: type[nn.Module], size: tuple[int, int]) -> None:
    theirs = vit(kind, dynamic_img_size=True).double().eval()
    redraw(theirs, seed=3)
    ours = from_timm(theirs)
    x = images(theirs, size=size)
    with torch.no_grad():
        assert off(ours(x), theirs(x)) < 1e-12
        assert off(to_timm(ours)(x), theirs(x)) < 1e-12


@pytest.mark.parametrize("name", CAITS)
def test_published_caits_have_timms_weights(name: str) -> None:
    with torch.device("meta"):
        theirs, ours = timm.create_model(CAITS[name]), create_model(name)
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert {key: value.shape for key, value in timm_state_dict(ours).items()} == shapes
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1]
    assert ours.config.layer_scale == {"cait_xxs36": 1e-5}.get(name, 1e-5 if ours.config.depth == 24 else 1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        *((f"vit_{size}_patch16", f"vit_{size}_patch16_224") for size in ("tiny", "small", "base", "large")),
        *((f"deit_{size}_patch16", f"deit_{size}_patch16_224") for size in ("tiny", "small", "base")),
        *((f"deit_{size}_patch16_distilled", f"deit_{size}_distilled_patch16_224") for size in ("tiny", "base")),
    ],
)
def test_published_vits_have_timms_weights(ours: str, theirs: str) -> None:
    with torch.device("meta"):
        model, reference = create_model(ours), timm.create_model(theirs)
    shapes = {key: value.shape for key, value in reference.state_dict().items()}
    assert {key: value.shape for key, value in timm_state_dict(model).items()} == shapes


def test_original_names_are_read() -> None:
    """DeiT wraps its weights, CaiT prefixes them, DeiT III has gamma_1, DINOv2 has its own names."""
    for case in ("distilled", "cait_xxs24", "deit3", "dinov2"):
        theirs = drawn(case)
        states = dict(theirs.state_dict())
        if case == "deit3":
            states = {
                name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for name, v in states.items()
            }
        if case == "dinov2":
            renamed = (("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3"), ("reg_token", "register_tokens"))
            for new, old in renamed:
                states = {name.replace(new, old): value for name, value in states.items()}
            states["mask_token"] = torch.zeros(1, 32)
        ours = ViT(from_timm(theirs).config).double().eval()
        load_timm_state_dict(ours, {"model": {f"module.{name}": value for name, value in states.items()}, "epoch": 3})
        with torch.no_grad():
            assert off(ours(images(theirs)), theirs(images(theirs))) < 1e-12


def test_weights_that_do_not_fit_are_all_named_and_nothing_is_loaded() -> None:
    theirs = drawn("class")
    ours = from_timm(theirs)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    states = dict(drawn("class").state_dict())
    states["norm.weight"] = torch.zeros(7)
    states["extra"] = states.pop("cls_token")
    states["blocks.0.attn.qkv.weight"] = states["blocks.0.attn.qkv.weight"] + 1
    with pytest.raises(ModelLoadError) as caught:
        load_timm_state_dict(ours, states)
    for word in ("missing: cls_token", "unexpected: extra", "norm.weight is (7,), expected (32,)"):
        assert word in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())
    with pytest.raises(ModelLoadError, match=r"norm\.weight is"):
        load_timm_state_dict(ours, states, strict=False)
    with pytest.raises(ModelLoadError, match="a dict of tensors"):
        load_timm_state_dict(ours, {"epoch": 3})


def test_known_weights_start_a_model_with_further_tokens() -> None:
    theirs = drawn("class")
    config = from_timm(theirs).config
    color = TokenSpec("colour", Role.TASK, classes=3, visible=False, position=False)
    model = create_model(
        "vit_tiny_patch16", image_size=32, patch_size=8, width=32, depth=3, heads=2, num_classes=5,
        tokens=(*config.tokens, color),
    ).double().eval()  # fmt: skip
    with pytest.raises(ModelLoadError, match=r"tokens\.colour, heads\.colour\.weight, heads\.colour\.bias"):
        load_timm_state_dict(model, theirs.state_dict())
    load_timm_state_dict(model, theirs.state_dict(), strict=False)
    with torch.no_grad():
        assert off(model.forward_output(images(theirs)).logits, theirs(images(theirs))) < 1e-12


def further(theirs: nn.Module, *tokens: TokenSpec, **options: Any) -> ViT:
    """Return a ViT like the small timm models, with other tokens."""
    small = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "num_classes": 5, **options}
    return create_model("vit_tiny_patch16", **small, tokens=tokens).double().eval()


def test_positions_are_matched_by_token() -> None:
    theirs = drawn("registers-and-class")  # each of the four registers has a position
    color = TokenSpec("colour", Role.TASK, classes=3, visible=False)
    tokens = (color, TokenSpec("cls", Role.CLASS), TokenSpec("r", Role.REGISTER, 4))  # which have no position here
    model = further(theirs, *tokens)
    before = model.pos_embed[:, :1].clone()
    fit = load_timm_state_dict(model, {**theirs.state_dict(), "stray": torch.zeros(1)}, strict=False)
    assert fit.missing_keys == ["tokens.colour", "heads.colour.weight", "heads.colour.bias"]
    assert fit.unexpected_keys == ["stray"]
    assert torch.equal(model.pos_embed[:, :1], before)
    assert torch.equal(model.pos_embed[:, 1:2], theirs.pos_embed[:, :1])
    with torch.no_grad():
        assert off(model.forward_output(images(theirs)).logits, theirs(images(theirs))) < 1e-12


def test_a_token_without_position_in_the_file_has_none_afterwards() -> None:
    theirs = drawn("deit3")
    color = TokenSpec("colour", Role.TASK, classes=3, visible=False)
    model = further(theirs, TokenSpec("cls", Role.CLASS), color, layer_scale=0.1)
    load_timm_state_dict(model, theirs.state_dict(), strict=False)
    with torch.no_grad():
        assert off(model.forward_output(images(theirs)).logits, theirs(images(theirs))) < 1e-12


def test_positions_of_another_grid_are_resampled() -> None:
    theirs = vit(dynamic_img_size=True).double().eval()
    redraw(theirs, seed=3)
    model = further(theirs, TokenSpec("cls", Role.CLASS), image_size=(24, 56))
    assert load_timm_state_dict(model, theirs.state_dict(), strict=False) == ([], [])
    x = images(theirs, size=(24, 56))
    with torch.no_grad():
        assert off(model(x), theirs(x)) < 1e-12
    with pytest.raises(ModelLoadError, match=r"pos_embed is \(1, 17, 32\), expected \(1, 22, 32\)"):
        load_timm_state_dict(model, theirs.state_dict())
    odd = {**theirs.state_dict(), "pos_embed": torch.zeros(1, 19, 32)}
    with pytest.raises(ModelLoadError, match=r"pos_embed is \(1, 19, 32\)"):
        load_timm_state_dict(model, odd, strict=False)


def test_weights_without_a_matching_key_are_an_error() -> None:
    with pytest.raises(ModelLoadError, match="no key matches"):
        load_timm_state_dict(
            further(vit(), TokenSpec("cls", Role.CLASS)), {"stem.weight": torch.zeros(2)}, strict=False
        )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(vit, block_fn=ResPostBlock), "ResPostBlock"),
        (partial(vit, norm_layer=RmsNorm), r"blocks\.0\.norm1 \(RmsNorm"),
        (partial(vit, mlp_layer=GluMlp), "gate_last=True"),
        (partial(vit, act_layer="quick_gelu"), "QuickGELU"),
        (partial(vit, scale_attn_norm=True), r"attn\.norm \(LayerNorm"),
        (partial(vit, global_pool="max", class_token=False), "pool='max'"),
        (partial(vit, global_pool="avg", pool_include_prefix=True), "pool_include_prefix=True"),
        (partial(vit, fc_norm=True), "final_norm='pooled'"),
        (partial(vit, patch_drop_rate=0.5), "PatchDropout"),
        (partial(vit, drop_rate=0.1), "head_drop"),
        (partial(vit, embed_norm_layer=LayerNorm), r"patch_embed\.norm"),
        (partial(vit, VisionTransformerDistilled, reg_tokens=4), "num_reg_tokens=4"),
        (partial(nn.Linear, 3, 3), "Linear cannot be converted"),
        (partial(int, 3), "got int"),
        (partial(vit, block_fn=ParallelScalingBlock), "ParallelScalingBlock"),
    ],
)
def test_timm_models_without_an_equal_are_refused(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        from_timm(build())


class Wrapped(nn.Module):
    """A wrapper of a linear layer, without the layer's attributes."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


def _other_heads(model: Any) -> None:
    model.blocks[1].attn.num_heads, model.blocks[1].attn.head_dim = 4, 8


def _other_scale(model: Any) -> None:
    for block in model.blocks:
        block.attn.scale = 1.0


def _replaced_forward(model: Any) -> None:
    model.blocks[2].mlp.forward = lambda x: 2 * x


def _wrapped(model: Any) -> None:
    for block in model.blocks:
        block.attn.qkv = Wrapped(block.attn.qkv)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "heads": (_other_heads, r"blocks\.1\.attn \(num_heads=4"),
    "scale": (_other_scale, "scale=1.0"),
    "hook": (lambda model: model.blocks[0].register_forward_hook(lambda *_: None), r"blocks\.0 has hooks"),
    "pre-hook": (lambda model: model.register_forward_pre_hook(lambda *_: None), "the model has hooks"),
    "forward": (_replaced_forward, r"blocks\.2\.mlp has a replaced forward"),
    "identity": (lambda model: model.blocks.__setitem__(1, nn.Identity()), "Identity"),
    "no blocks": (lambda model: setattr(model, "blocks", nn.Sequential()), "out of range"),
    "wrapped": (_wrapped, "Wrapped"),
    "epsilon": (
        lambda model: setattr(model.blocks[2].norm1, "eps", 1e-3),
        r"blocks\.2\.norm1 \(eps=0\.001",
    ),
    "scaled once": (lambda model: setattr(model.blocks[0], "ls1", nn.Identity()), r"ls1"),
    "drop path": (
        lambda model: setattr(model.blocks[1].drop_path1, "drop_prob", 0.2),
        r"blocks\.1\.drop_path1 \(drop_prob=0\.2",
    ),
    "head": (lambda model: setattr(model, "head", nn.Sequential(nn.Linear(32, 5))), r"head \("),
    "head without bias": (
        lambda model: setattr(model, "head", nn.Linear(32, 5, bias=False)),
        r"head \(",
    ),
    "merged": (lambda model: vitrail.merge(model, r=1), "remove the merging"),
    "extended": (lambda model: vitrail.add_tokens(model, registers=1), "added tokens .* first"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modified_timm_models_are_refused(change: str) -> None:
    model = vit(init_values=0.1, drop_path_rate=0.1)
    from_timm(model)
    act, reason = CHANGES[change]
    act(model)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        from_timm(model)
    assert "strict" not in str(caught.value)


def test_stages_of_a_cait_must_agree() -> None:
    model = small_cait("cait_xxs24")
    for block in model.blocks_token_only:
        block.attn.num_heads, block.attn.scale = 2, 8**-0.5
    with pytest.raises(UnsupportedModel, match="num_heads"):
        from_timm(model)


def test_a_replaced_head_is_converted() -> None:
    model = vit().eval()
    model.head = nn.Linear(32, 3)  # timm's own num_classes stays 5
    ours, x = from_timm(model), images(model, torch.float32)
    assert ours.config.num_classes == 3
    torch.testing.assert_close(ours(x), model(x))


def test_merged_models_and_other_objects_are_refused() -> None:
    model = create_model("vit_tiny_patch16", image_size=32, depth=2)
    with vitrail.merge(model, r=1), pytest.raises(UnsupportedModel, match="remove the merging"):
        to_timm(model)
    for call in (to_timm, timm_state_dict, partial(load_timm_state_dict, states={})):
        with pytest.raises(UnsupportedModel, match=r"a vitrail\.ViT; got int"):
            call(3)  # type: ignore[arg-type]
    for states in (3, None, [1]):
        with pytest.raises(ModelLoadError, match="expected a state_dict"):
            load_timm_state_dict(model, states)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": (TokenSpec("cls", Role.CLASS, count=2),)}, "special tokens other than"),
        ({"tokens": (TokenSpec("cls", Role.CLASS), TokenSpec("c", Role.TASK, classes=2))}, "special tokens other than"),
        ({"tokens": (TokenSpec("r", Role.REGISTER), TokenSpec("cls", Role.CLASS))}, "special tokens other than"),
        ({"tokens": (TokenSpec("cls", Role.CLASS), TokenSpec("r", Role.REGISTER))}, "positions for all or none"),
        ({"tokens": (TokenSpec("cls", Role.CLASS, enters=1),)}, "entering first"),
        ({"tokens": (TokenSpec("cls", Role.CLASS, visible=False),)}, "all visible"),
        (
            {
                "tokens": tuple(
                    TokenSpec(f"{role.value}_token", role, position=False) for role in (Role.CLASS, Role.DISTILLATION)
                )
            },
            "which has a distillation token without position",
        ),
        ({"position": "rotary"}, "position='rotary'"),
        ({"stem": "convolutions"}, "stem='convolutions'"),
        ({"patch_drop": 0.1}, r"patch_drop=0\.1"),
        ({"drop_path": 0.1, "drop_path_uniform": True}, r"drop_path=0\.1"),
        ({"mlp": "swiglu", "pool": "attention"}, "SwiGLU with attention pooling"),
        (
            {
                "class_attention": 1,
                "talking_heads": True,
                "layer_scale": 0.1,
                "qk_norm": True,
                "tokens": (TokenSpec("cls", Role.CLASS, enters=-1),),
            },
            "qk_norm=True",
        ),
        ({"fuse": "softmax"}, "fuse='softmax'"),
        ({"talking_heads": True}, "talking_heads=True"),
        ({"class_attention": 1, "tokens": (TokenSpec("cls", Role.CLASS, enters=-1),)}, "talking_heads=False"),
        ({"image_size": (4, 32, 32), "patch_size": (2, 8, 8)}, r"patch_size=\(2, 8, 8\)"),
    ],
)
def test_models_without_an_equivalent_in_timm_are_refused(options: dict[str, Any], reason: str) -> None:
    small = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, **options}
    with pytest.raises(UnsupportedModel, match=reason):
        to_timm(ViT(model_config("vit_tiny_patch16", **small)))
