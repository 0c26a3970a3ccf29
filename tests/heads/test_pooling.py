"""Attention pooling, compared with explicit loops and timm."""

from math import erf, sqrt

import pytest
import torch
from timm.layers import AttentionPoolLatent

from vitrail.errors import InvalidOption
from vitrail.heads import AttentionPool


def drawn(pool):
    pool = pool.double()
    for parameter in pool.parameters():
        torch.nn.init.normal_(parameter)
    return pool


def by_hand(pool, x):
    """Compute attention pooling in loops over samples and heads."""
    width = x.shape[-1]
    size = width // pool.num_heads
    query = pool.latent[0, 0] @ pool.q.weight.T + pool.q.bias
    rows = []
    for tokens in x:
        both = tokens @ pool.kv.weight.T + pool.kv.bias
        keys, values = both[:, :width], both[:, width:]
        gathered = []
        for head in range(pool.num_heads):
            part = slice(head * size, (head + 1) * size)
            weights = (keys[:, part] @ query[part] / sqrt(size)).exp()
            gathered.append((weights / weights.sum()) @ values[:, part])
        rows.append(torch.cat(gathered) @ pool.proj.weight.T + pool.proj.bias)
    return torch.stack(rows)


def normed(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def gelu(x):
    return x * torch.tensor([(1 + erf(value / sqrt(2))) / 2 for value in x.flatten().tolist()]).double().view_as(x)


def test_by_hand():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    bare = drawn(AttentionPool(8, 2, norm=False, mlp_ratio=0))
    assert torch.allclose(bare(x), by_hand(bare, x), atol=1e-12)
    with_norm = drawn(AttentionPool(8, 4, mlp_ratio=0, norm_eps=1e-3))
    assert torch.allclose(with_norm(x), normed(with_norm.norm, by_hand(with_norm, x)), atol=1e-12)
    whole = drawn(AttentionPool(8, 2, mlp_ratio=1.5))
    y = by_hand(whole, x)
    fc1, fc2 = whole.mlp.fc1, whole.mlp.fc2
    assert fc1.out_features == 12
    expected = y + gelu(normed(whole.norm, y) @ fc1.weight.T + fc1.bias) @ fc2.weight.T + fc2.bias
    assert torch.allclose(whole(x), expected, atol=1e-11)


def test_as_timm():
    theirs = AttentionPoolLatent(8, num_heads=2, mlp_ratio=2.0, norm_layer=torch.nn.LayerNorm).double()
    ours = drawn(AttentionPool(8, 2, mlp_ratio=2.0, norm_eps=1e-5))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_gradients():
    pool = drawn(AttentionPool(4, 2))
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pool, x)
    pool(x).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in pool.parameters())


def test_heads_by_width():
    assert [AttentionPool(width).num_heads for width in (16, 192, 768)] == [1, 3, 12]
    for width, heads in ((8, 3), (8, 0), (200, None)):
        with pytest.raises(InvalidOption, match="must divide"):
            AttentionPool(width, heads)
    for width in (0, "8", None):
        with pytest.raises(InvalidOption, match=r"width=.*expected an integer"):
            AttentionPool(width)
    with pytest.raises(InvalidOption, match="must divide"):
        AttentionPool(8, "2")
    with pytest.raises(InvalidOption, match="mlp_ratio"):
        AttentionPool(8, 2, mlp_ratio=-1)
