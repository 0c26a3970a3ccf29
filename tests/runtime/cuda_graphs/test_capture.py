"""Captured models: equal to the model whatever the batch, the caller and the model do; graphs only where they hold."""

import copy
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.runtime.cuda_graphs.graphs import Pool, pools
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.models import create_model

__all__ = ["pools"]

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def small_vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"image_size": 32, "patch_size": 8, "width": 32, "heads": 2, "depth": 2, "num_classes": 4, **options}
    return create_model("vit_tiny_patch16", **given).eval()


def images(count: int, seed: int = 1, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 11])
def test_every_batch_gives_what_the_model_gives(pools: type[Pool], merged: bool, count: int) -> None:
    model = small_vit()
    if merged:
        vitrail.merge(model, r=3)
    fast = vitrail.capture(model, batch_sizes=(4, 1))
    batch = images(count)
    got = fast(batch)
    torch.testing.assert_close(got, expected(model, batch))
    assert not got.requires_grad
    assert pools.replays() == -(-count // 4)
    assert len(pools.made) == 1


def test_later_calls_leave_earlier_outputs_alone(pools: type[Pool]) -> None:
    model = small_vit()
    fast = vitrail.capture(model, batch_sizes=2)
    outputs = [fast(images(2, seed)) for seed in range(3)]
    for seed, output in enumerate(outputs):
        torch.testing.assert_close(output, expected(model, images(2, seed)))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass
class Named:
    logits: Tensor
    name: str = "named"


class Shaped(nn.Module):
    """A model whose output has any structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * 8 * 8, 5))
        self.structure = structure

    def forward(self, x: Tensor) -> Any:
        y = x.flatten(1) @ self.weight
        return {
            "tuple": lambda: (y, (y + 1, None)),
            "list": lambda: [y, y.t()],
            "named": lambda: Pair(y, None),
            "dict": lambda: OrderedDict(logits=y, scale=2.5),
            "dataclass": lambda: Named(y),
            "nested": lambda: {"one": Named(y * 2), "two": (Pair(y, y - 1),)},
        }[self.structure]()


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
    elif isinstance(want, Named):
        same((got.logits, got.name), (want.logits, want.name))
    elif isinstance(want, dict):
        assert list(got) == list(want)
        same(tuple(got.values()), tuple(want.values()))
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for one, two in zip(got, want, strict=True):
            same(one, two)
    else:
        assert got == want


@pytest.mark.parametrize("structure", ["tuple", "list", "named", "dict", "dataclass", "nested"])
@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_outputs_keep_their_structure(pools: type[Pool], structure: str, count: int) -> None:
    model = Shaped(structure).eval()
    fast = vitrail.capture(model, batch_sizes=3, sizes=[(3, 8, 8)])
    same(fast(images(count, size=8)), expected(model, images(count, size=8)))
    assert pools.replays() == -(-count // 3)


def test_outputs_of_transformers(pools: type[Pool]) -> None:
    transformers = pytest.importorskip("transformers", reason="outputs of its models")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    model = transformers.ViTModel(config).eval()
    vitrail.merge(model, r=2)
    fast = vitrail.capture(model, batch_sizes=(1, 4))
    got, want = fast(images(3)), expected(model, images(3))
    assert type(got) is type(want)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    torch.testing.assert_close(got.pooler_output, want.pooler_output)
    assert pools.replays() == 1


class Mean(nn.Module):
    """A model whose second output belongs to the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * 8 * 8, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.flatten(1) @ self.weight
        return y, y.mean(0)


def test_outputs_of_the_whole_batch_are_never_padded(pools: type[Pool]) -> None:
    model = Mean().eval()
    fast = vitrail.capture(model, batch_sizes=(1, 4), sizes=[(3, 8, 8)])
    for count, replays in ((4, 1), (3, 1), (1, 2), (9, 2)):
        same(fast(images(count, size=8)), expected(model, images(count, size=8)))
        assert pools.replays() == replays


def test_weights_may_change_in_place(pools: type[Pool]) -> None:
    model = small_vit()
    vitrail.merge(model, r=3)
    fast = vitrail.capture(model, batch_sizes=2)
    before = fast(images(2))
    model.load_state_dict(small_vit(num_classes=4).state_dict())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    assert not torch.allclose(fast(images(2)), before)
    torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    assert len(pools.made) == 1


def test_replaced_weights_are_recorded_anew(pools: type[Pool]) -> None:
    model = small_vit()
    fast = vitrail.capture(model, batch_sizes=2)
    head = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    head.weight = nn.Parameter(torch.randn_like(head.weight))
    torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    head.bias.data = torch.randn_like(head.bias)  # the same parameter, in other memory
    torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    assert len(pools.made) == 3
    model.blocks[1] = copy.deepcopy(model.blocks[0])
    torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    assert len(pools.made) == 4


def test_changes_of_merging_are_recorded_anew(pools: type[Pool]) -> None:
    model = small_vit()
    fast = vitrail.capture(model, batch_sizes=2)
    plain = fast(images(2))
    merging = vitrail.merge(model, r=5)
    merged = fast(images(2))
    torch.testing.assert_close(merged, expected(model, images(2)))
    assert not torch.allclose(merged, plain)
    merging.r = [0, 7]
    torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    assert len(pools.made) == 3
    merging.r = [0, 7]  # as before
    fast(images(2))
    assert len(pools.made) == 3
    merging.remove()
    torch.testing.assert_close(fast(images(2)), plain)
    assert len(pools.made) == 4


def test_hooks_traces_and_guides_run_the_model(pools: type[Pool]) -> None:
    model = small_vit()
    merging = vitrail.merge(model, r=3)
    fast = vitrail.capture(model, batch_sizes=2)
    seen: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda _, __, output: seen.append(output))
    fast(images(2))
    assert len(seen) == 1
    handle.remove()
    replays = pools.replays()
    with merging.track() as trace:
        fast(images(2))
    assert trace.groups.shape == (2, 16)
    with merging.guide(saliency=torch.rand(2, 16)):
        fast(images(2))
    assert pools.replays() == replays
    fast(images(2))
    assert pools.replays() == replays + 1
    assert len(pools.made) == 1


def test_other_inputs_and_settings_run_the_model(pools: type[Pool]) -> None:
    model = small_vit()
    vitrail.merge(model, r=2)
    fast = vitrail.capture(model, batch_sizes=2)
    others = (images(2, size=48), images(2).to(torch.float64))
    torch.testing.assert_close(fast(others[0]), expected(model, others[0]))
    with pytest.raises(RuntimeError):  # as the model itself: its weights are float32
        fast(others[1])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    with vitrail.kernels.reference():
        torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
    assert fast(images(0)).shape == (0, 4)
    assert pools.replays() == 0
    model.train()
    fast(images(2))
    model.eval()
    fast(images(2))
    assert len(pools.made) == 1


def test_keywords_run_the_model(pools: type[Pool]) -> None:
    transformers = pytest.importorskip("transformers", reason="its models take keywords")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    model = transformers.ViTModel(config).eval()
    fast = vitrail.capture(model, batch_sizes=2)
    assert len(fast(pixel_values=images(2), output_hidden_states=True).hidden_states) == 3
    assert pools.replays() == 0


def test_a_model_captured_in_autocast_runs_in_autocast(pools: type[Pool]) -> None:
    model = small_vit()
    vitrail.merge(model, r=2)
    with torch.autocast("cpu", torch.bfloat16):
        fast = vitrail.capture(model, batch_sizes=2)
        want = expected(model, images(2))
        torch.testing.assert_close(fast(images(2)), want)
        assert pools.replays() == 1
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(images(2)), expected(model, images(2)))
        assert not torch.allclose(fast(images(2)), want)
    assert len(pools.made) == 1


def test_several_sizes(pools: type[Pool]) -> None:
    model = small_vit()
    vitrail.merge(model, keep=0.5)
    fast = vitrail.capture(model, batch_sizes=(1, 2), sizes=(32, 48))
    assert fast.input_shapes == ((3, 32, 32), (3, 48, 48))
    for size in (32, 48):
        torch.testing.assert_close(fast(images(3, size=size)), expected(model, images(3, size=size)))
    assert pools.replays() == 4


def test_threads_wait_for_each_other(pools: type[Pool]) -> None:
    model = small_vit()
    merging = vitrail.merge(model, r=2)
    fast = vitrail.capture(model, batch_sizes=(1, 3))
    want = {r: {} for r in (2, 5)}
    for r in want:
        merging.r = r
        want[r] = {seed: expected(model, images(seed % 4 + 1, seed)) for seed in range(12)}
    wrong: list[int] = []

    def work(mine: range, r: int) -> None:
        for seed in mine:
            if not torch.allclose(fast(images(seed % 4 + 1, seed)), want[r][seed], atol=1e-6):
                wrong.append(seed)

    for r in (5, 2):
        merging.r = r  # all threads find the change at once
        workers = [threading.Thread(target=work, args=(range(first, 12, 4), r)) for first in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert wrong == []
    assert len(pools.made) == 3


def test_copies_and_pickles_record_for_themselves(pools: type[Pool]) -> None:
    model = small_vit()
    fast = vitrail.capture(model, batch_sizes=2)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert other.model is not model
        torch.testing.assert_close(other(images(2)), expected(model, images(2)))
    assert len(pools.made) == 3


def test_on_a_cpu_it_is_the_model_itself() -> None:
    model = small_vit()
    vitrail.merge(model, r=2)
    fast = vitrail.capture(model)
    assert not fast.is_recorded
    got = fast(images(3))
    assert torch.equal(got, expected(model, images(3)))
    assert not got.requires_grad
    assert "not recorded" in repr(fast)
    assert "ViT" in repr(fast)


def test_numbers_that_depend_on_the_images_are_refused(pools: type[Pool]) -> None:
    model = small_vit()
    fast = vitrail.capture(model, batch_sizes=2)
    vitrail.merge(model, r=2, method="threshold")
    with pytest.raises(UnsupportedInput, match="CUDA graph"):
        vitrail.capture(model)
    with pytest.raises(UnsupportedInput, match="CUDA graph"):
        fast(images(2))


def test_a_failed_recording_says_why(pools: type[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Pool, function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(pools, "record", fail)
    with pytest.raises(UnsupportedModel, match=r"ViT cannot be recorded .*operation not permitted"):
        vitrail.capture(small_vit())


def test_bad_options() -> None:
    model = small_vit()
    for sizes in ((), (0,), (1.5,), True):
        with pytest.raises(InvalidOption, match="batch_sizes"):
            vitrail.capture(model, batch_sizes=sizes)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="sizes"):
        vitrail.capture(model, sizes=[(32, -1)])
    with pytest.raises(InvalidOption, match="sizes"):
        vitrail.capture(nn.Linear(3, 3).eval())
    with pytest.raises(InvalidOption, match=r"eval\(\)"):
        vitrail.capture(small_vit().train())
    with pytest.raises(UnsupportedModel, match=r"nn\.Module"):
        vitrail.capture(lambda x: x)  # type: ignore[arg-type]


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merged", [False, True])
def test_graphs_on_a_gpu(dtype: torch.dtype, merged: bool) -> None:
    model = small_vit(width=64, depth=4).to("cuda", dtype)
    if merged:
        vitrail.merge(model, r=2)
    fast = vitrail.capture(model, batch_sizes=(1, 4, 8))
    assert fast.is_recorded
    outputs = {}
    for count in (1, 2, 4, 7, 8, 19):
        batch = images(count, count).to("cuda", dtype)
        outputs[count] = fast(batch), expected(model, batch)
    for got, want in outputs.values():
        torch.testing.assert_close(got, want, atol=3e-2 if dtype == torch.bfloat16 else 1e-4, rtol=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    batch = images(4).to("cuda", dtype)
    torch.testing.assert_close(fast(batch), expected(model, batch), atol=5e-2, rtol=0)


@GPU
def test_streams_and_threads_on_a_gpu() -> None:
    model = small_vit(width=64, depth=4).cuda()
    vitrail.merge(model, r=2)
    fast = vitrail.capture(model, batch_sizes=(1, 4))
    batches = [images(seed % 4 + 1, seed).cuda() for seed in range(64)]
    want = [expected(model, batch) for batch in batches]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(first: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(first, 64, 4):
                if not torch.allclose(fast(batches[seed]), want[seed], atol=1e-4):
                    wrong.append(seed)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
