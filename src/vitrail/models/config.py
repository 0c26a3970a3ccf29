"""Everything that makes up a model, as one frozen object that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vitrail.errors import InvalidOption
from vitrail.tokens import Role, TokenSpec, check_specs

CLASS_TOKEN = TokenSpec("cls", Role.CLASS)
DISTILLATION_TOKEN = TokenSpec("distillation", Role.DISTILLATION)

Position = Literal["learned", "sincos", "rotary", "none"]
FinalNorm = Literal["tokens", "pooled", "none"]

_CHOICES = {
    "stem": ("patches", "convolutions"),
    "position": ("learned", "sincos", "rotary", "none"),
    "mlp": ("gelu", "swiglu"),
    "pool": ("token", "mean", "attention"),
    "fuse": ("logits", "softmax", "class", "distillation"),
    "final_norm": ("tokens", "pooled", "none"),
}
_WHOLE = {"in_chans": 1, "width": 1, "depth": 1, "heads": 1, "num_classes": 0, "class_attention": 0}
_RATES = ("drop_path", "dropout", "attention_dropout", "patch_drop")
_FLAGS = ("qkv_bias", "proj_bias", "qk_norm", "talking_heads", "pre_norm", "drop_path_uniform")
_TIMM = {
    "img_size": "image_size", "embed_dim": "width", "num_heads": "heads", "init_values": "layer_scale",
    "global_pool": "pool", "drop_path_rate": "drop_path", "proj_drop_rate": "dropout", "pos_drop_rate": "dropout",
    "attn_drop_rate": "attention_dropout", "pos_embed": "position", "reg_tokens": "tokens", "class_token": "tokens",
    "depth_token_only": "class_attention", "patch_drop_rate": "patch_drop",
}  # fmt: skip
"""What timm calls some of the options."""


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer in words and numbers.

    - ``image_size``, ``patch_size``: one number, (height, width), or (time, height, width) for video; a spectrogram
      is a picture of one channel, (frequency, time). Other input sizes work too; this is the one that learned
      positions are kept for.
    - ``stem``: each patch projected by itself, as usual; or ``"convolutions"`` of 3 by 3 that halve the picture until a
      pixel is a patch (Xiao et al., 2021: easier to train, and far better on few pictures).
    - ``mlp_ratio``: outputs of the first linear layer over ``width``; with SwiGLU its two halves count together.
    - ``tokens``: the special tokens, in their order in front of the patches.
    - ``position``: of the patches. Learned positions may be shared by special tokens; rotary ones turn patches only.
    - ``layer_scale``: first value of the scale on each residual branch; ``None`` for no such scale.
    - ``pool``, ``fuse``: what the heads read, and how class and distillation heads become one answer.
    - ``final_norm``: of every token, as usual; ``"pooled"``, of the pooled patches alone; or none.
    - ``pre_norm``: a norm before the first block, and then no bias in the patch embedding.
    - ``patch_drop``: share of the patches that are left out while training, others of each input.
    - ``drop_path``: of the last block, rising linearly from 0; of every block with ``drop_path_uniform``.
    - ``class_attention``: so many layers after the blocks, in which the tokens that enter there gather from all the
      others, which those layers no longer change.
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
    stem: Literal["patches", "convolutions"] = "patches"
    position: Position = "learned"
    layer_scale: float | None = None
    qk_norm: bool = False
    mlp: Literal["gelu", "swiglu"] = "gelu"
    qkv_bias: bool = True
    proj_bias: bool = True
    norm_eps: float = 1e-6
    pool: Literal["token", "mean", "attention"] = "token"
    fuse: Literal["logits", "softmax", "class", "distillation"] = "logits"
    final_norm: FinalNorm = "tokens"
    pre_norm: bool = False
    drop_path: float = 0.0
    drop_path_uniform: bool = False
    patch_drop: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    class_attention: int = 0
    talking_heads: bool = False

    def __post_init__(self) -> None:
        self._check_values()
        patch = _sizes("patch_size", self.patch_size)
        image = _sizes("image_size", self.image_size, len(patch))
        if any(side % step for side, step in zip(image, patch, strict=True)):
            raise InvalidOption(f"image_size {image} is not a whole number of patches of {patch} in each direction")
        for name, sides in (("patch_size", patch), ("image_size", image)):
            if not isinstance(getattr(self, name), int):
                object.__setattr__(self, name, sides)  # a list, as JSON gives it, becomes a tuple
        halvings = len(patch) == 2 and patch[0] == patch[1] and patch[0].bit_count() == 1 and patch[0] > 1
        if self.stem == "convolutions" and not (halvings and self.width % (patch[0] // 2) == 0):
            raise InvalidOption(
                f"stem='convolutions' halves a picture and doubles its channels until a pixel is a patch; expected a "
                f"square patch_size of 2, 4, 8, 16 ... and a width that is a multiple of half of it, got {patch} and "
                f"{self.width}"
            )
        self._check_tokens()

    def _check_values(self) -> None:
        for name, low in _WHOLE.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._expect(name, whole and value >= low, f"a whole number, {low} or more")
        for name, choices in _CHOICES.items():
            self._expect(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in _FLAGS:
            self._expect(name, isinstance(getattr(self, name), bool), "True or False")
        for name in (*_RATES, "mlp_ratio", "norm_eps", "layer_scale"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in _RATES:
                self._expect(name, number and 0 <= value < 1, "a rate, 0 or more and less than 1")
            elif value is not None or name != "layer_scale":
                self._expect(name, number and value > 0, "a number more than 0")
        self._expect("width", self.width % self.heads == 0, f"a multiple of heads={self.heads}")
        self._expect("mlp_ratio", self.hidden >= 1, f"a hidden unit or more, so 1/{self.width} or more")
        self._expect("mlp", self.mlp == "gelu" or self.hidden % 2 == 0, f"an even number of halves, got {self.hidden}")
        if self.position == "rotary":
            needed = 2 * len(_sizes("patch_size", self.patch_size))
            right = self.head_width % 2 == 0 and self.head_width >= needed
            self._expect("heads", right, f"heads of an even width of {needed} or more for rotary position")
        if self.position == "sincos":
            needed = 2 * len(_sizes("patch_size", self.patch_size))
            self._expect("width", self.width % 2 == 0 and self.width >= needed, f"even, {needed} or more, for sincos")

    def _check_tokens(self) -> None:
        self._expect("tokens", isinstance(self.tokens, list | tuple), "a list of TokenSpec objects, in their order")
        specs = check_specs(TokenSpec.from_dict(spec) if isinstance(spec, Mapping) else spec for spec in self.tokens)
        object.__setattr__(self, "tokens", specs)
        last = self.depth + self.class_attention - 1
        for spec in specs:
            if self.entry(spec) > last:
                raise InvalidOption(
                    f"the token {spec.name!r} has enters={spec.enters}; expected 0 to {last}, for the model has "
                    f"{self.depth} blocks and {self.class_attention} class-attention layers"
                    + (" (-1 needs class_attention)" if spec.enters == -1 else "")
                )
            if spec.position and self.position != "learned":
                raise InvalidOption(
                    f"the token {spec.name!r} asks for a position; expected position='learned' in the model, got "
                    f"{self.position!r}: other positions are of patches alone. Leave the token's position at None"
                )
        if self.class_attention and not any(self.gathers(spec) for spec in specs):
            raise InvalidOption(
                f"class_attention={self.class_attention} needs tokens that gather there; give at least one token "
                "enters=-1 (after the last block)"
            )
        answering = [spec.name for spec in specs if spec.role is not Role.CLASS and spec.outputs(self.num_classes)]
        if self.final_norm == "pooled" and (self.pool == "token" or answering):
            raise InvalidOption(
                "final_norm='pooled' is for models whose patches alone answer (pool='mean' or 'attention', no "
                f"distillation or task token); got pool={self.pool!r} and {', '.join(answering) or 'no such token'}"
            )

    def _expect(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise InvalidOption(f"{name}={getattr(self, name)!r}; expected {expected}")

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
        """Patches of the model's own input size: (time, height, width)."""
        steps = tuple(side // step for side, step in zip(self.image, self.patch, strict=True))
        return (1, *steps)[-3:]  # type: ignore[return-value]

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Outputs of the first linear layer of an MLP."""
        return int(self.width * self.mlp_ratio + 1e-6)  # a ratio read off a model may be one bit short

    @property
    def drop_paths(self) -> list[float]:
        """Drop path of each block."""
        if self.drop_path_uniform or self.depth == 1:
            return [self.drop_path if self.drop_path_uniform else 0.0] * self.depth
        return [self.drop_path * layer / (self.depth - 1) for layer in range(self.depth)]

    def entry(self, spec: TokenSpec) -> int:
        """Layer before which a token enters; class-attention layers count on from the blocks."""
        return self.depth if spec.enters == -1 else spec.enters

    def gathers(self, spec: TokenSpec) -> bool:
        """Whether a token enters at the class-attention stage, where it queries and nothing else changes."""
        return self.entry(spec) >= self.depth

    def positioned(self, spec: TokenSpec) -> bool:
        """Whether a token has a learned position of its own."""
        if self.position != "learned":
            return False
        return (spec.role is not Role.REGISTER and not self.gathers(spec)) if spec.position is None else spec.position

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {**plain, "tokens": [spec.to_dict() for spec in self.tokens]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ViTConfig:
        """Build a config from plain values, as `to_dict` gives them; what is left out has its default."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"a config is written as a dict of options, as to_dict gives it; got {values!r}")
        check_options(values)
        return cls(**values)


def depth_rule(depth: int) -> float:
    """Give LayerScale's first value for a depth: the deeper a model, the nearer to the identity it starts."""
    if depth <= 18:
        return 0.1
    return 1e-5 if depth <= 24 else 1e-6


def check_options(options: Mapping[str, Any]) -> None:
    """Raise where an option is none of a config's."""
    known = {field.name for field in fields(ViTConfig)}
    wrong = sorted(map(str, set(options) - known))
    if wrong:
        meant = [f"timm's {name} is {_TIMM[name]}" for name in wrong if name in _TIMM]
        hint = f" ({', '.join(meant)} here)" if meant else ""
        raise InvalidOption(f"a model has no option {', '.join(wrong)}{hint}; it has {', '.join(sorted(known))}")


def _sizes(name: str, value: Any, count: int = 2) -> tuple[int, ...]:
    """Write a size as a tuple: one number stands for height and width alike."""
    if isinstance(value, int) and count == 3:
        raise InvalidOption(f"{name}={value}; expected (time, height, width), as patch_size has three numbers")
    sides = (value,) * count if isinstance(value, int) else value
    lengths = (2, 3) if name == "patch_size" else (count,)
    right = isinstance(sides, list | tuple) and len(sides) in lengths
    if not right or any(not isinstance(side, int) or isinstance(side, bool) or side < 1 for side in sides):
        expected = "(height, width), (time, height, width)" if name == "patch_size" else f"{count} numbers"
        raise InvalidOption(f"{name}={value!r}; expected one whole number or {expected}, each 1 or more")
    return tuple(sides)
