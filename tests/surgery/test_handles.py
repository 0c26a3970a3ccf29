"""All handles agree: the same verbs, the same errors, and models that are restored exactly."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import vitrail
from tests.surgery.models import ALL
from vitrail.errors import AlreadyApplied, NotApplied, UnsupportedModel
from vitrail.surgery import Handle

KINDS: dict[type[Handle], tuple[Callable[..., Handle], dict]] = {
    vitrail.Merging: (vitrail.merge, {"r": 2, "order": "original"}),
    vitrail.AddedTokens: (vitrail.add_tokens, {"registers": 2, "classes": 1, "tasks": {"breed": 3}, "num_classes": 5}),
    vitrail.TestTimeRegisters: (vitrail.test_time_registers, {"neurons": {0: (1, 7), 2: (3,)}, "registers": 2}),
    vitrail.Ablation: (vitrail.ablate, {"how": "zero", "layers": [0, -1]}),
}
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
CASE = ALL["timm-registers"]


def apply(kind: type[Handle], model: nn.Module) -> Handle:
    function, options = KINDS[kind]
    return function(model, **options)


@each
def test_apply_find_and_remove(kind: type[Handle]) -> None:
    model, images = CASE.model(), CASE.images()
    before, keys, attributes = model(images), list(model.state_dict()), [set(vars(part)) for part in model.modules()]
    handle = apply(kind, model)
    assert isinstance(handle, kind)
    assert handle.model is model
    assert handle.is_active
    assert kind.of(model).is_active
    assert kind.of(nn.Sequential(model)).config == handle.config
    handle.remove()
    assert not handle.is_active
    assert torch.equal(model(images), before)
    assert list(model.state_dict()) == keys
    assert [set(vars(part)) for part in model.modules()] == attributes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@each
def test_a_with_block_removes(kind: type[Handle]) -> None:
    model = CASE.model()
    with apply(kind, model) as handle:
        assert handle.is_active
    assert not handle.is_active
    with apply(kind, model) as handle:
        handle.remove()  # removed before the end of the block
    with pytest.raises(RuntimeError, match="inside"), apply(kind, model) as handle:
        raise RuntimeError("inside")
    assert not handle.is_active


@each
def test_errors(kind: type[Handle]) -> None:
    model = CASE.model()
    with pytest.raises(NotApplied, match=f"carries no {kind.__name__}.*vitrail"):
        kind.of(model)
    with apply(kind, model) as handle:
        with pytest.raises(AlreadyApplied, match="already"):
            apply(kind, model)
        assert kind.of(model).config == handle.config
    with pytest.raises(NotApplied, match="was removed"):
        handle.remove()
    for wrong in (3, None, "timm:vit_base_patch16_224", type(model)):
        for function in (kind.of, lambda given: KINDS[kind][0](given, **KINDS[kind][1])):
            with pytest.raises(UnsupportedModel, match=r"expected a model.*; got"):
                function(wrong)


@each
def test_config_applies_the_same_change(kind: type[Handle]) -> None:
    model, images = CASE.model(), CASE.images()
    with apply(kind, model) as handle:
        config, changed = handle.config, model(images)
    assert handle.config == config  # also after removal
    json.dumps(config)
    with KINDS[kind][0](model, **config) as again:
        assert again.config == config
        assert torch.equal(model(images), changed)


@each
def test_repr(kind: type[Handle]) -> None:
    model = CASE.model()
    with apply(kind, model) as handle:
        assert repr(handle).startswith(f"{kind.__name__}({type(model).__name__}, ")
        assert "removed" not in repr(handle)
    assert repr(handle).endswith("removed)")


@each
def test_deprecated_names(kind: type[Handle]) -> None:
    with apply(kind, CASE.model()) as handle, pytest.warns(DeprecationWarning, match="is_active"):
        assert handle.is_applied


@each
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_the_handle_of_a_copy_leaves_the_original_alone(kind: type[Handle], duplicate: Callable) -> None:
    model, images = CASE.model(), CASE.images()
    before = model(images)
    handle = apply(kind, model)
    changed = model(images)
    twin = duplicate(model)
    assert torch.equal(twin(images), changed)
    twin_handle = kind.of(twin)
    assert twin_handle.model is twin
    twin_handle.remove()
    assert torch.equal(twin(images), before)
    assert handle.is_active
    assert torch.equal(model(images), changed)


def test_old_errors_are_the_new_ones() -> None:
    from vitrail import errors

    for old, new in (("AlreadyMerged", AlreadyApplied), ("NotMerged", NotApplied), ("PictureError", errors.ImageError)):
        with pytest.warns(DeprecationWarning, match=new.__name__):
            assert getattr(errors, old) is new
