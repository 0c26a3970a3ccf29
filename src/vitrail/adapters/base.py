"""The interfaces between Vitrail and a model library: `Library`, `TrunkAdapter` and `BlockAdapter`.

An adapter names the parts of a model and nothing else; everything else is written once, in ``vitrail.runtime``.
Most blocks need no class of their own: describe them by a table, `vitrail.adapters.named_block.BlockNames`.
See ``docs/adapters.md``.

Shapes: B batch, H heads, N tokens, D channels, d channels of a head, L layers.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail.adapters.forward_pass import ForwardEntry
from vitrail.adapters.position import Position as Position
from vitrail.adapters.position import Rotary as Rotary
from vitrail.data.labels.targets import TargetSpec
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.tokens import Role, TokenLayout

if TYPE_CHECKING:
    from vitrail.adapters.windows import LayerWindows


def forward_class(module: nn.Module) -> type:
    """Return the class whose ``forward`` a module runs.

    Modules are recognized by it: wrappers such as FSDP put a class in front that leaves ``forward`` alone, while one
    that changes it is another kind of module. Vitrail's own mixins do not count.
    """
    kinds = type(module).__mro__
    ours = {
        mixin for kind in kinds if "_vitrail_swap" in vars(kind) for mixin in vars(kind)["_vitrail_swap"][0].__mro__
    }
    return next(kind for kind in kinds if "forward" in vars(kind) and kind not in ours)


QkvName = Literal["q", "k", "v"]
"""Queries, keys or values."""


class BlockCall(NamedTuple):
    """Arguments of a block besides its tokens.

    Attributes:
        mask: which token attends to which.
        causal: whether each token attends only to those before it.
        rope: table of the rotary position.
        among_special: whether the mask, (N, N), hides special tokens alone and treats all patches alike, so that its
            corner is the mask of fewer patches.
        grid: rows and columns of the tokens, as the block was given them.
    """

    mask: Tensor | None = None
    causal: bool = False
    rope: Tensor | None = None
    among_special: bool = False
    grid: Any = None


@dataclass(frozen=True)
class DenseMlp:
    """An MLP of two linear layers with a GELU between them.

    Attributes:
        gelu: ``"none"`` or ``"tanh"``, as in ``torch.nn.functional.gelu``.
        drops: active dropouts between the two linear layers, and after both.
    """

    fc1: nn.Linear
    fc2: nn.Linear
    gelu: str
    drops: tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]] = ((), ())


@dataclass(frozen=True)
class DenseBlock:
    """A block with plain LayerNorms and sums, which fused kernels compute; parts that are None run by the adapter.

    Attributes:
        gammas: layer scale of attention and MLP, or None for either.
        scale: factor of the attention scores; None for 1/√d.
        drops: active dropouts and drop paths at the end of attention and of the MLP.
        qkv: one projection to queries, keys and values together, or three; None where more than that computes them.
        proj: the projection behind attention; None where more than that follows.
        mlp: the MLP in detail; None for any other.
    """

    heads: int
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    gammas: tuple[Tensor | None, Tensor | None]
    scale: float | None = None
    drops: tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]] = ((), ())
    qkv: tuple[Callable[[Tensor], Tensor], ...] | None = None
    proj: nn.Module | None = None
    mlp: DenseMlp | None = None


def active_drops(*modules: nn.Module) -> tuple[nn.Module, ...]:
    """Return those dropouts and drop paths that are active now, or hooked."""
    return tuple(part for part in modules if not _is_idle(part))


def _is_idle(part: nn.Module) -> bool:
    if not is_plain(part, type(part)):
        return False
    return not part.training or type(part) is nn.Identity or getattr(part, "p", getattr(part, "drop_prob", 1)) == 0


def is_ordinary(module: nn.Module) -> bool:
    """Return whether all parameters of a module itself are plain tensors, not quantized or distributed ones."""
    return all(type(value) in (nn.Parameter, Tensor) for value in module._parameters.values() if value is not None)


def is_plain(module: nn.Module, *kinds: type) -> bool:
    """Return whether a module is exactly one of these classes, with ordinary parameters and no hooks."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) in kinds and is_ordinary(module) and not hooked


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values (B, heads, N, d) until they have as many heads as the queries."""
    if k.shape[1] == q.shape[1]:
        return k, v
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


class BlockAdapter(ABC):
    """The parts of one kind of block that attends, then feeds.

    `NamedBlock` implements all of it over a table of names; subclass that where a block's behavior differs.
    Adapters hold no state of a model: each method takes the block and resolves its part when it is called, so that
    a part replaced later (LoRA, quantization) is used.
    """

    input_name: str = "x"
    """Name of the argument that takes the tokens."""

    fused: bool = True
    """Whether attention is a softmax of the scores and nothing more, so that fused kernels compute it."""

    tuple_length: int = 0
    """Length of the tuple that the block returns, tokens first and None behind; 0 where it returns the tokens alone."""

    biased: bool = False
    """Whether the scores have a position bias, from `Position.bias` of the trunk: blocks do not run by themselves."""

    rotates: bool = False
    """Whether the block computes its rotation table itself; `Position.table` of the trunk replaces it: likewise."""

    mixes: bool = False
    """Whether queries, keys and values are also computed from those of neighbors on the grid, by `mix`."""

    def returned(self, tokens: Tensor, call: BlockCall) -> Any:
        """Return what the block returns for its output tokens."""
        return (tokens, *(None,) * (self.tuple_length - 1)) if self.tuple_length else tokens

    @abstractmethod
    def read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Read the arguments that the block was called with besides its tokens."""

    @abstractmethod
    def attend_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        """Normalize tokens (B, N, D) for attention; the identity in post-norm blocks."""

    @abstractmethod
    def qkv(self, block: nn.Module, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries, keys and values (B, H, N, d), with their norms and before any rotation.

        Keys and values may have fewer heads (grouped queries).
        """

    def mix(self, block: nn.Module, x: Tensor, part: QkvName, grid: tuple[int, int]) -> Tensor:
        """Return queries, keys or values (B, H, N, d) of all places of a grid, each from those of its neighbors."""
        return x

    def rotate(self, block: nn.Module, x: Tensor, table: Tensor) -> Tensor:
        """Rotate queries or keys (B, H, N, d) by a table for the last tokens of the sequence."""
        raise NotImplementedError

    def attention_scale(self, block: nn.Module) -> float | None:
        """Return the factor of the attention scores; None where the attention function's default, 1/√d, applies."""
        return None

    def weigh(self, block: nn.Module, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Turn scaled scores (B, H, Q, N) into weights; a key with bias b counts as exp b keys, with −inf as none."""
        return (scores if bias is None else scores + bias).softmax(-1)

    @abstractmethod
    def attention_dropout(self, block: nn.Module) -> float:
        """Return the dropout rate of the attention weights in the block's present mode."""

    def attended(self, block: nn.Module, values: Tensor, q: Tensor) -> Tensor:
        """Return the output of attention (B, N, H·d) from the attended values and the queries (B, H, N, d)."""
        return values

    @abstractmethod
    def attend_output(self, block: nn.Module, attended: Tensor, h: Tensor) -> Tensor:
        """Project the attended values (B, N, H·d); ``h`` is the input of attention."""

    @abstractmethod
    def attend_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        """Apply what comes between attention's output and the sum: layer scale, dropout, drop path, post-norm."""

    @abstractmethod
    def feed_norm(self, block: nn.Module, x: Tensor) -> Tensor:
        """Normalize tokens (B, N, D) for the MLP; the identity in post-norm blocks."""

    @abstractmethod
    def feed(self, block: nn.Module, h: Tensor) -> Tensor:
        """Run the MLP."""

    @abstractmethod
    def feed_branch(self, block: nn.Module, y: Tensor) -> Tensor:
        """Apply what comes between the MLP's output and the sum."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the output of one half to its input; the first operand decides the strides of the sum."""
        return x + y

    def dense(self, block: nn.Module) -> DenseBlock | None:
        """Return the block in the form that fused kernels compute; None where its norms or sums are not plain."""
        return None

    @abstractmethod
    def attend_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        """Return the modules whose weights multiply every token while attending."""

    @abstractmethod
    def feed_parts(self, block: nn.Module) -> Sequence[nn.Module]:
        """Return the modules whose weights multiply every token while feeding."""

    def shift_prefix(self, block: nn.Module, by: int) -> None:  # noqa: B027  (most blocks treat all tokens alike)
        """Add to the number of tokens before the patches, where the block keeps it."""

    def feed_last(self, block: nn.Module) -> nn.Module:
        """Return the MLP's last linear layer, whose inputs are the MLP's neurons."""
        found: list[tuple[str, nn.Module]] = []
        for index, whole in enumerate(self.feed_parts(block)):
            for name, part in whole.named_modules(prefix=str(index)):
                inside = any(name.startswith(f"{outer}.") for outer, _ in found)  # a wrapper's own layers
                if hasattr(part, "in_features") and not inside:
                    found.append((name, part))
        if not found:
            raise UnsupportedModel(f"the MLP of this {type(block).__name__} has no linear layer")
        return found[-1][1]

    def attend_last(self, block: nn.Module) -> Sequence[nn.Module]:
        """Return the modules whose output is that of attention, before `attend_branch`; of these the last that ran."""
        raise UnsupportedModel(f"the output of attention cannot be observed in {type(block).__name__}")

    def pair_weights(self, block: nn.Module) -> int:
        """Count the weights that multiply every pair of tokens while attending, besides queries and keys."""
        return 0

    @abstractmethod
    def head_shape(self, block: nn.Module) -> tuple[int, int]:
        """Return the number of heads, and the channels of one."""


@checked
def known_block(block: nn.Module, known: Mapping[type | str, BlockAdapter]) -> BlockAdapter:
    """Return the adapter of a block by its class or the class's dotted name; raise ``UnsupportedModel`` for others."""
    kind = forward_class(block)
    adapter = known.get(kind) or known.get(f"{kind.__module__}.{kind.__qualname__}")
    if adapter is None:
        names = [str(getattr(one, "__name__", one)).rpartition(".")[2] for one in known]
        raise UnsupportedModel(
            f"blocks of class {type(block).__name__} are not supported: Vitrail merges between attention and MLP, and "
            f"knows {', '.join(names)} here. If it is a wrapper, merge before wrapping"
        )
    return adapter


@dataclass(frozen=True)
class VisualTokens:
    """The tokens that a vision-language model passes to its language model for each image.

    Attributes:
        owner: the module that is called with ``input_ids`` and ``pixel_values``.
        projector: the module that returns the tokens (images, count, D).
        count: number of tokens for an image of the model's own size.
        placeholder: id that stands for each of them in a prompt.
        padding: id that pads prompts, where the model has one.
    """

    owner: nn.Module
    projector: nn.Module
    count: int
    placeholder: int
    padding: int | None


class TrunkAdapter(ABC):
    """One kind of model: its blocks in order, its tokens, and how a forward pass begins."""

    argument: str = "x"
    """Name of the argument that takes the input."""

    exposes: bool = False
    """Whether the model always reads the tokens between blocks (a backbone's feature maps)."""

    packed: bool = False
    """Whether images are packed into one sequence, so that tokens have no batch axis."""

    @abstractmethod
    def blocks(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks in the order in which they run."""

    @abstractmethod
    def block_adapter(self, block: nn.Module) -> BlockAdapter:
        """Return the adapter of a block; raise ``UnsupportedModel`` for an unknown one."""

    @abstractmethod
    def layout(self, trunk: nn.Module, size: tuple[int, ...] | None = None) -> TokenLayout:
        """Return the token layout before the first block, for inputs of a size in pixels or of the model's own."""

    def layout_in(self, trunk: nn.Module, layer: int, size: tuple[int, ...] | None = None) -> TokenLayout:
        """Return the token layout inside a block, where tokens enter between blocks; −1 is the last block.

        Layers of a class-attention stage count on from the blocks.
        """
        return self.layout(trunk, size)

    def layer_windows(self, trunk: nn.Module) -> tuple[LayerWindows, ...]:
        """Return the windows of each block, where attention runs inside windows; () where it sees all tokens.

        Tokens are restored behind the last of several blocks with the same windows, whose adapters are
        `WindowedAdapter`; blocks may then have grids of their own. In packed sequences (`packed`) the windows are
        segments: tokens stay in them, merged, through all blocks.
        """
        return ()

    def stage(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of a class-attention stage after the others; each returns its query tokens (B, Q, D)."""
        return ()

    def stage_attention(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the attention (B, H, Q, N) of a stage's query tokens over all special tokens, then patches."""
        raise NotImplementedError

    def channels_first(self, trunk: nn.Module, inputs: Tensor) -> Tensor:
        """Return a batch of inputs as (B, C, *size), where the model takes another order of axes."""
        return inputs

    @abstractmethod
    def resizes(self, trunk: nn.Module) -> bool:
        """Return whether the model takes inputs of other sizes than its own."""

    @abstractmethod
    def input_spec(self, trunk: nn.Module) -> InputSpec:
        """Return the size and normalization that the model expects of its inputs."""

    def entry_points(self) -> type:
        """Return the mixin whose methods wrap the model's own entry points, each opening a forward pass.

        The default wraps ``forward``. While a trunk has the mixin, its attribute ``_vitrail_adapter`` is this adapter.
        """
        return ForwardEntry

    @abstractmethod
    def patch_parts(self, trunk: nn.Module) -> Sequence[nn.Module]:
        """Return the modules outside the blocks whose weights multiply every patch (embedding, attention pooling)."""

    def pooled_weights(self, trunk: nn.Module) -> int:
        """Count the weights that multiply every patch in modules whose other weights do not (attention pooling)."""
        return 0

    def elsewhere(self, model: nn.Module, trunk: nn.Module) -> Sequence[nn.Module]:
        """Return the parts of a model around this trunk that do not run on its inputs (a text tower)."""
        return ()

    def image_model(self, model: nn.Module, trunk: nn.Module) -> nn.Module:
        """Return what runs a model around this trunk on a batch of images alone: the model, or a part or wrapper of it.

        It shares the trunk, and returns itself where it is given as the model.
        """
        return model

    def behind(self, model: nn.Module, trunk: nn.Module) -> Sequence[tuple[nn.Module, int]]:
        """Return the parts of a model behind the blocks that run on every patch, or once for several, with how many."""
        return ()

    def pairs_behind(self, model: nn.Module, trunk: nn.Module) -> int:
        """Count the multiply-adds for every pair of patches behind the blocks (pooling in which patches attend)."""
        return 0

    def visual_tokens(self, model: nn.Module, trunk: nn.Module) -> VisualTokens:
        """Return what a model around this trunk passes to its language model for each image.

        Raise ``UnsupportedModel`` where there is none, or where it needs every token at its place.
        """
        raise UnsupportedModel(
            f"shorten= is for vision-language models, given whole; this {type(model).__name__} has no language model"
        )

    def patch_embedding(self, trunk: nn.Module) -> nn.Module:
        """Return the module that turns images (B, C, H, W) into patch tokens, before any position is added."""
        return self.patch_parts(trunk)[0]

    def image_module(self, trunk: nn.Module) -> nn.Module:
        """Return the module that is called with images (B, C, *size); not `patch_embedding` where that gets patches."""
        return self.patch_embedding(trunk)

    def read_images(
        self, trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        """Return the size of the images that `image_module` is called with, and what it takes instead of images.

        That is None where it takes images, or was called with what it takes.
        """
        images = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        return tuple(images.shape[2:]), None

    def savers(self, model: nn.Module, trunk: nn.Module) -> Sequence[nn.Module]:
        """Return the parts of a model that contain the trunk and save themselves by ``save_pretrained``."""
        return ()

    def config(self, trunk: nn.Module) -> Mapping[str, Any]:
        """Return the options that the trunk was built with, as plain data; empty where its library keeps none."""
        return {}

    norm: str = ""
    """Attribute of the trunk that holds the norm behind the last block; empty where there is none."""

    def final_norm(self, trunk: nn.Module) -> nn.Module:
        """Return the norm behind the last block; the identity where tokens leave the trunk as the last block does."""
        found: Any = trunk
        for part in self.norm.split(".") if self.norm else ("",):
            found = getattr(found, part, None)
        return nn.Identity() if found is None else found

    def check(self, trunk: nn.Module) -> None:  # noqa: B027  (most trunks have nothing more to check)
        """Raise ``UnsupportedModel`` where something besides the blocks is not supported."""

    def position(self, trunk: nn.Module, grid: tuple[int, int, int]) -> Position | None:
        """Return the position that acts inside attention, for a patch grid; None where the model has none."""
        return None

    def token_parameters(self, trunk: nn.Module) -> dict[tuple[Role, str], Tensor]:
        """Return the learned values (1, count, D) of special tokens, by role and name as in the layout."""
        return {}

    def num_classes(self, model: nn.Module, trunk: nn.Module) -> int:
        """Return the number of classes of a model around this trunk, or of the trunk itself; 0 for none."""
        return 0


def around(model: nn.Module, trunk: nn.Module, kind: type) -> list[nn.Module]:
    """Return the parts of a model, itself included, that are of a class and contain the trunk."""
    return [part for part in model.modules() if isinstance(part, kind) and any(one is trunk for one in part.modules())]


def beside_tower(model: nn.Module, trunk: nn.Module) -> Sequence[nn.Module]:
    """Return the parts for text of open_clip's models, whose vision tower is their part ``visual``."""
    for owner in model.modules():
        tower = getattr(owner, "visual", None)
        if isinstance(tower, nn.Module) and any(part is trunk for part in tower.modules()):
            return [part for name, part in owner.named_children() if name != "visual"]
    return ()


def parameters_by_role(owner: Any, names: Mapping[Role, str]) -> dict[tuple[Role, str], Tensor]:
    """Return those parameters, by attribute name, that a module has: the result of `TrunkAdapter.token_parameters`."""
    found = {(role, ""): getattr(owner, name, None) for role, name in names.items()}
    return {role: value for role, value in found.items() if value is not None}


@dataclass(frozen=True)
class ModelRequest:
    """A model to train: the argument of `Library.build`.

    Attributes:
        classes: names of the classes by label column; the model has an output for each, column after column.
        pretrained: whether to start from trained weights; None for the library's default.
        image_size: size of the inputs in pixels; None for the model's own.
        drop_path: stochastic depth rate; None for the model's own.
        options: for the library's constructor.
        targets: what label columns hold that hold no classes; a dense one needs a head of its own.
    """

    classes: Mapping[str, tuple[str, ...]]
    pretrained: bool | None = None
    image_size: int | tuple[int, ...] | None = None
    drop_path: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, TargetSpec] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name of each output."""
        return tuple(name for column in self.classes.values() for name in column)


CODE_OPTIONS = frozenset({"trust_remote_code", "custom_generate", "allow_all_kernels", "pickle_module"})
"""Options of libraries with which loading a model runs code that comes with it."""


class Library(ABC):
    """All that Vitrail knows about one library: its trunks, and how its models are loaded, built and saved.

    ``vitrail.adapters.registry.LIBRARIES`` holds one by the prefix of its model names.
    """

    prefix: str
    """What names of its models begin with: ``PREFIX:NAME``."""

    package: str
    """Package that is imported wherever one of its models exists."""

    extra: str | None = None
    """Extra of Vitrail that installs it, where there is one."""

    heads: Mapping[str, str] = {}
    """Attribute names of the linear layers that predict the model's own classes, each with the role that it reads."""

    modalities: tuple[str, ...] = ("image",)
    """What its models take."""

    @abstractmethod
    def trunks(self) -> Mapping[str, TrunkAdapter]:
        """Return the adapters by the dotted name of the trunk class; the library itself need not be imported."""

    @abstractmethod
    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load a model by name, in eval mode; raise ``ModelLoadError`` if it is unknown or cannot be read."""

    def declared_spec(self, model: nn.Module) -> InputSpec | None:
        """Return the input specification that any model of the library declares, with a supported trunk or without."""
        return None

    def class_names(self, model: nn.Module) -> tuple[str, ...] | None:
        """Return the names of the classes that a model of the library was published with; None if unknown."""
        return None

    def size_options(self, size: tuple[int, ...]) -> dict[str, Any]:
        """Return the options with which `load` builds a model for inputs of another size."""
        return {}

    def uses_hub(self, name: str, pretrained: bool) -> bool:
        """Return whether loading a model may contact the Hugging Face Hub."""
        return False

    def quiet(self) -> AbstractContextManager[None]:
        """Silence progress bars inside, where the library prints them while it loads."""
        return nullcontext()

    directory: str = "PREFIX:DIRECTORY"
    """How a directory with weights is named, for error messages."""

    def is_missing_directory(self, name: str) -> bool:
        """Return whether a name can only be that of a directory, and there is no such directory."""
        return False

    def looks_like(self, name: str) -> bool:
        """Return whether a name without its prefix may be one of this library's models."""
        return False

    def build(self, name: str, request: ModelRequest) -> tuple[nn.Module, dict[str, Any]]:
        """Build a model to train, with heads for its classes; return it and its ``config.json``."""
        raise ModelLoadError(f"models of {self.package} cannot be trained")

    def rebuild(
        self, model: nn.Module, folder: Path, config: Mapping[str, Any], request: ModelRequest, *, keep_heads: bool
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Build a saved model again with heads for other classes, and copy all weights that fit.

        The model was read from ``folder``, and ``config`` is what `describe` returned for it. With ``keep_heads`` the
        classes are the same, and the weights of the heads are copied, too.
        """
        name = str(config["architecture"]).removeprefix(f"{self.prefix}:")
        options = {**config.get("options", {}), **request.options}
        made, architecture = self.build(name, replace(request, pretrained=False, options=options))
        copy_weights(made, model.state_dict())
        if not keep_heads:
            self.reset_heads(made)
        return made, architecture

    def reset_heads(self, model: nn.Module) -> None:  # noqa: B027  (only those that `build` makes)
        """Initialize the heads of a model again."""

    def describe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a saved model's ``config.json`` that training keeps and `save` is given."""
        return dict(config)

    def save(
        self,
        folder: Path,
        model: nn.Module,
        states: Mapping[str, Tensor],
        config: Mapping[str, Any],
        labels: Mapping[str, Any],
    ) -> None:
        """Write a model with the weights ``states``, so that `restore` reads it back."""
        from vitrail.models.saving import write_folder

        write_folder(folder, dict(config), states, labels)

    def restores(self, config: Mapping[str, Any]) -> bool:
        """Return whether a ``config.json`` describes a model of this library."""
        return str(config.get("architecture", "")).startswith(f"{self.prefix}:")

    def restore(self, folder: Path, config: Mapping[str, Any]) -> nn.Module:
        """Load a saved model from its directory, in eval mode."""
        from vitrail.adapters.saved import read_weights
        from vitrail.models.saving import check_fit

        name, options = str(config["architecture"]).removeprefix(f"{self.prefix}:"), config.get("options", {})
        if not isinstance(options, Mapping):
            raise ModelLoadError(f"{folder}: options is {options!r:.80}; expected a mapping of names to values")
        self.check_options(name, options)
        model, states = self.load(name, False, **options), read_weights(folder)
        check_fit(f"{self.prefix}:{name}", model.state_dict(), states)
        model.load_state_dict(states, strict=True)
        return model.eval()

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise for options from a file that are not the model's own; those of `load` come from Python code."""
        refused = {*options} & CODE_OPTIONS
        if refused:
            raise ModelLoadError(
                f"options: {', '.join(sorted(refused))}: a file cannot allow code to run; leave it out"
            )

    def imported(self, name: str, module: str = "") -> Any:
        """Import the library, or a module of it, for a model; raise ``ModelLoadError`` if it is not installed."""
        try:
            return importlib.import_module(module or self.package)
        except ImportError as error:
            command = f"pip install vitrail[{self.extra}]" if self.extra else f"pip install {self.package}"
            raise ModelLoadError(f"{self.prefix}:{name} needs {self.package}; install it with `{command}`") from error

    def failed(self, name: str, error: Exception, hint: str = "") -> ModelLoadError:
        """Return the error for a model that the library could not build or load, with the library's own reason."""
        return ModelLoadError(f"{self.package} could not build {name!r}: {str(error).rstrip('.')}. {hint}".rstrip())


def copy_weights(model: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Load those weights into a model that fit by name and shape; raise ``ModelLoadError`` if none does."""
    own = model.state_dict()
    fits = {name: value for name, value in states.items() if name in own and own[name].shape == value.shape}
    if not fits:
        raise ModelLoadError(f"no weight fits this {type(model).__name__} by name and shape")
    model.load_state_dict(fits, strict=False)
