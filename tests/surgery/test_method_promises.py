"""Promises of every merging method on every kind of model."""

from typing import Any

import pytest
import torch

import vitrail
from tests.merging.test_custom_methods import KMeans, Threshold
from tests.surgery.models import ALL, FEW, distance, run
from vitrail.merging import Prune, Random, ToMe
from vitrail.merging.methods import clustering, learned
from vitrail.merging.methods.learned._learned import LearnedMethod
from vitrail.merging.methods.pruning import ATS, AViT, DynamicViT, EViT


def trained(method: LearnedMethod) -> LearnedMethod:
    """Return a method that counts as trained, with random weights."""
    method.passes.fill_(1)
    return method


METHODS: dict[str, Any] = {
    "tome": ToMe,
    "values": lambda: ToMe(features="values"),
    "mix": lambda: ToMe(features={"keys": 0.5, "tokens": 0.5}),
    "random": Random,
    "prune": Prune,
    "clustering": KMeans,
    "threshold": lambda: Threshold(0.5),
    "evit": EViT,
    "evit-drop": lambda: EViT("drop"),
    "kmeans": clustering.KMeans,
    "dpc_knn": clustering.DPCKNN,
    "ats": ATS,
    "agglomerative": clustering.Agglomerative,
    "dynamicvit": lambda: trained(DynamicViT()),
    "avit": lambda: trained(AViT(epsilon=0.5, scale=0.1, shift=-0.5)),
    "dtem": lambda: trained(learned.DTEM()),
    "gumbel": lambda: trained(learned.Gumbel()),
}
NEEDS_CLASS_TOKEN = {"evit", "evit-drop", "ats"}

PAIRS = [(name, method) for name in FEW for method in METHODS if name != "timm-map" or method not in NEEDS_CLASS_TOKEN]
every_pair = pytest.mark.parametrize(("name", "method"), PAIRS)


@every_pair
def test_zero_merges_reproduce_the_model_and_removal_restores_it(name: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    before, keys = run(model, images, case), list(model.state_dict())
    with vitrail.merge(model, r=0, method=METHODS[method]()):
        assert distance(run(model, images, case), before) <= (0 if case.bit_equal else 5e-6)
    with vitrail.merge(model, r=2, method=METHODS[method]()) as merging:
        assert distance(run(model, images, case), before) > 1e-4
        assert [key for key in model.state_dict() if "vitrail_method." not in key] == keys
        assert vitrail.Merging.of(model).config == merging.config
    assert torch.equal(run(model, images, case), before)


@every_pair
def test_special_tokens_survive_and_every_patch_is_restored(name: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    with vitrail.merge(model, r=2, method=METHODS[method]()) as merging, merging.track() as trace:
        run(model, images, case)
    special = trace.layout.num_special
    target = trace.latest.assignment.target
    assert target[:, :special].tolist() == [list(range(special))] * 2
    assert int(trace.groups.min()) >= special
    assert trace.unmerge(torch.randn(2, trace.sizes.shape[1], 3)).shape == (2, trace.layout.num_tokens, 3)


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if pair[1] != "random"])
def test_a_batch_equals_its_images_one_by_one(name: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images(batch=3)
    with vitrail.merge(model, r=3, method=METHODS[method]()):
        together = run(model, images, case)
        alone = torch.cat([run(model, image[None], case) for image in images])
    assert distance(alone, together) < 1e-7


@pytest.mark.parametrize("name", ["timm-registers", "eva-dinov3"])
@pytest.mark.parametrize("method", ["values", "mix", "prune", "evit", "kmeans", "dpc_knn"])
def test_static_methods_compile_as_one_graph(name: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2, method=METHODS[method]())
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(model, images, case)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert distance(run(compiled, images, case), wanted) < 1e-5
