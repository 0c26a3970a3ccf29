"""``vitrail web --static``: the page as plain files, with the model running in the browser."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.errors import ExportError
from vitrail.runtime.cost import CostModel
from vitrail.training.evaluation.outputs import forward_output
from vitrail.web.files import FOLDER, own_files, sample_files, sample_list
from vitrail.web.graph import IMAGE, MERGES, build_graph, check_model
from vitrail.web.model_views import ModelViews, without_warnings

VENDOR = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm.gz", "LICENSE")
"""ONNX Runtime Web; the page unpacks the WebAssembly itself, so that any web space may serve it."""

TOLERANCE = 1e-2
"""Largest difference of the logits from the model's, relative to the largest: the weights are in half precision."""


def write_static(views: ModelViews, folder: Path) -> list[Path]:
    """Write the page for one model into a folder, which must be empty or new; return the files.

    The graph is compared with the model first: logits, groups and sizes of ToMe with several schedules.
    """
    check_model(views.model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is not an empty directory; name a new one, or empty it first")
    graph = build_graph(views.model).SerializeToString()
    verify(graph, views)
    parts, block = views.found.block_adapters[0], views.found.blocks[0]
    info = {
        **views.info(),
        "cost": _cost(views),
        "readouts": _readouts(views),
        "scale": parts.attention_scale(block) or parts.head_shape(block)[1] ** -0.5,
        "thresholds": views.thresholds,
    }
    info["methods"] = info["methods"][:1]
    info["views"] = ["attention", "tokens", "similar", "step"]
    files = {
        **own_files(),
        **{f"vendor/{name}": (FOLDER / "vendor" / name).read_bytes() for name in VENDOR},
        **sample_files([views.spec.modality]),
        "backend.json": json.dumps({"backend": "browser"}).encode(),
        "model.json": json.dumps({"info": info, "samples": sample_list([views.spec.modality])}).encode(),
        "model.onnx": graph,
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return [folder / name for name in files]


def _cost(views: ModelViews) -> dict[str, Any]:
    """Return the terms of the cost model that the page adds up for a number of merges in each layer."""
    cost = CostModel.of(views.model, views.found)
    merged = [{"attend": one.attend, "feed": one.feed, "pair": one.pair, "feature": one.feature} for one in cost.blocks]
    plain = cost.parts(views.layout.num_special, views.layout.num_patches, [0] * len(cost.blocks))
    return {"outside": plain["patches"] + plain["rest"], "blocks": merged}


@torch.no_grad()
def _readouts(views: ModelViews) -> list[dict[str, Any]]:
    """Return the predictions, with the graph's output that each is read from."""
    if not views.questions:
        return []
    output = forward_output(views.model, torch.zeros(1, *views.spec.shape))
    return [
        {
            "name": one.name,
            "question": one.question.name,
            "output": f"logits.{one.head}" if one.head else "logits",
            "start": one.question.start,
            "classes": list(one.question.classes),
        }
        for one in views.readouts(list(output.by_role))
    ]


@torch.no_grad()
def verify(graph: bytes, views: ModelViews) -> None:
    """Raise ``ExportError`` unless a graph merges and answers like the model, on a random image."""
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    depth, model = len(views.found.blocks), views.model.to("cpu")
    image = torch.randn(1, *views.spec.shape, generator=torch.Generator().manual_seed(0))
    most = views.layout.num_patches // depth
    for r in (0, most // 2, most, [most] * (depth // 2) + [0] * (depth - depth // 2)):
        with without_warnings(), vitrail.merge(model, r=r) as merging, merging.track() as trace:
            expected = views.vector(views.run(image)).numpy()
            merges = merging.r
        given = {IMAGE: image.numpy(), MERGES: np.array(merges)}
        logits, groups, size = session.run(["logits", "groups", f"size.{depth - 1}"], given)
        error = float(np.abs(logits.ravel() - expected).max() / np.abs(expected).max())
        same = (groups == trace.latest.assignment.target.numpy()).all() and (size == trace.sizes.numpy()).all()
        if error > TOLERANCE or not same:
            raise ExportError(
                f"the graph does not compute what the model does with r={r} (logits differ by {error:.1e} of their "
                f"largest value, groups are {'equal' if same else 'different'}); nothing was written"
            )
