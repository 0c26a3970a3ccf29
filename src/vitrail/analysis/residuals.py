"""Norms of the residual stream and of what attention and MLP add to it, by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitrail._arguments import checked
from vitrail.adapters import find
from vitrail.adapters.base import BlockAdapter
from vitrail.analysis.result import Result
from vitrail.errors import UnsupportedModel
from vitrail.runtime.trace import eagerly
from vitrail.surgery.recording import evaluating


class Residuals(Result):
    """Norms by layer, as means over images and tokens.

    A scale is the norm of what a branch adds, divided by the norm of what attention or MLP computed: LayerScale (or a
    norm behind the branch) makes them differ. Without either it is 1.

    Attributes:
        stream: norms of the tokens that enter each block.
        attention, mlp: norms of what the two branches add to them.
        attention_scale, mlp_scale: scales of the two branches.
    """

    stream: tuple[float, ...]
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    attention_scale: tuple[float, ...]
    mlp_scale: tuple[float, ...]


@checked
def measure_residuals(model: nn.Module, inputs: Tensor) -> Residuals:
    """Measure the residual stream and its branches on a batch, in evaluation mode.

    Models of every library work, merged or not, except those that attend inside windows or compute attention and MLP
    together. Blocks of a class-attention stage are not measured.

    Example:
        >>> model = vitrail.create_model("vit_tiny_patch16", image_size=32, depth=2, layer_scale=0.1)
        >>> found = measure_residuals(model, torch.randn(4, 3, 32, 32))
        >>> [round(scale, 3) for scale in found.mlp_scale]
        [0.1, 0.1]
    """
    norms: list[Tensor] = []
    with watched(model, lambda branches: norms.append(branches.norms())), evaluating(model), torch.no_grad():
        model(inputs)
    columns = torch.stack(norms).T.tolist()
    return Residuals(*(tuple(column) for column in columns))


@dataclass
class Branches:
    """What ran in one block: its input, and what attention and MLP computed."""

    block: nn.Module
    parts: BlockAdapter
    stream: Tensor
    computed: dict[str, Tensor] = field(default_factory=dict)

    def added(self) -> dict[str, Tensor]:
        """Return what the two branches add to the stream."""
        branches = {"attention": self.parts.attend_branch, "mlp": self.parts.feed_branch}
        return {name: branch(self.block, self.computed[name]) for name, branch in branches.items()}

    def norms(self) -> Tensor:
        """Return the values of `Residuals` for this block (5,)."""
        added = torch.stack([_mean_norm(one) for one in self.added().values()])
        computed = torch.stack([_mean_norm(self.computed[name]) for name in ("attention", "mlp")])
        return torch.cat([_mean_norm(self.stream)[None], added, added / computed.clamp_min(1e-30)])


def _mean_norm(tokens: Tensor) -> Tensor:
    """Return the mean L2 norm of tokens (..., D)."""
    return tokens.float().norm(dim=-1).mean()


@contextmanager
def watched(model: nn.Module, take: Callable[[Branches], object]) -> Iterator[None]:
    """Call ``take`` with the branches of each block as it ends; compiled models run eagerly meanwhile."""
    found = find(model)
    if found.adapter.layer_windows(found.trunk):
        raise UnsupportedModel("residual branches of blocks that attend inside windows cannot be measured")
    parts = [
        (block, known, known.attend_last(block))
        for block, known in zip(found.blocks, found.block_adapters, strict=True)
    ]
    with ExitStack() as stack, eagerly():
        for block, known, attention in parts:
            for handle in _hooks(block, known, attention, take):
                stack.callback(handle.remove)
        yield


def _hooks(
    block: nn.Module, known: BlockAdapter, attention: Sequence[nn.Module], take: Callable[[Branches], object]
) -> list[RemovableHandle]:
    running: list[Branches] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running[:] = [Branches(block, known, args[0] if args else kwargs[known.input_name])]

    def keep(name: str) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            running[0].computed[name] = output[0] if isinstance(output, tuple) else output

        return after

    def end(*_: Any) -> None:
        take(running.pop())

    return [
        block.register_forward_pre_hook(begin, with_kwargs=True),
        *(part.register_forward_hook(keep("attention")) for part in attention),
        known.feed_parts(block)[-1].register_forward_hook(keep("mlp")),
        block.register_forward_hook(end),
    ]
