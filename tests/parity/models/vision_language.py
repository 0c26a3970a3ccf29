"""Small vision-language models of the transformers library, with inputs for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.oracle.models import vision_language as oracle
from tests.parity.models.cases import redraw

IMAGE, START, PAD = 60, 1, 0
"""Ids of the image placeholder, of the first token and of padding."""

VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": 63,
}

Inputs = dict[str, Tensor]
Oracle = Callable[[Any, Inputs, Any], list[Tensor]]


@dataclass(frozen=True)
class Vlm:
    """A vision-language model.

    Attributes:
        features: what the language model receives for the images, by the oracle.
        images: inputs of the tower, by dtype.
        tokens: number of placeholders for each image, by prompt.
        packed: whether images are one sequence of patches.
        patches_per_token: how many patches become one token of the language model.
        tolerance: largest difference to the oracle; RMS norms of the library compute in float32.
        types: name of the input that marks placeholders, for models that take one.
    """

    name: str
    build: Callable[[], nn.Module]
    features: Oracle
    images: Callable[[torch.dtype], Inputs]
    tokens: tuple[tuple[int, ...], ...] = ((16,), (16,))
    patches_per_token: int = 1
    tolerance: float = 1e-8
    packed: bool = False
    types: str = ""

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return a fresh model with redrawn parameters, in evaluation mode."""
        model = self.build().double()
        redraw(model, seed=sum(map(ord, self.name)))
        return model.to(dtype).eval()

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Return two prompts with an image each; the second is shorter, and padded in front."""
        prompts = [prompt(self.tokens[0], [5, 9, 7]), prompt(self.tokens[1], [8])]
        length = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (length - len(one)) + one for one in prompts])
        types = {self.types: (ids == IMAGE).int()} if self.types else {}
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), **types, **self.images(dtype)}


def prompt(placeholders: tuple[int, ...], words: list[int]) -> list[int]:
    """Return the ids of a prompt with images in the middle."""
    return [START, *[token for count in placeholders for token in [3, *[IMAGE] * count]], *words]


def pixels(dtype: torch.dtype, *shape: int) -> Inputs:
    """Return random images."""
    generator = torch.Generator().manual_seed(7)
    return {"pixel_values": torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)}


def pair(dtype: torch.dtype) -> Inputs:
    """Return two square images."""
    return pixels(dtype, 2, 3, 32, 32)


def llava(**options: Any) -> nn.Module:
    """Return LLaVA with CLIP and Llama."""
    vision, text = hf.CLIPVisionConfig(**VISION), hf.LlamaConfig(**TEXT)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, **options)
    return hf.LlavaForConditionalGeneration(config)


def paligemma() -> nn.Module:
    """Return PaliGemma: SigLIP and Gemma."""
    vision, text = hf.SiglipVisionConfig(**VISION, vision_use_head=False), hf.GemmaConfig(**TEXT)
    config = hf.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=24)
    return hf.PaliGemmaForConditionalGeneration(config)


def idefics3(config: Any = hf.Idefics3Config, model: Any = hf.Idefics3ForConditionalGeneration) -> nn.Module:
    """Return Idefics3, or SmolVLM, which is the same: a tower like SigLIP, pixel shuffle, and Llama."""
    vision = {**VISION, "num_channels": 3, "vocab_size": 64}
    text = hf.LlamaConfig(**TEXT)
    return model(config(vision_config=vision, text_config=text, image_token_id=IMAGE, scale_factor=2))


def internvl(**vision: Any) -> nn.Module:
    """Return InternVL with Llama."""
    tower = hf.InternVLVisionConfig(**VISION, **vision)
    config = hf.InternVLConfig(
        vision_config=tower, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE, image_seq_length=4
    )
    return hf.InternVLForConditionalGeneration(config)


def qwen2() -> nn.Module:
    """Return Qwen2-VL."""
    vision = {**QWEN_VISION, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}
    text = {**TEXT, "rope_parameters": MROPE}
    config = hf.Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen25() -> nn.Module:
    """Return Qwen2.5-VL, with windows of 2 × 2 cells in half of its blocks."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 24, "window_size": 16}
    vision = {**QWEN_VISION, **tower, "fullatt_block_indexes": [1, 3]}
    config = hf.Qwen2_5_VLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": MROPE}, image_token_id=IMAGE
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def qwen3() -> nn.Module:
    """Return Qwen3-VL, which also hands features of the second block to its language model."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 24, "num_position_embeddings": 16}
    vision = {**QWEN_VISION, **tower, "deepstack_visual_indexes": [1]}
    text = {**TEXT, "rope_parameters": MROPE}
    config = hf.Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    return hf.Qwen3VLForConditionalGeneration(config)


def gemma3() -> nn.Module:
    """Return Gemma 3, whose projector pools 2 × 2 patches."""
    vision, text = hf.SiglipVisionConfig(**VISION, vision_use_head=False), hf.Gemma3TextConfig(**TEXT)
    config = hf.Gemma3Config(
        vision_config=vision, text_config=text, image_token_id=IMAGE, mm_tokens_per_image=4, boi_token_index=3
    )
    return hf.Gemma3ForConditionalGeneration(config)


def vipllava() -> nn.Module:
    """Return VipLLaVA, which reads several layers of CLIP."""
    vision, text = hf.CLIPVisionConfig(**VISION), hf.LlamaConfig(**TEXT)
    config = hf.VipLlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layers=[-2, 1]
    )
    return hf.VipLlavaForConditionalGeneration(config)


def in_tiles(config: Any, model: Any, tower: Any, text: Any) -> nn.Module:
    """Return LLaVA-NeXT or LLaVA-OneVision, which cut an image into tiles and lay these out as one grid."""
    sizes = [[32, 32], [64, 32], [32, 64]]
    return model(config(vision_config=tower, text_config=text, image_token_id=IMAGE, image_grid_pinpoints=sizes))


def llava_next() -> nn.Module:
    """Return LLaVA-NeXT."""
    tower, text = hf.CLIPVisionConfig(**VISION), hf.LlamaConfig(**TEXT)
    return in_tiles(hf.LlavaNextConfig, hf.LlavaNextForConditionalGeneration, tower, text)


def llava_onevision() -> nn.Module:
    """Return LLaVA-OneVision."""
    tower, text = hf.SiglipVisionConfig(**VISION, vision_use_head=False), hf.Qwen2Config(**TEXT)
    return in_tiles(hf.LlavaOnevisionConfig, hf.LlavaOnevisionForConditionalGeneration, tower, text)


QWEN_VISION = {"depth": 4, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}


def three_packed(dtype: torch.dtype) -> Inputs:
    """Return three images of two sizes, in one sequence of patches."""
    grids = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 4, 6]])
    return {**pixels(dtype, int(grids.prod(1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grids}


def pair_of_lists(dtype: torch.dtype) -> Inputs:
    """Return two images for each prompt."""
    return pixels(dtype, 2, 2, 3, 32, 32)


def tiles(dtype: torch.dtype) -> Inputs:
    """Return two images of two tiles, one upon the other, each with a small copy of the whole."""
    return {**pixels(dtype, 2, 3, 3, 32, 32), "image_sizes": torch.tensor([[64, 32], [64, 32]])}


smolvlm = partial(idefics3, hf.SmolVLMConfig, hf.SmolVLMForConditionalGeneration)

MODELS = [
    Vlm("llava", llava, oracle.llava, pair),
    Vlm(
        "llava-full",
        partial(llava, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        oracle.llava,
        pair,
        tokens=((17,), (17,)),
    ),
    Vlm("llava-layers", partial(llava, vision_feature_layer=[-3, 2, -1]), oracle.llava, pair),
    Vlm("paligemma", paligemma, oracle.paligemma, pair),
    Vlm("idefics3", idefics3, oracle.idefics3, pair_of_lists, ((4, 4), (4, 4)), 4),
    Vlm("smolvlm", smolvlm, oracle.idefics3, pair_of_lists, ((4, 4), (4, 4)), 4),
    Vlm(
        "internvl",
        partial(internvl, use_qk_norm=True, norm_type="rms_norm", attention_bias=True),
        oracle.internvl,
        pair,
        ((4,), (4,)),
        4,
        1e-5,
    ),
    Vlm("qwen2-vl", qwen2, oracle.qwen, three_packed, ((6,), (4, 6)), 4, 1e-5, packed=True, types="mm_token_type_ids"),
    Vlm(
        "qwen2.5-vl",
        qwen25,
        oracle.qwen,
        three_packed,
        ((6,), (4, 6)),
        4,
        1e-5,
        packed=True,
        types="mm_token_type_ids",
    ),
    Vlm("qwen3-vl", qwen3, oracle.qwen, three_packed, ((6,), (4, 6)), 4, 1e-5, packed=True, types="mm_token_type_ids"),
    Vlm("internvl-plain", internvl, oracle.internvl, pair, ((4,), (4,)), 4),
]


RELATED = [
    Vlm("gemma3", gemma3, oracle.gemma3, pair, ((4,), (4,)), 4, 1e-5, types="token_type_ids"),
    Vlm("vipllava", vipllava, oracle.vipllava, pair),
    # 16 for the small copy, and for the tiles 8 rows of 4 with a newline each
    Vlm("llava-next", llava_next, oracle.tiled, tiles, ((16 + 40,), (16 + 40,))),
    Vlm("llava-onevision", llava_onevision, oracle.tiled, tiles, ((16 + 40,), (16 + 40,))),
]
"""Models with the same towers."""


def named(name: str) -> Vlm:
    """Return a model of these lists."""
    return next(one for one in (*MODELS, *RELATED) if one.name == name)
