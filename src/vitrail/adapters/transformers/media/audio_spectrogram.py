"""transformers: the Audio Spectrogram Transformer (AST), whose patches of a spectrogram overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import MlpNames, NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk
from vitrail.adapters.transformers.vit import VIT_NAMES, VIT_NESTED_NAMES
from vitrail.data.media.sampling import Spectrogram
from vitrail.data.spec import InputSpec
from vitrail.tokens import Role, TokenLayout

_MODULE = f"{MODELS}.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer"
_DENSE = MlpNames(("ASTMLP",), act="mlp.activation_fn")


class SpectrogramTrunk(TransformersTrunk):
    """AST: a class and a distillation token, and patches by frequency, then time; sounds of one length alone."""

    argument = "input_values"
    modality = "audio"
    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{_MODULE}.ASTLayer": NamedBlock(replace(VIT_NAMES, dense=_DENSE))
    }
    nested_classes: Mapping[type | str, BlockAdapter] = {f"{_MODULE}.ASTLayer": NamedBlock(VIT_NESTED_NAMES)}
    mean, std = (-4.2677393,), (4.5689974,)  # of AudioSet

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        projection = trunk.embeddings.patch_embeddings.projection
        sides = self.own_size(trunk) if size is None else size
        steps = zip(sides, projection.kernel_size, projection.stride, strict=True)
        bands, frames = ((side - patch) // stride + 1 for side, patch, stride in steps)
        return TokenLayout.of(Role.CLASS, Role.DISTILLATION, grid=(1, bands, frames))

    def resizes(self, trunk: Any) -> bool:
        return False

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return the frequency bands and frames of the spectrograms that the model was made for."""
        return trunk.config.num_mel_bins, trunk.config.max_length

    def stored_spec(self, trunk: Any) -> InputSpec:
        """Return the spectrogram and normalization that the model was saved with, as its feature extractor has them."""
        stored = self.preprocessing(trunk)
        mean, std = stored.get("mean", self.mean[0]), stored.get("std", self.std[0])
        if not stored.get("do_normalize", True):
            mean, std = 0.0, 0.5
        return InputSpec(
            self.own_size(trunk),
            (mean,),
            (2 * std,),  # the feature extractor divides by twice the deviation
            self.modality,
            self.argument,
            scale=1,
            sampling=Spectrogram.kaldi(stored.get("sampling_rate", 16000)),
            axes="TF",
        )

    def channels_first(self, trunk: nn.Module, inputs: Tensor) -> Tensor:
        return inputs.transpose(1, 2).unsqueeze(1)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings.projection,)


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.ASTModel": SpectrogramTrunk()}
