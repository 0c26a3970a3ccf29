"""Relative position bias of merged tokens: the weighted mean over their members, wherever attention is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.test_custom_methods import Threshold
from tests.surgery.models import ALL, distance, run
from vitrail.adapters import RelativeBias, find
from vitrail.errors import BrokenPass, UnsupportedModel
from vitrail.merging import Assignment, MergeState, Method, Reduction

CASE = ALL["beit-own"]


def mean_by_loops(full: Tensor, groups: list[dict[int, float]]) -> Tensor:
    """Bias (H, M, M) between groups, each with the weight of every member."""
    out = full.new_zeros(full.shape[0], len(groups), len(groups))
    for head in range(full.shape[0]):
        for row, query in enumerate(groups):
            for column, key in enumerate(groups):
                pairs = [(a * b, full[head, i, j].item()) for i, a in query.items() for j, b in key.items()]
                out[head, row, column] = sum(w * value for w, value in pairs) / sum(w for w, _ in pairs)
    return out


@pytest.mark.parametrize("shape", [(2, 5, 5), (1, 2, 5, 5), (3, 2, 5, 5)], ids=["heads", "one", "per-image"])
def test_bias_of_merged_tokens_is_the_weighted_mean(shape: tuple[int, ...]) -> None:
    full = torch.randn(shape, dtype=torch.float64)
    bias = RelativeBias(lambda layer: full * layer)
    layout = vitrail.TokenLayout.of("class", grid=(1, 2, 2))
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    state = MergeState((1, 1), positions=bias.coordinates(layout, x, None).expand(3, -1, -1))
    assert bias.bias(1, None) is not None
    assert torch.equal(bias.bias(1, state.positions), full.expand(3, 2, 5, 5))  # type: ignore[arg-type]
    weight = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]], dtype=torch.float64).expand(3, -1)
    first = Assignment(torch.tensor([[0, 1, 2, 2, 1], [0, 1, 1, 1, 2], [0, 3, 3, 2, 1]]), 4)
    x, state = state.apply(x, Reduction(first, weight=weight))
    groups = [
        [{0: 1}, {1: 2, 4: 1}, {2: 1}],
        [{0: 1}, {1: 2, 2: 1}, {4: 1}],
        [{0: 1}, {4: 1}, {}, {1: 2, 2: 1}],
    ]
    merged = bias.bias(2, state.positions)
    assert merged is not None
    for image, members in enumerate(groups):
        present = [place for place, some in enumerate(members) if some]
        own = 2 * full.expand(3, 2, 5, 5)[image]
        wanted = mean_by_loops(own, [members[place] for place in present])
        assert torch.allclose(merged[image][:, present][:, :, present], wanted, rtol=0, atol=1e-12)
    assert merged.isfinite().all()  # groups without a share, too


class Recorder(Method):
    """Merge the last patches, and keep the attention that the method sees."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place  # type: ignore[assignment]
        self.seen: list[tuple[Tensor, Tensor]] = []

    def reduce(self, context, r):
        self.seen.append((context.attention([0, 1, -1]), context.attention()))
        batch, length = context.x.shape[:2]
        target = torch.arange(length).clamp_max(length - r - 1)
        return Reduction(Assignment(target.expand(batch, -1), length - r))


@pytest.mark.parametrize("place", ["before", "between"])
def test_attention_that_a_method_sees_has_the_bias(place: str) -> None:
    model, images = CASE.model(), CASE.images()
    plain = vitrail.record(model, images, "attention", queries=range(17))
    method = Recorder(place)
    with vitrail.merge(model, r=[2, 0, 0], method=method):
        run(model, images, CASE)
    (rows, received), *_ = method.seen
    first = plain.attention[0]
    assert distance(rows, first[:, :, [0, 1, -1]]) < 1e-12
    assert distance(received, first.mean(2)) < 1e-12


@pytest.mark.parametrize("gate", [0.0, -2.0])
def test_added_tokens_have_no_position_bias(gate: float) -> None:
    """One block by hand: the added token is the second of one long sequence, with bias 0 to and from all others."""
    model, images = CASE.model(), CASE.images()
    model.blocks = model.blocks[:1]
    added = vitrail.add_tokens(model, registers=1)
    added.open(gate)
    block, attention = model.blocks[0], model.blocks[0].attn
    with torch.no_grad():
        out = added(images)
        patches = model.patch_embed(images)
        token = added.tokens.values["registers"].expand(len(images), -1, -1)
        x = torch.cat([model.cls_token.expand(len(images), -1, -1), token, patches], 1)
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        projected = torch.nn.functional.linear(block.norm1(x), attention.qkv.weight, bias)
        q, k, v = projected.unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        others = [0, *range(2, 18)]
        scores = q @ k.transpose(-1, -2) / 4
        own = torch.zeros(2, 18, 18, dtype=torch.float64)
        own[:, torch.tensor(others).unsqueeze(1), torch.tensor(others)] = attention._get_rel_pos_bias()[0]
        own[:, others, 1] = gate
        mixed = ((scores + own).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + block.gamma_1 * attention.proj(mixed)
        x = x + block.gamma_2 * block.mlp(block.norm2(x))
        wanted = model.forward_head(model.norm(x[:, others]))
    assert distance(out.logits, wanted) < 1e-9
    assert distance(out.features, added.tokens.norm(x[:, 1:2])) < 1e-9


def test_padding_has_no_weight() -> None:
    model, images = CASE.model(), CASE.images(batch=3)
    with vitrail.merge(model, r=4, method=Threshold(0.6)) as merging, merging.track() as trace:
        together = run(model, images, CASE)
        assert (trace.sizes == 0).any()
        alone = torch.cat([run(model, image[None], CASE) for image in images])
    assert distance(together, alone) < 1e-9


def test_blocks_by_themselves_and_registers_are_refused() -> None:
    model = CASE.model()
    with vitrail.merge(model, r=0), pytest.raises(BrokenPass, match=r"position.*call the model"):
        model.blocks[0](torch.randn(1, 17, 32, dtype=torch.float64))
    with pytest.raises(UnsupportedModel, match="position bias"):
        vitrail.test_time_registers(model, neurons={0: (1,)})
    unbiased = ALL["beit-none"].model()
    with vitrail.test_time_registers(unbiased, neurons={0: (1,)}) as handle:
        assert handle.is_active
    assert find(unbiased).adapter.resizes(unbiased) is False
