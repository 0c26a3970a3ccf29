"""Takes the vision tower of SigLIP 2 NaFlex of the transformers library apart for the oracle: images of one grid."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from tests.oracle.core import Recipe
from tests.oracle.models.transformers_clip import attention_pool, clip_parts


def describe_naflex(tower: PreTrainedModel, patches: Tensor, grids: Tensor) -> Recipe:
    """A tower on patches (B, N, pixels) without padding."""

    def finish(x: Tensor) -> dict[str, Tensor]:
        x = tower.post_layernorm(x)
        return {"last_hidden_state": x, "pooler_output": attention_pool(tower.head, x)}

    return Recipe(
        tokens=tower.embeddings(patches, grids),
        prefix=0,
        blocks=[clip_parts(layer) for layer in tower.encoder.layers],
        finish=finish,
        features=tower.post_layernorm,
    )
