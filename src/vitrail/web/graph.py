"""One ONNX graph of a model for the page in the browser: merges per layer are an input, what views show are outputs.

The three parts of a model (before the blocks, a block, behind them) are traced by ``torch.export`` from the model's own
modules and the library's own matching, with their weights as arguments. Each part is a function of the graph; the
block's is called once for each layer, with that layer's weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found, find
from vitrail.adapters.base import BlockAdapter
from vitrail.errors import ExportError
from vitrail.export._trace import explained, quiet
from vitrail.merging import Assignment
from vitrail.merging.attention import proportional_attention
from vitrail.merging.bipartite import best_edges, front_edges, place_by_kind, protected_mask, rank, similarity
from vitrail.merging.features import mean_over_heads
from vitrail.runtime.checks import biased_layers
from vitrail.training.evaluation.outputs import forward_output

OPSET = 20
DOMAIN = "vitrail"
IMAGE, MERGES = "image", "merges"
"""Inputs: a preprocessed image (1, C, H, W), and the number of merges in each layer (layers,)."""

PER_LAYER = ("tokens", "size", "target", "q", "k", "attended")
"""Outputs of each layer, such as ``tokens.3``: tokens that leave the layer (1, M, D), their sizes (1, M), where each
token that entered went (1, N), its queries and keys (1, H, N, d), and its value when it merges, behind attention."""


class Embedding(nn.Module):
    """What a model does before its first block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.entry = _replace_blocks(find(self.model))[0]

    def forward(self, image: Tensor) -> Tensor:
        self.model(image)
        return self.entry.seen[0]


class Step(nn.Module):
    """One block with one merge by ToMe, for any number of tokens and merges."""

    def __init__(self, block: nn.Module, parts: BlockAdapter, special: int) -> None:
        super().__init__()
        self.block, self.parts, self.special = block, parts, special

    def forward(self, x: Tensor, size: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        parts, block = self.parts, self.block
        h = parts.attend_norm(block, x)
        q, k, v = parts.qkv(block, h)
        attended = proportional_attention(q, k, v, size, scale=parts.attention_scale(block)).transpose(1, 2).flatten(2)
        entered = parts.add(x, parts.attend_branch(block, parts.attend_output(block, attended, h)))
        step = self._match(mean_over_heads(k), r)
        x, size, _ = step.merge_all(entered, size)
        x = parts.add(x, parts.feed_branch(block, parts.feed(block, parts.feed_norm(block, x))))
        return x, size, step.target, q, k, entered

    def _match(self, metric: Tensor, r: Tensor) -> Assignment:
        """Return what `vitrail.merging.bipartite.match` returns; here the number of merges is a tensor without axes."""
        length = metric.shape[1]
        r = r.clamp(max=front_edges(length, self.special))
        mask = protected_mask(self.special, length, metric.device)
        best, partner = best_edges(similarity(metric, mask))
        position = torch.arange(length).expand(1, -1)
        group = position.clone()
        group[:, ::2] = torch.where(rank(best) < r, 2 * partner + 1, position[:, ::2])
        target = torch.where(r > 0, place_by_kind(group, mask), position)  # a layer without merges reorders nothing
        merges: Any = r.item()  # a number; a symbol while it is traced
        torch._check(merges >= 0)
        torch._check(merges < length)
        return Assignment(target, length - merges)


class Head(nn.Module):
    """What a model does behind its last block: its logits, then those of each head, from tokens at full length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        found = find(self.model)
        self.entry = _replace_blocks(found)[-1]
        self.shape = found.adapter.input_spec(found.trunk).shape

    def outputs(self, tokens: Tensor) -> dict[str, Tensor]:
        self.entry.given[:] = [tokens]
        output = forward_output(self.model, torch.zeros(1, *self.shape))
        logits = {"logits": output.logits, **{f"logits.{name}": one for name, one in output.by_role.items()}}
        return {name: one for name, one in logits.items() if one is not None}

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs(Assignment(target, 0).unmerge(x)).values())


class _Passing(nn.Module):
    """A block that changes nothing, keeps what it sees, and returns other tokens if they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.given: list[Tensor] = []

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        self.seen[:] = [x]
        return self.given[0] if self.given else x


def _replace_blocks(found: Found) -> list[_Passing]:
    made = []
    for block in found.blocks:
        owners = ((part, name) for part in found.trunk.modules() for name, one in part.named_children() if one is block)
        owner, name = next(owners)
        setattr(owner, name, passing := _Passing())
        made.append(passing)
    return made


class _Pure(nn.Module):
    """A part as a function of its weights."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.call = {"part": part.eval()}  # not a submodule: its weights are arguments

    def forward(self, weights: dict[str, Tensor], *inputs: Tensor) -> Any:
        return torch.func.functional_call(self.call["part"], weights, inputs)


@dataclass(frozen=True)
class _Function:
    """A part as a function of an ONNX graph; ``weights`` are the names of those that it uses."""

    proto: Any
    weights: tuple[str, ...]


def _trace(name: str, part: nn.Module, inputs: Mapping[str, Tensor], free: Mapping[str, Any], count: int) -> _Function:
    """Trace a part with ``count`` outputs; ``free`` has the free axes of each input."""
    onnx = import_module("onnx")
    weights = {key: value.detach() for key, value in part.state_dict().items() if value.is_floating_point()}
    shapes = (dict.fromkeys(weights), tuple(free.get(one) for one in inputs))
    arguments = [f"w.{key}" for key in weights]
    outputs = [f"out.{index}" for index in range(count)]
    with (
        explained(f"torch cannot convert the {name} of this model to ONNX"),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about what is kept while tracing
        with quiet("torch.onnx", "torch.fx", "torch._export", "onnxscript", "onnx_ir"):
            program = torch.export.export(_Pure(part), (weights, *inputs.values()), dynamic_shapes=shapes, strict=False)
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, opset_version=OPSET,
                input_names=[*arguments, *inputs], output_names=outputs,
            )  # fmt: skip
    assert made is not None
    graph = made.model_proto.graph
    read = {value for node in graph.node for value in node.input}
    used = tuple(key for key, argument in zip(weights, arguments, strict=True) if argument in read)
    constants = [onnx.helper.make_node("Constant", [], [one.name], value=_plain(one)) for one in graph.initializer]
    nodes = [*constants, *graph.node]
    for node in nodes:
        del node.metadata_props[:]
        node.name = node.doc_string = ""
    proto = onnx.helper.make_function(
        DOMAIN, name, [*inputs, *(f"w.{key}" for key in used)], [value.name for value in graph.output], nodes,
        [onnx.helper.make_opsetid("", OPSET)],
    )  # fmt: skip
    return _Function(proto, used)


def _plain(tensor: Any) -> Any:
    """Return a constant without its name."""
    made = type(tensor)()
    made.CopyFrom(tensor)
    made.name = ""
    return made


def check_model(model: nn.Module) -> Found:
    """Return the trunk of a model whose graph can be built; raise ``ExportError`` for others."""
    found = find(model)
    spec = found.adapter.input_spec(found.trunk)
    layouts = [found.adapter.layout_in(found.trunk, layer) for layer in (0, -1)]
    obstacles = {
        "it does not take images": spec.modality != "image" or bool(spec.axes),
        "its attention has a position bias": any(biased_layers(found)),
        "its attention has a rotary position": found.adapter.position(found.trunk, layouts[0].grid) is not None,
        "its attention is not the usual one": not all(parts.fused for parts in found.block_adapters),
        "tokens enter between its blocks": layouts[0] != layouts[1] or bool(found.adapter.stage(found.trunk)),
        "its blocks differ in shape": len({_shapes(block) for block in found.blocks}) > 1,
    }
    wrong = [why for why, is_so in obstacles.items() if is_so]
    if wrong:
        raise ExportError(
            f"a static page cannot run this {type(found.trunk).__name__}: {wrong[0]}. Use vitrail web without "
            "--static, or a plain ViT such as vitrail:tiny"
        )
    return found


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(value.shape)) for name, value in block.state_dict().items())


def build_graph(model: nn.Module, dtype: torch.dtype = torch.float16) -> Any:
    """Return the graph of a model as an ONNX ``ModelProto``, whose weights are stored in a dtype.

    It computes in float32. Inputs and outputs: `IMAGE`, `MERGES`; ``logits`` and those of each head, ``groups``
    (1, tokens at the start), and `PER_LAYER`. ToMe merges, with proportional attention and the order of the paper.
    """
    onnx = import_module("onnx")
    found = check_model(model)
    spec, layout = found.adapter.input_spec(found.trunk), found.adapter.layout(found.trunk)
    depth, special, tokens = len(found.blocks), layout.num_special, layout.num_tokens
    make, proto = onnx.helper, onnx.TensorProto

    embedding, head = Embedding(model), Head(model)
    x = embedding(torch.zeros(1, *spec.shape))
    names = list(head.outputs(x))
    length, merged = torch.export.Dim("length", min=4, max=tokens), torch.export.Dim("merged", min=2, max=tokens)
    r = torch.tensor(1)
    target = torch.arange(tokens).expand(1, -1)
    functions = {
        "embed": _trace("Embedding", embedding, {"image": torch.zeros(1, *spec.shape)}, {}, 1),
        "block": _trace(
            "Block", Step(found.blocks[0], found.block_adapters[0], special),
            {"x": x[:, : tokens - 3], "size": torch.ones(1, tokens - 3), "r": r},
            {"x": {1: length}, "size": {1: length}}, len(PER_LAYER),
        ),
        "head": _trace("Head", head, {"x": x[:, : tokens - 3], "target": target * 0}, {"x": {1: merged}}, len(names)),
    }  # fmt: skip
    weights: dict[str, Tensor] = {}
    nodes: list[Any] = []

    def call(part: str, module: nn.Module, inputs: Sequence[str], outputs: Sequence[str], prefix: str) -> None:
        function, values = functions[part], module.state_dict()
        weights.update({f"{prefix}.{key}": values[key] for key in function.weights})
        given = [*inputs, *(f"{prefix}.{key}" for key in function.weights)]
        nodes.append(make.make_node(function.proto.name, given, outputs, domain=DOMAIN))

    def constant(name: str, values: Any, dims: Sequence[int]) -> str:
        kind = proto.FLOAT if isinstance(values[0], float) else proto.INT64
        nodes.append(make.make_node("Constant", [], [name], value=make.make_tensor("", kind, dims, values)))
        return name

    call("embed", embedding, [IMAGE], ["embedded"], "embed")
    size, groups, before = constant("ones", [1.0] * tokens, [1, tokens]), "", "embedded"
    for layer, block in enumerate(found.blocks):
        index = constant(f"index.{layer}", [layer], [])
        nodes.append(make.make_node("Gather", [MERGES, index], [f"r.{layer}"], axis=0))
        step = Step(block, found.block_adapters[layer], special)
        call("block", step, [before, size, f"r.{layer}"], [f"{name}.{layer}" for name in PER_LAYER], f"blocks.{layer}")
        before, size, target_name = f"tokens.{layer}", f"size.{layer}", f"target.{layer}"
        if groups:
            nodes.append(make.make_node("GatherElements", [target_name, groups], [f"groups.{layer}"], axis=1))
        groups = f"groups.{layer}" if groups else target_name
    nodes.append(make.make_node("Identity", [groups], ["groups"]))
    call("head", head, [before, "groups"], names, "head")

    stored, casts = _store(weights, dtype)
    heads, width = found.block_adapters[0].head_shape(found.blocks[0])
    inside = {
        "tokens": (proto.FLOAT, ["kept", x.shape[2]]), "size": (proto.FLOAT, ["kept"]), "target": (proto.INT64, ["n"]),
        "q": (proto.FLOAT, [heads, "n", width]), "k": (proto.FLOAT, [heads, "n", width]),
        "attended": (proto.FLOAT, ["n", x.shape[2]]),
    }  # fmt: skip
    outputs = [make.make_tensor_value_info(name, proto.FLOAT, [1, None]) for name in names]
    outputs.append(make.make_tensor_value_info("groups", proto.INT64, [1, tokens]))
    for layer in range(depth):
        for name, (kind, shape) in inside.items():
            free = [f"{axis}.{layer}" if isinstance(axis, str) else axis for axis in shape]
            outputs.append(make.make_tensor_value_info(f"{name}.{layer}", kind, [1, *free]))
    inputs = [
        make.make_tensor_value_info(IMAGE, proto.FLOAT, [1, *spec.shape]),
        make.make_tensor_value_info(MERGES, proto.INT64, [depth]),
    ]
    graph = make.make_graph([*casts, *nodes], "vitrail", inputs, outputs, stored)
    opsets = [make.make_opsetid("", OPSET), make.make_opsetid(DOMAIN, 1)]
    made = make.make_model(
        graph, opset_imports=opsets, functions=[one.proto for one in functions.values()], ir_version=10,
        producer_name="vitrail",
    )  # fmt: skip
    onnx.checker.check_model(made)
    return made


def _store(weights: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Return weights as initializers in a dtype, and the nodes that turn them into float32."""
    onnx = import_module("onnx")
    stored, casts = [], []
    for name, value in weights.items():
        half = dtype == torch.float16 and value.numel() > 1
        array = value.detach().cpu().to(torch.float16 if half else torch.float32).numpy()
        stored.append(onnx.numpy_helper.from_array(array, f"{name}:stored" if half else name))
        if half:
            casts.append(onnx.helper.make_node("Cast", [f"{name}:stored"], [name], to=onnx.TensorProto.FLOAT))
    return stored, casts
