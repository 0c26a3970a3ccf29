"""Operator: a function registered with the compiler and autograd.

Outside compiled code the function is called directly, and for gradients through a plain ``autograd.Function``: the
dispatch of an operator costs more than a small kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op


class Operator:
    """A function that is a custom operator for the compiler, and a plain function otherwise."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.op = custom_op(f"vitrail::{name}", function, mutates_args=())
        self.function = function
        self.learning: type[torch.autograd.Function] | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.op(*args)
        grads = torch.is_grad_enabled()
        learns = False
        for value in args:
            if isinstance(value, Tensor):
                if type(value) not in _ORDINARY:
                    return self.op(*args)
                learns = learns or (grads and value.requires_grad)
        if not learns:
            return self.function(*args)
        return self.op(*args) if self.learning is None else self.learning.apply(*args)

    def differentiable(self, keep: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Register the gradient: what to save of inputs and outputs, and the backward function."""

        def forward(ctx: Any, *args: Any) -> Any:
            output = self.function(*args)
            keep(ctx, args, output)
            return output

        self.op.register_autograd(backward, setup_context=keep)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
        self.learning = type(f"Learning_{self.__name__}", (torch.autograd.Function,), methods)  # type: ignore[attr-defined]


_ORDINARY = (Tensor, torch.nn.Parameter)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Return a decorator that makes a function an operator."""
    return functools.partial(Operator, name)
