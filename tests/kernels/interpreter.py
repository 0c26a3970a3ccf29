"""Run one part of the tests with Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.kernels.interpreter PART``.

Triton decides when it is imported whether kernels are interpreted, and for all of them, so this is a process of its
own. What came out is the last line, as JSON: a list of outcomes.

bfloat16 is left out: the interpreter computes wrong products of it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.kernels.cases import SAMPLE, Outcome
from tests.kernels.whole import METHODS, SMALL, autocast_outcomes, kernels_everywhere, method_outcomes, outcomes
from vitrail.kernels import ops

FORMS = (("fp32", False), ("fp32", True), ("fp16", False), ("fp16", True))
"""Dtypes of models, and whether gradients are compared."""


def operators() -> dict[str, tuple[ops.Operator, tuple[Any, ...]]]:
    """Return every operator with the arguments of its checks."""
    k, size = torch.randn(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)[1], torch.rand(2, 17) + 1
    x, y, vector = torch.randn(2, 17, 24), torch.randn(2, 17, 24), torch.randn(24)
    _, member, start = ops.match(k, 3, 1)
    lists = (member, start)
    qkv, attended, sums = torch.randn(2, 17, 96), torch.randn(2, 17, 32), torch.rand(2, 2, 17) + 5
    merged_size, weight = torch.rand(2, 14) + 1, torch.randn(24)
    merged = torch.randn(2, 14, 24)

    def learns(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    whole, short = torch.float32, torch.float16
    half = tuple(tensor.half() for tensor in (x, y, vector))
    best, partner = ops.best(k[:, :1], 1, None, None, None)
    mask, present, amount = torch.rand(2, 17) < 0.3, torch.rand(2, 17) < 0.9, torch.tensor([3, 5])
    target = torch.randint(0, 9, (2, 17))
    return {
        "best": (ops.best, (k, 1, None, None, None)),
        "best under masks": (ops.best, (k, 0, torch.rand(2, 17), mask, present)),
        "best_given": (ops.best_given, (torch.randn(2, 9, 8),)),
        "settle": (ops.settle, (best, partner, 3, None, 17, 1, None, None)),
        "settle numbers": (ops.settle, (best, partner, 0, amount, 17, 1, None, None)),
        "place": (ops.place, (ops.first_members(target), 9, False, 0, None, None)),
        "place by kind": (ops.place, (ops.first_members(target), 17, True, 0, mask, None)),
        "list_members": (ops.list_members, (target, 9)),
        "first_members": (ops.first_members, (target,)),
        "ranks": (ops.ranks, (size,)),
        "strongest_between": (
            ops.strongest_between,
            (torch.rand(2, 4, 3), 3 * torch.rand(2, 9, 2), 3 * torch.rand(2, 8, 2)),
        ),
        "pairs": (ops.pairs, (x, present, 0.5)),
        "pairs, nearest": (ops.pairs, (x, present, None)),
        "best_members": (ops.best_members, (target, size)),
        "attend": (ops.attend, (k, k, k, size.log2(), 0.25)),
        "attend_keep": (ops.attend_keep, (learns(k), learns(k), learns(k), size.log2(), 0.25)),
        "attend_back": (ops.attend_back, (attended, k, k, k, size.log2(), attended, sums, 0.25)),
        "attend_packed": (ops.attend_packed, (learns(qkv), size.log2(), 2, 0.25)),
        "attend_packed_back": (ops.attend_packed_back, (attended, qkv, size.log2(), attended, sums, 2, 0.25)),
        "rotate": (ops.rotate, (learns(k), torch.randn(2, 1, 15, 32), True, False)),
        "rotate back": (ops.rotate, (k, torch.randn(15, 32), False, True)),
        "attention_received": (ops.attention_received, (k, k, size.log2(), torch.rand(2, 17), 0.25)),
        "match": (ops.match, (k, 3, 1)),
        "merge": (ops.merge, (learns(x), size, *lists)),
        "merge without sizes": (ops.merge, (learns(x), None, *lists)),
        "merge of half": (ops.merge, (half[0], size, *lists)),
        "merge of strided": (ops.merge, (torch.randn(2, 24, 17).transpose(1, 2), size, *lists)),
        "merge_back": (ops.merge_back, (merged, size, merged_size, *lists)),
        "merge_back without sizes": (ops.merge_back, (merged, None, merged_size, *lists)),
        "norm_back": (
            ops.norm_back,
            (merged, merged, merged, weight, 1e-6, y, vector, size, merged_size, *lists, whole),
        ),
        "norm_back, bare": (ops.norm_back, (None, x, x, weight, 1e-6, None, None, None, None, None, None, whole)),
        "norm_back of half": (ops.norm_back, (x, half[0], x, weight, 1e-6, *[None] * 6, short)),
        "merge_norm, learning": (
            ops.merge_norm,
            (*map(learns, (x, y, vector)), size, *lists, learns(weight), learns(vector), 1e-6, whole, None),
        ),
        "merge_norm of tokens alone, learning": (
            ops.merge_norm,
            (learns(x), None, None, size, *lists, learns(weight), learns(vector), 1e-6, whole, None),
        ),
        "add_norm, learning": (
            ops.add_norm,
            (*map(learns, (x, y)), None, learns(weight), learns(vector), 1e-6, whole, None),
        ),
        "add_norm of half, learning": (
            ops.add_norm,
            (learns(x), learns(half[1]), None, learns(weight), learns(vector), 1e-6, short, None),
        ),
        "merge_norm": (ops.merge_norm, (x, y, vector, size, member, start, vector, vector, 1e-6, whole, vector)),
        "merge_norm, bare": (ops.merge_norm, (x, y, None, None, member, start, vector, vector, 1e-6, short, None)),
        "merge_norm of half": (ops.merge_norm, (*half, size, member, start, half[2], half[2], 1e-6, short, None)),
        "norm": (ops.norm, (x, vector, vector, 1e-6, short)),
        "add_norm": (ops.add_norm, (x, y, vector, vector, vector, 1e-6, whole, vector)),
        "add_norm, bare": (ops.add_norm, (x, half[1], None, vector, vector, 1e-6, short, None)),
        "add_scaled": (ops.add_scaled, (x, y, vector)),
        "add_scaled, bare": (ops.add_scaled, (x, half[1], None)),
    }


def check_operators() -> list[Outcome]:
    """Let PyTorch compare each operator with its schema, shapes without values and gradients."""
    found = []
    for name, (operator, arguments) in operators().items():
        checks = torch.library.opcheck(operator.op, arguments, raise_exception=False)
        wrong = [f"{check}: {result}" for check, result in checks.items() if result != "SUCCESS"]
        found.append(Outcome("ops", name, 0.0, why="; ".join(wrong)))
    return found


def check_models() -> list[Outcome]:
    """Run small merged models through the kernels."""
    with kernels_everywhere():
        return [o for subject in SMALL for dtype, train in FORMS for o in outcomes(subject, dtype, "cpu", train)]


def check_autocast() -> list[Outcome]:
    """Run small merged float32 models through the kernels under autocast, with gradients."""
    return [o for subject in SMALL for o in autocast_outcomes(subject, torch.float16, "cpu", True)]


def check_kernels() -> list[Outcome]:
    """Run each kernel on its sample of cases."""
    from tests.kernels.checks import run

    return [run(case) for case in SAMPLE]


def check_methods() -> list[Outcome]:
    """Run a small model that merges by each method through the kernels."""
    return [
        outcome
        for method in METHODS
        for dtype in (torch.float32, torch.float16)
        for outcome in method_outcomes(SMALL[0], method, dtype, "cpu")
    ]


PARTS = {
    "kernels": check_kernels,
    "ops": check_operators,
    "models": check_models,
    "methods": check_methods,
    "autocast": check_autocast,
}


def look_once() -> Any:
    """Let the interpreter list the functions of Triton's language once, instead of at each call within a kernel.

    It replaces them by its own all the same. That took 30 % of the time; every outcome is the same to the bit.
    """
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch(package: Any, *given: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *given)

    return mock.patch.object(interpreter, "_patch_builtin", patch)


def main(part: str) -> None:
    """Run a part and print its outcomes."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with look_once():
        found = PARTS[part]()
    print(json.dumps([asdict(outcome) for outcome in found]))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
