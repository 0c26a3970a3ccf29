"""Heads by role, against values computed by hand."""

from math import log

import pytest
import torch
import torch.nn.functional as F

from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.heads import AttentionPool, Heads, Output
from vitrail.heads.by_role import mean_of_softmaxes
from vitrail.tokens import Role, TokenLayout, TokenSpan, TokenSpec

WIDTH, CLASSES, GRID = 6, 3, (1, 2, 3)
CLS, DIST = TokenSpec("cls", Role.CLASS), TokenSpec("dist", Role.DISTILLATION)
REG = TokenSpec("reg", Role.REGISTER, count=2)
COLOR = TokenSpec("color", Role.TASK, classes=4)
DEPTH = TokenSpec("depth", Role.TASK, classes=1, kind="regression")


def layout_of(*specs, grid=GRID):
    return TokenLayout(tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in specs), grid)


def made(*specs, num_classes=CLASSES, **options):
    """Return heads in float64 with random parameters, tokens, and their layout."""
    heads = Heads(specs, WIDTH, num_classes, **options).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    layout = layout_of(*specs)
    return heads, torch.randn(4, layout.num_tokens, WIDTH, dtype=torch.float64), layout


def by_hand(heads, name, token):
    return token @ heads.get_submodule(name).weight.T + heads.get_submodule(name).bias


def close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_one_class_token():
    heads, x, layout = made(CLS)
    out = heads(x, layout)
    assert isinstance(out, Output)
    assert list(heads.state_dict()) == ["cls.weight", "cls.bias"]
    assert close(out.logits, by_hand(heads, "cls", x[:, 0]))
    assert torch.equal(out.logits, out.by_role["cls"])
    assert out.features is x


def test_initial_weights():
    heads = Heads([CLS], 400, 50)
    assert heads.cls.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert heads.cls.bias.abs().max() == 0


def test_several_tokens_share_a_head_and_their_logits_are_averaged():
    two = TokenSpec("cls", Role.CLASS, count=2)
    heads, x, layout = made(REG, two)
    expected = (by_hand(heads, "cls", x[:, 2]) + by_hand(heads, "cls", x[:, 3])) / 2
    assert close(heads(x, layout).logits, expected)
    assert close(expected, by_hand(heads, "cls", x[:, 2:4].mean(1)))  # as the head of the mean token


def test_fuse():
    one, other = torch.tensor([[2.0, 0.0, -1.0]]).double(), torch.tensor([[-1.0, 0.5, 3.0]]).double()
    expected = {
        "logits": torch.tensor([[0.5, 0.25, 1.0]]).double(),
        "softmax": ((one.exp() / one.exp().sum() + other.exp() / other.exp().sum()) / 2).log(),
        "class": one,
        "distillation": other,
    }
    for fuse, value in expected.items():
        heads = Heads([CLS, DIST], 3, 3, fuse=fuse).double()
        for name in ("cls", "dist"):
            with torch.no_grad():
                heads.get_submodule(name).weight.copy_(torch.eye(3))
        x = torch.cat([one[:, None], other[:, None], torch.randn(1, 6, 3)], 1)
        out = heads(x, layout_of(CLS, DIST))
        assert close(out.logits, value), fuse
        assert close(out.by_role["cls"], one)
        assert close(out.by_role["dist"], other)


def test_mean_of_softmaxes_serves_argmax_and_cross_entropy():
    heads, x, layout = made(CLS, DIST, fuse="softmax")
    out = heads(x, layout)
    middle = (out.by_role["cls"].softmax(-1) + out.by_role["dist"].softmax(-1)) / 2
    target = torch.tensor([0, 1, 2, 0])
    assert close(out.logits.exp().sum(-1), torch.ones(4).double())
    assert close(out.logits.softmax(-1), middle)
    assert close(F.cross_entropy(out.logits, target), F.nll_loss(middle.log(), target))
    alone, x, layout = made(CLS, fuse="softmax")
    assert close(alone(x, layout).logits, alone(x, layout).by_role["cls"].log_softmax(-1))


def test_mean_of_softmaxes_survives_large_logits():
    heads = Heads([CLS, DIST], 2, 2, fuse="softmax").double()
    with torch.no_grad():
        heads.cls.weight.copy_(torch.eye(2))
        heads.dist.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1000.0, 0.0], [1000.0, 0.0], [0.0, 0.0]]]).double().requires_grad_()
    out = heads(x, layout_of(CLS, DIST, grid=(1, 1, 1))).logits
    assert close(out, torch.tensor([[0.0, -1000.0]]).double())
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_class_tokens_with_separate_heads_are_averaged_first():
    other = TokenSpec("other", Role.CLASS)
    heads, x, layout = made(CLS, other, DIST)
    a, b, c = (by_hand(heads, name, x[:, i]) for i, name in enumerate(("cls", "other", "dist")))
    assert close(heads(x, layout).logits, ((a + b) / 2 + c) / 2)
    heads, x, layout = made(CLS, other, DIST, fuse="softmax")
    a, b, c = (by_hand(heads, name, x[:, i]).softmax(-1) for i, name in enumerate(("cls", "other", "dist")))
    assert close(heads(x, layout).logits.exp(), (a + b) / 4 + c / 2)


def test_tokens_are_read_by_layout():
    heads, x, layout = made(CLS, REG, COLOR)
    moved = layout_of(COLOR, CLS, REG)
    order = [3, 0, 1, 2, *range(4, 10)]
    first, second = heads(x, layout), heads(x[:, order], moved)
    assert close(first.logits, second.logits)
    assert close(first.by_role["color"], second.by_role["color"])
    assert close(first.by_role["color"], by_hand(heads, "color", x[:, 3]))


def test_tasks_have_a_head_each_and_are_not_fused():
    heads, x, layout = made(CLS, COLOR, DEPTH)
    out = heads(x, layout)
    assert {name: tuple(value.shape) for name, value in out.by_role.items()} == {
        "cls": (4, 3),
        "color": (4, 4),
        "depth": (4, 1),
    }
    assert close(out.logits, by_hand(heads, "cls", x[:, 0]))
    assert close(out.by_role["depth"], by_hand(heads, "depth", x[:, 2]))


def test_task_tokens_alone():
    heads, x, layout = made(COLOR, DEPTH, num_classes=0)
    out = heads(x, layout)
    assert out.logits is None
    assert list(out.by_role) == ["color", "depth"]
    with pytest.raises(UnsupportedInput, match="task tokens alone"):
        heads.pooled(x, layout)


def test_mean_over_patches():
    heads, x, layout = made(REG, COLOR, pool="mean")
    out = heads(x, layout)
    assert close(out.logits, by_hand(heads, "patch", x[:, 3:].mean(1)))
    assert list(out.by_role) == ["patch", "color"]
    heads, x, layout = made(REG, pool="mean", norm_eps=1e-3)
    pooled = x[:, 2:].mean(1)
    normed = (pooled - pooled.mean(-1, keepdim=True)) / (pooled.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    assert close(heads.pooled(x, layout), normed * heads.fc_norm.weight + heads.fc_norm.bias)
    assert close(heads(x, layout).logits, by_hand(heads, "patch", heads.pooled(x, layout)))


def test_class_tokens_with_pooled_patches():
    heads, x, layout = made(CLS, DIST, pool="mean")
    out = heads(x, layout)
    assert list(out.by_role) == ["patch", "dist"]
    assert close(out.logits, (out.by_role["patch"] + out.by_role["dist"]) / 2)
    own = TokenSpec("cls", Role.CLASS, classes=5)
    heads, x, layout = made(own, pool="mean")
    out = heads(x, layout)
    assert out.by_role["cls"].shape == (4, 5)
    assert close(out.logits, out.by_role["patch"])
    heads, x, layout = made(CLS, DIST, pool="mean", fuse="class")
    assert close(heads(x, layout).logits, by_hand(heads, "patch", x[:, 2:].mean(1)))


def test_attention_pool():
    heads, x, layout = made(REG, pool="attention", attention=AttentionPool(WIDTH, 2, mlp_ratio=0, norm=False))
    assert close(heads(x, layout).logits, by_hand(heads, "patch", heads.attn_pool(x[:, 2:])))
    assert isinstance(Heads([], WIDTH, 3, pool="attention").attn_pool, AttentionPool)


def test_without_classes_logits_are_features():
    for specs, options, places in [
        ((CLS, REG), {}, [0]),
        ((CLS, DIST), {}, [0, 1]),
        ((CLS, DIST), {"fuse": "softmax"}, [0, 1]),
        ((CLS, DIST), {"fuse": "class"}, [0]),
        ((CLS, DIST), {"fuse": "distillation"}, [1]),
        ((TokenSpec("cls", Role.CLASS, count=3),), {}, [0, 1, 2]),
        ((), {"pool": "mean"}, range(6)),
    ]:
        heads, x, layout = made(*specs, num_classes=0, **options)
        out = heads(x, layout)
        assert close(out.logits, x[:, list(places)].mean(1)), (specs, options)
        assert out.by_role == {}
        assert not list(heads.parameters())


def test_logits_of_single_tokens():
    two = TokenSpec("cls", Role.CLASS, count=2)
    heads, x, layout = made(two, DIST, COLOR)
    found = heads.token_logits(x, layout)
    assert list(found) == ["cls[0]", "cls[1]", "dist"]
    assert close(found["cls[1]"], by_hand(heads, "cls", x[:, 1]))
    heads, x, layout = made(REG, pool="mean")
    assert list(heads.token_logits(x, layout)) == ["patch"]
    heads, x, layout = made(TokenSpec("cls", Role.CLASS, kind="regression"))
    assert heads.token_logits(x, layout) == {}


@pytest.mark.parametrize(
    ("fuse", "used"),
    [("logits", {"cls", "dist"}), ("softmax", {"cls", "dist"}), ("class", {"cls"}), ("distillation", {"dist"})],
)
def test_gradients_reach_exactly_the_heads_and_tokens_in_use(fuse, used):
    heads, x, layout = made(CLS, DIST, REG, COLOR, fuse=fuse)
    x.requires_grad_()
    (heads(x, layout).logits * torch.randn(4, 3)).sum().backward()
    assert {name.partition(".")[0] for name, p in heads.named_parameters() if p.grad is not None} == used
    places = {i for i in range(layout.num_tokens) if x.grad[:, i].abs().max() > 0}
    assert places == {{"cls": 0, "dist": 1}[name] for name in used}


def test_gradients_of_a_task():
    heads, x, layout = made(CLS, COLOR, DEPTH)
    x.requires_grad_()
    heads(x, layout).by_role["depth"].sum().backward()
    assert {name for name, p in heads.named_parameters() if p.grad is not None} == {"depth.weight", "depth.bias"}
    assert [i for i in range(layout.num_tokens) if x.grad[:, i].abs().max() > 0] == [2]


@pytest.mark.parametrize("fuse", ["logits", "softmax"])
@pytest.mark.parametrize("pool", ["token", "mean", "attention"])
def test_gradients_are_right(pool, fuse):
    heads, x, layout = made(TokenSpec("cls", Role.CLASS, count=2), DIST, pool=pool, fuse=fuse)
    x = x[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: heads(x, layout).logits, x)


@pytest.mark.parametrize("pool", ["token", "mean", "attention"])
def test_compiles_as_one_graph(pool):
    heads, x, layout = made(CLS, DIST, REG, COLOR, pool=pool, fuse="softmax")
    compiled = torch.compile(heads, fullgraph=True, backend="aot_eager")
    for layout_now in (layout, layout.with_grid((1, 3, 3))):
        x = torch.randn(2, layout_now.num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        plain, fast = heads(x, layout_now), compiled(x, layout_now)
        assert close(plain.logits, fast.logits)
        assert all(close(plain.by_role[name], fast.by_role[name]) for name in plain.by_role)
        grads = [torch.autograd.grad(out.logits.square().sum(), x)[0] for out in (plain, fast)]
        assert close(*grads)


def test_reset():
    heads, x, layout = made(CLS, DIST, COLOR)
    heads.eval()
    color = heads.color
    heads.reset(7)
    assert (heads.num_classes, heads.cls.out_features, heads.dist.out_features) == (7, 7, 7)
    assert heads.cls.weight.dtype is torch.float64
    assert not heads.cls.training
    assert heads.color is color
    assert heads(x, layout).logits.shape == (4, 7)
    heads.reset(0)
    assert list(heads.state_dict()) == ["color.weight", "color.bias"]
    assert close(heads(x, layout).logits, x[:, :2].mean(1))
    heads.reset(2)
    assert list(heads(x, layout).by_role) == ["cls", "dist", "color"]
    bare = Heads([], WIDTH, 0, pool="mean")
    bare.reset(5, dtype=torch.float64)
    assert bare.patch.weight.shape == (5, WIDTH)
    assert bare.patch.weight.dtype is torch.float64


def test_an_invalid_reset_changes_nothing():
    heads, x, layout = made(CLS, TokenSpec("dist", Role.DISTILLATION, classes=3))
    before = heads(x, layout)
    with pytest.raises(InvalidOption, match="cls 5, dist 3"):
        heads.reset(5)
    with pytest.raises(InvalidOption, match="num_classes"):
        heads.reset(-1)
    assert torch.equal(heads(x, layout).logits, before.logits)
    assert heads.num_classes == 3


@pytest.mark.parametrize(
    ("specs", "options", "words"),
    [
        ([REG], {}, "none among reg .register."),
        ([], {}, "no special tokens"),
        ([COLOR], {}, "none among color"),
        ([DIST], {}, "pool='token' needs a class token"),
        ([CLS], {"fuse": "distillation"}, "fuse='distillation'.*there is none"),
        ([CLS], {"fuse": "sum"}, "fuse is one of"),
        ([CLS], {"pool": "max"}, "pool is one of"),
        ([CLS], {"norm_eps": 1e-6}, "norm_eps applies to pooled patches"),
        ([CLS], {"attention": AttentionPool(WIDTH)}, "pool='attention'"),
        ([CLS, TokenSpec("dist", "distillation", classes=9)], {}, "cls 3, dist 9"),
        ([CLS, TokenSpec("dist", "distillation", kind="regression")], {}, "cannot be fused"),
        ([TokenSpec("cls", "class", kind="regression")], {"fuse": "softmax"}, "fuse='softmax' needs classification"),
        ([CLS, TokenSpec("attn_pool", "task", classes=2)], {}, "'attn_pool' cannot name"),
        ([CLS, TokenSpec("reset", "task", classes=2)], {}, "'reset' cannot name"),
        ([CLS, CLS], {}, "more than once"),
        ([CLS, DIST, TokenSpec("other", "distillation")], {}, "at most one distillation"),
    ],
)
def test_invalid_combinations(specs, options, words):
    with pytest.raises(InvalidOption, match=words):
        Heads(specs, WIDTH, CLASSES, **options)


def test_a_head_for_a_role_that_has_none():
    with pytest.raises(InvalidOption, match="registers have no head"):
        Heads([CLS, TokenSpec("reg", Role.REGISTER, classes=2)], WIDTH, CLASSES)


def test_wrong_input():
    heads, x, layout = made(CLS, REG)
    for wrong in (x[:, :-1], x[..., :-1], x[0]):
        with pytest.raises(UnsupportedInput, match="9 tokens, 6 channels"):
            heads(wrong, layout)
    other = TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=GRID)
    with pytest.raises(UnsupportedInput, match="1 class tokens named 'cls'"):
        heads(x, other)
    fewer = layout_of(CLS, TokenSpec("reg", Role.REGISTER), grid=(1, 1, 7))
    with pytest.raises(UnsupportedInput, match="2 register tokens named 'reg'"):
        heads(x, fewer)


def test_mean_of_softmaxes_by_hand():
    logits = [torch.tensor([[0.0, value]], dtype=torch.float64) for value in (0.0, log(3))]
    assert close(mean_of_softmaxes(logits).exp(), torch.tensor([[3 / 8, 5 / 8]]).double())
