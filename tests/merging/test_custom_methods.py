"""Custom methods: the interface supports clustering, counts per image, and custom restoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from tests.models.mixes import SMALL, built, random_images
from vitrail import Assignment, Context, Method, Reduction, Role, TokenSpec, register_method
from vitrail.errors import InvalidOption, NotApplied, UnsupportedInput
from vitrail.merging import METHODS, ModelShape, ToMe
from vitrail.merging.features import compute_features
from vitrail.models import ViTConfig


@register_method("test-kmeans")
class KMeans(Method):
    """Cluster the patches by the mean value over heads; protected tokens stay alone."""

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        free = context.mergeable.expand(context.x.shape[:2])
        targets = [self.cluster(f, m, r) for f, m in zip(compute_features(context, "values"), free, strict=True)]
        return Reduction(Assignment(torch.stack(targets), context.x.shape[1] - r))

    def cluster(self, features: Tensor, free: Tensor, r: int) -> Tensor:
        points, alone = features[free], int((~free).sum())
        centers = points[: len(points) - r]
        for _ in range(5):
            distance = torch.cdist(points, centers)
            distance[range(len(centers)), range(len(centers))] = -1  # every cluster keeps one member
            nearest = distance.argmin(1)
            centers = torch.stack([points[nearest == i].mean(0) for i in range(len(centers))])
        target = torch.zeros(len(features), dtype=torch.long)
        target[~free] = torch.arange(alone)
        target[free] = alone + nearest
        return target


@register_method("test-threshold")
class Threshold(ToMe):
    """Merge every pair whose similarity is above a threshold: each image keeps its own number of tokens."""

    static = False

    def __init__(self, threshold: float = 0.9) -> None:
        super().__init__()
        self.threshold = threshold

    @property
    def twin(self) -> str | None:
        return None

    def amount(self, context: Context, planned: int) -> Tensor:
        unit = F.normalize(compute_features(context, self.features), dim=-1)
        free = context.mergeable.expand(unit.shape[:2])
        pairs = free[:, ::2, None] & free[:, None, 1::2]
        similarity = (unit[:, ::2] @ unit[:, 1::2].mT).masked_fill(~pairs, -1)
        return (similarity.amax(2) > self.threshold).sum(1).clamp(max=planned)


MIXES = [
    {},
    {"tokens": (TokenSpec("cls", Role.CLASS), TokenSpec("memory", Role.REGISTER, 2))},
    {"position": "rotary"},
]


def model_of(**options: Any) -> tuple[Any, Tensor]:
    config = ViTConfig(**{**SMALL, "image_size": 24, "depth": 4, **options})
    return built(config), random_images(config, batch=5)


@pytest.mark.parametrize("options", MIXES, ids=["class", "registers", "rotary"])
@pytest.mark.parametrize("proportional", [True, False])
@pytest.mark.parametrize("order", ["paper", "original"])
def test_a_batch_with_different_counts_equals_its_images_one_by_one(
    options: dict[str, Any], proportional: bool, order: str
) -> None:
    model, x = model_of(**options)
    settings: dict[str, Any] = {"method": Threshold(), "proportional": proportional, "order": order}
    with vitrail.merge(model, **settings) as merging:
        with torch.no_grad(), merging.track() as trace:
            together = model.forward_features(x)
            groups, sizes, flops, lengths = trace.groups, trace.sizes, trace.flops, trace.tokens_per_layer
            alone = torch.cat([model.forward_features(image[None]) for image in x])
        singles = trace.passes[1:]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
        assert len(set(lengths[:, -1].tolist())) > 1, "all images keep the same number: the test would prove nothing"
        for image, single in enumerate(singles):
            kept = int(lengths[image, -1])
            assert single.assignment.length == kept
            assert torch.equal(single.assignment.target[:, single.layout.patches], groups[image : image + 1])
            assert single.state.size is not None
            torch.testing.assert_close(single.state.size[0], sizes[image, :kept].double())
            assert not sizes[image, kept:].any()
    before = lengths.new_full((5, 1), merging.layout.num_tokens)
    merges = -torch.diff(lengths, dim=1, prepend=before)
    with vitrail.merge(model, r=merges[0].tolist()) as static:
        assert static.flops() == int(flops[0])


def test_gradients_of_a_padded_batch_equal_those_of_its_images() -> None:
    model, x = model_of()
    model.requires_grad_(False)
    with vitrail.merge(model, method=Threshold()):
        together = x.clone().requires_grad_()
        model(together).square().sum().backward()
        for image in range(len(x)):
            one = x[image : image + 1].clone().requires_grad_()
            model(one).square().sum().backward()
            torch.testing.assert_close(together.grad[image], one.grad[0], rtol=1e-8, atol=1e-12)


def test_drawing_works_where_images_keep_different_numbers() -> None:
    model, _ = model_of()
    from vitrail.data import samples

    with vitrail.merge(model.float(), method=Threshold()) as merging:
        drawn = merging.draw(list(samples().values()))
    assert len(drawn) == len(samples())


def test_merged_tokens_come_out_padded() -> None:
    model, x = model_of()
    with torch.no_grad(), vitrail.merge(model, method=Threshold(), unmerge=False) as merging:
        with merging.track() as trace:
            tokens = model.forward_features(x)
        assert tokens.shape[:2] == trace.sizes.shape
        assert trace.unmerge(tokens).shape[1] == merging.layout.num_tokens
        assert tokens.isfinite().all()


def test_a_dynamic_method_has_no_costs_before_it_runs() -> None:
    model, _ = model_of()
    with vitrail.merge(model, method=Threshold()) as merging:
        for ask in (merging.flops, merging.tokens_per_layer, lambda: merging.r):
            with pytest.raises(InvalidOption, match="depends on the image"):
                ask()


def test_a_dynamic_method_cannot_be_compiled() -> None:
    model, x = model_of()
    with vitrail.merge(model, method=Threshold()), pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


def test_a_limit_per_layer_holds() -> None:
    model, x = model_of()
    with torch.no_grad(), vitrail.merge(model, r=[0, 2, 0, 1], method=Threshold(0.0)) as merging:
        with merging.track() as trace:
            model(x)
        assert trace.tokens_per_layer.tolist() == [[37, 35, 35, 34]] * 5


@pytest.mark.parametrize("options", MIXES, ids=["class", "registers", "rotary"])
def test_clustering_lives_outside_the_package(options: dict[str, Any]) -> None:
    model, x = model_of(**options)
    with torch.no_grad(), vitrail.merge(model, r=[25, 5, 3, 2], method="test-kmeans") as merging:
        special = merging.layout.num_special
        with merging.track() as trace:
            full = model.forward_features(x)
        assert trace.tokens_per_layer[0, -1] == merging.tokens_per_layer()[-1] == special + 1
        assert (trace.sizes.sum(1) == merging.layout.num_tokens).all()
        assert trace.sizes[:, :special].eq(1).all()
        assert full.shape[1] == merging.layout.num_tokens
        assert merging.r[0] > (merging.layout.num_patches // 2), "more than half of the tokens merge in one layer"


def test_nothing_changes_with_r_0_and_after_removal() -> None:
    model, x = model_of()
    with torch.no_grad():
        before = model(x)
        with vitrail.merge(model, r=0, method=KMeans()):
            assert torch.equal(model(x), before)
        assert torch.equal(model(x), before)


class Learned(Method):
    """Merge neighbors by a learned score; restore tokens from a residual stored in the archive."""

    def __init__(self, scope: str = "pass", place: str = "between") -> None:
        super().__init__()
        self.scope, self.place = scope, place  # type: ignore[misc, assignment]
        self.scores = nn.ModuleList()
        self.seen: list[int] = []
        self.penalty: Tensor | None = None

    def build(self, shape: ModelShape) -> None:
        self.scores.extend(nn.Linear(shape.width, 1).double() for _ in range(shape.depth))

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        self.seen.append(context.x.shape[1])
        length = context.x.shape[1]
        target = torch.arange(length).clamp(max=length - r - 1).expand(len(context.x), -1)
        weight = self.scores[context.layer](context.x).squeeze(-1).exp()
        self.penalty = weight.square().mean()
        return Reduction(Assignment(target, length - r), weight=weight, archive={f"x{context.layer}": context.x})

    def restore(
        self, x: Tensor, assignment: Assignment, memory: Mapping[str, Tensor], archive: Mapping[str, Tensor]
    ) -> Tensor:
        return super().restore(x, assignment, memory, archive) + 0 * archive["x0"].mean()

    def loss(self) -> Tensor | None:
        return self.penalty


def test_parameters_of_a_method_train_and_travel_with_the_model() -> None:
    model, x = model_of()
    keys = set(model.state_dict())
    method = Learned()
    merging = vitrail.merge(model, r=3, method=method)
    new = {f"vitrail_method.scores.{layer}.{name}" for layer in range(4) for name in ("weight", "bias")}
    assert set(model.state_dict()) - keys == new
    (model(x).sum() + merging.loss()).backward()
    assert all(layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0 for layer in method.scores)
    merging.remove()
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_method_restores_after_each_block(place: str) -> None:
    model, x = model_of()
    method = Learned("block", place)
    with torch.no_grad(), vitrail.merge(model, r=3, method=method) as merging:
        assert model.forward_features(x).shape[1] == merging.layout.num_tokens
        assert method.seen == [37] * 4
        assert merging.tokens_per_layer() == [37] * 4
        assert merging.flops() < merging.flops(merged=False)


class Watching(ToMe):
    """ToMe that reads attention and external guidance."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Context] = []

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        self.rows, self.received = context.attention([0]), context.attention()
        self.seen.append(context)
        return super().reduce(context, r)


def test_attention_on_demand_is_that_of_the_block() -> None:
    model, x = model_of()
    method = Watching()
    with torch.no_grad():
        wanted = vitrail.record(model, x, ["attention"], layers=[0], queries=range(37)).attention[0]
        with vitrail.merge(model, r=[3, 0, 0, 0], method=method):
            model(x)
    torch.testing.assert_close(method.rows, wanted[:, :, :1].double(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(method.received, wanted.mean(2).double(), rtol=1e-6, atol=1e-8)


def test_guidance_reaches_the_method_and_merges_along() -> None:
    model, x = model_of()
    method = Watching()
    saliency = torch.rand(5, 6, 6)
    with torch.no_grad(), vitrail.merge(model, r=3, method=method) as merging:
        with merging.guide(saliency=saliency), merging.track() as trace:
            model(x)
        first, second = method.seen[0].guide["saliency"], method.seen[1].guide["saliency"]
        assert torch.equal(first[:, 1:], saliency.flatten(1))
        assert not first[:, 0].any()
        assert second.shape[1] == 34
        torch.testing.assert_close((second * method.seen[1].size).sum(1), first.sum(1).double(), rtol=1e-5, atol=1e-5)
        assert trace.layout.num_patches == 36
        model(x)
        assert not method.seen[-1].guide
        with pytest.raises(InvalidOption, match="saliency"):
            merging.guide(saliency=torch.rand(2, 3, 4, 5))
        with pytest.raises(UnsupportedInput, match="saliency"), merging.guide(saliency=torch.rand(3, 36)):
            model(x)


def test_a_static_method_with_varying_counts_is_refused() -> None:
    class Wrong(ToMe):
        @property
        def twin(self) -> str | None:
            return None

        def reduce(self, context: Context, r: int | Tensor) -> Reduction:
            return super().reduce(context, 1)

    model, x = model_of()
    with vitrail.merge(model, r=3, method=Wrong()), pytest.raises(InvalidOption, match="static"):
        model(x)


def test_registering() -> None:
    assert METHODS["test-kmeans"] is KMeans
    with pytest.raises(InvalidOption, match="registered already"):
        register_method("tome")(type("Other", (Method,), {}))
    with pytest.raises(InvalidOption, match="subclasses"):
        register_method("nothing")(int)  # type: ignore[type-var]


class Returning(Method):
    """A method that returns whatever it is given."""

    def __init__(self, result: Any, amount: Any = 3) -> None:
        super().__init__()
        self.result, self.removes = result, amount

    def amount(self, context: Context, planned: int) -> Any:
        return self.removes

    def reduce(self, context: Context, r: int | Tensor) -> Any:
        return self.result


PAIRS = torch.arange(37).clamp(max=33).expand(5, 37)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Returning(None), "Reduction"),
        (Returning(PAIRS), "Reduction"),
        (Returning(Assignment(PAIRS, 34)), "Reduction"),
        (Returning(Reduction(Assignment(PAIRS[:1], 34))), "shape"),
        (Returning(Reduction(Assignment(PAIRS.double(), 34))), "int64"),
        (Returning(Reduction(Assignment(PAIRS + 5, 34))), "indices below 34"),
        (Returning(Reduction(Assignment((PAIRS - 3).clamp(min=0), 34))), "protected"),
        (Returning(Reduction(Assignment(PAIRS, 34), weight=torch.ones(5, 3))), "weight"),
        (Returning(Reduction(Assignment(PAIRS, 34), memory={"mine": torch.ones(5, 3)})), "mine"),
        (Returning(Reduction(Assignment(PAIRS, 34), soft=torch.ones(5, 37, 3))), "soft"),
        (Returning(None, amount=None), "amount"),
        (Returning(None, amount=-1), "amount"),
        (Returning(None, amount=torch.ones(3, dtype=torch.long)), "one per image"),
        (Returning(None, amount=torch.ones(5)), "integer"),
    ],
)
def test_what_a_method_returns_is_checked(method: Method, words: str) -> None:
    model, x = model_of()
    with vitrail.merge(model, r=3, method=method), pytest.raises(InvalidOption, match=words):
        model(x)


def test_methods_that_are_not_registered_travel_as_themselves() -> None:
    model, _ = model_of()
    method = Returning(None)
    with vitrail.merge(model, r=3, method=method) as merging:
        assert merging.config["method"] is method
    with vitrail.merge(model, **merging.config) as again:
        assert again.method is method
    for wrong in (Threshold, KMeans):
        with pytest.raises(InvalidOption, match="or a Method"):
            vitrail.merge(model, r=3, method=wrong)
    with pytest.raises(InvalidOption, match="takes a name"):
        register_method(KMeans)  # type: ignore[arg-type]
    method.place = "behind"  # type: ignore[misc, assignment]
    with pytest.raises(InvalidOption, match="place"):
        vitrail.merge(model, r=3, method=method)


def test_a_block_may_be_left_as_it_is() -> None:
    class Nothing(Returning):
        static = False

    model, x = model_of()
    with torch.no_grad():
        before = model(x)
        with vitrail.merge(model, r=3, method=Nothing(None)) as merging, merging.track() as trace:
            assert torch.equal(model(x), before)
        assert trace.tokens_per_layer.unique().tolist() == [37]
        assert trace.flops.tolist() == [merging.flops(merged=False)] * 5


def test_an_empty_batch() -> None:
    model, x = model_of()
    with torch.no_grad(), vitrail.merge(model, r=3):
        assert model(x[:0]).shape == (0, 5)


class Nothing(Method):
    """A method that lacks what every method needs."""


def test_a_method_without_reduce_is_refused_before_the_model_is_changed() -> None:
    model = built(ViTConfig(**SMALL))
    with pytest.raises(InvalidOption, match=r"Nothing does not implement reduce\(context, r\)"):
        vitrail.merge(model, r=2, method=Nothing())
    with pytest.raises(NotApplied):
        vitrail.Merging.of(model)
