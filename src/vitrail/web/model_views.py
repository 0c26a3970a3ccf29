"""What the page shows of one model on one image, clip or sound, as plain data. `docs/web.md` describes every field.

`page/browser-views.js` computes the same from the graph of a static page.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getdoc
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail._timing import Clock
from vitrail.adapters import Found, find
from vitrail.adapters.outputs import output_tensor
from vitrail.analysis.features import pca_maps
from vitrail.analysis.norms import find_threshold
from vitrail.data import InputSpec
from vitrail.errors import InvalidOption, UnsupportedInput, VitrailError
from vitrail.heads import Output
from vitrail.merging import Context, MergeState, Reduction, ToMe
from vitrail.merging.bipartite import best_edges, blocked_mask, similarity
from vitrail.merging.features import mean_over_heads
from vitrail.merging.method import METHODS
from vitrail.surgery.recording import evaluating
from vitrail.tokens import Role, token_names
from vitrail.training.evaluation.outputs import forward_output
from vitrail.training.objective.targets import Target
from vitrail.web.cache import Cache
from vitrail.web.media import MEDIA, Medium
from vitrail.web.samples import samples_of

VERSION = 2
"""Version of the data; a page refuses another one."""

SCHEDULES = ("constant", "decreasing", "increasing")
KEEPS = tuple(round(1 - 0.05 * step, 2) for step in range(20))
"""Shares of the patches that the page offers."""

TOP = 5
"""Classes named for each head."""

CHANNELS = 4
"""Channels of each token that the step by step view shows."""

WIDE = 700
"""Tokens from which on attention is computed for one query at a time."""


@dataclass(frozen=True)
class Setting:
    """How a model is merged: ``by`` is ``"r"`` or ``"keep"``, or ``""`` for methods that decide by themselves."""

    method: str = "tome"
    by: str = "r"
    value: float = 0
    schedule: str = "constant"

    @classmethod
    def parse(cls, given: Any) -> Setting:
        """Return a setting from plain data; raise ``InvalidOption`` for anything else."""
        allowed = {"method", "by", "value", "schedule"}
        if not isinstance(given, Mapping) or set(given) - allowed:
            raise InvalidOption(f"a setting has {', '.join(sorted(allowed))}; got {str(given)[:100]!r}")
        made = cls(**given)
        number = isinstance(made.value, int | float) and not isinstance(made.value, bool) and math.isfinite(made.value)
        whole = made.by != "r" or (number and made.value == int(made.value) and 0 <= made.value <= 100_000)
        if (
            made.by not in ("r", "keep", "")
            or not number
            or not whole
            or (made.by == "keep" and not 0 < made.value <= 1)
        ):
            raise InvalidOption("by is r, with a whole number, keep, with a share above 0 and at most 1, or empty")
        if made.schedule not in SCHEDULES or not isinstance(made.method, str) or made.method not in METHODS:
            raise InvalidOption(f"a setting has a known method, and a schedule of {', '.join(SCHEDULES)}")
        return made

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``vitrail.merge``."""
        amounts: dict[str, dict[str, Any]] = {"r": {"r": int(self.value)}, "keep": {"keep": float(self.value)}, "": {}}
        planned = {"schedule": self.schedule} if self.by and self.schedule != "constant" else {}
        return {**amounts[self.by], **planned, "method": self.method}


class Readout(NamedTuple):
    """One prediction: what it is called, its question, and the head it comes from; "" for the fused one."""

    name: str
    question: Target
    head: str

    def of(self, output: Output) -> Tensor:
        """Return its scores (B, classes)."""
        logits = output.by_role[self.head] if self.head else output.logits
        assert logits is not None
        return self.question.read(logits)


@dataclass(eq=False)
class ModelViews:
    """A model, and what the page asks about it. One request runs the model at a time.

    Attributes:
        name: the model as commands take it.
        questions: the tasks with class names that it answers.
        cache: where tensors of recent images are kept.
    """

    name: str
    model: nn.Module
    spec: InputSpec
    layout: vitrail.TokenLayout
    device: torch.device
    questions: Sequence[Target] = ()
    cache: Cache = field(default_factory=Cache)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def found(self) -> Found:
        """The model's trunk and blocks."""
        return find(self.model)

    @property
    def medium(self) -> Medium:
        """How its samples are read and drawn."""
        return MEDIA[self.spec.modality]

    def batch(self, sample: Any) -> Tensor:
        """Return an image, a clip or a sound as a batch of one for this model."""
        return self.medium.batch(sample, self.spec).to(self.device)

    # --- what does not depend on an image

    def info(self) -> dict[str, Any]:
        """Return what the page must know of the model before any image."""
        heads, channels = self.found.block_adapters[0].head_shape(self.found.blocks[0])
        with self.lock:
            plans, methods = self._plans(), list(self._methods())
        return {
            "version": VERSION,
            "name": self.name,
            "modality": self.spec.modality,
            "grid": list(self.layout.grid),
            "special": [
                {"name": name, "role": self.layout.role_of(index).value}
                for index, name in enumerate(token_names(self.layout.special))
            ],
            "layers": len(self.found.blocks),
            "heads": heads,
            "width": heads * channels,
            "input": {"size": list(self.spec.size), "mean": list(self.spec.mean), "std": list(self.spec.std)},
            "questions": [{"name": one.name, "classes": list(one.classes)} for one in self.questions],
            "methods": methods,
            "schedules": list(SCHEDULES),
            "plans": plans,
            "views": ["attention", "tokens", "similar", "step", "registers"],
        }

    def _plans(self) -> dict[str, Any]:
        """Return the merges per layer of ToMe for every amount that the page offers."""
        most = self.layout.num_patches // len(self.found.blocks)
        plans: dict[str, Any] = {}
        for by, values in (("r", range(most + 1)), ("keep", KEEPS)):
            tables = {value: [self._plan(by, value, schedule) for schedule in SCHEDULES] for value in values}
            offered = [value for value, merges in tables.items() if None not in merges]
            merges = {schedule: [tables[value][at] for value in offered] for at, schedule in enumerate(SCHEDULES)}
            plans[by] = {"values": offered, "merges": merges}
        return plans

    def _plan(self, by: str, value: float, schedule: str) -> list[int] | None:
        try:
            with (
                without_warnings(),
                vitrail.merge(self.model, **Setting("tome", by, value, schedule).options) as merging,
            ):
                lengths = merging.tokens_per_layer(self.spec.size)
        except VitrailError:  # more than the model can merge
            return None
        starts = [self.layout.num_tokens, *lengths]
        return [before - after for before, after in zip(starts, lengths, strict=False)]

    def _methods(self) -> Iterator[dict[str, Any]]:
        """Yield the methods that need no training, ToMe first; ``amount`` is whether they take r or keep."""
        for name in sorted(vitrail.list_methods(), key=lambda name: (name != "tome", name)):
            about = (getdoc(METHODS[name]) or name).split("\n\n")[0].replace("\n", " ")
            choices: tuple[dict[str, Any], ...] = ({"keep": 0.5}, {})
            for options in choices:
                try:
                    with vitrail.merge(self.model, method=name, **options), torch.no_grad():
                        pass
                except VitrailError:
                    continue
                yield {"name": name, "about": about, "amount": bool(options)}
                break

    @cached_property
    def thresholds(self) -> list[dict[str, Any]]:
        """The artifact detector's answer for each layer, on the samples."""
        images = torch.cat([self.batch(self.medium.read(one.data)) for one in samples_of(self.spec.modality)])
        recorded = vitrail.record(self.model, images, "norms", batch_size=1, device="cpu")
        found = (find_threshold(recorded.norms[layer][:, self.layout.patches]) for layer in recorded.layers)
        return [
            {
                "verdict": one.verdict,
                "threshold": one.threshold,
                "typical": _short(one.typical),
                "reason": one.reason,
                "images": len(images),
            }
            for one in found
        ]

    # --- one image

    def result(self, image: str, batch: Tensor, setting: Setting) -> dict[str, Any]:
        """Return groups, sizes, cost and prediction of one image under a setting."""
        return self._cached((image, setting, "result"), lambda: self._result(image, batch, setting))

    def _result(self, image: str, batch: Tensor, setting: Setting) -> dict[str, Any]:
        clock = Clock(self.device)
        with self._merged(setting) as merging, merging.track() as trace:
            with self._states() as states:
                output = self.run(batch)
            seconds = []
            for _ in range(2):
                start = clock.now()
                self.run(batch)
                seconds.append(clock.now() - start)
            tokens = trace.tokens_per_layer[0].tolist()
            flops = {"before": merging.flops(self.spec.size, merged=False), "after": int(trace.flops[0])}
        patches, start = self.layout.patches, self.layout.num_tokens
        groups, sizes = [], []
        for state in states:
            one = torch.arange(start)[None] if state.assignment is None else state.assignment.target.cpu()
            groups.append(one[0, patches].tolist())
            size = torch.ones(start) if state.size is None else state.size[0].float().cpu()
            sizes.append(_numbers(size[: int(one.max()) + 1]))
        vector = self.vector(output)
        plain = self._cached((image, "vector"), lambda: self._unmerged_vector(batch))
        return {
            "setting": setting.__dict__,
            "tokens": tokens,
            "groups": groups,
            "sizes": sizes,
            "flops": flops,
            "seconds": min(seconds),
            "heads": self._heads(output),
            "cosine": _short(float(vector @ plain / (vector.norm() * plain.norm()))),
        }

    def attention(self, image: str, batch: Tensor, setting: Setting, layer: int, query: int) -> dict[str, Any]:
        """Return how much each head of a layer lets one token attend to every token, in the order before merging."""
        queries = [query] if self.layout.num_tokens > WIDE else list(range(self.layout.num_tokens))
        key = (image, setting, "attention", layer, query if len(queries) == 1 else None)

        def compute() -> Tensor:
            with self._merged(setting):
                recorded = vitrail.record(self.model, batch, "attention", layers=layer, queries=queries, device="cpu")
            return recorded.attention[layer][0]

        rows = self._cached(key, compute)[:, 0 if len(queries) == 1 else query]
        return {"layer": layer, "query": query, "rows": [_numbers(row, 6) for row in rows]}

    def tokens(self, image: str, batch: Tensor, setting: Setting, layer: int) -> dict[str, Any]:
        """Return norms, colors of the patch features' principal components, and how alike the special tokens are."""
        values = self._tokens(image, batch, setting, layer)
        patches, special = values[self.layout.patches], values[: self.layout.num_special]
        colors = pca_maps(patches[None], self.layout.grid)[0].reshape(len(patches), -1)
        unit = F.normalize(special, dim=-1)
        with self.lock:
            threshold = self.thresholds[layer]
        return {
            "layer": layer,
            "norms": _numbers(values.norm(dim=-1)),
            "threshold": threshold,
            "colors": [_numbers(color, 3) for color in colors],
            "cosines": [_numbers(row) for row in unit @ unit.T],
        }

    def similar(self, image: str, batch: Tensor, setting: Setting, layer: int, query: int) -> dict[str, Any]:
        """Return the cosine of one token's features with every token's."""
        unit = F.normalize(self._tokens(image, batch, setting, layer), dim=-1)
        return {"layer": layer, "query": query, "cosines": _numbers(unit @ unit[query])}

    def step(self, image: str, batch: Tensor, setting: Setting, layer: int) -> dict[str, Any]:
        """Return one merge: the tokens that enter, their pairs, and what leaves."""
        if setting.method != "tome":
            raise UnsupportedInput("the step by step view shows ToMe; choose method tome")
        watched = _Watched()
        options = {**setting.options, "method": watched}
        reference = vitrail.kernels.reference()
        with (
            self._locked(),
            reference,
            without_warnings(),
            vitrail.merge(self.model, **options),
            self._states() as states,
        ):
            self.run(batch)
        before = states[layer - 1] if layer else None
        entered = self.layout.num_tokens if before is None or before.size is None else before.size.shape[1]
        groups = torch.arange(self.layout.num_tokens)
        if before is not None and before.assignment is not None:
            groups = before.assignment.target[0].cpu()
        blank = {"layer": layer, "tokens": entered, "groups": groups.tolist(), "merges": 0}
        if layer not in watched.seen:
            return blank
        seen = watched.seen[layer]
        blocked = blocked_mask(self.layout.num_special, None, entered, seen.keys.device)
        scores = similarity(seen.keys, blocked)
        best, partner = (one[0].cpu() for one in best_edges(scores))
        size = torch.ones(entered) if seen.size is None else seen.size[0].cpu()
        target = seen.target[0].cpu()
        odd = 2 * partner + 1
        merged = target[::2] == target[odd]
        order = torch.argsort(best.where(torch.isfinite(best), torch.tensor(-math.inf)), descending=True, stable=True)
        pairs = [
            {
                "a": 2 * int(index),
                "b": int(odd[index]),
                "cosine": _short(float(best[index]), 5),
                "merges": bool(merged[index]),
            }
            for index in order.tolist()
            if math.isfinite(float(best[index]))
        ]
        return {
            **blank,
            "merges": int(merged.sum()),
            "sizes": _numbers(size),
            "target": target.tolist(),
            "pairs": pairs,
            "values": [_numbers(row, 4) for row in seen.x[0, :, :CHANNELS]],
            "keys": [_numbers(row, 4) for row in seen.keys[0]],
        }

    def registers(self, image: str, batch: Tensor, layer: int) -> dict[str, Any]:
        """Return the norms of the patches without and with a test-time register; its neurons are found on the image."""
        with self._locked():
            before = vitrail.record(self.model, batch, "norms", device="cpu").norms
            plain = self._heads(self.run(batch))
            with vitrail.test_time_registers(self.model, batch) as registers:
                after = vitrail.record(self.model, batch, "norms", device="cpu").norms
                heads = self._heads(self.run(batch))
                neurons = {str(at): list(some) for at, some in registers.by_layer.items()}
        special = self.layout.num_special
        return {
            "layer": layer,
            "before": _numbers(before[layer][0][special:]),
            "after": _numbers(after[layer][0][-self.layout.num_patches :]),
            "register": _numbers(after[layer][0][special : -self.layout.num_patches]),
            "neurons": neurons,
            "heads": {"before": plain, "after": heads},
        }

    # --- running the model

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.lock, evaluating(self.model), torch.inference_mode():
            yield

    @contextmanager
    def _merged(self, setting: Setting) -> Iterator[vitrail.Merging]:
        with self._locked(), without_warnings(), vitrail.merge(self.model, **setting.options) as merging:
            yield merging

    @contextmanager
    def _states(self) -> Iterator[list[MergeState]]:
        """Keep the state of the merge behind each block."""
        states: list[MergeState] = []

        def keep(_: nn.Module, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
            states.append(kwargs["vitrail_slot"].passed.carried.state)

        hooks = [block.register_forward_hook(keep, with_kwargs=True) for block in self.found.blocks]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, batch: Tensor) -> Any:
        """Return the model's output; with its heads by name where classes have names."""
        return forward_output(self.model, batch) if self.questions else self.model(batch)

    def vector(self, output: Any) -> Tensor:
        """Return a model's output as one vector."""
        logits = getattr(output, "logits", None)
        if logits is None and getattr(output, "by_role", None):
            return torch.cat([one.flatten() for one in output.by_role.values()]).double().cpu()
        return (output_tensor(output) if logits is None else logits).flatten().double().cpu()

    def _unmerged_vector(self, batch: Tensor) -> Tensor:
        with self._locked():
            return self.vector(self.run(batch))

    def readouts(self, heads: Sequence[str]) -> list[Readout]:
        """Return what is read off the output: the fused prediction of each question, and single heads if several."""
        made = []
        for question in self.questions:
            sources = {"fused": ""} if question.own else {question.name: question.name}
            if question.own and len(heads) > 1:
                single = {*question.heads, Role.DISTILLATION.value}
                sources |= {name: name for name in heads if name in single}
            made += [Readout(name, question, source) for name, source in sources.items()]
        return made

    def _heads(self, output: Any) -> list[dict[str, Any]]:
        """Return the most likely classes of each readout, or of bare logits."""
        if self.questions:
            return [
                _answer(one.name, one.question.name, one.of(output)[0], one.question.classes)
                for one in self.readouts(list(output.by_role))
            ]
        values = output_tensor(output)
        if values.dim() != 2 or not self.found.adapter.num_classes(self.model, self.found.trunk):
            return []
        return [_answer("logits", "", values[0], [f"class {index}" for index in range(values.shape[1])])]

    def _tokens(self, image: str, batch: Tensor, setting: Setting, layer: int) -> Tensor:
        def compute() -> Tensor:
            with self._merged(setting):
                recorded = vitrail.record(self.model, batch, "tokens", layers=layer, dtype=torch.float32, device="cpu")
            return recorded.tokens[layer][0]

        return self._cached((image, setting, "tokens", layer), compute)

    def _cached(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        return self.cache.get((self.name, *key), compute)


@dataclass
class _Seen:
    """What ToMe saw in one layer: keys (B, N, d), values of the tokens (B, N, D), sizes, and where each token went."""

    keys: Tensor
    x: Tensor
    size: Tensor | None
    target: Tensor


class _Watched(ToMe):
    """ToMe, keeping what each layer saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, _Seen] = {}

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        reduction = super().reduce(context, r)
        keys, target = mean_over_heads(context.k), reduction.assignment.target
        self.seen[context.layer] = _Seen(keys.detach(), context.x.detach(), context.size, target)
        return reduction


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings that fewer tokens merge than requested: the page shows how many are left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _answer(name: str, question: str, scores: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    likely, places = scores.double().softmax(0).topk(min(TOP, len(scores)))
    pairs = zip(places.tolist(), likely.tolist(), strict=True)
    top = [{"class": classes[place], "probability": _short(probability, 5)} for place, probability in pairs]
    return {"name": name, "question": question, "top": top}


def _short(value: float, digits: int = 4) -> float | None:
    """Return a number with few digits behind the point; None if it is not finite, which JSON cannot say."""
    return round(value, digits) if math.isfinite(value) else None


def _numbers(values: Tensor, digits: int = 4) -> list[float | None]:
    return [_short(value, digits) for value in values.tolist()]
