"""Variants and modes: shared weights, equal outputs, real training steps, captured graphs."""

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bench.models import quick, tiny
from tests.extras import always
from tests.runtime.cuda_graphs.graphs import Pool, pools
from vitrail.adapters.outputs import output_tensor
from vitrail.bench import VARIANTS
from vitrail.bench._modes import CapturedGraph, prepare
from vitrail.bench._variants import build, random_batches, slice_tokens
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.models import create_model
from vitrail.surgery import Merging, merge
from vitrail.surgery.copies import copy_model

__all__ = ["pools"]


def test_variants_share_weights_and_keep_the_baseline() -> None:
    config = quick()
    base = build(config, tiny())
    variants = {name: base.variant(name, own_weights=False) for name in ("unmerged", "sliced", "merged")}
    for variant in variants.values():
        pairs = zip(variant.parameters(), base.module.parameters(), strict=True)
        assert all(mine is theirs for mine, theirs in pairs)
        assert variant is not base.module
    assert base.tokens == (15, 13, 11)
    assert Merging.of(variants["merged"]).tokens_per_layer() == [15, 13, 11]
    assert type(base.module.blocks[0]) is type(variants["unmerged"].blocks[0])
    assert type(base.module.blocks[0]) is not type(variants["sliced"].blocks[0])
    own = base.variant("merged", own_weights=True)
    assert all(mine is not theirs for mine, theirs in zip(own.parameters(), base.module.parameters(), strict=True))


def test_copies_share_buffers() -> None:
    module = nn.BatchNorm1d(3)
    assert copy_model(module, share=True).get_buffer("running_mean") is module.running_mean
    assert copy_model(module, share=False).get_buffer("running_mean") is not module.running_mean


def test_baseline_counts() -> None:
    base = build(quick(r=(2, 0, 1)), tiny())
    assert base.tokens == (15, 15, 14)
    assert base.tokens_before == 17
    merging = base.merge(base.module)
    assert (base.flops_before, base.flops_after) == (merging.flops(merged=False), merging.flops())


@pytest.mark.parametrize("proportional", [True, False])
def test_proportional_attention(proportional: bool) -> None:
    base = build(quick(proportional=proportional), tiny())
    made = base.variant("merged", own_weights=False)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        for given in (True, False):
            with merge(base.module, r=2, proportional=given):
                assert torch.equal(made(images), base.module(images)) == (given == proportional)


def test_random_batches() -> None:
    config = quick(batch=4, dtype="bf16")
    batches = random_batches(config, (2, 32, 48))
    assert [tuple(batch.shape) for batch in batches] == [(4, 2, 32, 48)] * 4
    assert all(batch.dtype == torch.bfloat16 and 0.9 < batch.float().std() < 1.1 for batch in batches)
    assert not torch.equal(batches[0], batches[1])


def test_size_must_be_whole_patches() -> None:
    with pytest.raises(InvalidOption, match="not a whole number of patches"):
        build(quick(size=(56, 64)), tiny())
    with pytest.raises(InvalidOption, match="not a whole number of patches"):
        build(quick(size=(4, 4)), tiny())


COMPARED = [*((variant, "eager") for variant in VARIANTS), ("merged", "compiled"), ("merged", "blocks")]
"""Compared in every run; test_benchmark.py compares the other rows, too."""


@pytest.mark.parametrize("row", always(COMPARED, product(VARIANTS, ("eager", "compiled", "blocks"))), ids="-".join)
@pytest.mark.usefixtures("no_inductor")
def test_all_modes_agree(row: tuple[str, str]) -> None:
    variant, mode = row
    config = quick(modes=("eager", mode) if mode != "eager" else ("eager",))
    base = build(config, tiny())
    batches = random_batches(config, base.shape)
    made = base.variant(variant, own_weights=False)
    with torch.inference_mode():
        expected = made(batches[1])
    runner = prepare(mode, base.variant(variant, own_weights=False), batches)
    assert torch.allclose(runner.step(1), expected, atol=1e-5)
    assert runner.static_bytes() == 4 * sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("mode", ["blocks", "blocks-graph"])
@pytest.mark.parametrize("variant", ["unmerged", "sliced", "merged"])
def test_blocks_mode_compiles_each_block(variant: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    config = quick()
    made = build(config, tiny()).variant(variant, own_weights=False)
    runner = prepare(mode, made, [])
    assert compiled == list(made.blocks)
    assert (runner.graph is not None) == (mode == "blocks-graph")


def test_training_step_is_adamw() -> None:
    config = quick(train=True)
    base = build(config, tiny())
    batches = random_batches(config, base.shape)
    made = base.variant("merged", own_weights=True)
    expected = base.variant("merged", own_weights=True).train()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-6)
    runner = prepare("eager", made, batches, train=True)
    weights = sum(parameter.nbytes for parameter in expected.parameters())
    assert runner.static_bytes() == weights
    for index in (0, 1):
        runner.step(index)
        expected(batches[index]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert made.training
    assert all(parameter.grad is None for parameter in made.parameters())
    for mine, theirs in zip(made.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-7)
    assert not torch.equal(made.head.weight, base.module.head.weight)
    # Two moments for each weight, and a count for each tensor.
    assert runner.static_bytes() == 3 * weights + 4 * len(list(expected.parameters()))


def test_autocast() -> None:
    config = quick(dtype="bf16", autocast=True)
    base = build(config, tiny())
    batches = random_batches(config, base.shape)
    assert batches[0].dtype == torch.float32
    made = base.variant("merged", own_weights=False)
    assert prepare("eager", made, batches, autocast=torch.bfloat16).step(0).dtype == torch.bfloat16
    assert made.head.weight.dtype == torch.float32
    own = base.variant("merged", own_weights=True)
    prepare("eager", own, batches, autocast=torch.bfloat16, train=True).step(0)


def test_graph_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of CUDA that repeats the captured call."""

    class Graph:
        replays = 0

        def replay(self) -> None:
            Graph.replays += 1
            output.copy_(doubled(calls[-1]))

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    calls: list[Tensor] = []
    output = torch.zeros(3)

    def doubled(batch: Tensor) -> Tensor:
        return 2 * batch

    def call(batch: Tensor) -> Tensor:
        calls.append(batch)
        return output

    fakes: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda graph, pool, capture_error_mode: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "memory_allocated": lambda: 100,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 175,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorded = CapturedGraph(call)
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    assert recorded(first).tolist() == [2.0, 4.0, 6.0]
    assert recorded(second).tolist() == [8.0, 10.0, 12.0]
    assert len(calls) == 4  # three warm-up calls, one captured
    assert all(batch is first for batch in calls[:3])
    assert calls[3] is not first
    assert Graph.replays == 2
    assert recorded.peak_bytes == 75
    assert first.tolist() == [1.0, 2.0, 3.0]


def test_graph_modes_capture_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        "vitrail.bench._modes.CapturedGraph", lambda call: made.append(call) or (lambda batch: "replayed")
    )
    monkeypatch.setattr(torch, "compile", lambda module, **options: ("compiled", module, options))
    model = tiny()
    assert prepare("graph", model, [torch.zeros(1)]).step(0) == "replayed"
    assert prepare("compiled-graph", model, [torch.zeros(1)]).step(0) == "replayed"
    assert made[0] is model
    assert made[1] == ("compiled", model, {"dynamic": False, "mode": None})


def test_capture_mode_runs_a_captured_model(pools: type[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"memory_allocated": 100, "reset_peak_memory_stats": None, "max_memory_allocated": 175}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    model, batches = tiny(), [torch.randn(2, 3, 64, 64) for _ in range(2)]
    merge(model, r=2)
    for autocast in (None, torch.bfloat16):
        runner = prepare("capture", model, batches, autocast=autocast)
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            for index in (0, 1):
                torch.testing.assert_close(runner.step(index), model(batches[index]))
        assert runner.graph is not None
        assert runner.graph.peak_bytes == 75
    assert [len(pool.graphs) for pool in pools.made] == [1, 1]
    assert pools.replays() == 4


def test_output_tensor() -> None:
    class Output:
        pooler_output = torch.ones(2)

    assert output_tensor(Output()).tolist() == [1.0, 1.0]
    with pytest.raises(UnsupportedInput, match="dict"):
        output_tensor({})


@pytest.mark.parametrize("name", ["vit_tiny_patch16", "cait_xxs24"])
def test_vitrail_models_can_be_sliced(name: str) -> None:
    model = create_model(name, image_size=32, patch_size=8, width=32, heads=2, depth=2, num_classes=4).eval()
    slice_tokens(model, [12, 9])
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 4)
        assert model.forward_features(torch.randn(2, 3, 32, 32)).shape[1] == 9 + (name == "cait_xxs24")
