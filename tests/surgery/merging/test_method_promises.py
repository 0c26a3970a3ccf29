"""Promises of every merging method on every kind of model."""

from itertools import product
from typing import Any

import pytest
import torch

import vitrail
from tests.extras import always
from tests.merging.test_custom_methods import KMeans, Threshold
from tests.surgery.models import ALL, FEW, distance, run
from vitrail.merging import Prune, Random, ToMe
from vitrail.merging.methods import clustering, content, dynamic, learned
from vitrail.merging.methods.learned._learned import LearnedMethod
from vitrail.merging.methods.pairs import MCTF, MLERP, Energy, Grid, Mutual
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
    "energy": Energy,
    "mctf": MCTF,
    "grid": Grid,
    "mutual": Mutual,
    "mlerp": MLERP,
    "prune energy": lambda: Prune("energy"),
    "prune grid": lambda: Prune("grid"),
    "prune mutual": lambda: Prune("mutual"),
    "evit": EViT,
    "evit-drop": lambda: EViT("drop"),
    "kmeans": clustering.KMeans,
    "dpc_knn": clustering.DPCKNN,
    "ats": ATS,
    "agglomerative": clustering.Agglomerative,
    "dynamicvit": lambda: trained(DynamicViT()),
    "avit": lambda: trained(AViT(epsilon=0.5, scale=0.1, shift=-0.5)),
    "thresholds": lambda: dynamic.Threshold(-0.5, size_aware=True, bucket=4),
    "salient": lambda: content.Salient("norm", keep=0.2),
    "vid_tldr": content.VidTLDR,
    "edges": content.Edges,
    "entropy": lambda: dynamic.Entropy(strength=0.2),
    "pixel-entropy": lambda: dynamic.Entropy("input", center=0.8, spread=0.2),
    "local_global": lambda: dynamic.LocalGlobal(-1.0, deviations=-1.0),
    "identical": lambda: dynamic.Identical(tolerance=100.0),
    "dtem": lambda: trained(learned.DTEM()),
    "gumbel": lambda: trained(learned.Gumbel()),
}
NEEDS_CLASS_TOKEN = {"evit", "evit-drop", "ats"}
HAS_NONE = {"timm-map", "clip-siglip"}

PAIRS = [(name, one) for name in FEW for one in METHODS if name not in HAS_NONE or one not in NEEDS_CLASS_TOKEN]
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


COMPILED = [
    *product(["timm-registers", "eva-dinov3"], ["values", "mix", "prune", "energy", "mctf", "grid", "mlerp"]),
    *product(["eva-dinov3"], ["salient", "vid_tldr", "edges"]),
]


@pytest.mark.parametrize(
    ("name", "method"),
    always([("timm-registers", "mix"), ("timm-registers", "mlerp"), ("eva-dinov3", "salient")], COMPILED, tuples=True),
)
def test_static_methods_compile_as_one_graph(name: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2, method=METHODS[method]())
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(model, images, case)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert distance(run(compiled, images, case), wanted) < 1e-5


@pytest.mark.parametrize(
    "method", always(["evit", "kmeans"], ["evit", "kmeans", "evit-drop", "dpc_knn", "agglomerative", "dynamicvit"])
)
def test_static_choices_are_one_graph(method: str) -> None:
    case = ALL["timm-registers"]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2, method=METHODS[method]())
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(model, images, case)
        assert distance(run(torch.compile(model, fullgraph=True, backend="eager"), images, case), wanted) < 1e-5
