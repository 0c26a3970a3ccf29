"""transformers: ViT, DeiT, DINOv2 and DINOv2 with registers, with any of their heads and attention implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, BlockCall, DenseBlock, TrunkAdapter, at_work, forward_class, is_plain
from vitrail.adapters.forward_pass import open_pass
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.tokens import Role, TokenLayout


def load(name: str, pretrained: bool = True, **options: Any) -> nn.Module:
    """Load a model from a folder or the Hub, with its classification head where it has one."""
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
    except ImportError as error:
        raise ModelLoadError(
            f"hf:{name} needs transformers; install it with `pip install vitrail[transformers]`"
        ) from error
    try:
        config = AutoConfig.from_pretrained(name)
        classifies = any("ForImageClassification" in kind for kind in config.architectures or ())
        auto = AutoModelForImageClassification if classifies else AutoModel
        model = auto.from_pretrained(name, **options) if pretrained else auto.from_config(config, **options)
    except Exception as error:
        raise ModelLoadError(
            f"transformers could not load {name!r}: {str(error).rstrip('.')}. Give a folder written by "
            "save_pretrained, or a name on the Hub that can be reached."
        ) from error
    return model.eval()


class TransformersBlock(BlockAdapter):
    """A layer whose attention holds ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` (ViT, DeiT)."""

    input_name = "hidden_states"

    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        return BlockCall(args[0] if args else kwargs.get("attention_mask"))

    def attend_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.layernorm_before(x)

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attention
        return _heads(attention.head_dim, attention.q_proj(h), attention.k_proj(h), attention.v_proj(h))

    def attention_scale(self, block: Any) -> float:
        return block.attention.scaling

    def attention_dropout(self, block: Any) -> float:
        return block.attention.attention_dropout if block.attention.training else 0.0

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        return block.attention.o_proj(attended)

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.dropout(y)

    def feed_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.layernorm_after(x)

    def feed(self, block: Any, h: Tensor) -> Tensor:
        return block.mlp(h)

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.dropout(y)

    def norms(self, block: Any) -> tuple[Any, Any]:
        """Give the norms of attention and MLP."""
        return block.layernorm_before, block.layernorm_after

    def gammas(self, block: Any) -> tuple[Tensor | None, Tensor | None]:
        """Give the layer scale of attention and MLP."""
        return None, None

    def dense(self, block: Any) -> DenseBlock | None:
        attention = block.attention
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms, heads, proj = self.norms(block), attention.num_attention_heads, attention.o_proj
        mlp = block.mlp
        linears = (*qkv, proj, *((mlp.fc1, mlp.fc2) if hasattr(mlp, "fc1") else (mlp,)))
        plain = (
            all(is_plain(linear, nn.Linear) and linear.bias is not None for linear in linears)
            and all(is_plain(norm, nn.LayerNorm) for norm in norms)
            and is_plain(mlp, type(mlp))
            and type(getattr(mlp, "activation_fn", None)).__name__ == "GELUActivation"
            and self.attention_dropout(block) == 0
        )
        if not plain:
            return None
        scale = self.attention_scale(block)
        drop = at_work(block.drop_path if hasattr(block, "drop_path") else block.dropout)
        return DenseBlock(
            heads, norms[0], qkv, proj, norms[1], mlp.fc1, mlp.fc2,
            self.gammas(block), scale, "none", (drop, (), drop),
        )  # fmt: skip

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attention,)

    def feed_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.mlp,)

    def head_shape(self, block: Any) -> tuple[int, int]:
        return block.attention.num_attention_heads, block.attention.head_dim


class Dinov2Block(TransformersBlock):
    """A DINOv2 layer: other names for the norms, layer scale and drop path."""

    def norms(self, block: Any) -> tuple[Any, Any]:
        return block.norm1, block.norm2

    def gammas(self, block: Any) -> tuple[Tensor | None, Tensor | None]:
        return block.layer_scale1.lambda1, block.layer_scale2.lambda1

    def attend_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm1(x)

    def attend_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path(block.layer_scale1(y))

    def feed_norm(self, block: Any, x: Tensor) -> Tensor:
        return block.norm2(x)

    def feed_branch(self, block: Any, y: Tensor) -> Tensor:
        return block.drop_path(block.layer_scale2(y))


class NestedDinov2Block(Dinov2Block):
    """A DINOv2 layer of transformers before 5.18, whose attention is two modules deep."""

    def dense(self, block: Any) -> DenseBlock | None:
        return None

    def qkv(self, block: Any, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attention.attention
        return _heads(attention.attention_head_size, attention.query(h), attention.key(h), attention.value(h))

    def attention_scale(self, block: Any) -> float:
        return block.attention.attention.scaling

    def attention_dropout(self, block: Any) -> float:
        attention = block.attention.attention
        return attention.dropout_prob if attention.training else 0.0

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        return block.attention.output(attended, h)

    def head_shape(self, block: Any) -> tuple[int, int]:
        attention = block.attention.attention
        return attention.num_attention_heads, attention.attention_head_size


def _heads(width: int, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    return q, k, v


class TransformersEntryPoint:
    """The way into a transformers trunk; opens a pass with the layout of the input at hand."""

    _vitrail_adapter: TransformersTrunk

    def forward(self: Any, pixel_values: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if kwargs.get("output_attentions", getattr(config, "output_attentions", False)):
            raise UnsupportedInput(
                "attention maps of a merged model are not square and are not kept; remove the merging, or the tokens "
                "that were added, use vitrail.record, or call the model without output_attentions"
            )
        if pixel_values is None:
            return super().forward(pixel_values, *args, **kwargs)  # type: ignore[misc]
        hidden = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        adapter = self._vitrail_adapter
        layout = adapter.layout(self, (pixel_values.shape[-2], pixel_values.shape[-1]))
        expose = adapter.exposes or bool(hidden)
        gridded = adapter.exposes and getattr(config, "reshape_hidden_states", False)
        # while exporting, transformers makes a mask that allows everything
        unmasked = kwargs.get("attention_mask") is None and not any(isinstance(value, Tensor) for value in args[2:])
        with open_pass(self, layout, expose=expose, gridded=gridded, unmasked=unmasked):
            return super().forward(pixel_values, *args, **kwargs)  # type: ignore[misc]


class TransformersTrunk(TrunkAdapter):
    """A model without its head; ``exposes`` says that it always looks at the tokens between blocks."""

    exposes = False

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.layers)

    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        kind = forward_class(block)
        adapter = _BLOCKS.get(kind.__name__)
        if adapter is None or not kind.__module__.startswith("transformers."):
            raise UnsupportedModel(
                f"layers of class {type(block).__name__} are not supported; of transformers, Vitrail knows "
                f"{', '.join(_BLOCKS)}. If this is a wrapper, merge before wrapping"
            )
        nested = isinstance(adapter, Dinov2Block) and not hasattr(block.attention, "q_proj")
        return NestedDinov2Block() if nested else adapter

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        patch = trunk.embeddings.patch_embeddings.patch_size
        height, width = self.preprocessing(trunk).size if size is None else size
        return TokenLayout.of(*self.special(trunk), grid=(1, height // patch[0], width // patch[1]))

    def special(self, trunk: Any) -> tuple[tuple[Role, int], ...]:
        """Give the special tokens in their order."""
        return ((Role.CLASS, 1),)

    def resizes(self, trunk: Any) -> bool:
        return True

    def preprocessing(self, trunk: Any) -> InputSpec:
        size = trunk.config.image_size
        half = (0.5, 0.5, 0.5)
        return InputSpec((size, size) if isinstance(size, int) else tuple(size), half, half)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "distillation_token", Role.REGISTER: "register_tokens"}
        found = {(role, ""): getattr(trunk.embeddings, name, None) for role, name in names.items()}
        return {role: value for role, value in found.items() if value is not None}

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return 0 if model is trunk else trunk.config.num_labels

    def entry_points(self) -> type:
        return TransformersEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings,)


class DeiTTrunk(TransformersTrunk):
    """DeiT: a distillation token behind the class token."""

    def special(self, trunk: Any) -> tuple[tuple[Role, int], ...]:
        return ((Role.CLASS, 1), (Role.DISTILLATION, 1))


class Dinov2Trunk(TransformersTrunk):
    """DINOv2: layers inside an encoder, ImageNet's mean and deviation, maybe registers."""

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.encoder.layer)

    def special(self, trunk: Any) -> tuple[tuple[Role, int], ...]:
        return ((Role.CLASS, 1), (Role.REGISTER, getattr(trunk.config, "num_register_tokens", 0)))

    def preprocessing(self, trunk: Any) -> InputSpec:
        return InputSpec(super().preprocessing(trunk).size, MEAN, STD)


class Dinov2BackboneTrunk(Dinov2Trunk):
    """DINOv2 as a backbone: its feature maps are the tokens between blocks."""

    exposes = True


_BLOCKS: dict[str, BlockAdapter] = {
    "ViTLayer": TransformersBlock(),
    "DeiTLayer": TransformersBlock(),
    "Dinov2Layer": Dinov2Block(),
    "Dinov2WithRegistersLayer": Dinov2Block(),
}


def trunks() -> dict[type, TrunkAdapter]:
    """Give the supported model classes of transformers."""
    import transformers as library

    return {
        library.ViTModel: TransformersTrunk(),
        library.DeiTModel: DeiTTrunk(),
        library.Dinov2Model: Dinov2Trunk(),
        library.Dinov2WithRegistersModel: Dinov2Trunk(),
        library.Dinov2Backbone: Dinov2BackboneTrunk(),
        library.Dinov2WithRegistersBackbone: Dinov2BackboneTrunk(),
    }
