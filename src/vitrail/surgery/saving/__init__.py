"""Changes of a model on disk: ``vitrail.json`` beside the model's own files, and back; tensors in safetensors."""

from vitrail.surgery.saving.base import Base, weights_hash
from vitrail.surgery.saving.changes import apply, collect
from vitrail.surgery.saving.loading import add_saved_tokens, from_pretrained, load
from vitrail.surgery.saving.settings import FILE, TOKENS, Settings
from vitrail.surgery.saving.text import read_settings

__all__ = [
    "FILE",
    "TOKENS",
    "Base",
    "Settings",
    "add_saved_tokens",
    "apply",
    "collect",
    "from_pretrained",
    "load",
    "read_settings",
    "weights_hash",
]
