"""``Embedder``: a batch of images in, columns of features out. It knows neither files nor engines."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail._checks import as_tuple, check_choice
from vitrail.adapters import Found, find
from vitrail.adapters.outputs import output_tensor
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.runtime.cuda_graphs.capture import capture
from vitrail.surgery.hooks import watch
from vitrail.surgery.recording import taking
from vitrail.tokens import Role, TokenLayout

TOKENS = ("class", "mean", "patches", "output")
"""What can be embedded: the class token, the mean of the patches, every patch, the model's own output."""

DTYPES = {"float16": np.float16, "float32": np.float32}
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_WANTED = re.compile(r"(class|mean|patches|output)(?:@(-?\d+))?")


@dataclass(frozen=True)
class Column:
    """A column of the result.

    Attributes:
        name: its name: ``class``, or ``class_5`` for the tokens behind block 5.
        shape: shape of one row; empty for a single value.
        dtype: ``float16``, ``float32``, ``int64``, or ``string``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def width(self) -> int:
        """Number of values of one row."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """About how many bytes one row takes."""
        return self.width * {"float16": 2, "float32": 4, "int64": 8}.get(self.dtype, 16)


class Core(ABC):
    """What an engine runs on each batch: an `Embedder` or a `Predictor`.

    Attributes:
        model: the model, in eval mode, merged or not.
        spec: what it takes.
        columns: the columns of the result.
    """

    kind: str
    model: nn.Module
    spec: InputSpec
    columns: tuple[Column, ...]

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What decides about the values besides model and input, as plain data."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @abstractmethod
    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Compute columns (B, …) on the model's device for images on it; on a GPU this returns before it is done."""

    def finish(self, found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return what :meth:`run` returned as arrays in memory."""
        return {name: value.cpu().numpy() for name, value in found.items()}

    def prepare(self, images: Tensor) -> Tensor:
        """Return images in bytes, or normalized values, as the model takes them, on its device."""
        weight = next(self.model.parameters())
        x = images.to(weight.device, non_blocking=True)
        return (self.spec.normalize(x) if x.dtype == torch.uint8 else x).to(weight.dtype)

    def __call__(self, images: Tensor) -> dict[str, np.ndarray]:
        return self.finish(self.run(self.prepare(images)))


@dataclass(frozen=True)
class Wanted:
    """One kind of tokens behind one block; the last one's are normalized as the library does."""

    tokens: str
    layer: int
    name: str

    def of(self, tokens: Tensor, layout: TokenLayout, norm: nn.Module | None) -> Tensor:
        """Return this column (B, …) of the tokens (B, N, D) that leave a block."""
        if self.tokens == "class":
            x = tokens[:, list(layout.indices(Role.CLASS))]
            return (x if norm is None else norm(x)).mean(1)
        x = tokens[:, layout.patches]
        x = x if norm is None else norm(x)
        return x.mean(1) if self.tokens == "mean" else x


class Features(nn.Module):
    """Runs a model and returns the wanted tokens as a dict of tensors, so that it can be recorded as a CUDA graph."""

    def __init__(self, model: nn.Module, found: Found, wanted: Sequence[Wanted]) -> None:
        super().__init__()
        self.model = model
        self._found, self._wanted = found, tuple(wanted)
        self._depth, stage = len(found.blocks), found.adapter.stage(found.trunk)
        self._stage = self._depth + len(stage) - 1 if stage else None
        layers = sorted({one.layer for one in wanted if one.layer < self._depth})
        self._recorder = watch(model, "tokens", layers or -1, keep=lambda tensor: tensor)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        whole = any(one.tokens == "output" for one in self._wanted)
        return self.run(self.model if whole else self._found.trunk, images)[0]

    def run(self, call: Callable[[Tensor], Any], images: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Return the wanted tokens of a pass, and what ``call`` returns, which runs the model or its trunk."""
        late: list[Tensor] = []
        trunk, adapter = self._found.trunk, self._found.adapter
        norm = adapter.final_norm(trunk)
        hook = None
        if self._stage is not None:  # class attention: all tokens are together in the norm behind it
            hook = norm.register_forward_hook(lambda _, __, output: late.append(output))
        try:
            with self._recorder.hooked():
                output = call(images)
        finally:
            if hook is not None:
                hook.remove()
        recording = self._recorder.take()[-1]
        found = {}
        for one in self._wanted:
            if one.tokens == "output":
                value = output_tensor(output)
                found[one.name] = value if value.dim() == 2 else value.flatten(1)
            elif self._stage is not None and one.layer > self._depth - 1:
                layout = adapter.layout_in(trunk, self._stage, tuple(images.shape[2:]))
                found[one.name] = one.of(late[-1], layout, None)
            else:
                is_last = one.layer == self._depth - 1 and self._stage is None
                found[one.name] = one.of(recording.tokens[one.layer], recording.layout, norm if is_last else None)
        return found, output


class Embedder(Core):
    """Features of images, as one column for each kind of tokens.

    >>> embedder = Embedder(model, ("class", "mean", "patches@5"), dtype="float16")    # doctest: +SKIP
    >>> embedder(images)["class"].shape                                                # doctest: +SKIP
    (8, 384)

    Tokens behind the last block are normalized by the model's final norm, as the library returns them; those of other
    blocks are as they leave the block. Of a merged model every patch has the token that it was merged into.

    Args:
        model: a supported model, merged or not; it is set to eval mode.
        tokens: some of ``class`` (mean of the class tokens), ``mean`` (of the patches), ``patches``, and ``output``
            (what the model returns: logits or pooled features), each with an optional block, as in ``mean@5``; negative
            blocks count from the end. By default the class token, or the mean of the patches of models without one.
        dtype: ``float16`` or ``float32``: how features are stored.
        precision: ``float32``, ``float16`` or ``bfloat16``: how the model computes; None leaves it as it is.
        spec: what images are prepared to; by default what the model takes.
        batch: batch size that is recorded as a CUDA graph where the model is on a GPU; None for none.
    """

    kind = "embed"

    def __init__(
        self,
        model: nn.Module,
        tokens: str | Sequence[str] = (),
        *,
        dtype: str = "float16",
        precision: str | None = None,
        spec: InputSpec | None = None,
        batch: int | None = None,
    ) -> None:
        check_choice("dtype", dtype, DTYPES)
        self.model = cast_model(model, precision)
        found = find(model)
        self.spec = found.adapter.input_spec(found.trunk) if spec is None else spec
        wanted = parse_tokens(found, tokens)
        self.dtype = dtype
        self._found = found
        self._features: Any = Features(model, found, wanted)
        with torch.inference_mode(), taking(found, torch.empty(1, *self.spec.shape)):
            example = self._features(torch.zeros(1, *self.spec.shape).to(next(model.parameters())))
        self.columns = tuple(Column(name, tuple(value.shape[1:]), dtype) for name, value in example.items())
        if batch is not None:  # on a CPU, what capture returns runs the model itself
            with suppress(UnsupportedModel, UnsupportedInput):  # where images decide about lengths
                self._features = capture(self._features.eval(), batch, [self.spec.shape])

    @property
    def settings(self) -> dict[str, Any]:
        return {"tokens": [column.name for column in self.columns], "precision": precision_of(self.model)}

    def run(self, images: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode(), taking(self._found, images):
            found = self._features(images)
            kind = torch.float16 if self.dtype == "float16" else torch.float32
            return {name: value.to(kind) for name, value in found.items()}

    def finish(self, found: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        made = super().finish(found)
        for name, values in made.items():
            if not np.isfinite(values).all():
                hint = "pass dtype='float32', which holds larger values, or " if self.dtype == "float16" else ""
                raise UnsupportedInput(
                    f"column {name!r} has values that are not finite in {self.dtype}; {hint}check the model's weights "
                    "and precision"
                )
        return made


def parse_tokens(found: Found, tokens: str | Sequence[str]) -> tuple[Wanted, ...]:
    """Return the wanted columns; raise for tokens that this model does not have."""
    depth, stage = len(found.blocks), found.adapter.stage(found.trunk)
    last = depth - 1 + bool(stage)
    layouts = {layer: found.adapter.layout_in(found.trunk, layer) for layer in range(depth)}
    if stage:
        layouts[last] = found.adapter.layout_in(found.trunk, depth + len(stage) - 1)
    texts = [text.strip() for one in as_tuple(tokens) for text in str(one).split(",") if text.strip()]
    if not texts:
        texts = ["class" if layouts[last].indices(Role.CLASS) else "mean"]
    wanted = []
    for text in texts:
        match = _WANTED.fullmatch(text)
        if match is None or (match[1] == "output" and match[2]):
            raise InvalidOption(
                f"tokens={text!r}: expected class, mean, patches or output; the first three also of a block: mean@5"
            )
        layer = last if match[2] is None else int(match[2])
        if not -depth <= layer < depth and match[2] is not None:
            raise InvalidOption(f"tokens={text!r}: this model has blocks 0 to {depth - 1} (or -{depth} to -1)")
        layer = layer + depth if layer < 0 else layer
        if match[1] == "class" and not layouts[layer].indices(Role.CLASS):
            raise InvalidOption(
                f"tokens={text!r}: {type(found.trunk).__name__} has no class token"
                f"{' in this block' if layouts[last].indices(Role.CLASS) else ''}; choose mean, patches or output"
            )
        wanted.append(Wanted(match[1], layer, match[1] if match[2] is None else f"{match[1]}_{layer}"))
    names = [one.name for one in wanted]
    if len(set(names)) < len(names):
        raise InvalidOption(f"tokens={','.join(texts)}: a column is wanted twice")
    return tuple(wanted)


def cast_model(model: nn.Module, precision: str | None) -> nn.Module:
    """Set a model to eval mode, and to a floating point precision if one is given."""
    if precision is None:
        return model.eval()
    check_choice("precision", precision, PRECISIONS)
    return model.to(PRECISIONS[precision]).eval()


def precision_of(model: nn.Module) -> str:
    """Return the dtype of a model's weights as torch spells it."""
    weight = next(value for value in model.parameters() if value.is_floating_point())
    return str(weight.dtype).removeprefix("torch.")
