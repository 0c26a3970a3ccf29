"""The lower bound: as many tokens as a merged model, with the library's own values."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import vitrail
from tests.extras import always
from tests.surgery.models import ALL, FEW, distance, leaving, main_output, run, trunk_blocks
from vitrail.adapters import find
from vitrail.bench._variants import slice_tokens
from vitrail.surgery.copies import copy_model


def input_size(model: nn.Module, images: Tensor) -> tuple[int, ...]:
    """Return the size of a batch, whatever the model's order of axes."""
    found = find(model)
    return tuple(found.adapter.channels_first(found.trunk, images).shape[2:])


CASES = [name for name in ALL if "backbone" not in name]  # feature maps of a backbone need every patch


@pytest.mark.parametrize("name", CASES)
def test_full_lengths_are_the_library_model(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    sliced = copy.deepcopy(model)
    with torch.no_grad(), vitrail.merge(copy.deepcopy(model), r=0) as merging:
        lengths = merging.tokens_per_layer(input_size(model, images))
        slice_tokens(sliced, lengths, input_size(model, images))
        assert distance(run(sliced, images, case), run(model, images, case)) <= max(case.tolerance, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_token_counts_equal_merged(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    size = input_size(model, images)
    merged, sliced = copy.deepcopy(model), copy.deepcopy(model)
    merging = vitrail.merge(merged, r=2, unmerge=False)
    expected = merging.tokens_per_layer(size)
    slice_tokens(sliced, expected, size)
    assert [tokens.shape[1] for tokens in leaving(sliced, images, **case.call)] == expected
    assert expected[0] - expected[-1] == 2 * (len(expected) - 1)


def test_values() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, init_values=0.3).double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    sliced = copy_model(model, share=True)
    slice_tokens(sliced, [14, 14, 5])
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for block, length in zip(model.blocks, [14, 14, 5], strict=True):
            x = x + block.ls1(block.attn(block.norm1(x)))
            x = x[:, :length]
            x = x + block.ls2(block.mlp(block.norm2(x)))
        expected = model.forward_head(model.norm(x))
        assert distance(sliced(images), expected) < 1e-12
        assert distance(sliced(images), model(images)) > 1e-6


def test_tokens_by_keyword() -> None:
    case = ALL["hf-vit"]
    model = case.model()
    slice_tokens(model, [6, 5, 4])
    block = trunk_blocks(model)[0]
    tokens = torch.randn(2, 17, 32, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        assert torch.equal(main_output(block(hidden_states=tokens)), main_output(block(tokens)))
        assert main_output(block(tokens)).shape[1] == 6


@pytest.mark.parametrize("name", always(FEW[:1], FEW))
def test_compiles_in_one_graph(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    with vitrail.merge(copy.deepcopy(model), r=2) as merging:
        slice_tokens(model, merging.tokens_per_layer(input_size(model, images)))
    with torch.no_grad():
        expected = run(model, images, case)
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        assert distance(run(compiled, images, case), expected) < 1e-12
