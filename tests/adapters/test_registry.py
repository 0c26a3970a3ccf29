"""Registering model classes and libraries from outside, and finding a trunk in a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import vitrail
from tests.fakes import ToyAdapter, ToyViT
from vitrail.adapters import ADAPTERS, LIBRARIES, Library, TrunkAdapter, find, size_options, supported
from vitrail.adapters.registry import head_names, library, split_name
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedModel


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the registry after a test."""
    adapters, libraries = dict(ADAPTERS), dict(LIBRARIES)
    yield
    for table, before in ((ADAPTERS, adapters), (LIBRARIES, libraries)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]


class Subclass(ToyViT):
    pass


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("key", [ToyViT, "tests.fakes.ToyViT"])
def test_a_class_is_registered_by_itself_or_by_its_name(key: type | str) -> None:
    with pytest.raises(UnsupportedModel, match="register_adapter"):
        find(ToyViT())
    adapter = ToyAdapter()
    vitrail.register_adapter(key, adapter)
    for model in (ToyViT(), Subclass(), nn.Sequential(ToyViT())):
        assert find(model).adapter is adapter
    assert any("ToyViT" in name for name in supported())
    with vitrail.merge(Subclass().eval(), r=2) as merging:
        assert merging.tokens_per_layer() == [15, 13, 11]


@pytest.mark.usefixtures("restored")
def test_the_nearest_class_and_the_latest_adapter_win() -> None:
    first, second, third = ToyAdapter(), ToyAdapter(), ToyAdapter()
    for key, adapter in ((ToyViT, first), (Subclass, second), (ToyViT, third)):
        vitrail.register_adapter(key, adapter)
    assert find(Subclass()).adapter is second
    assert find(ToyViT()).adapter is third


@pytest.mark.usefixtures("restored")
def test_a_dotted_name_imports_nothing_and_may_precede_its_class() -> None:
    vitrail.register_adapter("no_such_package.models.ViT", ToyAdapter())
    with pytest.raises(UnsupportedModel):
        find(ToyViT())


@pytest.mark.parametrize("key", [3, "ViT", "not a name.ViT", ToyViT()])
def test_keys_are_classes_or_dotted_names(key: Any) -> None:
    with pytest.raises(InvalidOption, match="trunk_class"):
        vitrail.register_adapter(key, ToyAdapter())


def test_adapters_are_instances() -> None:
    with pytest.raises(InvalidOption, match="TrunkAdapter"):
        vitrail.register_adapter(ToyViT, ToyAdapter)  # type: ignore[arg-type]


class ToyLibrary(Library):
    prefix, package = "toy", "tests.fakes"
    heads = {"classifier_of_toys": "class"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        return {"tests.fakes.ToyViT": ToyAdapter()}

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        return ToyViT(depth=int(name), **options).eval()


@pytest.mark.usefixtures("restored")
def test_a_library_names_its_models() -> None:
    LIBRARIES["toy"] = ToyLibrary()
    model = vitrail.load_model("toy:2", heads=4)
    assert len(find(model).blocks) == 2
    assert head_names()["classifier_of_toys"] == "class"
    assert size_options("toy:2", (64, 64)) == {}
    with pytest.raises(ModelLoadError, match="toy:NAME"):
        vitrail.load_model("nothing:2")


def test_names_are_split_at_known_prefixes_alone() -> None:
    assert split_name("timm:vit:x")[1] == "vit:x"
    assert split_name("runs/a:b") == (None, "runs/a:b")
    assert split_name("timm")[0] is None
    assert size_options("timm:vit", (32, 64)) == {"img_size": (32, 64)}
    assert size_options("hf:vit", (32, 64)) == size_options("timm:vit", None) == {}


@pytest.mark.parametrize("prefix", LIBRARIES)
def test_every_library_is_complete(prefix: str) -> None:
    one = library(prefix)
    assert one.prefix == prefix
    assert one.trunks()
    assert all(isinstance(adapter, TrunkAdapter) for adapter in one.trunks().values())


def test_two_models_inside_of_one_are_refused(toy: ToyViT) -> None:
    with pytest.raises(UnsupportedModel, match="pass one"):
        find(nn.ModuleList([toy, ToyViT()]))
    with pytest.raises(UnsupportedModel, match=r"torch\.nn\.Module"):
        find(torch.zeros(1))  # type: ignore[arg-type]
