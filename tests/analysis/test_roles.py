"""Roles: planted copies, planted differences, known divergences."""

import json
from math import log2

import pytest
import timm
import torch
import transformers as hf
from torch import nn

import vitrail
from tests.surgery.models import ALL
from vitrail.adapters import head_outputs
from vitrail.analysis.roles import (
    Collapse,
    Thresholds,
    cosine_matrix,
    disagreement,
    find_collapsed,
    measure_roles,
    token_attention,
    token_cosines,
    token_parameters,
)
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.heads import Heads
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenLayout, TokenSpan, TokenSpec

GRID = (1, 2, 2)
LAYOUT = TokenLayout.of((Role.CLASS, 2), Role.DISTILLATION, (Role.REGISTER, 2), grid=GRID)


def distilled(**options):
    """A tiny distilled DeiT with every parameter drawn."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = timm.models.deit.VisionTransformerDistilled(**{**sizes, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def own(*tokens, **options):
    """One of our models, tiny, with every parameter drawn."""
    sizes = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 3, "heads": 2, "num_classes": 5}
    model = ViT(ViTConfig(**{**sizes, **options}, tokens=tokens))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_cosines_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-6.0, -8.0], [4.0, -3.0], [0.0, 0.0], [1.0, 0.0]])
    cosine = cosine_matrix(x)
    assert cosine[0].tolist() == pytest.approx([1, 0, -1, 0, 0, 0.6])
    assert cosine[1].tolist() == [0, 1, 0, 0, 1, 0]  # two tokens of zeros are the same token
    assert torch.equal(cosine, cosine.T)


def planted():
    """Two layers and three images of five tokens whose cosines are known: unit vectors and sums of them."""
    axis = torch.eye(8, dtype=torch.float64)
    first = [axis[0], axis[0], axis[0], axis[1], axis[2]]
    second = [axis[0], axis[0] + axis[1], axis[2], axis[3], -axis[3]]
    layers = [torch.stack([image * torch.stack(tokens) for image in (1, 2, 5)]) for tokens in (first, second)]
    return torch.stack(layers)


def test_planted_tokens():
    found = token_cosines(planted(), LAYOUT, (4, 9))
    assert found.layers == (4, 9)
    assert found.within["class"].tolist() == pytest.approx([1, 0.5**0.5])
    assert found.within["register"].tolist() == pytest.approx([0, -1])
    assert list(found.within) == ["class", "register"]  # one distillation token has no pair
    assert found.between["class, distillation"].tolist() == pytest.approx([1, 0])
    assert found.between["class, register"].tolist() == pytest.approx([0, 0])
    assert found.between["distillation, register"].tolist() == pytest.approx([0, 0])
    assert found.matrix.shape == (2, 5, 5)
    assert torch.allclose(found.matrix.diagonal(dim1=1, dim2=2), torch.ones(2, 5).double())


def test_centered_cosine_ignores_constant_parts():
    layout = TokenLayout.of((Role.REGISTER, 3), grid=GRID)
    message, noise = torch.randn(2, 50, 1, 64).double()
    constant = 30 * torch.randn(1, 2, 64).double()
    tokens = torch.cat([message + constant, noise], 1)[None]
    found = token_cosines(tokens, layout)
    assert abs(found.matrix[0, 0, 1]) < 0.6
    assert found.centred[0, 0, 1].item() == pytest.approx(1)
    assert abs(found.centred[0, 0, 2]) < 0.1
    still = token_cosines(torch.full((1, 7, 3, 4), 0.1), layout)  # tokens that never vary
    assert torch.equal(still.centred, torch.ones(1, 3, 3).double())
    assert token_cosines(tokens[:, :1], layout).centred is None


def test_several_tasks_are_one_role():
    layout = TokenLayout((TokenSpan(Role.TASK, 1, "color"), TokenSpan(Role.TASK, 1, "shape")), GRID)
    tokens = torch.eye(2).expand(1, 3, 2, 2)
    found = token_cosines(tokens, layout)
    assert found.tokens == ("color", "shape")
    assert found.within["task"].tolist() == [0]
    assert found.between == {}


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 3, 5), (0, 3, 5, 8), (2, 0, 5, 8)])
def test_wrong_tokens(shape):
    with pytest.raises(UnsupportedInput, match=r"expected .L, B, 5, D"):
        token_cosines(torch.ones(shape), LAYOUT)


def test_tokens_that_are_not_finite():
    tokens = planted()
    tokens[1, 2, 0, 0] = torch.nan
    with pytest.raises(UnsupportedInput, match="number 2"):
        token_cosines(tokens, LAYOUT)


def test_known_divergences():
    certain = [[50.0, -50.0], [50.0, -50.0]]
    logits = {
        "a": torch.tensor(certain),
        "same": torch.tensor(certain) + 3.0,
        "opposite": -torch.tensor(certain),
        "half": torch.tensor([certain[0], [-50.0, 50.0]]),
        "even": torch.tensor([[0.0, -1e-6], [0.0, -1e-6]]),
    }
    found = disagreement(logits)
    assert found.heads == tuple(logits)
    assert found.argmax[0].tolist() == [0, 0, 1, 0.5, 0]
    # A certain answer against an even one: H(3/4, 1/4) - 1/2, in bits.
    even = -(0.75 * log2(0.75) + 0.25 * log2(0.25)) - 0.5
    assert found.divergence[0].tolist() == pytest.approx([0, 0, 1, 0.5, even], abs=1e-6)
    assert torch.equal(found.divergence, found.divergence.T)
    log_probabilities = {name: value.log_softmax(-1) for name, value in logits.items()}
    assert torch.allclose(disagreement(log_probabilities).divergence, found.divergence)


def test_heads_that_cannot_be_compared():
    for logits in ({}, {"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, {"a": torch.ones(3)}):
        with pytest.raises(UnsupportedInput, match="heads are compared"):
            disagreement(logits)


def test_attention_of_tokens():
    layout = TokenLayout.of((Role.REGISTER, 3), grid=GRID)
    rows = torch.zeros(2, 1, 3, 7)
    rows[:, :, 0, 3] = rows[:, :, 1, 3] = 1.0
    rows[:, :, 2, 5:] = 0.5
    found = token_attention(rows, layout)
    assert found.overlap.cosine[0].tolist() == pytest.approx([1, 1, 0])
    assert found.overlap.divergence[0].tolist() == pytest.approx([0, 0, 1])
    assert found.spread.effective.tolist() == pytest.approx([1, 1, 2])


def test_collapsed_pairs_have_their_threshold():
    tokens = planted()[:1]
    found = find_collapsed(token_cosines(tokens, LAYOUT))
    assert {(one.first, one.second) for one in found} == {
        ("class 1", "class 2"),
        ("class 1", "distillation"),
        ("class 2", "distillation"),
    }
    assert found[0] == Collapse("tokens", "class 1", "class 2", pytest.approx(1), 0.99)
    assert find_collapsed(token_cosines(planted(), LAYOUT)) == ()  # the last layer counts
    assert find_collapsed(token_cosines(planted(), LAYOUT), thresholds=Thresholds(tokens=0.7))[0].value < 0.71


def test_heads_collapse_only_with_equal_predictions():
    layout = TokenLayout.of(Role.CLASS, grid=GRID)
    cosines = token_cosines(torch.ones(1, 2, 1, 4), layout)
    equal = disagreement({"a": torch.tensor([[5.0, 0.0]]), "b": torch.tensor([[5.01, 0.0]])})
    untrained = disagreement({"a": torch.tensor([[0.01, 0.0]]), "b": torch.tensor([[0.0, 0.01]])})
    assert [one.where for one in find_collapsed(cosines, heads=equal)] == ["heads"]
    assert untrained.divergence[0, 1] < 0.001
    assert find_collapsed(cosines, heads=untrained) == ()


def test_a_distilled_model():
    model = distilled()
    images = torch.randn(6, 3, 16, 16)
    found = measure_roles(model, images, batch_size=4, attention_layers=(0, -1))
    assert found.images == 6
    assert found.cosines.tokens == ("class", "distillation")
    assert found.cosines.layers == (0, 1, 2)
    recorded = vitrail.record(model, images)
    x = torch.stack([recorded.tokens[layer][:, :2] for layer in range(3)]).double()
    expected = nn.functional.cosine_similarity(x[:, :, 0], x[:, :, 1], dim=-1).mean(1)
    assert torch.allclose(found.cosines.between["class, distillation"], expected)
    cosine = nn.functional.cosine_similarity(model.cls_token[0, 0], model.dist_token[0, 0], dim=0)
    assert found.parameters.matrix[0, 1].item() == pytest.approx(cosine.item(), abs=1e-6)
    model.distilled_training = True
    model.train()
    with torch.no_grad():
        one, other = model(images)
    assert found.heads.heads == ("class", "distillation")
    assert found.heads.argmax[0, 1].item() == pytest.approx((one.argmax(1) != other.argmax(1)).double().mean().item())
    assert torch.allclose(found.heads.divergence, disagreement({"a": one, "b": other}).divergence, atol=1e-5)
    assert list(found.attention) == [0, 2]
    rows = vitrail.record(model.eval(), images, "attention").attention[2]
    assert torch.allclose(found.attention[2].overlap.cosine, token_attention(rows, recorded.layout).overlap.cosine)
    assert found.collapsed == ()
    json.dumps(found.to_dict(), allow_nan=False)


def test_planted_collapse_in_a_model():
    model = distilled()
    with torch.no_grad():
        model.dist_token.copy_(model.cls_token)
        model.pos_embed[:, 1] = model.pos_embed[:, 0]
        model.head_dist.load_state_dict(model.head.state_dict())
    found = measure_roles(model, torch.randn(3, 3, 16, 16))
    assert {one.where for one in found.collapsed} == {"tokens", "parameters", "heads", "attention"}
    assert found.cosines.between["class, distillation"].tolist() == pytest.approx([1, 1, 1])
    assert found.heads.argmax.abs().max() == 0


@pytest.mark.parametrize(("std", "same"), [(1e-6, True), (0.02, False)])
def test_registers_with_no_position_and_a_tiny_spread_are_one_register(std, same):
    """In every layer and before training; the directions of their parameters do not show it."""
    model = timm.create_model("test_vit", img_size=32, reg_tokens=4, no_embed_class=True, num_classes=0).eval()
    nn.init.normal_(model.reg_token, std=std)
    found = measure_roles(model, torch.randn(2, 3, 32, 32))
    assert found.heads is None
    assert list(found.cosines.within) == ["register"]
    assert (found.cosines.within["register"] > 0.9999).all() == same
    assert found.parameters.matrix[1:, 1:].triu(1).max() < 0.5
    pairs = {(one.first, one.second) for one in found.collapsed if one.where == "tokens"}
    assert (("register 1", "register 2") in pairs) == same


def test_uniform_attention_is_no_collapse():
    layout = TokenLayout.of((Role.REGISTER, 2), grid=GRID)
    cosines = token_cosines(torch.eye(2).expand(1, 1, 2, 2), layout)
    even = torch.full((1, 1, 2, 6), 1 / 6)
    narrow = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.0, 0.0]).expand(1, 1, 2, 6)
    assert find_collapsed(cosines, attention={0: token_attention(even, layout)}) == ()
    assert [one.where for one in find_collapsed(cosines, attention={0: token_attention(narrow, layout)})] == [
        "attention"
    ]


@pytest.mark.parametrize(
    "name", ["timm-registers", "timm-dinov2-registers", "eva-dinov3", "hf-deit", "hf-registers-head"]
)
def test_other_models(name):
    case = ALL[name]
    model = case.model(torch.float32)
    found = measure_roles(model, case.images(torch.float32), call=case.call)
    special = vitrail.record(model, case.images(torch.float32), call=case.call).layout.num_special
    assert len(found.cosines.tokens) == special > 1
    assert found.parameters.tokens == found.cosines.tokens
    assert found.cosines.matrix.isfinite().all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_teacher_model_of_transformers():
    config = hf.DeiTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    config.num_labels = 4
    model = hf.DeiTForImageClassificationWithTeacher(config).eval()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        out = model(images)
    found = measure_roles(model, images)
    expected = disagreement({"class": out.cls_logits, "distillation": out.distillation_logits})
    assert torch.allclose(found.heads.divergence, expected.divergence, atol=1e-9)


def test_a_merged_model_is_measured_and_left_alone():
    model = distilled(img_size=32)
    merging = vitrail.merge(model, r=2)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
    found = measure_roles(model, images)
    assert found.cosines.tokens == ("class", "distillation")
    with torch.no_grad():
        assert torch.equal(model(images), before)
    merging.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_errors(toy):
    with pytest.raises(UnsupportedInput, match="no special tokens"):
        measure_roles(ALL["timm-gap-no-class"].model(), ALL["timm-gap-no-class"].images())
    for model in (nn.Linear(2, 2), None):
        with pytest.raises(UnsupportedModel):
            measure_roles(model, torch.randn(1, 3, 8, 8))
    with pytest.raises(InvalidOption, match="layers are"):
        measure_roles(distilled(), torch.randn(1, 3, 16, 16), attention_layers=(7,))
    with pytest.raises(UnsupportedInput, match="one or more"):
        measure_roles(distilled(), [])


def test_a_single_token(toy):
    found = measure_roles(toy, torch.randn(2, 3, 16, 16).double())
    assert found.cosines.matrix.shape == (3, 1, 1)
    assert found.cosines.within == found.cosines.between == {}
    assert found.parameters is None  # this library's name for its token is not known
    assert found.heads is None
    assert found.collapsed == ()


def test_parameters_of_our_models_are_assigned_by_name():
    model = own(TokenSpec("cls", Role.CLASS, 2), TokenSpec("color", Role.TASK, classes=3))
    found = token_parameters(model, model.layout())
    assert list(found) == ["class 1", "class 2", "color"]
    assert torch.equal(found["class 2"], model.tokens["cls"][0, 1])
    assert token_parameters(model, TokenLayout((TokenSpan(Role.CLASS, 3, "cls"),), GRID)) == {}


def test_recording_logits_by_role():
    specs = [TokenSpec("cls", Role.CLASS, count=2), TokenSpec("head", Role.TASK, classes=3)]
    layout = TokenLayout(tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in specs), GRID)
    model = nn.ModuleDict({"heads": Heads(specs, 4, 3)})
    x = torch.randn(2, layout.num_tokens, 4)
    with head_outputs(model) as found:
        model["heads"](x, layout=layout)
        model["heads"](x, layout)
    assert list(found) == ["cls[0]", "cls[1]"]
    assert [len(parts) for parts in found.values()] == [2, 2]
    assert torch.equal(found["cls[1]"][0], model["heads"].cls(x[:, 1]).detach())
    assert not model["heads"]._forward_hooks


GATHERING = (
    TokenSpec("cls", Role.CLASS, enters=-1),
    TokenSpec("r", Role.REGISTER, 2),
    TokenSpec("teacher", Role.DISTILLATION, enters=-1, visible=False),
)


def test_tokens_of_a_class_attention_stage():
    model = own(*GATHERING, class_attention=2)
    images = torch.randn(3, 3, 16, 16)
    found = measure_roles(model, images, batch_size=2)
    assert found.cosines.tokens == ("class", "register 1", "register 2", "distillation")
    assert found.cosines.layers == (3, 4)
    assert found.parameters.tokens == found.cosines.tokens
    with torch.no_grad():
        model.norm = nn.Identity()  # recordings are from before it
        features = model.forward_features(images)[:, :4]
    assert torch.allclose(found.cosines.matrix[-1], cosine_matrix(features).mean(0), atol=1e-6)
    assert found.heads.heads == ("cls", "teacher")
    assert list(found.attention) == [4]
    assert found.attention[4].tokens == ("class", "distillation")
    assert found.notes == ()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_attention_of_a_class_attention_stage():
    model = own(*GATHERING, class_attention=2)
    block, seen = model.blocks_token_only[1], []
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    found = measure_roles(model, torch.randn(1, 3, 16, 16))
    (queries,), others = seen[0][0], seen[0][1]
    with torch.no_grad():
        weights = block.weights(queries, **others)
        x = block.norm1(torch.cat([queries, others["others"]], 1))
        mixed = (weights @ block.attn._heads(block.attn.v(x))).transpose(1, 2).flatten(2)
        assert torch.allclose(block.attn.proj(mixed), block.attn(x, 2, mask=others["mask"]), atol=1e-5)
    assert weights[:, :, 0, 1].abs().max() == 0  # only the teacher attends to itself
    maps = weights[..., 4:]
    cosine = nn.functional.cosine_similarity(maps[:, :, 0], maps[:, :, 1], dim=-1).mean()
    assert found.attention[4].overlap.cosine[0, 1].item() == pytest.approx(cosine.item(), abs=1e-5)


def test_a_cait_is_measured_where_its_class_token_is():
    model = vitrail.create_model("cait_xxs24", image_size=32, patch_size=8, width=32, heads=2, depth=2, num_classes=4)
    images = torch.randn(2, 3, 32, 32)
    found = measure_roles(model, images, attention_layers=(0, -1))
    assert found.cosines.tokens == ("class",)
    assert found.cosines.layers == (2, 3)
    assert list(found.attention) == [3]
    assert found.notes == (
        "no attention of layer 0: its heads mix their weights after the softmax, so weights may be negative",
    )
    with vitrail.merge(model, r=2, unmerge=False):
        assert "are merged" in measure_roles(model, images).notes[0]
    with pytest.raises(InvalidOption, match="from -4 to 3"):
        measure_roles(model, images, attention_layers=[4])
    json.dumps(found.to_dict(), allow_nan=False)


def test_talking_heads_have_no_maps():
    model = own(TokenSpec("cls", Role.CLASS, 2), talking_heads=True)
    found = measure_roles(model, torch.randn(2, 3, 16, 16))
    assert found.attention == {}
    assert "layer 2" in found.notes[0]
    assert found.cosines.matrix.shape == (3, 2, 2)
    assert found.parameters is not None
    assert found.heads.heads == ("cls[0]", "cls[1]")


def test_attention_may_be_left_out():
    for none in ((), []):
        found = measure_roles(distilled(), torch.randn(2, 3, 16, 16), attention_layers=none)
        assert (found.attention, found.notes, found.images) == ({}, (), 2)


def test_heads_of_added_tokens_are_compared():
    model = distilled()
    images = torch.randn(5, 3, 16, 16)
    with vitrail.add_tokens(model, classes=2, tasks={"breed": 5}) as added:
        for head in added.tokens.heads.values():
            nn.init.normal_(head.weight)
        found = measure_roles(model, images, batch_size=2)
        with torch.no_grad():
            features = added(images).features
            output = [added.tokens.heads["classes"](features[:, index]) for index in range(2)]
    assert found.heads.heads == ("class", "distillation", "classes[0]", "classes[1]")
    expected = disagreement({"a": output[0], "b": output[1]})
    assert found.heads.argmax[2, 3] == expected.argmax[0, 1]
    assert found.heads.divergence[2, 3].item() == pytest.approx(expected.divergence[0, 1].item(), abs=1e-6)


def test_heads_for_other_classes_are_left_out():
    model = distilled()
    with vitrail.add_tokens(model, classes=1, num_classes=7):
        assert measure_roles(model, torch.randn(2, 3, 16, 16)).heads.heads == ("class", "distillation")


def test_added_tokens_of_a_model_with_class_attention():
    model = own(*GATHERING, class_attention=1)
    with vitrail.add_tokens(model, registers=2):
        found = measure_roles(model, torch.randn(2, 3, 16, 16))
    assert found.cosines.tokens[-2:] == ("registers 1", "registers 2")
    assert found.parameters.tokens == found.cosines.tokens


def test_videos():
    model = own(TokenSpec("cls", Role.CLASS, 2), image_size=(4, 8, 8), patch_size=(2, 4, 4))
    found = measure_roles(model, torch.randn(2, 3, 6, 8, 8))
    assert found.cosines.matrix.shape == (3, 2, 2)
    assert found.attention[2].spread.patches == 12
