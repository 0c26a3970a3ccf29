"""Attention with a bias per key, in every form that PyTorch offers, beside the kernel of our own.

    python benchmarks/attention.py               ViT-B at batch 256, ViT-L at batch 64, DINOv2-L at batch 16
    python benchmarks/attention.py --backward    the gradients, too

Medians in µs of CUDA-graph replays (of plain calls for gradients), and the largest error against float64 for the first
pictures. `plain` has no bias and is the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from vitrail.kernels import ops
from vitrail.merging import proportional_attention

SHAPES = (
    [(256, 12, n) for n in (197, 165, 101, 37)] + [(64, 16, n) for n in (554, 301)] + [(16, 16, n) for n in (1324, 524)]
)
"""Batch, heads and tokens; heads have 64 channels."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """No bias."""
    return F.scaled_dot_product_attention(q, k, v)


def mask(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """The bias as a mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=size.log().to(q.dtype)[:, None, None])


def channels(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """The bias in two more channels of the keys, eight with what fills them up."""
    bias = (size.log() * q.shape[-1] ** 0.5).unsqueeze(1).expand(-1, q.shape[1], -1)
    high = bias.to(k.dtype)
    low = (bias - high.float()).to(k.dtype)
    none, ones = torch.zeros_like(high), torch.ones_like(high)
    q_wide = torch.cat([q, torch.stack([ones, ones, *[none] * 6], -1)], -1)
    k_wide = torch.cat([k, torch.stack([high, low, *[none] * 6], -1)], -1)
    out = F.scaled_dot_product_attention(q_wide, k_wide, F.pad(v, (0, 8)), scale=q.shape[-1] ** -0.5)
    return out[..., : v.shape[-1]]


def flex() -> Attend:
    """FlexAttention with the bias as a change of scores, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
        bias = size.log()

        def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + bias[batch, column]

        found: Tensor = compiled(q, k, v, score_mod=biased)
        return found

    return attend


def own(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """The kernel of our own, tokens before heads as it gives them."""
    attend = ops.attend_keep if q.requires_grad else ops.attend
    out = attend(q, k, v, size.log2(), q.shape[-1] ** -0.5)
    out = out[0] if isinstance(out, tuple) else out
    return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


def measure(form: Attend, parts: tuple[Tensor, ...], size: Tensor, exact: Tensor, backward: bool) -> str:
    """Say how long a form takes, and how far it is from the exact one."""
    q, k, v = parts
    with torch.no_grad():
        error = float((form(q, k, v, size)[:2].double() - exact).abs().max() / exact.abs().max())
        text = f"{time_graph(lambda: form(q, k, v, size)):.0f} (error {error:.0e})"
    if not backward:
        return text
    learning = [part.detach().requires_grad_() for part in parts]
    out = form(learning[0], learning[1], learning[2], size)
    grad = torch.randn_like(out)
    return f"{text}, back {time_calls(lambda: torch.autograd.grad(out, learning, grad, retain_graph=True)):.0f}"


def time_graph(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a recorded call in µs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_calls(graph.replay, repeats)


def time_calls(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call in µs, by device events."""
    samples = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return statistics.median(samples[3:])


def main(backward: bool) -> None:
    """Measure every form on every shape."""
    forms: dict[str, Attend] = {"plain": plain, "mask": mask, "channels": channels, "flex": flex(), "own": own}
    torch._dynamo.config.recompile_limit = 128  # every length is compiled by itself
    for batch, heads, length in SHAPES:
        packed = torch.randn(batch, length, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
        q, k, v = (part.detach() for part in packed.permute(2, 0, 3, 1, 4))
        size = torch.randint(1, 5, (batch, length), device="cuda").float()
        exact = proportional_attention(q[:2].double(), k[:2].double(), v[:2].double(), size[:2].double())
        told = []
        for name, form in forms.items():
            try:
                told.append(f"{name} {measure(form, (q, k, v), size, exact, backward)}")
            except Exception as problem:
                told.append(f"{name}: {type(problem).__name__}")
        sys.stdout.write(f"batch {batch}, {heads} heads, {length} tokens: {'; '.join(told)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backward", action="store_true", help="time the gradients, too")
    main(parser.parse_args().backward)
