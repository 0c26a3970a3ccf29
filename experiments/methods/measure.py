"""Accuracy and fidelity of a model under every method and budget, and throughput."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrail
from experiments.common.machine import git_commit, machine_info
from experiments.common.results import add_row, pack, read_rows
from experiments.methods.subjects import Size, Subject
from experiments.methods.variants import FIRST_SHARE, Budget, Variant, adjust, flops_of, ordered, quiet
from vitrail.bench import copy_model, time_models
from vitrail.merging import Method
from vitrail.merging.method import METHODS

ACCURACY, SPEED = "accuracy.jsonl", "speed.jsonl"
UNMERGED, KERNELS = "unmerged", "kernels alone"
REFERENCE = "tome"
"""The method that others are compared with."""

GROUP = 25
"""Images whose mean KL divergence is kept; intervals treat groups as samples."""

CHUNK = 32
"""Settings that are timed interleaved, besides the unmerged model."""

Row = dict[str, Any]


def row_key(kind: str, seed: int, variant: str, share: float) -> str:
    """Return the key of a measurement."""
    return f"{kind}/{seed}/{variant}/{share:g}"


class Rows:
    """The rows of one file: which keys are there, and new ones."""

    def __init__(self, path: Path, commit: str | None) -> None:
        self.path, self.commit = path, commit or git_commit()

    def known(self) -> dict[str, Row]:
        """Return all rows by key, the newest of each."""
        return {row["key"]: row for row in read_rows(self.path, ("key",))}

    def add(self, row: Row) -> None:
        """Append a row with machine and commit."""
        add_row(self.path, {**row, **machine_info(), "commit": self.commit})


@torch.inference_mode()
def logits_of(model: nn.Module, inputs: Tensor, batch: int) -> Tensor:
    """Return the logits of all inputs in float32."""
    return torch.cat([model(part).float() for part in inputs.split(batch)])


def compare(logits: Tensor, reference: Tensor, targets: Tensor) -> Row:
    """Compare outputs with the targets and with the unmerged model's outputs."""
    correct, same = logits.argmax(1) == targets, logits.argmax(1) == reference.argmax(1)
    p = reference.double().log_softmax(1)
    kl = (p.exp() * (p - logits.double().log_softmax(1))).sum(1).clamp(min=0)
    whole = len(kl) // GROUP * GROUP
    groups = kl[:whole].view(-1, GROUP).mean(1) if whole else kl
    return {
        "count": len(targets),
        "accuracy": float(correct.double().mean()),
        "agreement": float(same.double().mean()),
        "kl": float(kl.mean()),
        "correct": pack(correct.tolist()),
        "same": pack(same.tolist()),
        "kl_groups": [float(f"{value:.3g}") for value in groups.tolist()],
    }


def measured(subject: Subject, merging: vitrail.Merging, reference: Tensor, batch: int) -> Row:
    """Return accuracy, fidelity and cost of a merged model, with the settings that reproduce it."""
    torch.manual_seed(0)  # for random merging
    began = time.monotonic()
    row = compare(logits_of(subject.model, subject.inputs, batch), reference, subject.targets)
    row["seconds"] = time.monotonic() - began
    flops = np.array(flops_of(subject.model, merging, subject.inputs, batch), dtype=float) / 1e9
    row |= {"gflops": float(flops.mean()), "gflops_sd": float(flops.std()), "static": merging.method.static}
    return row | {"config": merging.config, "r": merging.r if merging.method.static else None}


def measure_subject(
    subject: Subject,
    variants: Sequence[Variant],
    size: Size,
    rows: Rows,
    learned: Path,
    until: float,
) -> Iterator[str]:
    """Measure every variant at every budget; rows that exist are skipped. Yield one line for each."""
    reference = logits_of(subject.model, subject.inputs, size.batch)
    full, known = subject.gflops, rows.known()
    base = {"model": subject.kind, "seed": subject.seed, "unmerged_gflops": full}
    key = row_key(subject.kind, subject.seed, UNMERGED, 1)
    if key not in known:
        row = compare(reference, reference, subject.targets)
        rows.add({**base, "key": key, "variant": UNMERGED, "share": 1.0, "gflops": full, **row})
        with vitrail.merge(subject.model, r=0) as merging:
            row = measured(subject, merging, reference, size.batch)
        key = row_key(subject.kind, subject.seed, KERNELS, 1)
        rows.add({**base, "key": key, "variant": KERNELS, "share": 1.0, **row})
    for variant, share in ordered(variants, lambda one: size.fine if one.name == REFERENCE else size.shares):
        key = row_key(subject.kind, subject.seed, variant.name, share)
        if key in known and "skipped" not in known[key]:
            continue
        if time.monotonic() > until:
            yield "out of time"
            return
        row = {**base, "key": key, "variant": variant.name, "share": share}
        row |= _measure(subject, variant, share, size, reference, learned)
        if known.get(key, {}).get("skipped") != row.get("skipped", ""):
            rows.add(row)
        yield f"{key}  {row.get('skipped') or described(row)}"


def _measure(subject: Subject, variant: Variant, share: float, size: Size, reference: Tensor, learned: Path) -> Row:
    """Return the measurements at one budget, or why there are none; the model is left unmerged."""
    budget = Budget(share * subject.gflops, subject.tuning, size.batch)
    target, state = subject, None
    try:
        if variant.trains is not None:
            state = state_file(learned, subject.kind, subject.seed, variant)
            if not state.is_file():
                return {"skipped": "not trained"}
            method, model = load_learned(state, variant, subject.model)
            target = Subject(**{**vars(subject), "model": model})
        else:
            method = None
        with quiet(), budget.merge(target.model, variant, method) as merging:
            row = measured(target, merging, reference, size.batch)
            trained = state is not None and (variant.trains == "model" or merging.method.name == variant.base)
        row |= {} if budget.position is None else {"position": budget.position}
        return row | ({"state": state.name} if state is not None and trained else {})
    except Exception as error:  # a failed method must not stop the others
        subject.model.eval()
        return {"skipped": reason(error)}


def reason(error: Exception) -> str:
    """Return why a setting was not measured, in one line; free the memory if there was too little."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])


def described(row: Mapping[str, Any]) -> str:
    """Summarize a row in one line."""
    return (
        f"{100 * row['accuracy']:.2f} %  agreement {100 * row['agreement']:.2f} %  KL {row['kl']:.3g}  "
        f"{row['gflops']:.3g} GFLOPs  {row['seconds']:.2f} s"
    )


# Learned methods.


def state_file(learned: Path, kind: str, seed: int, variant: Variant) -> Path:
    """Return the file with the weights of a trained method."""
    return learned / f"{kind}-{seed}-{variant.name}.safetensors".replace(" ", "-").replace(",", "")


def load_learned(file: Path, variant: Variant, model: nn.Module) -> tuple[Method | None, nn.Module]:
    """Return a trained method, and the model: fine-tuned weights in a copy if the file has them."""
    weight = next(model.parameters())
    states = {
        name: value.to(weight.dtype) if value.is_floating_point() else value
        for name, value in load_file(file, device=str(weight.device)).items()
    }
    weights = {name[6:]: value for name, value in states.items() if name.startswith("model.")}
    own = {name[7:]: value for name, value in states.items() if name.startswith("method.")}
    if weights:
        model = copy_model(model, share=False)
        model.load_state_dict(weights)
    if not own:
        return None, model
    options = (
        {name: value for name, value in dict(variant.method).items() if name != "name"}
        if isinstance(variant.method, Mapping)
        else {}
    )
    from_state = METHODS[variant.base].from_state  # type: ignore[attr-defined]
    method: Method = from_state(own, **options)
    return method.to(weight.device).eval(), model


def merged_copy(subject: Subject, row: Mapping[str, Any], variants: Mapping[str, Variant], learned: Path) -> nn.Module:
    """Return a copy of a model that shares its weights, merged as in a row; None for the unmerged model."""
    if row["variant"] == UNMERGED:
        return copy_model(subject.model, share=True)
    model, config = subject.model, dict(row["config"])
    if "state" in row:
        method, model = load_learned(learned / row["state"], variants[row["variant"]], model)
        config |= {} if method is None else {"method": method}
    model = copy_model(model, share=True)
    with quiet():
        adjust(vitrail.merge(model, **config), row.get("position"))
    return model


# Throughput.


def modes_of(row: Mapping[str, Any], cuda: bool) -> tuple[str, ...]:
    """Return the modes in which a setting is timed.

    The unmerged model counts with the better of plain and compiled blocks. Methods whose lengths depend on the image
    cannot be captured as a CUDA graph; ToMe is timed eagerly too, to be compared with them.
    """
    if not cuda:
        return ("eager",)
    if row["variant"] == UNMERGED:
        return ("graph", "blocks-graph")
    if row["variant"] == REFERENCE:
        return ("graph", "eager")
    return ("graph",) if row["static"] else ("eager",)


def time_subject(
    subject: Subject,
    variants: Sequence[Variant],
    size: Size,
    accuracy: Rows,
    rows: Rows,
    learned: Path,
    until: float,
    also: Sequence[str] = (),
    shares: Sequence[float] = (),
) -> Iterator[str]:
    """Time every measured setting of a model, interleaved with the unmerged one, in chunks. Yield one line for each.

    Kernels alone and settings named in ``also`` come first, then all methods at one budget, then at the others.
    """
    cuda, by_name = subject.inputs.is_cuda, {variant.name: variant for variant in variants}
    names = {UNMERGED, KERNELS, *also, *by_name}
    found = {
        key: row
        for key, row in accuracy.known().items()
        if (row["model"], row["seed"]) == (subject.kind, subject.seed)
        and "skipped" not in row and row["variant"] in names and row["share"] in (1.0, *(shares or (row["share"],)))
    }  # fmt: skip
    reference = row_key(subject.kind, subject.seed, UNMERGED, 1)
    done = rows.known()
    todo = [key for key in found if key != reference and key not in done]
    first = (KERNELS, *also)
    todo.sort(key=lambda key: (found[key]["variant"] not in first, abs(found[key]["share"] - FIRST_SHARE)))
    batch = subject.inputs[: size.batch]
    for start in range(0, len(todo), CHUNK):
        keys = todo[start : start + CHUNK]
        if time.monotonic() > until:
            yield "out of time"
            return
        chosen: tuple[str, ...] = (reference, *keys)
        models = {}
        for key in chosen:
            try:
                models[key] = merged_copy(subject, found[key], by_name, learned)
            except Exception as error:  # a failed method must not stop the others
                yield f"{key}  {reason(error)}"
        chosen, keys = tuple(models), [key for key in keys if key in models]
        modes = {key: modes_of(found[key], cuda) for key in chosen}
        with quiet():
            times = time_models(models, batch, modes=modes, seconds=size.warm_seconds)
            failed = [key for key in chosen if times[key].best is None and modes[key] != ("eager",)]
            if failed:  # cannot be captured
                again = {key: models[key] for key in (reference, *failed)}
                eager = time_models(again, batch, modes=("eager",), seconds=size.warm_seconds / 4)
                times |= {key: eager[key] for key in failed}
        base = times[reference].best
        assert base is not None, times[reference].failed
        for key in keys:
            best = times[key].best
            names_of = ("model", "seed", "variant", "share")
            row = {"key": key, **{name: found[key][name] for name in names_of}, "batch": len(batch)}
            row |= {"unmerged_images_per_s": base.images_per_s, "unmerged_modes": _by_mode(times[reference].modes)}
            row |= {"images_per_s": _by_mode(times[key].modes), "failed": times[key].failed}
            row["speed_up"] = None if best is None else best.images_per_s / base.images_per_s
            row["spread"] = None if best is None else best.spread
            rows.add(row)
            yield f"{key}  {'failed' if best is None else format(row['speed_up'], '.3f')}"


def _by_mode(modes: Mapping[str, Any]) -> dict[str, float]:
    return {name: timed.images_per_s for name, timed in modes.items()}
