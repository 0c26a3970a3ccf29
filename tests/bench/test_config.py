"""BenchConfig rejects invalid options before a model is built."""

import re
from typing import Any

import pytest
import torch

import vitrail.bench
from vitrail.bench import MODES, BenchConfig
from vitrail.bench.config import uses_compiler, uses_graph
from vitrail.errors import InvalidOption

NAME = "timm:vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of fp32, bf16, fp16; got 'int8'"),
        ({"batch": 0}, "batch must be an integer of at least 1; got 0"),
        ({"batch": True}, "batch"),
        ({"threads": 0}, "threads"),
        ({"r": -1}, "r must be an integer of at least 0; got -1"),
        ({"r": (4, -1)}, "got 4, -1"),
        ({"r": ()}, "got ()"),
        ({"seconds": 0}, "seconds=0: expected a number above 0"),
        ({"seconds": float("nan")}, "seconds"),
        ({"limit": -3.0}, "limit"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"size": (0, 32)}, "size"),
        ({"size": (32,)}, "size"),
        ({"modes": ()}, "got nothing"),
        ({"modes": ("eager", "eager")}, "modes must be one of eager, graph"),
        ({"modes": ("quick",)}, "got 'quick'"),
        ({"attention": "xformers"}, "attention"),
        ({"compile_mode": "fastest"}, "compile_mode"),
        *(({"train": True, "modes": (mode,)}, "CUDA graphs") for mode in MODES if uses_graph(mode)),
        ({"train": True, "dtype": "fp16"}, "overflows"),
        ({"autocast": True}, "choose dtype bf16 or fp16"),
        ({"merge": "nothing"}, "nothing"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(message)):
        BenchConfig(NAME, **options)


def test_old_name_of_modes() -> None:
    with pytest.warns(DeprecationWarning, match="modes"):
        config = BenchConfig(NAME, forms=("eager", "blocks"))
    assert config.modes == ("eager", "blocks")
    with pytest.warns(DeprecationWarning, match="modes"):
        assert config.forms == config.modes
    with pytest.warns(DeprecationWarning, match="MODES"):
        assert vitrail.bench.FORMS == MODES


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BenchConfig(NAME).torch_device == torch.device("cpu")
    with pytest.raises(InvalidOption, match="no CUDA device"):
        _ = BenchConfig(NAME, device="cuda").torch_device
    with pytest.raises(InvalidOption, match="CUDA graphs need a CUDA device"):
        _ = BenchConfig(NAME, device="cpu", modes=("eager", "graph")).torch_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BenchConfig(NAME).torch_device == torch.device("cuda")
    assert BenchConfig(NAME, device="cpu").torch_device == torch.device("cpu")


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    BenchConfig(NAME, device="cpu", threads=2).check_here()
    with pytest.raises(InvalidOption, match="threads is 3, but this machine has 2 cores"):
        BenchConfig(NAME, device="cpu", threads=3).check_here()


def test_dtypes_of_weights_and_computation() -> None:
    plain = BenchConfig(NAME, dtype="bf16")
    assert (plain.weight_dtype, plain.autocast_dtype) == (torch.bfloat16, None)
    cast = BenchConfig(NAME, dtype="fp16", autocast=True, train=True)
    assert (cast.weight_dtype, cast.autocast_dtype) == (torch.float32, torch.float16)


def test_modes_that_need_the_compiler() -> None:
    assert [mode for mode in MODES if not uses_compiler([mode])] == ["eager", "graph", "capture"]
