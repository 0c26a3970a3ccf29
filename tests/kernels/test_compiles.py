"""Every form of a kernel that a launch can choose compiles for Hopper, on a machine without a GPU.

Launches run on tensors without memory, and a recorder in the place of each kernel takes down what it is called with:
so the forms are those that launches choose, not those that this file believes them to.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("needs Triton, which compiles the kernels", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.extras import always
from vitrail.kernels import launch as launching
from vitrail.kernels import triton_attention, triton_groups, triton_matching, triton_merging, triton_rotary
from vitrail.kernels import triton_attention_backward as triton_attention_back

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024
"""Bytes of shared memory that one program may have."""

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
SHORT, LONG = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Form:
    """A kernel with all that decides its machine code: types, constants, options, and what is a multiple of 16."""

    kernel: Any = field(compare=False)
    name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: dict[str, Any], **options: Any) -> Form:
        """Sort a launch's arguments as Triton does."""
        names = kernel.arg_names
        given = dict(zip(names, (*tensors, *numbers), strict=False)) | constants
        assert set(given) == set(names)
        plain = [name for index, name in enumerate(names) if kernel.params[index].do_not_specialize]
        special = {name: value for name, value in given.items() if _is_int(value) and name not in plain}
        fixed = constants | {name: value for name, value in special.items() if value == 1}
        signature = {name: "constexpr" if name in fixed else _type(given[name]) for name in names}
        aligned = [
            index
            for index, name in enumerate(names)
            if name not in fixed and (isinstance(given[name], Tensor) or special.get(name, 1) % 16 == 0)
        ]
        return cls(
            kernel, kernel.__name__, tuple(signature.items()), tuple(fixed.items()), tuple(options.items()),
            tuple(aligned),
        )  # fmt: skip

    def compile(self) -> Any:
        """Compile to machine code for Hopper."""
        attributes = {(index,): [["tt.divisibility", 16]] for index in self.aligned}
        source = ASTSource(self.kernel, dict(self.signature), dict(self.constants), attributes)
        return triton.compile(source, target=HOPPER, options=dict(self.options))

    def __str__(self) -> str:
        types = dict(self.signature)
        kinds = list(dict.fromkeys(kind[1:] for kind in types.values() if kind in ("*fp32", "*bf16", "*fp16")))
        mixed = types.get("x_ptr", types.get("dx_ptr")) == "*fp32"
        short = next((kind for kind in kinds if kind != "fp32"), "")
        floats = f"fp32 {short}".strip() if mixed else short or "fp32"
        sizes = [f"{name}={value}" for name, value in self.constants if name.isupper()]
        return " ".join([self.name.strip("_"), floats, *sizes])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def chosen(call: Callable[[], Any]) -> list[Form]:
    """Return the kernel variants that a call launches."""
    found: list[Form] = []

    def record(*args: Any, **options: Any) -> None:
        found.append(Form.of(*args, **options))

    with mock.patch.object(launching, "launch", record):
        call()
    return found


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(length: int, width: int, dtype: torch.dtype, heads: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = tensor(8, length, 3, heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    return q, k, v


ATTENTION = (
    *((SHORT, 64, length) for length in (7, 100, 197, 577, 1324)),
    *((SHORT, 80, length) for length in (20, 100, 577)),
    *((LONG, width, length) for width in (64, 128) for length in (100, 577)),
    (SHORT, 32, 256),
    (torch.float16, 64, 197),
)
"""Dtypes, widths of heads, and lengths: the largest blocks for each, and some of the smaller ones."""

MATCHING = (
    *((SHORT, 64, length) for length in (7, 100, 197, 577)),
    *((SHORT, 80, length) for length in (100, 197)),
    *((LONG, 128, length) for length in (197, 577)),
    (LONG, 64, 197),
    *((dtype, 768, length) for dtype in (SHORT, LONG) for length in (20, 197)),
)

MERGING = ((SHORT, 768), (LONG, 768), (torch.float16, 1280))
"""Dtypes, and channels of tokens."""


def attention_forms() -> Iterator[Form]:
    for dtype, width, length in ATTENTION:
        parts = packed(length, width, dtype)
        bias, sums, out = tensor(8, length), tensor(8, 12, length), tensor(8, length, 12 * width, dtype=dtype)
        for keep in (False, True):
            yield from chosen(partial(triton_attention.launch, *parts, bias, 0.125, keep))
        back = partial(triton_attention_back.launch, out, parts, bias, out, sums, 0.125, parts)
        yield from chosen(back)


def matching_forms() -> Iterator[Form]:
    for dtype, width, length in MATCHING:
        _, k, _ = packed(length, width, dtype)
        yield from chosen(partial(triton_matching.launch, k, 3, 1))


def merging_forms() -> Iterator[Form]:
    merging = triton_merging
    for dtype, channels in MERGING:
        x, y = tensor(8, 197, channels, dtype=dtype), tensor(8, 197, channels, dtype=dtype)
        vector = tensor(channels, dtype=dtype)
        size, merged = tensor(8, 197), tensor(8, 181)
        member, start = tensor(8, 197, dtype=torch.int32), tensor(8, 182, dtype=torch.int32)
        norm = merging.Norm(vector, vector, 1e-6, dtype)
        grad = tensor(8, 181, channels, dtype=dtype)
        back, through = (merging.NormBack(part, part, vector, 1e-6) for part in (grad, x))
        calls = [partial(merging.launch_norm, x, norm), partial(merging.launch_sum, x, y, vector)]
        for gamma, add, before in ((None, vector, None), (vector, None, size), (None, vector, size)):
            groups = merging.Groups(before, member, start)
            calls += [
                partial(merging.launch, x, groups, y, gamma, norm, add),
                partial(merging.launch, x, groups),
                partial(merging.launch, x, groups, None, None, norm, add),
                partial(merging.launch_norm, x, norm, y, gamma, add),
                partial(merging.launch_backward, grad, None, groups, merged),
                partial(merging.launch_backward, grad, back, groups, merged, y, gamma),
                partial(merging.launch_backward, x, through, None, None, y, gamma),
                partial(merging.launch_backward, None, through),
            ]
        if dtype == LONG:  # under autocast
            branch, short = y.to(SHORT), merging.Norm(vector, vector, 1e-6, SHORT)
            groups = merging.Groups(size, member, start)
            through = merging.NormBack(tensor(8, 181, channels, dtype=SHORT), grad, vector, 1e-6)
            calls += [partial(merging.launch_norm, x, short), partial(merging.launch_sum, x, branch, None)]
            for gamma in (None, vector):
                calls += [
                    partial(merging.launch, x, groups, branch, gamma, short),
                    partial(merging.launch_norm, x, short, branch, gamma),
                    partial(merging.launch_sum, x, branch, gamma),
                    partial(merging.launch_backward, grad, through, groups, merged, branch, gamma, SHORT),
                ]
        for call in calls:
            yield from chosen(call)


def rotary_forms() -> Iterator[Form]:
    for width, interleaved, back in ((64, True, False), (72, False, True)):
        q, _, _ = packed(197, width, SHORT)
        yield from chosen(partial(triton_rotary.launch, q, tensor(8, 1, 196, 2 * width), interleaved, back))


def group_forms() -> Iterator[Form]:
    matching, groups = triton_matching, triton_groups
    mask, present = tensor(1, 197, dtype=torch.bool), tensor(8, 197, dtype=torch.bool)
    amount, target = tensor(8, dtype=torch.int64), tensor(8, 197, dtype=torch.int64)
    best, partner = tensor(8, 99), tensor(8, 99, dtype=torch.int32)
    leaders = tensor(8, 197, dtype=torch.int32)
    for dtype, heads, width in ((SHORT, 1, 768), (LONG, 1, 64), (LONG, 1, 1152), (SHORT, 12, 64)):
        x = tensor(8, heads, 197, width, dtype=dtype)
        yield from chosen(partial(matching.launch_best, x, 1))
        yield from chosen(partial(matching.launch_best, x, 0, tensor(8, 197), mask, present))
    yield from chosen(partial(matching.launch_best_given, tensor(8, 99, 98)))
    for dtype, width in ((LONG, 64), (SHORT, 768)):
        for margin in (0.5, None):
            yield from chosen(partial(matching.launch_pairs, tensor(8, 197, width, dtype=dtype), present, margin))
    places = tensor(8, 197, 2)
    between = partial(groups.launch_strongest_between, tensor(8, 14, 14), places[:, ::2], places[:, 1::2])
    yield from chosen(between)
    yield from chosen(partial(groups.launch_best_members, target, tensor(8, 197)))
    yield from chosen(partial(groups.launch_settle, best, partner, 3, None, 197, 1, None, None))
    yield from chosen(partial(groups.launch_settle, best, partner, 0, amount, 197, 1, None, present))
    yield from chosen(partial(groups.launch_settle, best, partner, 0, amount, 197, 0, mask, None))
    yield from chosen(partial(groups.launch_place, leaders, 181, False))
    yield from chosen(partial(groups.launch_place, leaders, 181, True, 1))
    yield from chosen(partial(groups.launch_place, leaders, 181, True, 0, mask, present))
    yield from chosen(partial(groups.launch_list, target, 181))
    yield from chosen(partial(groups.launch_first, target))
    yield from chosen(partial(groups.launch_rank, tensor(8, 197)))


FORMS = list(dict.fromkeys([*attention_forms(), *matching_forms(), *merging_forms(), *rotary_forms(), *group_forms()]))


def outermost(forms: list[Form]) -> set[Form]:
    """Return the first and the last variant of each kernel in each dtype but fp16, which equals bf16."""
    of: dict[tuple[str, ...], list[Form]] = {}
    for form in forms:
        of.setdefault(tuple(str(form).split()[:2]), []).append(form)
    return {form for (_, dtype), own in of.items() if dtype != "fp16" for form in (own[0], own[-1])}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("form", always(outermost(FORMS), FORMS), ids=str)
def test_form_compiles_for_hopper(form: Form) -> None:
    compiled = form.compile()
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED
    # TF32 keeps ten bits of each factor, where float32 has twenty-three
    assert not re.search(r"inputPrecision = tf32 : tensor<[0-9x]+xf32>", compiled.asm["ttir"])


def test_every_kernel_is_compiled() -> None:
    modules = (triton_attention, triton_attention_back, triton_groups, triton_matching, triton_merging, triton_rotary)
    launched = {
        name for module in modules for name in re.findall(r"launching\.launch\(\s*(\w+)", inspect.getsource(module))
    }
    assert launched == {form.name for form in FORMS}
