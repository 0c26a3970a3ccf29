"""Captured steps: replaying gives the same weights as running, with a fallback if capture fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.training.toys import FIELDS, difference, same, weights
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption
from vitrail.models import ViT, ViTConfig
from vitrail.runtime import block_forward as running
from vitrail.training import Event, evaluate, train, trainer
from vitrail.training import loop as loops
from vitrail.training.config import Config
from vitrail.training.model import Built
from vitrail.training.objective.objective import Terms
from vitrail.training.step import RECOMPILE_LIMIT, WARMUP_STEPS, safe_attention

NO_CLASS = {"class_token": False, "global_pool": "avg"}


class FakeGraph:
    """A fake CUDA graph: capture runs nothing, and replays use static inputs and outputs."""

    made: int
    played: int

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, function: Callable[..., list[Terms]], given: tuple[Tensor, ...]) -> Callable[..., list[Terms]]:
        self.made += 1
        own = tuple(torch.empty_like(one) for one in given)
        kept: list[Terms] = []

        def play(*new: Tensor) -> list[Terms]:
            self.replayed += 1
            for mine, theirs in zip(own, new, strict=True):
                mine.copy_(theirs)
            for place, terms in enumerate(function(*own)):
                if len(kept) <= place:
                    kept.append(terms)
                kept[place].total.copy_(terms.total)
                for name, part in terms.parts.items():
                    kept[place].parts[name].copy_(part)
            return kept

        return play


def run(photos: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capture: Any, **fields: Any) -> list[Event]:
    messages: list[Event] = []
    monkeypatch.setattr(loops, "capture_for", lambda config, world: capture)
    train(data=photos, out=str(folder), on_event=messages.append, **{**FIELDS, "epochs": 4, **fields})
    return messages


@pytest.mark.parametrize(
    "fields",
    [
        {"mixup": 0.2, "cutmix": 1.0, "drop_path": 0.2, "ema": 0.8},
        {"accumulate": 2, "clip": 0, "optimizer": "muon"},
        {"recipe": "dino", "recipe_options": {"prototypes": 8, "patches": 1.0, "reconstruct": 0.1}, "augment": "light"},
    ],
)
def test_replayed_steps_are_those_that_are_run(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Learning rates, drop path and schedules keep changing from one replay to the next."""
    capture = FakeGraph()
    usual = run(photos, tmp_path / "run", monkeypatch, None, **fields)
    replayed = run(photos, tmp_path / "replayed", monkeypatch, capture, **fields)
    assert same(weights(tmp_path / "run" / "last"), weights(tmp_path / "replayed" / "last"))
    steps = 4 * 3
    assert (capture.made, capture.replayed) == (1, steps - WARMUP_STEPS)
    losses = [[event.values["loss"] for event in messages if event.kind == "epoch"] for messages in (usual, replayed)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


def test_another_number_of_merges_is_captured_anew(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = FakeGraph()
    merged = {"merge": "r=4,over_epochs=2", "epochs": 6, "batch_size": 4}
    run(photos, tmp_path / "run", monkeypatch, None, **merged)
    run(photos, tmp_path / "replayed", monkeypatch, capture, **merged)
    assert same(weights(tmp_path / "run" / "last"), weights(tmp_path / "replayed" / "last"))
    assert capture.made == 3  # r = 0, 2 and 4


def test_steps_that_cannot_be_captured_run_eagerly(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def refuse(function: Callable[..., list[Terms]], given: tuple[Tensor, ...]) -> Callable[..., list[Terms]]:
        nonlocal tries
        tries += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    run(photos, tmp_path / "run", monkeypatch, None)
    messages = run(photos, tmp_path / "refused", monkeypatch, refuse)
    assert same(weights(tmp_path / "run" / "last"), weights(tmp_path / "refused" / "last"))
    output = [event.text for event in messages if event.kind == "note"]
    assert tries == len(output) == 1
    assert "runs eagerly (operation not permitted when stream is capturing)" in output[0]


def test_graphs_need_a_gpu(photos: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="graphs=True needs a single rank on CUDA"):
        train(data=photos, out=str(tmp_path / "run"), **{**FIELDS, "graphs": True})
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "fields", [{}, {"merge": "r=2"}, {"recipe": "dino", "augment": "light"}, {"optimizer": "muon"}]
)
def test_a_gpu_replays_what_it_runs(photos: str, tmp_path: Path, fields: dict[str, Any]) -> None:
    messages: list[Event] = []
    for name, graphs in (("run", False), ("replayed", True)):
        given = {**FIELDS, "device": "cuda", "dtype": "fp32", "compile": "off", "epochs": 4, "graphs": graphs, **fields}
        train(data=photos, out=str(tmp_path / name), on_event=messages.append, **given)
    assert not [event.text for event in messages if event.kind == "note"]
    assert difference(weights(tmp_path / "run" / "last"), weights(tmp_path / "replayed" / "last")) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", ["off", "blocks"])
def test_merged_blocks_train_by_their_kernels(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    calls = []
    fused = running.dense_forward

    def spy(*given: Any) -> Any:
        calls.append(given[1].dtype)
        return fused(*given)

    monkeypatch.setattr(running, "dense_forward", spy)
    wide = {**FIELDS, "options": {"width": 64, "depth": 2, "heads": 1}, "merge": "r=2", "device": "cuda", "epochs": 6}
    found = {}
    for dtype in ("fp32", "bf16-weights"):
        run = train(data=photos, out=str(tmp_path / dtype), **{**wide, "dtype": dtype, "compile": compiled})
        found[dtype] = evaluate(run.folder, photos, seconds=0, device="cuda").loss
        if dtype == "fp32":
            assert not calls
    if compiled == "off":
        assert set(calls) == {torch.bfloat16}
    assert found["bf16-weights"] == pytest.approx(found["fp32"], abs=0.1)


def test_the_last_epochs_may_use_plain_images(photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are preprocessed as for evaluation, or flipped, with their own labels; one captured graph serves both."""
    kinds: list[tuple[bool, bool]] = []
    capture = FakeGraph()

    class Watched(loops.Loop):
        def _batch(self, step: int) -> Any:
            images, labels, mixed = super()._batch(step)
            plain = self.augment.plain(self.loader.batch(step).images)
            same = torch.stack([(images - one).abs().amax((1, 2, 3)) < 1e-5 for one in (plain, plain.flip(-1))])
            kinds.append((bool(same.any(0).all()), bool((mixed[1] == 1).all())))
            if kinds[-1][0]:
                assert same.sum(1).tolist() != [len(images), 0], "none is flipped"
            return images, labels, mixed

    monkeypatch.setattr(trainer, "Loop", Watched)
    fields = {"mixup": 0.5, "cutmix": 1.0, "augment": "strong", "epochs": 5, "plain_epochs": 2}
    run(photos, tmp_path / "run", monkeypatch, capture, **fields)
    assert kinds == [(False, False)] * 9 + [(True, True)] * 6
    assert capture.made == 1


def test_plain_epochs_are_some_of_all_and_need_labels() -> None:
    with pytest.raises(InvalidOption, match="plain_epochs=4 exceeds epochs=3"):
        Config(data="photos", epochs=3, plain_epochs=4)
    with pytest.raises(InvalidOption, match="plain_epochs=-1: expected an integer of at least 0"):
        Config(data="photos", plain_epochs=-1)
    with pytest.raises(InvalidOption, match="does not take plain_epochs"):
        Config(data="photos", recipe="dino", plain_epochs=1)
    with pytest.raises(InvalidOption, match="plain_epochs=500 exceeds epochs"):
        Config(data="photos", plain_epochs=500).resolved(100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
def test_blocks_that_merge_are_all_compiled_to_learn_and_to_evaluate(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counter, compiling = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: compiling(block, backend=counter))
    deep = {**FIELDS, "options": {"width": 16, "depth": 5, "heads": 1}, "patch_size": 4, "merge": "r=3", "epochs": 1}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        train(data=photos, out=str(tmp_path / "run"), **{**deep, "validation": 0.25, "compile": "blocks"})
    assert counter.frame_count == 9  # first, second, then any even and any odd number, last; all but one once more


@pytest.mark.parametrize("compiled", ["off", "blocks"])
def test_there_is_room_for_graphs_while_a_compiled_model_trains(
    photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block: None)
    limits: list[int] = []

    def look(event: Event) -> None:
        limits.append(torch._dynamo.config.recompile_limit)

    before = 8
    with torch._dynamo.config.patch(recompile_limit=before):  # other libraries raise it, too
        train(data=photos, out=str(tmp_path / "run"), on_event=look, **{**FIELDS, "epochs": 1, "compile": compiled})
        assert torch._dynamo.config.recompile_limit == before
    assert max(limits) == (RECOMPILE_LIMIT if compiled == "blocks" else before)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, True),  # ours: every call looks for itself
        ({"model": "timm:vit_tiny_patch16_224", "options": {"depth": 1, "patch_size": 4}}, True),  # 65 tokens
        ({"model": "timm:vit_tiny_patch16_224", "options": {"depth": 1, "patch_size": 4, **NO_CLASS}}, False),  # 64
        ({"model": "timm:resnet10t", "options": {}}, False),  # its attention is unknown
    ],
)
def test_cudnn_attention_is_disabled_for_other_models_that_may_overflow(
    fields: dict[str, Any], allowed: bool, photos: str, tmp_path: Path
) -> None:
    pytest.importorskip("timm", reason="models of timm are trained")
    states: list[bool] = []

    def look(event: Event) -> None:
        if event.kind == "train":
            states.append(torch.backends.cuda.cudnn_sdp_enabled())

    others = {"tokens": None, "patch_size": None} if fields else {}
    assert torch.backends.cuda.cudnn_sdp_enabled()
    train(data=photos, out=str(tmp_path / "run"), on_event=look, **{**FIELDS, "epochs": 1, **others, **fields})
    assert set(states) == {allowed}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_attention_is_restored_after_an_error_unless_it_was_off() -> None:
    unknown, own = (
        Built(model, {}, InputSpec.of_arrays((0.0,), (1.0,)))
        for model in (torch.nn.Identity(), ViT(ViTConfig(width=32, depth=1, heads=2)))
    )
    with pytest.raises(RuntimeError, match="stopped"), safe_attention(unknown):
        raise RuntimeError("stopped")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with safe_attention(own):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
