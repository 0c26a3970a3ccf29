"""Models of transformers, compared with the oracle."""

from __future__ import annotations

import pytest
import torch

import vitrail
from tests.oracle import describe
from tests.parity.checks import (
    SETTINGS,
    Setting,
    ask_oracle,
    check_against_oracle,
)
from tests.parity.models import (
    transformers_beit,
    transformers_clip,
    transformers_dinov3,
    transformers_vit,
)
from vitrail.errors import UnsupportedInput

CASES = {
    **transformers_vit.CASES,
    **transformers_clip.CASES,
    **{f"beit-{name}": case for name, case in transformers_beit.CASES.items()},
    **{f"dinov3-{name}": case for name, case in transformers_dinov3.CASES.items()},
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("r", range(11))
@pytest.mark.parametrize("name", ["vit", "deit-teacher", "registers"])
def test_every_r_up_to_the_cap_and_beyond(name: str, r: int) -> None:
    check_against_oracle(CASES[name], Setting(r))


@every_case
def test_hidden_states_come_out_at_full_length(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad():
        entering = describe(model, images, **case.call).tokens
        plain = model(images, output_hidden_states=True, **case.call).hidden_states
        with vitrail.merge(model, **options):
            hidden = model(images, output_hidden_states=True, **case.call).hidden_states
    assert len(hidden) == len(plain) == 1 + len(expected.hidden)
    for actual, wanted in zip(hidden, [entering, *expected.hidden], strict=True):
        assert actual.shape == wanted.shape
        assert torch.allclose(actual, wanted, rtol=0, atol=case.tolerance)


@every_case
def test_layers_before_the_first_merge_are_the_models_own(name: str) -> None:
    """No shortcut: a model that merges in its last layer only still runs its first layers to the bit."""
    case = CASES[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        before = model(images, output_hidden_states=True, **case.call).hidden_states
        with vitrail.merge(model, r=[0, 0, 2]):
            after = model(images, output_hidden_states=True, **case.call).hidden_states
    for own, patched in zip(before[:-1], after[:-1], strict=True):
        assert torch.equal(patched, own) if case.bit_equal else torch.allclose(patched, own, atol=5e-5)
    assert (after[-1] - before[-1]).abs().max() > 1e-3


@every_case
def test_a_tuple_instead_of_names(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad(), vitrail.merge(model, **options):
        first = model(images, return_dict=False, **case.call)[0]
    wanted = next(iter(expected.outputs.values()))
    assert torch.allclose(first, wanted, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2-wide", "registers"])
def test_tokens_stay_merged_on_request(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad():
        with vitrail.merge(model, **options, unmerge=False):
            tokens = model(images).last_hidden_state
        assert torch.allclose(tokens, model.layernorm(expected.merged), rtol=0, atol=case.tolerance)


@every_case
def test_attention_maps_are_refused(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    with torch.no_grad(), vitrail.merge(model, r=2):
        with pytest.raises(UnsupportedInput):
            model(images, output_attentions=True, **case.call)
        after = model(images, **case.call)
    expected, _ = ask_oracle(model, case, images, Setting(2))
    wanted = next(iter(expected.outputs.values()))
    assert torch.allclose(after[0], wanted, rtol=0, atol=case.tolerance)
