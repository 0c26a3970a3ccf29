"""``.onnx``: graphs for ONNX Runtime and everything else that reads ONNX."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ExportError, InvalidOption
from vitrail.export.base import INPUT, Format, Traced, Written, first_line
from vitrail.export.program import quiet

OPSETS = range(18, 23)
"""From the oldest that torch translates to, to the newest whose attention ONNX Runtime can run.

From 23 on attention is one operator, and ONNX Runtime's refuses a bias that is the same for all queries.
"""

OPSET = 20
"""The default: what torch translates to by default, and ONNX Runtime has run since 1.17."""

LIMIT = 2**31 - 2**26
"""Most bytes of weights in one file: 2 GiB is the most that ONNX's format holds, less room for the graph."""

SCOPES = "pkg.torch.onnx.name_scopes"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DTYPES = (torch.float32, torch.float16)


class Onnx(Format):
    """A graph that ONNX Runtime runs."""

    name, suffix = "onnx", ".onnx"

    def check(self, dtype: torch.dtype, opset: int | None) -> None:
        missing = [name for name in PACKAGES if find_spec(name) is None]
        if missing:
            raise ExportError(
                f"format='onnx' needs {', '.join(missing)}; install what is missing with `pip install vitrail[export]`"
            )
        if isinstance(opset, bool) or (opset is not None and opset not in OPSETS):
            raise InvalidOption(
                f"opset is a version of ONNX's operators from {OPSETS[0]} to {OPSETS[-1]}; got {opset!r}. Leave it out "
                f"for {OPSET}"
            )
        if dtype not in DTYPES:
            known = " or ".join(_name(known) for known in DTYPES)
            raise ExportError(
                f"ONNX Runtime does not run {_name(dtype)} models on a CPU, so the file could not be checked; export "
                f"{known} to ONNX, or use format='pt2'"
            )

    def write(self, traced: Traced, path: Path, opset: int | None) -> None:
        wanted = OPSET if opset is None else opset
        try:
            with quiet(), _silent("torch.onnx", "onnxscript", "onnx_ir"):
                made = torch.onnx.export(
                    traced.program,
                    dynamo=True,
                    verbose=False,
                    opset_version=wanted,
                    input_names=[INPUT],
                    output_names=list(traced.outputs),
                )
                assert made is not None
                _tidy(made.model, traced)
                _save(made, path)
        except OSError:
            raise
        except Exception as error:
            raise ExportError(f"torch cannot translate this model to ONNX ({first_line(error)})") from error
        reached = made.model.opset_imports[""]
        if reached != wanted:
            raise ExportError(
                f"the model could be translated to opset {reached} only, and opset={wanted} was asked for; choose "
                f"opset={reached}, or another one from {OPSETS[0]} to {OPSETS[-1]}"
            )

    def read(self, path: Path, outputs: tuple[str, ...]) -> Written:
        try:
            return WrittenOnnx(path)
        except OSError:
            raise
        except Exception as error:
            raise ExportError(f"ONNX Runtime refuses the exported model ({first_line(error)})") from error


class WrittenOnnx(Written):
    """A graph that was read back."""

    def __init__(self, path: Path) -> None:
        runtime = import_module("onnxruntime")
        self.graph = import_module("onnx").load(path, load_external_data=False)
        self.opset = next(entry.version for entry in self.graph.opset_import if entry.domain in ("", "ai.onnx"))
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised, and need not be printed
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, images: Tensor) -> dict[str, Tensor]:
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {INPUT: images.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    def values(self) -> Iterator[tuple[tuple[str, ...], tuple[int | None, ...]]]:
        graph = self.graph.graph
        shapes = {
            info.name: tuple(side.dim_value or None for side in info.type.tensor_type.shape.dim)
            for info in (*graph.value_info, *graph.output)
        }
        for node in graph.node:
            scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
            for name in node.output:
                if name in shapes:
                    yield tuple(ast.literal_eval(scopes)), shapes[name]


def _tidy(model: Any, traced: Traced) -> None:
    """Name the free dimension, keep the names of modules, and drop what tells of this machine."""
    ir = import_module("onnxscript.ir")

    free = model.graph.inputs[0].shape[0]
    values = [*model.graph.inputs]
    for node in model.graph.all_nodes():
        values += node.outputs
        for key in set(node.metadata_props) - {SCOPES}:
            del node.metadata_props[key]
    for value in values:
        value.metadata_props.clear()
        for axis, side in enumerate(value.shape or ()):
            if not isinstance(side, int) and side == free:
                value.shape[axis] = ir.SymbolicDim("batch")
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props["vitrail"] = json.dumps(traced.notes)


def _save(made: Any, path: Path) -> None:
    """Write one file while ONNX's format allows it, and the weights beside it where it does not."""
    ir = import_module("onnxscript.ir")

    weights = (value.const_value for value in made.model.graph.initializers.values())
    if sum(weight.nbytes for weight in weights if weight is not None) < LIMIT:
        ir.save(made.model, path)
    else:
        made.save(path, external_data=True)


@contextmanager
def _silent(*names: str) -> Iterator[None]:
    """Keep loggers from printing what they skipped."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
