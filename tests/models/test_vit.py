"""``ViT`` apart from numerical parity: input sizes, video, heads, weight decay, training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.mixes import MIXES, SMALL, built, random_images
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads import Output
from vitrail.models import ViT, ViTConfig, create_model
from vitrail.models.layers import DropPath
from vitrail.tokens import Role, TokenSpec

CLASS = TokenSpec("cls", Role.CLASS)
COLOR = TokenSpec("colour", Role.TASK, classes=3)


def test_video_has_a_grid_of_three_and_any_length() -> None:
    config = ViTConfig(**{**SMALL, "image_size": (4, 16, 16), "patch_size": (2, 4, 4)})
    model = built(config)
    assert model.layout().grid == (2, 4, 4)
    with torch.no_grad():
        assert model(random_images(config)).shape == (2, 5)
        longer = random_images(config, size=(6, 8, 16))
        assert model.forward_features(longer).shape == (2, model.layout((6, 8, 16)).num_tokens, 24)
    assert model.layout((6, 8, 16)).grid == (3, 2, 4)


def test_video_patches_are_cubes() -> None:
    config = ViTConfig(**{**SMALL, "image_size": (4, 16, 16), "patch_size": (2, 4, 4)})
    model = built(config)
    x = random_images(config)
    cubes = x.unfold(2, 2, 2).unfold(3, 4, 4).unfold(4, 4, 4)  # (B, C, t, h, w, 2, 4, 4)
    cubes = cubes.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(1, 3)
    proj = model.patch_embed.proj
    expected = cubes @ proj.weight.flatten(1).T + proj.bias
    torch.testing.assert_close(model.patch_embed(x), expected)


@pytest.mark.parametrize("position", ["learned", "sincos", "rotary", "none"])
def test_a_video_of_one_frame_is_an_image(position: Any) -> None:
    config = ViTConfig(**SMALL, position=position)
    video = ViTConfig(**{**SMALL, "image_size": (1, 16, 16), "patch_size": (1, 4, 4)}, position=position)
    image, film = built(config), built(video)
    states = dict(image.state_dict())
    states["patch_embed.proj.weight"] = states["patch_embed.proj.weight"].unsqueeze(2)
    film.load_state_dict(states)
    x = random_images(config)
    with torch.no_grad():
        same = torch.allclose(film(x.unsqueeze(2)), image(x), rtol=1e-10)
    # Fixed waves are shared out among three axes instead of two.
    assert same is (position in ("learned", "none"))


def test_spectrograms_are_images_of_one_channel() -> None:
    config = ViTConfig(**{**SMALL, "image_size": (16, 64), "in_chans": 1})
    model = built(config)
    assert model.layout().grid == (1, 4, 16)
    with torch.no_grad():
        assert model(random_images(config)).shape == (2, 5)
        assert model(random_images(config, size=(16, 100))).shape == (2, 5)


@pytest.mark.parametrize("shape", [(2, 3, 15, 16), (2, 3, 16, 3), (2, 1, 16, 16), (2, 3, 16), (2, 3, 1, 16, 16)])
def test_wrong_inputs_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedInput, match=r"not divisible into patches|expected an input of"):
        ViT(ViTConfig(**SMALL))(torch.zeros(shape))


def test_forward_returns_a_tensor_or_an_output_with_tasks() -> None:
    plain, tasked = ViT(ViTConfig(**SMALL)), ViT(ViTConfig(**SMALL, tokens=(CLASS, COLOR)))
    x = random_images(plain.config, dtype=torch.float32)
    assert plain(x).shape == (2, 5)
    output = tasked(x)
    assert isinstance(output, Output)
    assert output.logits is not None
    assert {name: tuple(value.shape) for name, value in output.by_role.items()} == {"cls": (2, 5), "colour": (2, 3)}
    again = tasked.forward_head(tasked.forward_features(x))
    assert isinstance(again, Output)
    torch.testing.assert_close(again.by_role, output.by_role)
    alone = ViT(ViTConfig(**{**SMALL, "num_classes": 0}, tokens=(COLOR,)))(x)
    assert isinstance(alone, Output)
    assert alone.logits is None
    with pytest.raises(UnsupportedInput, match="have no patches"):
        plain.forward_head(torch.zeros(1, 1, 24))


def test_layout_of_a_layer_has_the_tokens_that_entered() -> None:
    tokens = (TokenSpec("late", Role.REGISTER, enters=1), CLASS, TokenSpec("last", Role.TASK, classes=2, enters=-1))
    model = ViT(ViTConfig(**SMALL, tokens=tokens, class_attention=1))
    names = [[span.name for span in model.layout(layer=layer).special] for layer in range(3)]
    assert names == [["cls"], ["late", "cls"], ["late", "cls", "last"]]
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model(random_images(model.config, dtype=torch.float32))
    assert seen == [model.layout(layer=layer).num_tokens for layer in range(2)]


def test_class_attention_keeps_patches_and_passes_gradients() -> None:
    config = MIXES["class+registers+gathering"]
    model = built(config)
    x = random_images(config)
    caught: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: caught.append(output))
    features = model.forward_features(x)
    assert torch.equal(features[:, model.layout().patches], model.norm(caught[0]))
    caught[0].retain_grad()
    model.forward_head(features).sum().backward()
    assert caught[0].grad.abs().amax((0, 2)).min() > 0  # of each single patch


def test_any_vit_can_end_in_class_attention() -> None:
    tokens = (TokenSpec("cls", Role.CLASS, enters=-1), TokenSpec("r", Role.REGISTER, count=2))
    model = create_model("deit_tiny_patch16", **SMALL, tokens=tokens, class_attention=2, mlp="swiglu", qk_norm=True)
    assert model.pos_embed is not None
    assert model.pos_embed.shape[1] == 16  # the class token has no position there, nor have registers
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 5)


def test_reset_classifier_keeps_tasks() -> None:
    model = ViT(ViTConfig(**SMALL, tokens=(CLASS, TokenSpec("teacher", Role.DISTILLATION), COLOR))).double()
    task = model.heads.colour.weight.clone()
    model.reset_classifier(7)
    output = model.forward_output(random_images(model.config))
    assert {name: value.shape[1] for name, value in output.by_role.items()} == {"cls": 7, "teacher": 7, "colour": 3}
    assert output.logits is not None
    assert output.logits.dtype == torch.float64
    assert torch.equal(model.heads.colour.weight, task)
    assert model.config.num_classes == 7
    with pytest.raises(InvalidOption):
        model.reset_classifier(-1)
    assert model.config.num_classes == 7
    model.reset_classifier(0)
    model.reset_classifier(4)
    assert model.forward_output(random_images(model.config)).logits.shape == (2, 4)  # type: ignore[union-attr]


def test_no_weight_decay_for_tokens_and_positions() -> None:
    tokens = (CLASS, TokenSpec("r", Role.REGISTER, decay=True))
    model = ViT(ViTConfig(**SMALL, tokens=tokens))
    assert model.no_weight_decay() == {"tokens.cls", "pos_embed"}
    assert model.no_weight_decay() < {name for name, _ in model.named_parameters()}


def test_initial_std_of_tokens() -> None:
    tokens = (
        TokenSpec("cls", Role.CLASS, count=200),
        TokenSpec("zero", Role.REGISTER, count=3, std=0.0),
        TokenSpec("wide", Role.REGISTER, count=200, std=0.5),
    )
    model = ViT(ViTConfig(**SMALL, tokens=tokens))
    assert model.tokens["cls"].std().item() == pytest.approx(0.02, rel=0.05)
    assert model.tokens["wide"].std().item() == pytest.approx(0.5, rel=0.05)
    assert not model.tokens["zero"].any()


def test_checkpointing_changes_no_gradient() -> None:
    config = MIXES["class+distillation+registers+tasks+mixed"]
    plain = built(config).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    for model in (plain, saving):
        sum(value.sum() for value in model.forward_output(random_images(config)).by_role.values()).backward()
    for ours, theirs in zip(plain.parameters(), saving.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_drop_path_acts_in_training_only_and_never_in_class_attention() -> None:
    config = ViTConfig(
        **SMALL, tokens=(TokenSpec("cls", Role.CLASS, enters=-1),), class_attention=2, drop_path=0.5,
        drop_path_uniform=True, dropout=0.3, attention_dropout=0.2,
    )  # fmt: skip
    model = built(config)
    x = random_images(config)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    dropping = [part for part in model.blocks_token_only.modules() if isinstance(part, nn.Dropout)]
    assert all(part.p == 0 for part in dropping)
    kept = model.blocks[0].drop_path1(torch.ones(4000, 1, 1))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert float(kept.mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["class+registers+tasks+reading", "class+distillation+gathering"])
def test_half_precision(name: str) -> None:
    model = built(MIXES[name], torch.float32)
    x = random_images(model.config, dtype=torch.float32)
    with torch.no_grad():
        exact = model.forward_output(x)
        with torch.autocast("cpu", torch.bfloat16):
            cast = model.forward_output(x)
        half = copy.deepcopy(model).bfloat16().forward_output(x.bfloat16())
    for output in (cast, half):
        assert output.logits is not None
        torch.testing.assert_close(output.logits.float(), exact.logits, rtol=0.2, atol=0.2)


def test_tokens_that_differ_from_the_config_are_refused() -> None:
    model = ViT(ViTConfig(**SMALL))
    model.tokens["cls"] = nn.Parameter(torch.zeros(1, 2, 24))
    with pytest.raises(UnsupportedModel, match=r"'cls': \(1, 2, 24\).*its config.*\(1, 1, 24\)"):
        model(torch.zeros(1, 3, 16, 16))
    model.tokens["cls"] = nn.Parameter(torch.zeros(1, 1, 24))
    model.tokens["more"] = nn.Parameter(torch.zeros(1, 1, 24))
    with pytest.raises(UnsupportedModel, match="'more'"):
        model(torch.zeros(1, 3, 16, 16))


def test_invalid_layouts() -> None:
    model = ViT(ViTConfig(**SMALL))
    for layer in (2, 99, -1, "1"):
        with pytest.raises(InvalidOption, match="expected 0 to 1"):
            model.layout(layer=layer)  # type: ignore[arg-type]
    for size in ("x", 17, (16,), (16.0, 16.0), 0, (2, 16, 16)):
        with pytest.raises(UnsupportedInput, match=r"expected \(height, width\)"):
            model.layout(size)  # type: ignore[arg-type]
    video = ViT(ViTConfig(**{**SMALL, "image_size": (4, 16, 16), "patch_size": (2, 4, 4)}))
    with pytest.raises(UnsupportedInput, match=r"size 32 .* expected \(time, height, width\)"):
        video.layout(32)


def test_vit_takes_a_config() -> None:
    with pytest.raises(InvalidOption, match="ViT takes a ViTConfig"):
        ViT({"width": 24})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pool", "meant"), [("avg", "mean"), ("map", "attention"), ("mean", "mean"), ("token", "token")]
)
def test_reset_classifier_takes_timms_pool_names(pool: str, meant: str) -> None:
    model = ViT(ViTConfig(**SMALL, tokens=(CLASS, COLOR))).double().eval()
    task = model.heads.colour.weight
    model.reset_classifier(7, pool)
    assert (model.config.pool, model.config.num_classes) == (meant, 7)
    output = model.forward_output(random_images(model.config))
    assert output.logits is not None
    assert output.logits.shape == (2, 7)
    assert model.heads.colour.weight is task
    assert not model.heads.training
    with pytest.raises(InvalidOption, match="pool='max'"):
        model.reset_classifier(3, "max")
    assert model.config.num_classes == 7


def test_features_before_the_logits() -> None:
    model = built(ViTConfig(**SMALL, tokens=(CLASS, COLOR)))
    features = model.forward_features(random_images(model.config))
    assert torch.equal(model.forward_head(features, pre_logits=True), features[:, 0])
    with pytest.raises(UnsupportedInput, match="expected features"):
        model.forward_head(features[0])


def test_compiles_as_one_graph() -> None:
    config = MIXES["class+distillation+registers+tasks+mixed"]
    model = built(config)
    x = random_images(config)
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found.by_role, model(x).by_role)


def test_blocks_with_their_own_drop_path_share_compiled_code() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    model = ViT(
        ViTConfig(image_size=16, patch_size=8, width=16, depth=6, heads=2, num_classes=3, drop_path=0.5)
    ).train()
    for block in model.blocks:
        block.compile(backend=counter)
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
    torch.compiler.reset()
    assert counter.frame_count == 2  # with drop path, and the first block without


def test_drop_path_rate_and_scaling() -> None:
    part = DropPath(0.25).train()
    x = torch.ones(4000, 2, 3)
    y = part(x)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs(float((y[:, 0, 0] == 0).float().mean()) - 0.25) < 0.03
    assert torch.equal(y, y[:, :1, :1].expand_as(y))
    part.drop_prob = 0.0
    assert part(x) is x
    part.drop_prob = 0.5
    assert part.eval()(x) is x
    assert part.train()(x.bfloat16()).dtype == torch.bfloat16
