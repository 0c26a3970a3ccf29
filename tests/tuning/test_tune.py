"""``vitrail.tune`` on small models: what it promises holds, by independent measurement."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from tests.models.mixes import SMALL, built, random_images
from vitrail.analysis.statistics import split_images, wilson
from vitrail.errors import AlreadyApplied, InvalidOption, UnsupportedInput, VitrailWarning
from vitrail.merging.method import as_method
from vitrail.models import ViTConfig
from vitrail.tokens import Role, TokenSpec
from vitrail.tuning import SEARCHES, Tuning, tune
from vitrail.tuning.tuner import Tuner

COUNT = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return built(ViTConfig(**{**SMALL, "image_size": 24, "depth": 3, "num_classes": 5})).float()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return random_images(ViTConfig(**{**SMALL, "image_size": 24}), batch=COUNT).float()


def quickly(model: Any, images: Any, *args: Any, **options: Any) -> Tuning:
    return tune(model, images, *args, **{"batch_size": 8, "seconds": 20, **options})


@pytest.mark.parametrize("search", SEARCHES)
def test_the_tolerance_holds_on_held_out_images(model: Any, images: Tensor, search: str) -> None:
    before = model(images)
    found = quickly(model, images, "agreement 0.8", search=search)
    test = split_images(COUNT, test_share=0.5, seed=0).test
    with found.apply(model) as merging:
        same = (model(images[test]).argmax(1) == before[test].argmax(1)).double()
        assert merging.flops() == found.flops < found.flops_unmerged == merging.flops(merged=False)
        assert merging.config == found.config
    assert found.value == pytest.approx(float(same.mean()))
    assert found.value >= 0.8
    assert found.interval == wilson(float(same.sum()), len(test))
    assert torch.equal(model(images), before), "the model is left as it was"
    assert found.tuned_on + found.held_out == COUNT
    assert min(one.flops for one in found.curve) <= found.flops
    assert found.speedup > 0


def test_images_that_cannot_be_read_are_named(model: Any, tmp_path: Path) -> None:
    for number in range(8):
        Image.new("RGB", (24, 24), (30 * number, 90, 200 - 20 * number)).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"no image")
    with pytest.warns(VitrailWarning, match=r"left out 1 sample: .*3\.png"):
        found = quickly(model, tmp_path, "agreement 0.5", seconds=2)
    assert found.tuned_on + found.held_out == 7


def test_a_looser_tolerance_merges_more(model: Any, images: Tensor) -> None:
    tight, loose = (quickly(model, images, ("dense_error", bound)) for bound in (0.2, 0.6))
    assert loose.flops < tight.flops
    assert tight.value <= 0.2 < loose.value <= 0.6


def test_a_budget_is_kept(model: Any, images: Tensor) -> None:
    full = vitrail.count(model).flops
    found = quickly(model, images, gflops=0.7 * full / 1e9, quality="cosine")
    assert found.flops <= 0.7 * full
    assert found.bound is None
    with found.apply(model):
        assert vitrail.Merging.of(model).flops() == found.flops


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_that_ends_above_the_budget_is_dropped(
    model: Any, images: Tensor, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where time runs out: the search returns after its first step, which merges nothing."""
    monkeypatch.setitem(SEARCHES, search, lambda problem: iter([[(0, 0, 0), (1, 0, 0)]]))
    budget = 0.7 * vitrail.count(model).flops
    found = quickly(model, images, gflops=budget / 1e9, quality="cosine", search=search)
    assert found.flops <= budget
    assert found.family == "constant"


def test_an_interrupted_tuning_stays_within_the_budget(model: Any, images: Tensor) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "search":
            raise KeyboardInterrupt

    budget = 0.7 * vitrail.count(model).flops
    found = quickly(model, images, gflops=budget / 1e9, quality="cosine", on_progress=interrupt)
    assert found.interrupted
    assert found.flops <= budget


def test_a_budget_that_cannot_be_reached_is_refused(model: Any, images: Tensor) -> None:
    full = vitrail.count(model).flops
    with pytest.raises(InvalidOption, match=r"cannot be reached: .* leaves [0-9.e-]+ GFLOPs of") as caught:
        quickly(model, images, gflops=0.01 * full / 1e9)
    least = float(str(caught.value).partition("leaves ")[2].partition(" ")[0])
    assert 0.2 * full <= least * 1e9 <= full
    assert quickly(model, images, gflops=1.001 * least).flops <= 1.001 * least * 1e9
    with pytest.raises(InvalidOption, match="latency_ms=1e-06 cannot be reached"):
        quickly(model, images, latency_ms=1e-6)
    assert not hasattr(model, "_vitrail_plan")


def test_a_budget_of_time_merges_as_little_as_it_needs(model: Any, images: Tensor) -> None:
    found = quickly(model, images, latency_ms=1e6)
    assert sum(found.config["r"]) <= 1 * 3, "an endless budget needs no merge"


def test_the_better_of_two_methods_is_chosen(model: Any, images: Tensor) -> None:
    found = quickly(model, images, "cosine 0.99", method=["random", "tome"])
    assert found.config["method"] == "tome"


def test_labels_and_scores_of_the_user(model: Any, images: Tensor) -> None:
    labels = model(images).argmax(1)
    found = quickly(model, images, "accuracy_loss 0.1", labels=labels)
    assert found.value <= 0.1
    score = quickly(model, images, (lambda logits, truth: (logits.argmax(1) == truth).float(), 0.1), labels=labels)
    assert score.value <= 0.1


def test_a_result_is_saved_and_read_back(model: Any, images: Tensor, tmp_path: Path) -> None:
    found = quickly(model, images, "agreement 0.8")
    found.save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == found
    json.loads((tmp_path / "tune.json").read_text())
    with pytest.raises(InvalidOption, match="existing directory"):
        found.save(tmp_path / "missing" / "tune.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidOption, match="not a result"):
        Tuning.load(tmp_path / "other.json")


def test_an_interrupted_search_still_decides(model: Any, images: Tensor) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "search" and done == 2:
            raise KeyboardInterrupt

    found = quickly(model, images, "agreement 0.8", on_progress=interrupt)
    assert found.interrupted
    assert found.value >= 0.8


def interrupting(stage: str, at: int = 0) -> Any:
    def tell(now: str, done: int, total: int | None) -> None:
        if now == stage and done >= at:
            raise KeyboardInterrupt

    return tell


def test_an_interrupt_while_choosing_keeps_the_best_so_far(model: Any, images: Tensor) -> None:
    found = quickly(model, images, "agreement 0.0", on_progress=interrupting("tuning samples", 2))
    assert found.interrupted
    assert sum(found.config["r"]) > 0
    assert found.value is not None
    assert found.held_out == COUNT // 2


@pytest.mark.parametrize("stage", ["held-out samples", "timing"])
def test_an_interrupt_while_measuring_leaves_out_what_was_not_measured(model: Any, images: Tensor, stage: str) -> None:
    found = quickly(model, images, "agreement 0.5", on_progress=interrupting(stage))
    assert found.interrupted
    assert sum(found.config["r"]) > 0
    assert (found.value is None) == (found.held_out == 0) == (stage == "held-out samples")
    assert found.speedup is found.latency_ms is found.speedup_interval is found.is_faster is None
    assert not hasattr(model, "_vitrail_plan")


def test_an_interrupt_before_any_setting_is_raised(model: Any, images: Tensor) -> None:
    for stage in ("unmerged model", "tuning samples"):
        with pytest.raises(KeyboardInterrupt):
            quickly(model, images, "agreement 0.5", on_progress=interrupting(stage))
    assert not hasattr(model, "_vitrail_plan")


@pytest.mark.parametrize("options", [{"within": "agreement 0.5"}, {"latency_ms": 1e6}])
def test_running_out_of_time_is_said(model: Any, images: Tensor, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"time ran out.*seconds="):
        quickly(model, images, **options, seconds=1e-3)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_time_limit_is_kept(model: Any, images: Tensor, search: str) -> None:
    def dawdle(_: Any, args: tuple[Tensor]) -> None:
        time.sleep(0.004 * len(args[0]))

    handle = model.register_forward_pre_hook(dawdle)
    try:
        began = time.monotonic()
        found = quickly(model, images, "agreement 0.5", search=search, seconds=4)
        took = time.monotonic() - began
    finally:
        handle.remove()
    assert found.seconds <= took <= 4 * 1.25
    assert found.value is not None
    assert found.speedup is not None
    assert found.speedup_interval is not None
    assert found.speedup_interval[0] <= found.speedup <= found.speedup_interval[1]


def test_a_bad_search_is_no_worse_than_the_best_constant_schedule(
    model: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SEARCHES, "greedy", lambda problem: iter([[(0, 0, 0), (4, 0, 0), (8, 0, 0)]]))
    split = split_images(COUNT, test_share=0.5, seed=0)
    with torch.no_grad():
        before = model(images)
    known = []
    for r in range(10):
        with torch.no_grad(), vitrail.merge(model, r) as merging:
            cosine = torch.cosine_similarity(model(images).double(), before.double(), dim=1)
            known.append((float(min(cosine[split.train].mean(), cosine[split.test].mean())), merging.flops()))
    bound = known[5][0] - 1e-6
    allowed = [flops for value, flops in known if value >= bound]
    found = quickly(model, images, ("cosine", bound))
    assert found.flops <= min(allowed)


def constants(model: Any, images: Tensor, method: str) -> list[tuple[Tensor, int]]:
    """Return the cosine of each image and the FLOPs of every constant schedule."""
    found = []
    with torch.no_grad():
        before = model(images)
        for r in range(10):
            with vitrail.merge(model, r, method=method) as merging:
                cosine = torch.cosine_similarity(model(images).double(), before.double(), dim=1)
                found.append((cosine, merging.flops()))
    return found


def test_no_constant_schedule_of_any_method_is_better(
    model: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pilot prefers the worst method, and the search proposes nothing good."""
    order = ["random", "prune", "energy", "tome"]
    monkeypatch.setattr(Tuner, "_pilot", lambda _, path: order.index(as_method(path.method).label))
    monkeypatch.setitem(SEARCHES, "greedy", lambda problem: iter([[(0, 0, 0), (4, 0, 0), (8, 0, 0)]]))
    split = split_images(COUNT, test_share=0.5, seed=0)
    known = {method: constants(model, images, method) for method in order}
    budget = known["tome"][4][1]
    within = quickly(model, images, gflops=budget / 1e9, quality="cosine", method=order)
    allowed = [one for method in order for one in known[method] if one[1] <= budget]
    first = {flops for _, flops in known["tome"] if flops <= budget}
    best = max(float(cosine[split.test].mean()) for cosine, flops in allowed if flops == max(first))
    assert within.value is not None
    assert within.value >= best - 1e-9
    for number in (3, 6):
        cosine = known["energy"][number][0]
        bound = min(float(cosine[part].mean()) for part in (split.train, split.test)) - 1e-9
        meets = [
            flops
            for every in known.values()
            for cosine, flops in every
            if min(float(cosine[part].mean()) for part in (split.train, split.test)) >= bound
        ]
        found = quickly(model, images, ("cosine", bound), method=order)
        assert found.flops <= min(meets) == known["energy"][number][1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one"),
        ({"within": "agreement 0.9", "gflops": 1.0}, "exactly one"),
        ({"gflops": -1.0}, "gflops"),
        ({"within": "agreement 0.9", "search": "luck"}, "greedy"),
        ({"within": "agreement 0.9", "method": []}, "empty"),
        ({"within": "agreement 0.9", "held_out": 1.0}, "held_out"),
        ({"within": "agreement 0.9", "method": "unknown"}, "method"),
    ],
)
def test_wrong_options_are_refused(model: Any, images: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        quickly(model, images, **options)


def test_what_cannot_be_tuned_is_refused(model: Any, images: Tensor) -> None:
    with pytest.raises(UnsupportedInput, match="4 samples"):
        quickly(model, images[:2], "agreement 0.9")
    with pytest.raises(UnsupportedInput, match="labels"):
        quickly(model, images, "accuracy_loss 0.1")
    with pytest.raises(InvalidOption, match="loosen"):
        quickly(model, images, "dense_error 0.0")
    with vitrail.merge(model, r=1), pytest.raises(AlreadyApplied):
        quickly(model, images, "agreement 0.9")
    assert not hasattr(model, "_vitrail_plan")


def test_all_tasks_of_a_model_have_to_agree() -> None:
    torch.manual_seed(0)
    small = {"image_size": 24, "patch_size": 4, "width": 16, "depth": 3, "heads": 2}
    tokens = (TokenSpec("digit", Role.TASK, classes=4), TokenSpec("speaker", Role.TASK, classes=3))
    model = vitrail.create_model("vit_tiny_patch16", **small, tokens=tokens, num_classes=0).eval()
    images = torch.randn(COUNT, 3, 24, 24)
    found = quickly(model, images, gflops=0.6 * vitrail.count(model).flops / 1e9)
    test = split_images(COUNT, test_share=0.5, seed=0).test
    with torch.no_grad():
        before = model(images[test]).by_role
        with found.apply(model):
            after = model(images[test]).by_role
    same = torch.stack([before[name].argmax(1) == after[name].argmax(1) for name in before]).all(0)
    assert found.value == pytest.approx(float(same.double().mean()))
    with pytest.raises(InvalidOption, match="for models of one task"):
        quickly(model, images, "accuracy_loss 0.1", labels=torch.zeros(COUNT, dtype=torch.long))
