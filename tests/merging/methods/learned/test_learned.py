"""Learned methods: refused before they are trained; their weights move, train, and travel with the model."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrail
from tests.merging.methods.small import small_images, small_model
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import METHODS, Assignment, Context, ModelShape, Reduction
from vitrail.merging.method import as_method
from vitrail.merging.methods.learned import DTEM, DiffRate, LearnedMethod
from vitrail.merging.methods.pruning import DynamicViT, Prune


class Scored(LearnedMethod):
    """Drop the tokens with the lowest learned score; in training every token weighs what its score says."""

    def create(self, shape: ModelShape) -> Mapping[str, nn.Module]:
        return {"scores": nn.ModuleList(nn.Linear(shape.width, 1) for _ in range(shape.depth))}

    def score(self, context: Context) -> Tensor:
        scores = self.get_submodule(f"scores.{context.layer}")(context.x).squeeze(-1).sigmoid()
        return torch.where(context.mergeable, scores, 1)

    def relax(self, context: Context, r: int | Tensor) -> Reduction:
        score = self.score(context)
        self.add_loss(context, score.mean())
        step = Assignment.identity(*score.shape, device=score.device)
        return Reduction(step, weight=torch.ones_like(score), size=score)

    def select(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        order = self.score(context).argsort(dim=1, stable=True)
        length = order.shape[1] - r
        target = torch.zeros_like(order).scatter(1, order, (torch.arange(length + r) - r).clamp(0).expand_as(order))
        return Reduction(Assignment(target, length))


def trained() -> tuple[nn.Module, Scored]:
    """Return a merged model in eval mode whose method has seen two training passes."""
    model, method = small_model().train(), Scored()
    vitrail.merge(model, r=4, method=method)
    for _ in range(2):
        (model(small_images()).sum() + method.loss()).backward()
    return model.eval(), method


def test_an_untrained_method_is_refused_in_eval_mode() -> None:
    model = small_model()
    before = model(small_images())
    with pytest.raises(UntrainedMethod, match=r"not been trained.*Scored\.from_state"):
        vitrail.merge(model, r=4, method=Scored())
    assert torch.equal(model(small_images()), before)
    assert not [name for name in model.state_dict() if "vitrail_method" in name]


LEARNED = sorted(name for name, made in METHODS.items() if issubclass(made, LearnedMethod))


def merged_for_training(method: Any) -> tuple[nn.Module, vitrail.surgery.Merging]:
    model = small_model().train()
    amount = {} if as_method(method).decides else {"r": [0, 2, 2, 2]}  # dynamicvit has no predictor before block 0
    return model, vitrail.merge(model, **amount, method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LEARNED)
def test_a_method_that_was_never_trained_does_not_run_in_eval_mode(name: str, tmp_path: Path) -> None:
    assert {"avit", "diffrate", "dtem", "dynamicvit", "gumbel"} <= set(LEARNED)
    model, merging = merged_for_training({"name": name})
    model(small_images())  # no gradients are computed: nothing is trained
    with torch.no_grad():
        model(small_images())
    model.eval()
    with pytest.raises(UntrainedMethod, match=f"{name} is learned.*save_method"):
        model(small_images())
    with pytest.raises(UntrainedMethod, match="never trained, so there is nothing to save"):
        merging.save_method(tmp_path / "method.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UntrainedMethod, match="saved before it was trained"):
        METHODS[name].from_state(merging.method.state_dict())  # type: ignore[attr-defined]
    if not merging.method.decides:
        merging.r = 0
        model(small_images())  # nothing merges: nothing is to be learned

    model, merging = merged_for_training({"name": name})
    (model(small_images()).square().sum() + merging.loss()).backward()
    assert int(merging.method.passes) == 1  # type: ignore[arg-type]
    model.eval()(small_images())
    merging.save_method(tmp_path / "method.safetensors")
    assert int(load_file(tmp_path / "method.safetensors")["passes"]) == 1


def test_a_method_inside_another_one_is_checked_too() -> None:
    model = small_model().train()
    vitrail.merge(model, r=2, method=Prune("dtem"))
    with pytest.raises(UntrainedMethod, match="dtem is learned"):
        model.eval()(small_images())


def test_loading_weights_that_were_never_trained_forgets_the_training() -> None:
    model, _ = merged_for_training("dtem")
    before = copy.deepcopy(model.state_dict())
    model(small_images()).square().sum().backward()
    model.eval()(small_images())
    model.load_state_dict(before)
    with pytest.raises(UntrainedMethod):
        model(small_images())


def test_settings_without_weights_are_refused() -> None:
    model, merging = merged_for_training("dtem")
    model(small_images()).square().sum().backward()
    config = json.loads(json.dumps(merging.config))
    with pytest.raises(UntrainedMethod, match=r"merging\.save_method.*merging\.config, do not have the weights"):
        vitrail.merge(small_model(), **config)


def test_a_saved_method_knows_the_blocks_that_it_was_trained_with(tmp_path: Path) -> None:
    model, merging = merged_for_training("dtem")
    model(small_images()).square().sum().backward()
    merging.save_method(tmp_path)
    loaded = vitrail.load_method(tmp_path)
    assert loaded.trained_on is not None
    assert {f"blocks.{name}": shape for name, shape in loaded.trained_on.items()} == {
        name: tuple(weight.shape) for name, weight in small_model().named_parameters() if name.startswith("blocks.")
    }
    same = small_model()
    vitrail.merge(same, r=2, method=tmp_path)
    other = small_model()
    for block in other.blocks:  # type: ignore[union-attr]
        block.mlp.fc2.bias = None  # type: ignore[union-attr]
    keys = list(other.state_dict())
    with pytest.raises(InvalidOption, match=r"another model: 0\.mlp\.fc2\.bias.*\(16,\).*missing.*trained_on = None"):
        vitrail.merge(other, r=2, method=tmp_path)
    assert list(other.state_dict()) == keys
    loaded.trained_on = None
    vitrail.merge(other, r=2, method=loaded)


def test_passes_are_counted_in_training_alone() -> None:
    model, method = trained()
    assert int(method.passes) == 2
    model(small_images())
    with torch.no_grad():
        model.train()(small_images())
    model(small_images())
    assert int(method.passes) == 2
    assert int(model.state_dict()["vitrail_method.passes"]) == 2


def test_training_keeps_all_tokens_and_reaches_the_parameters() -> None:
    model, method = small_model().train(), Scored()
    merging = vitrail.merge(model, r=4, method=method)
    with merging.track() as trace:
        output = model(small_images())
    assert trace.sizes.shape == (3, 65)
    assert (trace.sizes[:, 1:] < 1).all()
    output.square().sum().backward(retain_graph=True)
    *before, last = method.get_submodule("scores").children()
    assert all(layer.weight.grad.isfinite().all() and layer.weight.grad.any() for layer in before)
    assert last.weight.grad is None, "no attention follows the last reduction"
    merging.loss().backward()
    assert last.weight.grad.any()
    with merging.track() as trace:
        model.eval()(small_images())
    assert trace.tokens_per_layer[0].tolist() == merging.tokens_per_layer() == [61, 57, 53, 49]


def test_the_loss_is_that_of_the_latest_pass() -> None:
    model, method = small_model().train(), Scored()
    merging = vitrail.merge(model, r=4, method=method)
    assert merging.loss() == 0
    model(small_images())
    first = float(merging.loss().detach())
    model(small_images())
    assert float(merging.loss().detach()) == pytest.approx(first)
    assert 0 < first < 4


@pytest.mark.parametrize("source", ["model", "wrapper", "method"])
def test_a_trained_method_is_applied_again_from_its_weights(source: str) -> None:
    model, method = trained()
    wanted = model(small_images())
    holder = {"model": model, "wrapper": nn.ModuleDict({"inner": model}), "method": method}[source]
    states = {name: value.clone() for name, value in holder.state_dict().items()}
    again = small_model()
    with vitrail.merge(again, r=4, method=Scored.from_state(states)) as merging:
        assert torch.equal(again(small_images()), wanted)
        assert int(merging.method.passes) == 2
        assert again.state_dict().keys() == model.state_dict().keys()
    assert not [name for name in again.state_dict() if "vitrail_method" in name]


def test_weights_without_a_count_are_trained_ones() -> None:
    _, method = trained()
    states = {name: value for name, value in method.state_dict().items() if name != "passes"}
    assert int(Scored.from_state(states).passes) == 1


def test_weights_of_another_model_are_refused() -> None:
    _, method = trained()
    wider = small_model(width=24)
    keys = list(wider.state_dict())
    unknown = Scored.from_state(method.state_dict())
    with pytest.raises(InvalidOption, match=r"scores\.0\.weight is \(1, 16\).*needs \(1, 24\)"):
        vitrail.merge(wider, r=4, method=unknown)
    with pytest.raises(InvalidOption, match=r"scores\.4"):
        vitrail.merge(small_model(depth=5), r=4, method=unknown)
    with pytest.raises(InvalidOption, match=r"trained with another model: 0\.norm1\.weight.*\(16,\).*\(24,\)"):
        vitrail.merge(wider, r=4, method=method)
    with pytest.raises(InvalidOption, match=r"another model: 4\..*missing"):
        vitrail.merge(small_model(depth=5), r=4, method=method)
    assert list(wider.state_dict()) == keys
    with pytest.raises(InvalidOption, match="from_state takes the state_dict"):
        Scored.from_state({})
    with pytest.raises(InvalidOption, match="another model"):
        vitrail.merge(small_model(), keep=0.5, method=DynamicViT.from_state(method.state_dict()))


def test_a_method_keeps_its_parameters_when_it_is_applied_again() -> None:
    model, method = trained()
    wanted, before = model(small_images()), dict(method.named_parameters())
    merging = vitrail.surgery.Merging.of(model)
    merging.remove()
    vitrail.merge(model, r=4, method=method)
    assert torch.equal(model(small_images()), wanted)
    assert all(before[name] is parameter for name, parameter in method.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_have_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model, method = small_model(dtype).train(), Scored()
    vitrail.merge(model, r=4, method=method)
    assert {parameter.dtype for parameter in method.parameters()} == {dtype}
    assert method.passes.dtype == torch.int64
    assert model(small_images(dtype)).dtype == dtype


@pytest.mark.parametrize(("made", "training"), [(DTEM, True), (DiffRate, False)])
def test_methods_compile_as_one_graph(made: type[LearnedMethod], training: bool) -> None:
    torch._dynamo.reset()
    model, method = small_model(torch.float32, depth=1).train(training), made()
    method.passes.fill_(1)
    merging = vitrail.merge(model, **({} if method.decides else {"r": 2}), method=method)  # type: ignore[arg-type]
    images = small_images(torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
    torch.testing.assert_close(compiled, model(images))
    if training:
        (compiled.square().sum() + merging.loss()).backward()
        assert all(weight.grad is not None for weight in method.parameters())
        assert int(method.passes) == 2, "the eager pass computed no gradients"
    torch._dynamo.reset()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_is_copied_in_the_middle_of_training(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, method = small_model().train(), Scored()
    vitrail.merge(model, r=4, method=method)
    output = model(small_images())
    again = copied(model)
    assert torch.equal(again(small_images()), output)
    assert int(again.state_dict()["vitrail_method.passes"]) == int(method.passes) == 0
    loss = method.loss()
    assert loss is not None
    loss.backward()
    assert int(method.passes) == 1
    assert int(again.state_dict()["vitrail_method.passes"]) == 0
