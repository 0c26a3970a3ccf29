"""``run``: every variant in every mode, on a fake clock."""

import warnings
from typing import Any

import pytest
import torch

from tests.bench.models import NAME, quick, tiny
from tests.surgery.models import ALL
from vitrail.bench import BenchConfig, benchmark, run
from vitrail.bench._modes import CapturedGraph, Runner
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, VitrailWarning

pytestmark = pytest.mark.usefixtures("short_timing")


@pytest.mark.usefixtures("counting_clock")
def test_all_variants_in_all_modes(no_inductor: None) -> None:
    messages: list[str] = []
    config = quick(modes=("eager", "compiled", "blocks"), seconds=1.0)
    model = tiny(depth=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(config, model=model, tell=messages.append)
    assert [(row.variant, row.mode) for row in result.rows] == [
        *(("unmerged", "eager"), ("unmerged", "compiled"), ("unmerged", "blocks")),
        *(("sliced", "eager"), ("sliced", "compiled"), ("sliced", "blocks")),
        *(("merged", "eager"), ("merged", "compiled"), ("merged", "blocks")),
    ]
    assert result.failed == ()
    for row in result.rows:
        assert row.ms == pytest.approx(250.0)
        assert row.images_per_s == pytest.approx(2 / 0.25)
        assert row.ready_s == 1.0
        assert row.peak_mb is None
        assert row.samples == 5
        assert (row.difference is None) == (row.mode == "eager")
        assert row.difference is None or row.difference < 1e-5
    assert (result.speedup, result.efficiency, result.ratio("sliced", "eager")) == (1.0, 1.0, 1.0)
    assert result.tokens_per_layer == (15, 13)
    assert (result.tokens_before, result.size) == (17, (64, 64))
    assert result.flops_after < result.flops_before
    assert result.startup_s == 1.0
    assert messages[0] == f"building {NAME}"
    assert "preparing merged, blocks" in messages
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(hasattr(part, "_vitrail_plan") for part in model.modules())
    assert result.machine["versions"]["torch"] == torch.__version__
    assert result.machine["threads"] == torch.get_num_threads()


@pytest.mark.usefixtures("counting_clock")
def test_named_model_at_a_size() -> None:
    result = run(BenchConfig(NAME, r=1, batch=1, device="cpu", size=(64, 96), seconds=0.01))
    assert result.tokens_before == 25
    assert result.tokens_per_layer == tuple(range(24, 12, -1))
    assert result.startup_s is None
    assert {row.mode for row in result.rows} == {"eager"}


def test_real_times_are_plausible() -> None:
    result = run(quick(seconds=0.05), model=tiny())
    assert all(0 < row.ms_least <= row.ms_low <= row.ms <= row.ms_high < 60_000 for row in result.rows)
    assert all(row.ready_s > 0 for row in result.rows)


@pytest.mark.usefixtures("counting_clock")
def test_training() -> None:
    result = run(quick(train=True), model=tiny())
    assert len(result.rows) == 3
    assert all(row.difference is None for row in result.rows)


@pytest.mark.usefixtures("counting_clock")
def test_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: before + 1)
    result = run(quick(threads=before + 1), model=tiny())
    assert result.machine["threads"] == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("counting_clock")
def test_attention_backend_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[tuple[bool, bool, bool]] = []

    def state() -> tuple[bool, bool, bool]:
        cuda = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()

    before = state()
    run(quick(attention="math"), model=tiny(), tell=lambda text: states.append(state()))
    assert set(states) == {(False, False, True)}
    assert state() == before


@pytest.mark.usefixtures("counting_clock")
def test_failed_mode_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = benchmark._prepare_one

    def prepare(config: BenchConfig, base: Any, variant: str, mode: str, *rest: Any) -> Any:
        if mode == "compiled" and variant == "merged":
            raise RuntimeError("the compiler\nfell over")
        return whole(config, base, variant, "eager", *rest)

    monkeypatch.setattr(benchmark, "_prepare_one", prepare)
    monkeypatch.setattr(benchmark, "_start_compiler", lambda *given: None)
    result = run(quick(modes=("eager", "compiled")), model=tiny())
    assert [(row.variant, row.mode) for row in result.rows][-2:] == [("sliced", "compiled"), ("merged", "eager")]
    assert [(entry.variant, entry.mode, entry.reason) for entry in result.failed] == [
        ("merged", "compiled", "RuntimeError: the compiler fell over")
    ]


@pytest.mark.usefixtures("counting_clock")
def test_limit_skips_a_mode_for_all_variants(no_inductor: None) -> None:
    result = run(quick(modes=("eager", "compiled"), limit=0.5), model=tiny())
    assert {row.mode for row in result.rows} == {"eager"}
    assert [(entry.variant, entry.mode) for entry in result.failed] == [
        *(("unmerged", "compiled"), ("sliced", "compiled"), ("merged", "compiled"))
    ]
    assert "no time left" in result.failed[0].reason


@pytest.mark.usefixtures("counting_clock")
def test_check_can_be_skipped() -> None:
    assert run(quick(check=False), model=tiny()).check is None


@pytest.mark.usefixtures("counting_clock")
def test_fp16_on_cpu_warns() -> None:
    with pytest.warns(VitrailWarning, match="fp16 on a CPU"):
        result = run(quick(dtype="fp16", check=False), model=tiny())
    assert "fp16 on a CPU" in result.notes[0]


@pytest.mark.usefixtures("counting_clock")
def test_saturation_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(quick(r=8), model=tiny())
    assert len([entry for entry in caught if issubclass(entry.category, VitrailWarning)]) == 1
    assert result.tokens_per_layer == (9, 5, 3)


def test_invalid_models_and_sizes() -> None:
    with pytest.raises(ModelLoadError, match="timm has no model named"):
        run(BenchConfig("timm:no_such_model", device="cpu"))
    with pytest.raises(InvalidOption, match="3 layers, the list 2"):
        run(quick(r=(1, 2)), model=tiny())
    with pytest.raises(InvalidOption, match="64 × 64 pixels only"):
        run(quick(size=(96, 96)), model=tiny())
    with pytest.raises(UnsupportedInput, match=r"3 × 64 × 64 .*Leave the size out"):
        run(quick(size=(64, 64)), model=ALL["hf-vit-head"].model())


@pytest.mark.usefixtures("counting_clock")
def test_failed_lower_bound_leaves_the_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, lengths: Any, size: Any) -> None:
        raise RuntimeError("no slicing here")

    monkeypatch.setattr("vitrail.bench._variants.slice_tokens", refuse)
    result = run(quick(), model=tiny())
    assert (result.speedup, result.efficiency) == (1.0, None)
    assert [(entry.variant, entry.reason) for entry in result.failed] == [("sliced", "RuntimeError: no slicing here")]


@pytest.mark.parametrize("variant", ["unmerged", "merged"])
@pytest.mark.usefixtures("counting_clock")
def test_failing_model_raises(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = benchmark._prepare_one

    def prepare(config: BenchConfig, base: Any, name: str, *rest: Any) -> Any:
        if name == variant:
            raise RuntimeError("a bug")
        return whole(config, base, name, *rest)

    monkeypatch.setattr(benchmark, "_prepare_one", prepare)
    with pytest.raises(RuntimeError, match="a bug"):
        run(quick(), model=tiny())


def test_cuda_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")

    monkeypatch.setattr(benchmark, "_prepare_one", full)
    with pytest.raises(UnsupportedInput, match=r"batch 2 does not fit .*CUDA out of memory\. Choose a smaller batch"):
        run(quick(), model=tiny())


@pytest.mark.parametrize("batch", [10**9, 2**31 - 1])
def test_batch_larger_than_memory(batch: int) -> None:
    with pytest.raises(UnsupportedInput, match=rf"batch {batch} does not fit .*Choose a smaller batch"):
        run(quick(batch=batch), model=tiny())


@pytest.mark.parametrize("where", ["random_batches", "prepare"])
def test_cpu_out_of_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(benchmark, where, full)
    with pytest.raises(UnsupportedInput, match="batch 2 does not fit"):
        run(quick(), model=tiny())


def test_peak_memory_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of CUDA: other rows hold 1000 bytes, a step needs 300 more."""

    class Batch:
        nbytes, device = 7, "cuda"

    fakes: dict[str, Any] = {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: 1000,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 1300,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    batch: Any = Batch()
    assert benchmark._peak(Runner(lambda index: None, lambda: 50), batch) == 300 + 50 + 7
    graph = CapturedGraph(lambda batch: batch)
    graph.peak_bytes = 200
    # a replay allocates nothing
    assert benchmark._peak(Runner(lambda index: None, lambda: 50, graph), batch) == 200 + 50 + 7
