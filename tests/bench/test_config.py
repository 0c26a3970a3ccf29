"""Configurations: nonsense is refused before anything is built."""

import re
from typing import Any

import pytest
import torch

from vitrail.bench import BenchConfig
from vitrail.errors import InvalidOption

NAME = "timm:vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is one of fp32, bf16, fp16; got 'int8'"),
        ({"batch": 0}, "batch is a whole number above 0; got 0"),
        ({"batch": True}, "batch is a whole number above 0; got True"),
        ({"inputs": 0}, "inputs is a whole number above 0; got 0"),
        ({"threads": 0}, "threads is a whole number above 0; got 0"),
        ({"r": -1}, "r counts tokens to merge per layer: whole numbers of 0 or more; got -1"),
        ({"r": (4, -1)}, "whole numbers of 0 or more"),
        ({"r": ()}, "whole numbers of 0 or more"),
        ({"seconds": 0}, "seconds is a time above 0"),
        ({"seconds": float("nan")}, "seconds is a time above 0"),
        ({"limit": -3.0}, "limit is a time above 0"),
        ({"device": "tpu"}, "device is cpu or cuda; got 'tpu'"),
        ({"size": (0, 32)}, "size is height and width"),
        ({"forms": ()}, "forms is one of eager, graph, compiled, compiled-graph, blocks, blocks-graph; got nothing"),
        ({"forms": ("eager", "eager")}, "forms is one of"),
        ({"forms": ("quick",)}, "got 'quick'"),
        ({"variants": ("pruned",)}, "variants is one of unmerged, sliced, merged; got 'pruned'"),
        ({"attention": "xformers"}, "attention is one of auto, flash, cudnn, efficient, math"),
        ({"compile_mode": "fastest"}, "compile_mode is one of"),
        ({"train": True, "forms": ("eager", "graph")}, "not recorded as a CUDA graph"),
        ({"train": True, "forms": ("compiled-graph",)}, "not recorded as a CUDA graph"),
        ({"train": True, "forms": ("blocks-graph",)}, "not recorded as a CUDA graph"),
        ({"train": True, "dtype": "fp16"}, "overflows"),
        ({"autocast": True}, "give dtype bf16 or fp16"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(message)):
        BenchConfig(NAME, **options)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BenchConfig(NAME).place == torch.device("cpu")
    with pytest.raises(InvalidOption, match="no CUDA device"):
        _ = BenchConfig(NAME, device="cuda").place
    with pytest.raises(InvalidOption, match="CUDA graphs need a CUDA device"):
        _ = BenchConfig(NAME, device="cpu", forms=("eager", "graph")).place
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BenchConfig(NAME).place == torch.device("cuda")
    assert BenchConfig(NAME, device="cpu").place == torch.device("cpu")


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    BenchConfig(NAME, device="cpu", threads=2).check_here()
    with pytest.raises(InvalidOption, match=r"threads 3: there are 2 cores here.*Give 2 or fewer"):
        BenchConfig(NAME, device="cpu", threads=3).check_here()


def test_dtypes_of_weights_and_computation() -> None:
    plain = BenchConfig(NAME, dtype="bf16")
    assert (plain.weight_dtype, plain.compute_dtype) == (torch.bfloat16, torch.bfloat16)
    cast = BenchConfig(NAME, dtype="fp16", autocast=True, train=True)
    assert (cast.weight_dtype, cast.compute_dtype) == (torch.float32, torch.float16)


def test_what_needs_the_compiler() -> None:
    assert not BenchConfig(NAME, forms=("eager", "graph")).compiles
    for form in ("compiled", "blocks", "compiled-graph", "blocks-graph"):
        assert BenchConfig(NAME, forms=("eager", form)).compiles
