"""Restorers on models: promises, fitting, and the error of what is restored."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import vitrail
from tests.extras import always
from tests.merging.test_custom_methods import Threshold
from tests.surgery.models import ALL, FEW, distance, leaving, run
from vitrail.errors import InvalidOption, UnsupportedInput, UntrainedMethod
from vitrail.merging import Context, Reduction, ToMe
from vitrail.merging.restoring import Restorer, Transport
from vitrail.models import create_model

FITTED = {"name": "residual", "channels": 2}
RESTORERS: dict[str, Any] = {
    "copy": "copy",
    "residual": {"name": "residual", "channels": None},
    "fitted": FITTED,
    "transport": {"name": "transport", "neighbors": 3},
    "attention": {"name": "attention", "channels": 2, "hidden": 8, "heads": 2},
}
everywhere = pytest.mark.parametrize("name", FEW)
every_restorer = pytest.mark.parametrize("restore", RESTORERS)


class InBlocks(ToMe):
    """ToMe that restores the tokens after each block."""

    scope = "block"
    twin = None  # type: ignore[assignment]


def merged(model: nn.Module, images: Tensor, restore: str, r: Any = 2, **options: Any) -> vitrail.Merging:
    merging = vitrail.merge(model, r=r, restore=RESTORERS[restore], **options)
    if restore in ("fitted", "attention"):
        merging.calibrate_restorer(images, steps=3)
    return merging


def vit() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=12, depth=3, num_heads=2, num_classes=5, init_values=1.0
    ).eval()


@everywhere
@every_restorer
def test_zero_merges_reproduce_the_model_and_removal_restores_it(name: str, restore: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    before, keys = run(model, images, case), list(model.state_dict())
    with vitrail.merge(model, r=0, restore=RESTORERS[restore]):
        assert distance(run(model, images, case), before) <= (0 if case.bit_equal else 5e-6)
    with merged(model, images, restore) as merging:
        assert distance(run(model, images, case), before) > 1e-4
        own = [key for key in model.state_dict() if "vitrail_restorer" in key]
        assert bool(own) == (restore not in ("copy", "transport"))
        again = vitrail.Merging.of(model)
        assert again.config == merging.config
        assert again.config["restore"] == (RESTORERS[restore] if restore != "copy" else "copy")
    assert torch.equal(run(model, images, case), before)
    assert list(model.state_dict()) == keys


@everywhere
@every_restorer
@pytest.mark.parametrize("method", ["tome", "threshold", "block"])
def test_a_batch_equals_its_images_one_by_one(name: str, restore: str, method: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images(batch=3)
    methods = {"tome": "tome", "threshold": Threshold(0.5), "block": InBlocks()}
    with merged(model, images, restore, r=3, method=methods[method]):
        together = run(model, images, case)
        alone = torch.cat([run(model, image[None], case) for image in images])
    assert distance(alone, together) < 1e-7


@pytest.mark.parametrize("name", always(["timm-registers"], ["timm-registers", "eva-dinov3"]))
@every_restorer
def test_static_methods_compile_as_one_graph(name: str, restore: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    merged(model, images, restore)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(model, images, case)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert distance(run(compiled, images, case), wanted) < 1e-5


@every_restorer
def test_order_and_protection(restore: str) -> None:
    model, images = vit().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with merged(model, images, restore, r=[4, 0, 0], order="paper") as merging:
        paper = model(images)
        saved = merging.restorer
    with vitrail.merge(model, r=[4, 0, 0], restore=saved, order="original"):
        assert distance(model(images), paper) < 1e-12
    protect = torch.zeros(2, 4, 4, dtype=torch.bool)
    protect[0, :2] = protect[1, :, 2] = True
    with merged(model, images, restore, protect=protect):
        restored = leaving(model, images)[-1]
    with vitrail.merge(model, r=2, protect=protect):
        copies = leaving(model, images)[-1]
    where = torch.cat([torch.ones(2, 1, dtype=torch.bool), protect.flatten(1)], 1)
    assert torch.equal(restored[where], copies[where])
    assert torch.equal(restored, copies) == (restore == "copy")


def test_whole_residuals_restore_the_input_of_the_mlp_exactly() -> None:
    model, images = vit().double(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    mlp = model.blocks[2].mlp
    with torch.no_grad():
        mlp.fc2.weight.zero_()
        mlp.fc2.bias.zero_()
    plain = leaving(model, images)[2]
    with vitrail.merge(model, r=[0, 0, 5], restore=RESTORERS["residual"]):
        assert distance(leaving(model, images)[2], plain) < 1e-13
    with vitrail.merge(model, r=[0, 0, 5]):
        assert distance(leaving(model, images)[2], plain) > 0.1


def test_late_class_tokens_keep_their_place() -> None:
    model = create_model("cait_xxs24", image_size=32, patch_size=8, width=12, depth=4, heads=2, layer_scale=1.0).eval()
    images = torch.randn(2, 3, 32, 32)
    plain = model(images)
    for restore in RESTORERS:
        with merged(model, images, restore) as merging:
            assert 1e-5 < distance(model(images), plain) < 1
            assert merging.restoration_error(images).layers.shape == (2, len(merging.r))
    assert torch.equal(model(images), plain)


def test_errors_are_relative_norms_of_patches_behind_each_block() -> None:
    model, images = vit().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    plain = leaving(model, images)
    for method in ("tome", InBlocks()):
        with merged(model, images, "fitted", method=method) as merging:
            with torch.no_grad():
                shown = [model.forward_intermediates(images, indices=[0, 1, 2], output_fmt="NLC")[1]]
            error = merging.restoration_error(images, batch_size=2)
        for layer, (tokens, wanted) in enumerate(zip(shown[0], plain, strict=True)):
            for image in range(3):
                expected = (tokens[image] - wanted[image, 1:]).norm() / wanted[image, 1:].norm()
                assert float(error.layers[image, layer]) == pytest.approx(float(expected), rel=1e-9)
        assert error.mean == pytest.approx(float(error.layers[:, 2].mean()))
        assert error.restorer == "residual"
        assert error.bytes_per_token == (2 * 8 if method == "tome" else 0)
        assert float(error.layers[:, 0].mean()) < float(error.copies[:, 0].mean())  # images that it was fitted to
        assert error.to_dict()["error"] == error.mean
    with vitrail.merge(model, r=2) as merging:
        error = merging.restoration_error(images)
        assert torch.equal(error.layers, error.copies)
        with pytest.raises(UnsupportedInput, match="no images"):
            merging.restoration_error([])


def test_the_fit_is_the_least_squares_of_one_layer() -> None:
    model, images = vit().double(), torch.randn(16, 3, 32, 32, dtype=torch.float64)
    with vitrail.merge(model, r=[4, 0, 0], restore={"name": "residual", "channels": 12}) as merging:
        merging.calibrate_restorer(images)
        fitted = merging.restorer
        assert float(fitted.encode.detach()[1].abs().max()) == 0
        gram = fitted.decode[2] @ fitted.decode[2].t()
        assert torch.allclose(gram, torch.eye(12, dtype=torch.float64), atol=1e-10)
        error = merging.restoration_error(images)
    assert error.mean < 0.97 * error.mean_of_copies
    assert bool((error.layers < error.copies).float().mean() > 0.9)


def test_fitted_parameters_are_saved_and_copied_with_the_model() -> None:
    model, images = vit(), torch.randn(4, 3, 32, 32)
    for restore in ("fitted", "attention"):
        merging = merged(model, images, restore)
        wanted, config, state = model(images), merging.config, copy.deepcopy(model.state_dict())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(images), wanted)
        merging.remove()
        fresh = vit()
        vitrail.merge(fresh, **config)
        with pytest.raises(UntrainedMethod, match="calibrate_restorer"):
            fresh(images)
        fresh.load_state_dict(state)
        assert torch.equal(fresh(images), wanted)


@every_restorer
def test_gradients_and_half_precision(restore: str) -> None:
    model, images = vit().train(), torch.randn(2, 3, 32, 32)
    merged(model, images, restore)
    model(images).square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert [name for name in missing if "restorer" not in name] == []
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    half = copy.deepcopy(model).eval().to(torch.bfloat16)
    with torch.no_grad():
        assert distance(half(images.bfloat16()).float(), model.eval()(images)) < 0.1


def test_training_lowers_the_loss_of_attention() -> None:
    model, images, losses = vit(), torch.randn(8, 3, 32, 32), []
    with vitrail.merge(model, r=4, restore=RESTORERS["attention"]) as merging:
        merging.calibrate_restorer(images, steps=60, learning_rate=1e-2, progress=lambda *step: losses.append(step))
        with_attention = merging.restoration_error(images).mean
        merging.calibrate_restorer(images, steps=0)
        assert with_attention < merging.restoration_error(images).mean
    assert [step[:2] for step in losses] == [(done, 60) for done in range(1, 61)]
    assert losses[-1][2] < 0.9 * losses[0][2]


def test_a_failed_fit_changes_nothing() -> None:
    model, images = vit(), torch.randn(4, 3, 32, 32)
    with vitrail.merge(model, r=2, restore=RESTORERS["attention"]) as merging:
        merging.calibrate_restorer(images, steps=2)
        wanted = model(images)

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            merging.calibrate_restorer(images + 1, progress=fail)
        assert torch.equal(model(images), wanted)
        with pytest.raises(InvalidOption, match="learning_rate above 0"):
            merging.calibrate_restorer(images, learning_rate=0)
    merging = vitrail.merge(model, r=0, restore=FITTED)
    with pytest.raises(UnsupportedInput, match="nothing merged"):
        merging.calibrate_restorer(images)
    merging.remove()
    for restore in (None, "copy", Transport()):
        merging = vitrail.merge(model, r=2, restore=restore)
        with pytest.raises(InvalidOption, match="nothing to fit"):
            merging.calibrate_restorer(images)
        merging.remove()
    before = model(images)
    with pytest.raises(InvalidOption, match="unmerge=False"):
        vitrail.merge(model, r=2, restore="copy", unmerge=False)
    with pytest.raises(InvalidOption, match="tokens of this model have 12"):
        vitrail.merge(model, r=2, restore={"name": "residual", "channels": 13})
    assert torch.equal(model(images), before)


class OwnRestore(ToMe):
    """ToMe that restores zeros for patches."""

    def restore(self, x: Tensor, assignment: Any, memory: Any, archive: Any) -> Tensor:
        return assignment.unmerge(x) * 0

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        return super().reduce(context, r)


def test_methods_restore_by_themselves_unless_a_restorer_is_given() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    with vitrail.merge(model, r=2, method=OwnRestore()) as merging:
        assert "restore" not in merging.config
        assert float(leaving(model, images)[-1].abs().max()) == 0
    with vitrail.merge(model, r=2, method=OwnRestore(), restore="copy"):
        restored = model(images)
    with vitrail.merge(model, r=2):
        assert torch.equal(model(images), restored)


class Constant(Restorer):
    """Restores ones; never registered."""

    def restore(self, x: Tensor, state: Any) -> Tensor:
        return torch.ones_like(state.unmerge(x))


def test_own_restorers_need_no_registration() -> None:
    model, images, own = vit(), torch.randn(2, 3, 32, 32), Constant()
    with vitrail.merge(model, r=2, restore=own) as merging:
        assert float(leaving(model, images)[-1].min()) == 1
        assert merging.config["restore"] is own


@pytest.mark.slow
def test_fitted_restorers_beat_copies_on_real_images(shared_data: Path) -> None:
    model = vitrail.load_model("vitrail:tiny").eval()
    train, held_out = (str(shared_data / f"imagenette-128-{part}.parquet") for part in ("train", "val"))
    errors = {}
    for restore in ("residual", "attention"):
        with vitrail.merge(model, r=16, restore=restore) as merging:
            merging.calibrate_restorer(train, limit=64, batch_size=32, steps=100)
            error = merging.restoration_error(held_out, limit=32, batch_size=32)
        errors[restore] = error.mean
        assert bool((error.layers.mean(0) < error.copies.mean(0)).all())
        assert bool((error.per_image < error.copies[:, -1]).float().mean() > 0.9)
    assert errors["attention"] < errors["residual"]
