"""Attention with a bias per key: PyTorch's implementations against our kernel.

    python benchmarks/attention.py               ViT-B at batch 256, ViT-L at batch 64, DINOv2-L at batch 16
    python benchmarks/attention.py --backward    gradients, too
    python benchmarks/attention.py --tokens 197 554

Prints the median time of CUDA graph replays in µs, and the largest error against float64 on the first images, relative
to the largest value. `plain` has no bias and is the lower bound on time; its error is that of ignoring the sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
"""Batch, heads and tokens; each head has 64 channels."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Attend without a bias."""
    return F.scaled_dot_product_attention(q, k, v)


def mask(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Pass the bias as a mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=size.log().to(q.dtype)[:, None, None])


def channels(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Put the bias into two more channels of the keys, padded to eight."""
    bias = (size.log() * q.shape[-1] ** 0.5).unsqueeze(1).expand(-1, q.shape[1], -1)
    high = bias.to(k.dtype)
    low = (bias - high.float()).to(k.dtype)
    none, ones = torch.zeros_like(high), torch.ones_like(high)
    q_wide = torch.cat([q, torch.stack([ones, ones, *[none] * 6], -1)], -1)
    k_wide = torch.cat([k, torch.stack([high, low, *[none] * 6], -1)], -1)
    out = F.scaled_dot_product_attention(q_wide, k_wide, F.pad(v, (0, 8)), scale=q.shape[-1] ** -0.5)
    return out[..., : v.shape[-1]]


def flex() -> Attend:
    """Return compiled FlexAttention with the bias as ``score_mod``."""
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
    """Use our kernel; its output has tokens before heads."""
    attend = ops.attend_keep if q.requires_grad else ops.attend
    out = attend(q, k, v, size.log2(), q.shape[-1] ** -0.5)
    out = out[0] if isinstance(out, tuple) else out
    return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class Problem:
    """Queries, keys and values (B, H, N, D), sizes (B, N), an output gradient, and float64 results for some images."""

    parts: tuple[Tensor, Tensor, Tensor]
    size: Tensor
    grad: Tensor
    exact: Tensor
    exact_grads: tuple[Tensor, ...]

    @classmethod
    def draw(cls, batch: int, heads: int, length: int, device: str = "cuda", first: int = 2) -> Problem:
        """Draw a random problem; queries, keys and values share one tensor, like the output of a linear layer."""
        packed = torch.randn(batch, length, 3, heads, 64, device=device, dtype=torch.bfloat16)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        size = torch.randint(1, 5, (batch, length), device=device).float()
        grad = torch.randn_like(q)
        some = [part[:first].double().requires_grad_() for part in (q, k, v)]
        exact = proportional_attention(some[0], some[1], some[2], size[:first].double())
        exact_grads = torch.autograd.grad(exact, some, grad[:first].double())
        return cls((q, k, v), size, grad, exact.detach(), exact_grads)


def forward(attend: Attend, problem: Problem) -> str:
    """Return time and error of the forward pass."""
    with torch.no_grad():
        error = distance(attend(*problem.parts, problem.size), problem.exact)
        return f"{time_graph(lambda: attend(*problem.parts, problem.size)):.0f} (error {error:.0e})"


def gradients(attend: Attend, problem: Problem) -> str:
    """Return time and error of the backward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # backward runs on the stream of the forward, which must be the captured one
        q, k, v = (part.detach().requires_grad_() for part in problem.parts)
        out = attend(q, k, v, problem.size)
        grad = torch.empty_like(out).copy_(problem.grad)

        def back() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        error = max(map(distance, back(), problem.exact_grads))
    return f"back {time_graph(back, stream):.0f} (error {error:.0e})"


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the largest error on the first images, relative to the largest value."""
    return float((found[: len(exact)].double() - exact).abs().max() / exact.abs().max())


def time_graph(call: Callable[[], object], stream: torch.cuda.Stream | None = None) -> float:
    """Return the median time of a call in µs, captured as a CUDA graph on a stream."""
    stream = torch.cuda.Stream() if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    return time_calls(graph.replay)


def time_calls(call: Callable[[], object], repeats: int = 50) -> float:
    """Return the median time of a call in µs, by CUDA events."""
    samples = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return statistics.median(samples[3:])


def main(backward: bool, tokens: Sequence[int], wanted: Sequence[str]) -> None:
    """Measure the wanted implementations (all by default) on the wanted shapes."""
    implementations: dict[str, Attend] = {
        "plain": plain,
        "mask": mask,
        "channels": channels,
        "flex": flex(),
        "own": own,
    }
    torch._dynamo.config.recompile_limit = 128  # each length is compiled separately
    torch._functorch.config.donated_buffer = False  # backward runs more than once
    for batch, heads, length in SHAPES:
        if tokens and length not in tokens:
            continue
        say(f"batch {batch}, {heads} heads, {length} tokens")
        problem = Problem.draw(batch, heads, length)
        for name, attend in implementations.items():
            if wanted and name not in wanted:
                continue
            texts = [attempt(part, attend, problem) for part in ([forward, gradients] if backward else [forward])]
            say(f"    {name:8} {', '.join(texts)}")


def attempt(part: Callable[[Attend, Problem], str], attend: Attend, problem: Problem) -> str:
    """Measure, or return the error."""
    try:
        return part(attend, problem)
    except Exception as error:
        return f"failed, {type(error).__name__}: {error}"[:500]


def say(text: str) -> None:
    """Print and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backward", action="store_true", help="time gradients, too")
    parser.add_argument("--tokens", type=int, nargs="*", default=[], help="only shapes with these numbers of tokens")
    parser.add_argument("--only", nargs="*", default=[], help="only these: plain, mask, channels, flex, own")
    parser.add_argument(
        "--forms", dest="only", nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )  # the old name of --only
    options = parser.parse_args()
    main(options.backward, options.tokens, options.only)
