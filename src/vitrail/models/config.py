"""``ViTConfig``: all options of a model in one frozen object, convertible to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, get_args

from vitrail._checks import is_int, is_number, shown
from vitrail.errors import InvalidOption
from vitrail.heads.by_role import Fuse, Pool
from vitrail.tokens import Role, TokenSpec, check_specs

CLASS_TOKEN = TokenSpec("cls", Role.CLASS)
DISTILLATION_TOKEN = TokenSpec("distillation", Role.DISTILLATION)

Stem = Literal["patches", "convolutions"]
Position = Literal["learned", "sincos", "rotary", "none"]
MlpKind = Literal["gelu", "swiglu"]
DenseKind = Literal["linear", "decoder"]
FinalNorm = Literal["tokens", "pooled", "none"]

_CHOICES = {
    "stem": Stem,
    "position": Position,
    "mlp": MlpKind,
    "pool": Pool,
    "fuse": Fuse,
    "final_norm": FinalNorm,
    "dense_head": DenseKind,
}
_INTEGERS = {
    "in_chans": (1, 2**16), "width": (1, 2**20), "depth": (1, 2**12), "heads": (1, 2**20),
    "num_classes": (0, 10**8), "class_attention": (0, 2**12), "dense": (0, 10**8),
}  # fmt: skip
"""Smallest and largest values; without limits a single number in a file could ask for all memory."""
_MAX_SIDE = 2**20
MAX_PARAMETERS = 10**11
"""Configurations of larger models are refused before anything is allocated."""
_RATES = ("drop_path", "dropout", "attention_dropout", "patch_drop")
_FLAGS = ("qkv_bias", "proj_bias", "qk_norm", "talking_heads", "pre_norm", "drop_path_uniform")
_TIMM = {
    "img_size": "image_size", "embed_dim": "width", "num_heads": "heads", "init_values": "layer_scale",
    "global_pool": "pool", "drop_path_rate": "drop_path", "proj_drop_rate": "dropout", "pos_drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout", "pos_embed": "position", "reg_tokens": "tokens", "class_token": "tokens",
    "depth_token_only": "class_attention", "patch_drop_rate": "patch_drop",
}  # fmt: skip
"""timm's names of some options, for error messages."""


@dataclass(frozen=True)
class ViTConfig:
    """Configuration of a vision transformer.

    - ``image_size``, ``patch_size``: one number, (height, width), or (time, height, width) for video; a spectrogram
      is an image of one channel, (frequency, time). Models accept other input sizes; learned positions are stored for
      this one.
    - ``stem``: a linear projection of each patch, or ``"convolutions"`` of 3 × 3 that halve the image until a pixel is
      a patch (Xiao et al., 2021: easier to train, and much better on small datasets).
    - ``mlp_ratio``: outputs of the first linear layer of the MLP relative to ``width``; for SwiGLU, both halves.
    - ``tokens``: the special tokens, in their order in front of the patches.
    - ``position``: positions of the patches. Special tokens can have learned ones, too; rotary ones are for patches.
    - ``layer_scale``: initial value of the scale of each residual branch; ``None`` for no scale.
    - ``pool``, ``fuse``: see :class:`vitrail.heads.Heads`.
    - ``final_norm``: a norm of all tokens, of the ``"pooled"`` patches only, or none.
    - ``pre_norm``: a norm before the first block, and no bias in the patch embedding.
    - ``patch_drop``: share of the patches dropped in training, chosen at random for each sample.
    - ``drop_path``: rate in the last block, rising linearly from 0; in all blocks with ``drop_path_uniform``.
    - ``class_attention``: number of class-attention layers after the blocks (CaiT); only tokens that enter there
      change in them.
    - ``dense``: classes of a head that predicts one for each pixel; 0 for no such head. ``dense_head``: ``"linear"``,
      or a small convolutional ``"decoder"`` (`vitrail.heads`).
    """

    image_size: int | tuple[int, ...] = 224
    patch_size: int | tuple[int, ...] = 16
    in_chans: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    tokens: tuple[TokenSpec, ...] = (CLASS_TOKEN,)
    stem: Stem = "patches"
    position: Position = "learned"
    layer_scale: float | None = None
    qk_norm: bool = False
    mlp: MlpKind = "gelu"
    qkv_bias: bool = True
    proj_bias: bool = True
    norm_eps: float = 1e-6
    pool: Pool = "token"
    fuse: Fuse = "logits"
    final_norm: FinalNorm = "tokens"
    pre_norm: bool = False
    drop_path: float = 0.0
    drop_path_uniform: bool = False
    patch_drop: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    class_attention: int = 0
    talking_heads: bool = False
    dense: int = 0
    dense_head: DenseKind = "linear"

    def __post_init__(self) -> None:
        self._check_values()
        patch = _sizes("patch_size", self.patch_size)
        image = _sizes("image_size", self.image_size, len(patch))
        if any(side % step for side, step in zip(image, patch, strict=True)):
            raise InvalidOption(f"image_size {image} is not a whole number of patches of {patch} in each direction")
        for name, sides in (("patch_size", patch), ("image_size", image)):
            if not isinstance(getattr(self, name), int):
                object.__setattr__(self, name, sides)  # JSON has lists instead of tuples
        if self.dense and len(patch) == 3:
            raise InvalidOption(f"dense={self.dense} needs a model of images; this one takes clips")
        halvings = len(patch) == 2 and patch[0] == patch[1] and patch[0].bit_count() == 1 and patch[0] > 1
        if self.stem == "convolutions" and not (halvings and self.width % (patch[0] // 2) == 0):
            raise InvalidOption(
                "stem='convolutions' needs a square patch_size of 2, 4, 8, 16, ... and a width that is a multiple of "
                f"half of it; got {patch} and {self.width}"
            )
        self._check_tokens()
        self._check_memory()

    def _check_values(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            self._expect(name, is_int(getattr(self, name), low, high), f"an integer from {low} to {high}")
        for name, literal in _CHOICES.items():
            value = getattr(self, name)
            right = isinstance(value, str) and value in get_args(literal)
            self._expect(name, right, f"one of {', '.join(get_args(literal))}")
        for name in _FLAGS:
            self._expect(name, isinstance(getattr(self, name), bool), "True or False")
        for name in _RATES:
            value = getattr(self, name)
            self._expect(name, is_number(value) and 0 <= value < 1, "a rate, 0 or more and less than 1")
        for name in ("mlp_ratio", "norm_eps", *(["layer_scale"] if self.layer_scale is not None else [])):
            value = getattr(self, name)
            self._expect(name, is_number(value) and value > 0, "a number greater than 0")
        self._expect("mlp_ratio", self.mlp_ratio <= 1000, "a number of at most 1000")
        self._expect("width", self.width % self.heads == 0, f"a multiple of heads={self.heads}")
        self._expect("mlp_ratio", self.hidden >= 1, f"at least one hidden channel, so 1/{self.width} or more")
        even = self.mlp == "gelu" or self.hidden % 2 == 0
        self._expect("mlp", even, f"an even number of hidden channels for SwiGLU; got {self.hidden}")
        if self.position in ("rotary", "sincos"):
            needed = 2 * len(_sizes("patch_size", self.patch_size))
            name, width = ("heads", self.head_width) if self.position == "rotary" else ("width", self.width)
            what = "heads of an even width" if self.position == "rotary" else "an even width"
            self._expect(name, width % 2 == 0 and width >= needed, f"{what} of {needed} or more for {self.position}")

    def _check_memory(self) -> None:
        layers = self.depth + self.class_attention
        count = layers * (4 * self.width**2 + 2 * self.width * self.hidden)
        count += (prod(self.grid) + sum(spec.count for spec in self.tokens)) * self.width
        count += self.width * (self.in_chans * prod(self.patch) + self.num_classes)
        if count > MAX_PARAMETERS:
            raise InvalidOption(
                f"a model of width={self.width}, depth={self.depth} for images of {self.image} has {count:.2g} "
                f"parameters; expected at most {MAX_PARAMETERS:.0e}"
            )

    def _check_tokens(self) -> None:
        self._expect("tokens", isinstance(self.tokens, list | tuple), "a list of TokenSpec objects, in their order")
        specs = check_specs(self.tokens)
        object.__setattr__(self, "tokens", specs)
        last = self.depth + self.class_attention - 1
        for spec in specs:
            if self.entry(spec) > last:
                raise InvalidOption(
                    f"the token {spec.name!r} has enters={spec.enters}; expected 0 to {last}: the model has "
                    f"{self.depth} blocks and {self.class_attention} class-attention layers"
                    + (" (-1 needs class_attention)" if spec.enters == -1 else "")
                )
            if spec.position and self.position != "learned":
                raise InvalidOption(
                    f"the token {spec.name!r} has position=True, which needs a model with position='learned'; got "
                    f"{self.position!r}. Leave the token's position at None"
                )
        if self.class_attention and not any(self.gathers(spec) for spec in specs):
            raise InvalidOption(
                f"class_attention={self.class_attention} needs at least one token with enters=-1 (after the last block)"
            )
        with_head = [spec.name for spec in specs if spec.role is not Role.CLASS and spec.outputs(self.num_classes)]
        if self.final_norm == "pooled" and (self.pool == "token" or with_head):
            raise InvalidOption(
                "final_norm='pooled' needs pool='mean' or 'attention', and no distillation or task token; got "
                f"pool={self.pool!r} and {', '.join(with_head) or 'no such token'}"
            )

    def _expect(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise InvalidOption(f"{name}={shown(getattr(self, name))}; expected {expected}")

    @property
    def patch(self) -> tuple[int, ...]:
        """Sides of a patch: (height, width) or (time, height, width)."""
        return _sizes("patch_size", self.patch_size)

    @property
    def image(self) -> tuple[int, ...]:
        """Sides of the input, as many as a patch has."""
        return _sizes("image_size", self.image_size, len(self.patch))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patch grid at ``image_size``: (time, height, width)."""
        steps = tuple(side // step for side, step in zip(self.image, self.patch, strict=True))
        return (1, *steps)[-3:]  # type: ignore[return-value]

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Outputs of the first linear layer of an MLP."""
        return int(self.width * self.mlp_ratio + 1e-6)  # a ratio computed from a model may be one bit short

    @property
    def drop_paths(self) -> list[float]:
        """Drop path rate of each block."""
        if self.drop_path_uniform:
            return [self.drop_path] * self.depth
        return [self.drop_path * layer / max(1, self.depth - 1) for layer in range(self.depth)]

    def entry(self, spec: TokenSpec) -> int:
        """Return the layer before which a token enters; class-attention layers are numbered after the blocks."""
        return self.depth if spec.enters == -1 else spec.enters

    def gathers(self, spec: TokenSpec) -> bool:
        """Return whether a token enters at the class-attention stage."""
        return self.entry(spec) >= self.depth

    def positioned(self, spec: TokenSpec) -> bool:
        """Return whether a token has a learned position."""
        if self.position != "learned":
            return False
        return (spec.role is not Role.REGISTER and not self.gathers(spec)) if spec.position is None else spec.position

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {**plain, "tokens": [spec.to_dict() for spec in self.tokens]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ViTConfig:
        """Build a config from plain data as `to_dict` returns it; missing options have their defaults."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"a config is a dict of options as to_dict returns it; got {values!r}")
        check_options(values)
        return cls(**values)


def depth_rule(depth: int) -> float:
    """Return CaiT's initial value of LayerScale: smaller for deeper models."""
    if depth <= 18:
        return 0.1
    return 1e-5 if depth <= 24 else 1e-6


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if a name is not an option of `ViTConfig`."""
    known = {field.name for field in fields(ViTConfig)}
    wrong = sorted(map(str, set(options) - known))
    if wrong:
        meant = [f"timm's {name} is {_TIMM[name]}" for name in wrong if name in _TIMM]
        hint = f" ({', '.join(meant)} here)" if meant else ""
        raise InvalidOption(f"ViTConfig has no option {', '.join(wrong)}{hint}; it has {', '.join(sorted(known))}")


def _sizes(name: str, value: Any, count: int = 2) -> tuple[int, ...]:
    """Return a size as a tuple; one number is both height and width."""
    if isinstance(value, int) and count == 3:
        raise InvalidOption(f"{name}={value}; expected (time, height, width), as patch_size has three numbers")
    sides = (value,) * count if isinstance(value, int) else value
    lengths = (2, 3) if name == "patch_size" else (count,)
    right = isinstance(sides, list | tuple) and len(sides) in lengths
    if not right or not all(is_int(side, 1, _MAX_SIDE) for side in sides):
        expected = "(height, width), (time, height, width)" if name == "patch_size" else f"{count} numbers"
        raise InvalidOption(f"{name}={value!r}; expected one integer or {expected}, each from 1 to {_MAX_SIDE}")
    return tuple(sides)
