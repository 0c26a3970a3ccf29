"""``ViT``: vision transformers with special tokens of any roles, DeiT and CaiT included."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.heads import AttentionPool, DecoderHead, DenseHead, Heads, Output
from vitrail.models.config import ViTConfig
from vitrail.models.layers import Block, ClassAttentionBlock, PatchEmbed, layer_norm
from vitrail.models.position import resample, rotary_table, sincos_table
from vitrail.models.saving import LABELS_ATTRIBUTE, load_states, push_folder, read_folder, write_folder
from vitrail.tokens import Role, TokenLayout, TokenSpec

TIMM_POOLS = {"avg": "mean", "map": "attention"}
"""timm's names of ``pool``, accepted by `ViT.reset_classifier`."""

TOKEN_AND_POSITION_NAMES = (
    *("cls_token", "dist_token", "distillation_token", "register", "reg_token", "mask_token"),
    *("pos_embed", "position_embedding", "relative_position_bias_table", "latent"),
)
"""Parts of parameter names by which other libraries call tokens and positions."""


_AXES = ("time", "height", "width")


class ViT(nn.Module):
    """A vision transformer with special tokens of any roles.

    The sequence is the special tokens, in the order of ``config.tokens``, followed by the patches.

    >>> config = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=5)
    >>> model = ViT(config)
    >>> model(torch.zeros(1, 3, 32, 32)).shape, model.layout().num_tokens
    (torch.Size([1, 5]), 17)
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise InvalidOption(f"ViT takes a ViTConfig; got {config!r}. Use ViTConfig.from_dict for a dict")
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
        self.dense_head = _dense_head(config)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of special tokens in the output of `forward_features`."""
        return sum(spec.count for spec in self.config.tokens)

    def layout(self, size: int | tuple[int, ...] | None = None, layer: int | None = None) -> TokenLayout:
        """Return the layout for inputs of a size, by default ``config.image_size``.

        With ``layer``, leave out the tokens that enter after that layer. Class-attention layers are numbered after
        the blocks.
        """
        last = self.config.depth + self.config.class_attention - 1
        if layer is not None and not (isinstance(layer, int) and 0 <= layer <= last):
            raise InvalidOption(
                f"layer={layer!r}; expected 0 to {last}; class-attention layers are numbered after the blocks"
            )
        specs = self.config.tokens if layer is None else self._entered(layer)
        return TokenLayout.from_specs(specs, self._grid(size))

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay, apart from norms and biases."""
        tokens = {f"tokens.{spec.name}" for spec in self.config.tokens if not spec.decay}
        return tokens | ({"pos_embed"} if self.pos_embed is not None else set())

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: recompute each block in the backward pass."""
        self.grad_checkpointing = enable

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the heads by new ones for ``num_classes``; heads whose spec sets ``classes`` (tasks) are kept.

        ``global_pool`` changes ``config.pool``; timm's names are accepted, too.
        """
        pool: Any = self.config.pool if global_pool is None else TIMM_POOLS.get(global_pool, global_pool)
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

    def forward(self, x: Tensor) -> Tensor | Output:
        """Return the logits (B, num_classes), or an `Output` if the model has task tokens or a dense head."""
        return self._short(self.forward_output(x))

    def forward_output(self, x: Tensor) -> Output:
        """Return the logits, the logits of each head by name, the features of all tokens, and a map if there is one."""
        features = self.forward_features(x)
        output: Output = self.heads(features, self._layout_of(features))
        if self.dense_head is None:
            return output
        layout = TokenLayout.from_specs(self.config.tokens, self._grid(tuple(x.shape[2:])))
        return output._replace(dense=self.dense_head(features, layout, tuple(x.shape[2:])))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor | Output:
        """Return the output of `forward` for features (B, N, D); with ``pre_logits`` the pooled features (B, D)."""
        layout = self._layout_of(features)
        return self.heads.pooled(features, layout) if pre_logits else self._short(self.heads(features, layout))

    def _layout_of(self, features: Tensor) -> TokenLayout:
        """Return the layout of features (B, N, D) with any number of patches."""
        if features.dim() != 3:
            raise UnsupportedInput(f"expected features of shape (batch, tokens, channels); got {tuple(features.shape)}")
        patches = features.shape[1] - self.num_prefix_tokens
        if patches < 1:
            raise UnsupportedInput(
                f"features of {features.shape[1]} tokens have no patches after the {self.num_prefix_tokens} special "
                "tokens; expected all tokens, as forward_features returns them"
            )
        return TokenLayout.from_specs(self.config.tokens, (1, 1, patches))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the features (B, N, D) of all tokens after the final norm, in the order of `layout`."""
        config, axes = self.config, len(self.config.patch)
        if x.dim() != 2 + axes or x.shape[1] != config.in_chans:
            raise UnsupportedInput(
                f"expected an input of (batch, {config.in_chans} channels, {', '.join(_AXES[-axes:])}); got "
                f"{tuple(x.shape)}"
            )
        grid = self._grid(tuple(x.shape[2:]))
        x, special = self._embed(x, grid)
        rope = rotary_table(grid, config.head_width, axes, x) if config.position == "rotary" else None
        if self.training and config.patch_drop:
            x, rope = _drop_patches(x, rope, config.patch_drop)
        patches = x.shape[1]
        here: tuple[TokenSpec, ...] = ()
        mask = None
        for layer, block in enumerate(self.blocks):
            if (entered := self._entered(layer)) != here:
                x, here = self._enter(x, entered, here, special), entered
                mask = _attention_mask(here, patches, x.shape[1], x.device)
            x = self._run(block, x, rope=rope, mask=mask)
        if config.class_attention:
            x = _weave(config.tokens, here, x, self._gather(x, here, special))
        return self.norm(x)

    def _enter(
        self, x: Tensor, entered: tuple[TokenSpec, ...], here: tuple[TokenSpec, ...], special: dict[str, Tensor]
    ) -> Tensor:
        """Insert tokens so that a sequence with the special tokens ``here`` has those of ``entered``."""
        return _weave(entered, here, x, special)

    def _gather(self, x: Tensor, here: tuple[TokenSpec, ...], special: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the class-attention stage; return the tokens that enter there by name."""
        queries, mask = x[:, :0], None
        asking: tuple[TokenSpec, ...] = ()
        for layer, block in enumerate(self.blocks_token_only, self.config.depth):
            entered = tuple(spec for spec in self._entered(layer) if self.config.gathers(spec))
            if entered != asking:
                queries, asking = _weave(entered, asking, queries, special), entered
                patches = x.shape[1] - sum(spec.count for spec in here)
                mask = _attention_mask((*asking, *here), patches, queries.shape[1], x.device)
            queries = self._run(block, queries, others=x, mask=mask)
        return _pick(asking, queries)

    def _run(self, block: nn.Module, x: Tensor, **given: Tensor | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            again: Tensor = checkpoint(partial(block, **given), x, use_reentrant=False)
            return again
        return block(x, **given)

    def _embed(self, x: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the patches (B, P, D) and the special tokens by name, with their positions."""
        config = self.config
        self._check_tokens()
        x = self.patch_embed(x)
        special = dict(self.tokens.items())
        if self.pos_embed is not None:
            front, positions = self.pos_embed.tensor_split([self._num_positioned], 1)
            own = _pick([spec for spec in config.tokens if config.positioned(spec)], front)
            special = {name: token + own[name] if name in own else token for name, token in special.items()}
            x = x + resample(positions, config.grid, grid)
        elif config.position == "sincos":
            x = x + sincos_table(grid, config.width, len(config.patch), x)
        for name, token in special.items():
            special[name] = self.norm_pre(self.pos_drop(token.expand(x.shape[0], -1, -1))).to(x.dtype)
        return self.norm_pre(self.pos_drop(x)), special

    @property
    def _num_positioned(self) -> int:
        return sum(spec.count for spec in self.config.tokens if self.config.positioned(spec))

    def _short(self, output: Output) -> Tensor | Output:
        several = any(spec.role is Role.TASK for spec in self.config.tokens)
        several = several or output.dense is not None
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
            axes = ", ".join(_AXES[-len(patch) :])
            raise UnsupportedInput(
                f"input size {size!r} is not divisible into patches of {patch}; expected ({axes}), each a multiple. "
                "Resize or pad the input"
            )
        return (1, *(side // step for side, step in zip(sides, patch, strict=True)))[-3:]  # type: ignore[return-value]

    def _check_tokens(self) -> None:
        """Raise if the token parameters differ from the config, so that the layout would be wrong."""
        wanted = {spec.name: (1, spec.count, self.config.width) for spec in self.config.tokens}
        given = {name: tuple(value.shape) for name, value in self.tokens.items()}
        if given != wanted:
            raise UnsupportedModel(
                f"the model has the tokens {given}, but its config {wanted}; build a model with these specs, or use "
                "vitrail.add_tokens"
            )

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Initialize linear layers and positions from a truncated normal distribution, tokens from a normal one."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.trunc_normal_(part.weight, std=0.02)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for spec in self.config.tokens:
            nn.init.normal_(self.tokens[spec.name], std=spec.std)

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a directory, each atomically.

        Also writes ``labels.json`` (class names) if the model was loaded with one, and ``vitrail.json`` while it is
        merged or has added tokens. ``state_dict`` holds weights to write instead of the model's own.
        """
        states = self.state_dict() if state_dict is None else state_dict
        with torch.device("meta"):
            own = ViT(self.config).state_dict()
        if foreign := [name for name in states if name not in own]:
            raise ModelLoadError(
                f"this model has parameters beyond its config: {', '.join(foreign[:8])}. Remove them first; use "
                "AddedTokens.save for tokens added by vitrail.add_tokens"
            )
        write_folder(Path(folder), self.config.to_dict(), states, vars(self).get(LABELS_ATTRIBUTE))

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload the model to ``owner/name`` on the Hugging Face Hub, created if needed; return its URL.

        Options are ``private``, ``token``, and those of the Hub's ``upload_folder``, such as ``commit_message``.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), repository, **options)

    @classmethod
    def from_pretrained(cls, name: str | Path, **hub: Any) -> Self:
        """Load a model from a directory written by `save_pretrained`, or from a repository of the Hugging Face Hub.

        Options (``revision``, ``cache_dir``, ``token``, ...) are passed to ``hf_hub_download``. The model has the
        dtype of its file, and is in evaluation mode.
        """
        values, states = read_folder(name, **hub)
        try:
            config = ViTConfig.from_dict(values)
        except InvalidOption as error:
            raise InvalidOption(f"{name} has no valid config: {error}") from error
        with torch.device("meta"):
            model = cls(config)
        load_states(model, states, assign=True)
        return model.eval()


def _heads(config: ViTConfig) -> Heads:
    width, norm = config.width, config.norm_eps if config.final_norm == "pooled" else None
    attention = None
    if config.pool == "attention":
        attention = AttentionPool(width, config.heads, mlp_ratio=config.mlp_ratio, norm_eps=config.norm_eps)
    given: dict[str, Any] = {"pool": config.pool, "fuse": config.fuse, "attention": attention, "norm_eps": norm}
    return Heads(config.tokens, width, config.num_classes, **given)


def _dense_head(config: ViTConfig) -> DenseHead | DecoderHead | None:
    if not config.dense:
        return None
    kind = DecoderHead if config.dense_head == "decoder" else DenseHead
    return kind(config.width, config.dense)


def undecayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay, for any model.

    These are parameters of one dimension or less (norms, biases, scales), those listed by a module's
    ``no_weight_decay``, and, in models of other libraries, tokens and positions.
    """
    named = dict(model.named_parameters())
    found = {name for name, parameter in named.items() if parameter.ndim <= 1}
    for prefix, part in model.named_modules():
        listed = getattr(part, "no_weight_decay", None)
        if callable(listed):
            found |= {f"{prefix}.{name}" if prefix else name for name in listed()}
    if not any(isinstance(part, ViT) for part in model.modules()):
        found |= {name for name in named if any(word in name for word in TOKEN_AND_POSITION_NAMES)}
    return found & set(named)


def _weave(specs: Sequence[TokenSpec], here: Sequence[TokenSpec], x: Tensor, joining: Mapping[str, Tensor]) -> Tensor:
    """Insert tokens into a sequence (B, N, D) that starts with the tokens of ``here``, in the order of ``specs``."""
    pieces, start = [], 0
    for spec in specs:
        if spec in here:
            pieces.append(x[:, start : start + spec.count])
            start += spec.count
        elif spec.name in joining:
            pieces.append(joining[spec.name])
    return torch.cat([*pieces, x[:, start:]], 1)


def _pick(specs: Sequence[TokenSpec], x: Tensor) -> dict[str, Tensor]:
    """Split the special tokens (B, N, D) by name."""
    return {spec.name: part for spec, part in zip(specs, x.split([spec.count for spec in specs], 1), strict=True)}


def _drop_patches(x: Tensor, rope: Tensor | None, share: float) -> tuple[Tensor, Tensor | None]:
    """Drop a random share of the patches (B, P, D) of each sample, and their rows of the rotary table (P, d)."""
    count = max(round(x.shape[1] * (1 - share)), 1)
    kept = torch.rand(x.shape[:2], device=x.device).argsort(1)[:, :count]
    if rope is not None:
        rope = rope[kept].unsqueeze(1)  # (B, 1, P, d): the same for all heads
    return x.gather(1, kept.unsqueeze(-1).expand(-1, -1, x.shape[2])), rope


def _attention_mask(specs: Sequence[TokenSpec], patches: int, queries: int, device: torch.device) -> Tensor | None:
    """Return a mask (queries, keys) that is true where a query attends to a key; None if all do.

    The keys are the special tokens of ``specs`` and the patches; the queries are the first of them. Only an invisible
    token itself attends to it.
    """
    visible = [spec.visible for spec in specs for _ in range(spec.count)]
    if all(visible):
        return None
    readable = torch.tensor(visible + [True] * patches, device=device)
    return readable | torch.eye(queries, len(visible) + patches, dtype=torch.bool, device=device)
