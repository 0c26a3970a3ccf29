"""Adapters: how Vitrail reaches into the models of other libraries.

One file per library names its models' parts; `register_adapter` adds a model class from outside (``docs/adapters.md``).
"""

from vitrail.adapters.base import (
    BlockAdapter,
    BlockCall,
    Library,
    ModelRequest,
    TrunkAdapter,
    VisualTokens,
    known_block,
)
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.adapters.outputs import head_outputs
from vitrail.adapters.position import Position, RelativeBias, Rotary
from vitrail.adapters.registry import (
    ADAPTERS,
    LIBRARIES,
    Found,
    find,
    image_model,
    input_spec,
    load_model,
    register_adapter,
    size_options,
    supported,
)
from vitrail.data.spec import InputSpec

__all__ = [
    "ADAPTERS",
    "LIBRARIES",
    "BlockAdapter",
    "BlockCall",
    "BlockNames",
    "Found",
    "InputSpec",
    "Library",
    "MlpNames",
    "ModelRequest",
    "NamedBlock",
    "Position",
    "RelativeBias",
    "Rotary",
    "TrunkAdapter",
    "VisualTokens",
    "find",
    "head_outputs",
    "image_model",
    "input_spec",
    "known_block",
    "load_model",
    "register_adapter",
    "size_options",
    "supported",
]
