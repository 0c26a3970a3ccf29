"""Export formats: ``.onnx`` graphs and ``.pt2`` programs; how each is written, loaded and run."""

from __future__ import annotations

import ast
import io
import json
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.errors import ExportError, InvalidOption
from vitrail.export._trace import explained, quiet

INPUT = "images"
"""Name of the input of every exported model."""

METADATA = "vitrail.json"
"""Extra file with the metadata inside a ``.pt2`` archive."""

Value = tuple[tuple[str, ...], tuple[int | None, ...]]
"""A value inside a file: the modules that computed it, and its shape."""


class Onnx:
    """ONNX, for ONNX Runtime and others."""

    name, suffix = "onnx", ".onnx"

    OPSETS = range(18, 23)
    """From the oldest opset that torch exports to the newest whose attention ONNX Runtime runs.

    From opset 23 on, attention is one operator, and ONNX Runtime's rejects a bias that is the same for all queries.
    """

    OPSET = 20
    """The default of torch, supported by ONNX Runtime since 1.17."""

    PACKAGES = ("onnx", "onnxscript", "onnxruntime")
    DTYPES = (torch.float32, torch.float16)

    def check(self, dtype: torch.dtype, opset: int | None) -> None:
        """Raise if a package is missing or an option does not apply."""
        missing = [name for name in self.PACKAGES if find_spec(name) is None]
        if missing:
            raise ExportError(f"ONNX export needs {', '.join(missing)}; install with `pip install vitrail[export]`")
        if isinstance(opset, bool) or (opset is not None and opset not in self.OPSETS):
            raise InvalidOption(
                f"opset must be from {self.OPSETS[0]} to {self.OPSETS[-1]}; got {opset!r}. The default is {self.OPSET}"
            )
        if dtype not in self.DTYPES:
            raise ExportError(
                f"ONNX Runtime does not run {str(dtype).removeprefix('torch.')} models on a CPU, so the file could not "
                "be verified; export float32 or float16 to ONNX, or use format='pt2'"
            )

    def write(
        self,
        program: ExportedProgram,
        names: Sequence[str],
        metadata: dict[str, Any],
        path: Path,
        opset: int | None,
    ) -> None:
        """Write a program to ``path``; weights that are too large for one file go beside it."""
        wanted = self.OPSET if opset is None else opset
        options = {"input_names": [INPUT], "output_names": list(names)}
        with explained("torch cannot convert this model to ONNX"), quiet("torch.onnx", "onnxscript", "onnx_ir"):
            made = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=wanted, **options)  # type: ignore[arg-type]
            assert made is not None
            _tidy(made.model)
            made.model.metadata_props["vitrail"] = json.dumps(metadata)
            _save(made, path)
        reached = made.model.opset_imports[""]
        if reached != wanted:
            raise ExportError(
                f"torch converted the model to opset {reached} instead of {wanted}; use opset={reached}, or another "
                f"one from {self.OPSETS[0]} to {self.OPSETS[-1]}"
            )

    def load(self, path: Path, outputs: Sequence[str]) -> OnnxFile:
        """Load a file as its users will."""
        with explained("ONNX Runtime cannot load the exported model"):
            return OnnxFile(path)


MAX_ONNX_BYTES = 2**31 - 2**26
"""Largest weights in one ``.onnx`` file: protobuf's 2 GiB, minus room for the graph."""

SCOPES = "pkg.torch.onnx.name_scopes"


class OnnxFile:
    """A loaded ``.onnx`` file."""

    def __init__(self, path: Path) -> None:
        runtime = import_module("onnxruntime")
        self.graph = import_module("onnx").load(path, load_external_data=False)
        self.opset = next(entry.version for entry in self.graph.opset_import if entry.domain in ("", "ai.onnx"))
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # errors are raised; do not print them, too
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name."""
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {INPUT: images.numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}

    def values(self) -> Iterator[Value]:
        """Yield the values inside the file."""
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


def _tidy(model: Any) -> None:
    """Name the batch dimension, keep module names, and remove other metadata, such as paths of this machine."""
    ir = import_module("onnxscript.ir")

    batch = model.graph.inputs[0].shape[0]
    values = [*model.graph.inputs]
    for node in model.graph.all_nodes():
        values += node.outputs
        for key in set(node.metadata_props) - {SCOPES}:
            del node.metadata_props[key]
    for value in values:
        value.metadata_props.clear()
        for axis, side in enumerate(value.shape or ()):
            if not isinstance(side, int) and side == batch:
                value.shape[axis] = ir.SymbolicDim("batch")
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


def _save(program: Any, path: Path) -> None:
    """Write one file if the format allows it, else the weights to a second one."""
    weights = (value.const_value for value in program.model.graph.initializers.values())
    if sum(weight.nbytes for weight in weights if weight is not None) < MAX_ONNX_BYTES:
        import_module("onnxscript.ir").save(program.model, path)
    else:
        program.save(path, external_data=True)


class Pt2:
    """A ``torch.export`` program."""

    name, suffix = "pt2", ".pt2"

    def check(self, dtype: torch.dtype, opset: int | None) -> None:
        if opset is not None:
            raise InvalidOption(f"opset={opset} applies to ONNX only; leave it out for format='pt2'")

    def write(
        self,
        program: ExportedProgram,
        outputs: Sequence[str],
        metadata: dict[str, Any],
        path: Path,
        opset: int | None,
    ) -> None:
        memory = io.BytesIO()  # torch's own writer ends the process where a disk is full
        with explained("torch cannot save this program"), quiet():
            torch.export.save(program, memory, extra_files={METADATA: json.dumps(metadata)})
        path.write_bytes(memory.getbuffer())

    def load(self, path: Path, outputs: Sequence[str]) -> Pt2File:
        with explained("torch cannot load the exported program"), quiet():
            return Pt2File(torch.export.load(path), outputs)


class Pt2File:
    """A loaded ``.pt2`` file."""

    opset: int | None = None

    def __init__(self, program: ExportedProgram, outputs: Sequence[str]) -> None:
        self.program = program
        self.outputs = outputs
        self.module = program.module()

    def run(self, images: Tensor) -> dict[str, Tensor]:
        result = self.module(images)
        return {self.outputs[0]: result} if isinstance(result, Tensor) else dict(result)

    def values(self) -> Iterator[Value]:
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                scopes = tuple(str(entry[0]) for entry in node.meta.get("nn_module_stack", {}).values())
                yield scopes, tuple(side if isinstance(side, int) else None for side in value.shape)


FORMATS: dict[str, Onnx | Pt2] = {kind.name: kind for kind in (Onnx(), Pt2())}
"""Formats by name."""


def find_format(path: str | os.PathLike[str], name: str | None = None) -> Onnx | Pt2:
    """Return the format for a file name; raise if it does not match the format's name, where that is given."""
    if name is not None and name not in FORMATS:
        raise InvalidOption(f"format must be {' or '.join(map(repr, FORMATS))}; got {name!r}")
    suffix = Path(path).suffix.lower()
    for kind in FORMATS.values():
        if kind.suffix == suffix and name in (None, kind.name):
            return kind
    wanted = FORMATS[name].suffix if name else " or ".join(kind.suffix for kind in FORMATS.values())
    raise InvalidOption(f"{path}: expected a file name that ends in {wanted}")
