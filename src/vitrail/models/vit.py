"""The vision transformer. DeiT is one with a distillation token; CaiT is one with class attention at its end."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.heads import AttentionPool, Heads, Output
from vitrail.models.class_attention import ClassAttentionBlock
from vitrail.models.config import ViTConfig
from vitrail.models.layers import Block, PatchEmbed, layer_norm
from vitrail.models.position import resample, rotary_table, sincos_table
from vitrail.models.saving import TOLD, load_states, push_folder, read_folder, write_folder
from vitrail.models.sequence import drop_patches, pick, reading_mask, weave
from vitrail.tokens import Role, TokenLayout, TokenSpec

POOLS = {"avg": "mean", "map": "attention"}
"""What timm calls our ways of pooling."""


class ViT(nn.Module):
    """A vision transformer with special tokens of any roles.

    The sequence is the special tokens that have entered, in the order of ``config.tokens``, then the patches.

    >>> config = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=5)
    >>> model = ViT(config)
    >>> model(torch.zeros(1, 3, 32, 32)).shape, model.layout().num_tokens
    (torch.Size([1, 5]), 17)
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise InvalidOption(f"ViT takes a ViTConfig, which ViTConfig.from_dict makes of a dict; got {config!r}")
        self.config = config
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(config)
        self.tokens = nn.ParameterDict(
            {spec.name: nn.Parameter(torch.zeros(1, spec.count, config.width)) for spec in config.tokens}
        )
        learned = config.position == "learned"
        positions = self._num_positioned + prod(config.grid)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, config.width)) if learned else None
        self.pos_drop = nn.Dropout(config.dropout)
        self.norm_pre = layer_norm(config) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, rate) for rate in config.drop_paths)
        self.blocks_token_only = nn.ModuleList(ClassAttentionBlock(config) for _ in range(config.class_attention))
        self.norm = layer_norm(config) if config.final_norm == "tokens" else nn.Identity()
        self._init_weights()
        self.heads = _heads(config)

    # What the model is.

    @property
    def num_prefix_tokens(self) -> int:
        """How many tokens stand before the patches in the output of `forward_features`."""
        return sum(spec.count for spec in self.config.tokens)

    def layout(self, size: int | tuple[int, ...] | None = None, layer: int | None = None) -> TokenLayout:
        """Say which index is which token, for inputs of a size (default: the model's own).

        With ``layer``, as that layer sees the sequence: without the tokens that enter later. In a class-attention
        layer the tokens that gather there are apart, in front; the layout names them with all others.
        """
        last = self.config.depth + self.config.class_attention - 1
        if layer is not None and not (isinstance(layer, int) and 0 <= layer <= last):
            raise InvalidOption(
                f"layer={layer!r}; expected 0 to {last}, class-attention layers counted on from the blocks"
            )
        specs = self.config.tokens if layer is None else self._entered(layer)
        return TokenLayout.from_specs(specs, self._grid(size))

    def no_weight_decay(self) -> set[str]:
        """Name the parameters that weight decay should leave alone, beside norms and biases."""
        tokens = {f"tokens.{spec.name}" for spec in self.config.tokens if not spec.decay}
        return tokens | ({"pos_embed"} if self.pos_embed is not None else set())

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep less for the backward pass: each block runs again there."""
        self.grad_checkpointing = enable

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Give the model new heads for ``num_classes``; heads with outputs of their own (tasks) stay as they are.

        With ``global_pool`` it pools in another way from now on: ``pool`` of the config, or as timm calls it.
        """
        pool: Any = self.config.pool if global_pool is None else POOLS.get(global_pool, global_pool)
        config = replace(self.config, num_classes=num_classes, pool=pool)
        reference = self.patch_embed.proj.weight
        if pool == self.config.pool:
            self.heads.reset(num_classes, device=reference.device, dtype=reference.dtype)
        else:
            heads = _heads(config).to(reference.device, reference.dtype).train(self.training)
            for spec in config.tokens:
                if spec.classes:
                    setattr(heads, spec.name, getattr(self.heads, spec.name))
            self.heads = heads
        self.config = config

    # What the model does.

    def forward(self, x: Tensor) -> Tensor | Output:
        """Give the logits (B, num_classes), or the whole `Output` where task tokens have heads of their own."""
        return self._short(self.forward_output(x))

    def forward_output(self, x: Tensor) -> Output:
        """Give the logits, the answer of each head by name, and the features of all tokens."""
        return self._answer(self.forward_features(x))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor | Output:
        """Give for features (B, N, D) what `forward` gives for inputs; or, as in timm, the pooled features (B, D)."""
        if pre_logits:
            return self.heads.pooled(features, self._layout_of(features))
        return self._short(self._answer(features))

    def _answer(self, features: Tensor) -> Output:
        return self.heads(features, self._layout_of(features))

    def _layout_of(self, features: Tensor) -> TokenLayout:
        """Give the layout of features (B, N, D), of however many patches."""
        if features.dim() != 3:
            raise UnsupportedInput(f"features are (pictures, tokens, channels); got {tuple(features.shape)}")
        patches = features.shape[1] - self.num_prefix_tokens
        if patches < 1:
            raise UnsupportedInput(
                f"features of {features.shape[1]} tokens have no patches after the {self.num_prefix_tokens} special "
                "tokens; expected all tokens, as forward_features gives them"
            )
        return TokenLayout.from_specs(self.config.tokens, (1, 1, patches))

    def forward_features(self, x: Tensor) -> Tensor:
        """Give the features (B, N, D) of all tokens after the last norm, in the order of `layout`."""
        config = self.config
        self._check_input(x)
        grid = self._grid(tuple(x.shape[2:]))
        x, special = self._embed(x, grid)
        axes = len(config.patch)
        rope = rotary_table(grid, config.head_width, axes, x) if config.position == "rotary" else None
        if self.training and config.patch_drop:
            x, rope = drop_patches(x, rope, config.patch_drop)
        patches = x.shape[1]
        here: tuple[TokenSpec, ...] = ()
        mask = None
        for layer, block in enumerate(self.blocks):
            if (entered := self._entered(layer)) != here:
                x, here = self._enter(x, entered, here, special), entered
                mask = reading_mask(here, patches, x.shape[1], x.device)
            x = self._run(block, x, rope=rope, mask=mask)
        if config.class_attention:
            x = weave(config.tokens, here, x, self._gather(x, here, special))
        return self.norm(x)

    def _enter(
        self, x: Tensor, entered: tuple[TokenSpec, ...], here: tuple[TokenSpec, ...], special: dict[str, Tensor]
    ) -> Tensor:
        """Let tokens into a sequence that has those of ``here``, so that it has those of ``entered``."""
        return weave(entered, here, x, special)

    def _gather(self, x: Tensor, here: tuple[TokenSpec, ...], special: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the class-attention stage: give the tokens that enter there, when they have read all others."""
        queries, mask = x[:, :0], None
        asking: tuple[TokenSpec, ...] = ()
        for layer, block in enumerate(self.blocks_token_only, self.config.depth):
            entered = tuple(spec for spec in self._entered(layer) if self.config.gathers(spec))
            if entered != asking:
                queries, asking = weave(entered, asking, queries, special), entered
                patches = x.shape[1] - sum(spec.count for spec in here)
                mask = reading_mask((*asking, *here), patches, queries.shape[1], x.device)
            queries = self._run(block, queries, others=x, mask=mask)
        return pick(asking, queries)

    def _run(self, block: nn.Module, x: Tensor, **given: Tensor | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            again: Tensor = checkpoint(partial(block, **given), x, use_reentrant=False)
            return again
        return block(x, **given)

    def _embed(self, x: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Give the patches (B, P, D) and the special tokens by name, with their positions."""
        config = self.config
        self._check_tokens()
        x = self.patch_embed(x)
        special = dict(self.tokens.items())
        if self.pos_embed is not None:
            front, positions = self.pos_embed.split(
                [self._num_positioned, self.pos_embed.shape[1] - self._num_positioned], 1
            )
            own = pick([spec for spec in config.tokens if config.positioned(spec)], front)
            special = {name: token + own[name] if name in own else token for name, token in special.items()}
            x = x + resample(positions, config.grid, grid)
        elif config.position == "sincos":
            x = x + sincos_table(grid, config.width, len(config.patch), x)
        batch = x.shape[0]
        special = {
            name: self.norm_pre(self.pos_drop(token.expand(batch, -1, -1))).to(x.dtype)
            for name, token in special.items()
        }
        return self.norm_pre(self.pos_drop(x)), special

    # Small things that the above are made of.

    @property
    def _num_positioned(self) -> int:
        return sum(spec.count for spec in self.config.tokens if self.config.positioned(spec))

    def _short(self, output: Output) -> Tensor | Output:
        several = any(spec.role is Role.TASK for spec in self.config.tokens)
        return output if several or output.logits is None else output.logits

    def _entered(self, layer: int) -> tuple[TokenSpec, ...]:
        return tuple(spec for spec in self.config.tokens if self.config.entry(spec) <= layer)

    def _grid(self, size: int | tuple[int, ...] | None) -> tuple[int, int, int]:
        patch = self.config.patch
        if size is None:
            return self.config.grid
        sides = (size, size) if isinstance(size, int) else size
        right = isinstance(sides, list | tuple) and len(sides) == len(patch)
        right = right and all(isinstance(side, int | torch.SymInt) for side in sides)
        if not right or any(side < step or side % step for side, step in zip(sides, patch, strict=True)):
            raise UnsupportedInput(
                f"an input of size {size!r} cannot be cut into patches of {patch}; expected ({', '.join(self._axes)}), "
                "each a multiple. Resize or pad it"
            )
        return (1, *(side // step for side, step in zip(sides, patch, strict=True)))[-3:]  # type: ignore[return-value]

    @property
    def _axes(self) -> tuple[str, ...]:
        return ("time", "height", "width")[3 - len(self.config.patch) :]

    def _check_tokens(self) -> None:
        """Raise where somebody gave the model other tokens than its config says; it would not know which is which."""
        wanted = {spec.name: (1, spec.count, self.config.width) for spec in self.config.tokens}
        given = {name: tuple(value.shape) for name, value in self.tokens.items()}
        if given != wanted:
            raise UnsupportedModel(
                f"the tokens of this model are {given}, and its config says {wanted}; build a model with such specs, "
                "or add tokens with vitrail.add_tokens"
            )

    def _check_input(self, x: Tensor) -> None:
        axes = self._axes
        if x.dim() != 2 + len(axes) or x.shape[1] != self.config.in_chans:
            raise UnsupportedInput(
                f"expected an input of (batch, {self.config.in_chans} channels, {', '.join(axes)}); "
                f"got {tuple(x.shape)}"
            )

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Draw linear layers, positions and tokens from a narrow normal distribution; biases begin at zero."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for spec in self.config.tokens:
            nn.init.normal_(self.tokens[spec.name], std=spec.std)

    # Files.

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, whole or not at all.

        With ``labels.json``, where the model was loaded with one: the names of its classes stay with it.
        """
        states = self.state_dict()
        with torch.device("meta"):
            own = ViT(self.config).state_dict()
        if foreign := [name for name in states if name not in own]:
            raise ModelLoadError(
                f"this model has more than its config says: {', '.join(foreign[:8])}. Take that away first; what "
                "vitrail.add_tokens added is saved by AddedTokens.save"
            )
        write_folder(Path(folder), self.config.to_dict(), states, vars(self).get(TOLD))

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes to ``owner/name`` on the Hugging Face Hub; gives its address.

        Options are ``private`` and ``token``, and those of the Hub's ``upload_folder``, such as ``commit_message``.
        The repository is made where there is none.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), repository, **options)

    @classmethod
    def from_pretrained(cls, name: str | Path, **hub: Any) -> Self:
        """Read a folder that `save_pretrained` wrote, or such a repository of the Hugging Face Hub.

        Options (``revision``, ``cache_dir``, ``token`` …) go to the Hub's download. The model has the precision of
        its file, and is in evaluation mode.
        """
        values, states = read_folder(name, **hub)
        try:
            config = ViTConfig.from_dict(values)
        except InvalidOption as error:
            raise InvalidOption(f"{name} holds no config of a model of ours: {error}") from error
        with torch.device("meta"):
            model = cls(config)
        load_states(model, states, assign=True)
        return model.eval()


def _heads(config: ViTConfig) -> Heads:
    pool = None
    if config.pool == "attention":
        pool = AttentionPool(config.width, config.heads, mlp_ratio=config.mlp_ratio, norm_eps=config.norm_eps)
    norm = config.norm_eps if config.final_norm == "pooled" else None
    return Heads(
        config.tokens,
        config.width,
        config.num_classes,
        pool=config.pool,
        fuse=config.fuse,
        attention=pool,
        norm_eps=norm,
    )
