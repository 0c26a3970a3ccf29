"""Views of a model on one image, against the library and plain loops."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.web.models import CLASSES, picture, small_vit, views_of
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.web.cache import Cache, size_of
from vitrail.web.model_views import ModelViews, Setting

SOME = Setting("tome", "r", 7)


@pytest.fixture(scope="module")
def views() -> ModelViews:
    return views_of(small_vit())


@pytest.fixture(scope="module")
def batch(views: ModelViews) -> torch.Tensor:
    return views.batch(picture())


def test_info_names_tokens_plans_and_untrained_methods(views: ModelViews) -> None:
    info = views.info()
    assert info == json.loads(json.dumps(info))
    assert (info["modality"], info["grid"]) == ("image", [1, 8, 8])
    assert [one["role"] for one in info["special"]] == ["class", "distillation", "register", "register"]
    assert info["questions"] == [{"name": "label", "classes": list(CLASSES)}]
    names = [method["name"] for method in info["methods"]]
    assert names[0] == "tome"
    assert {"kmeans", "energy", "threshold"} < set(names)
    assert not {"dtem", "avit"} & set(names)  # these must be trained first
    for by, table in info["plans"].items():
        for schedule, plans in table["merges"].items():
            for value, merges in zip(table["values"], plans, strict=True):
                with vitrail.merge(views.model, **Setting("tome", by, value, schedule).options) as merging:
                    lengths = merging.tokens_per_layer()
                assert [68 - sum(merges[: layer + 1]) for layer in range(3)] == lengths


@pytest.mark.parametrize("setting", [SOME, Setting("tome", "keep", 0.5, "decreasing"), Setting("prune", "r", 5)])
def test_result(views: ModelViews, batch: torch.Tensor, setting: Setting) -> None:
    found = views.result("image", batch, setting)
    assert found == json.loads(json.dumps(found))
    with torch.no_grad():
        plain = views.model(batch)
        with vitrail.merge(views.model, **setting.options) as merging, merging.track() as trace:
            output = views.model.forward_output(batch)
    assert found["tokens"] == trace.tokens_per_layer[0].tolist()
    assert found["groups"][-1] == trace.groups[0].tolist()
    assert found["sizes"][-1] == pytest.approx(trace.sizes[0].tolist())
    assert found["flops"] == {"before": merging.flops(merged=False), "after": int(trace.flops[0])}
    assert [head["name"] for head in found["heads"]] == ["fused", "cls", "distillation"]
    likely = output.logits[0].softmax(0)
    assert found["heads"][0]["top"][0]["class"] == CLASSES[int(likely.argmax())]
    assert found["heads"][0]["top"][0]["probability"] == pytest.approx(float(likely.max()), abs=1e-4)
    assert found["cosine"] == pytest.approx(float(F.cosine_similarity(output.logits[0], plain[0], 0)), abs=1e-3)
    assert len({len(groups) for groups in found["groups"]}) == 1
    for groups, sizes in zip(found["groups"], found["sizes"], strict=True):
        assert max(groups) < len(sizes)


def test_groups_of_each_layer_grow_out_of_those_before(views: ModelViews, batch: torch.Tensor) -> None:
    groups = views.result("image", batch, SOME)["groups"]
    for before, after in itertools.pairwise(groups):
        together = {tuple(sorted({after[patch] for patch in range(64) if before[patch] == one})) for one in before}
        assert all(len(one) == 1 for one in together)
    assert [len(set(one)) for one in groups] == [57, 50, 43]


def test_attention_rows_are_those_of_the_recorder_and_sum_to_one(views: ModelViews, batch: torch.Tensor) -> None:
    found = views.attention("image", batch, SOME, 2, 30)
    with vitrail.merge(views.model, r=7):
        expected = vitrail.record(views.model, batch, "attention", layers=2, queries=[30]).attention[2][0, :, 0]
    torch.testing.assert_close(torch.tensor(found["rows"]), expected, atol=1e-5, rtol=0)
    assert torch.tensor(found["rows"]).sum(1).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_tokens_and_nearest_patches(views: ModelViews, batch: torch.Tensor) -> None:
    found, near = views.tokens("image", batch, SOME, 1), views.similar("image", batch, SOME, 1, 20)
    with vitrail.merge(views.model, r=7):
        tokens = vitrail.record(views.model, batch, "tokens", layers=1).tokens[1][0]
    assert found["norms"] == pytest.approx(tokens.norm(dim=1).tolist(), abs=1e-3)
    assert near["cosines"] == pytest.approx(
        [float(F.cosine_similarity(one, tokens[20], 0)) for one in tokens], abs=1e-3
    )
    assert found["cosines"][0][2] == pytest.approx(float(F.cosine_similarity(tokens[0], tokens[2], 0)), abs=1e-3)
    assert torch.tensor(found["colors"]).shape == (64, 3)
    assert found["threshold"]["verdict"] in ("artifacts", "none", "uncertain")


def test_step_is_one_merge_that_can_be_checked_by_hand(views: ModelViews, batch: torch.Tensor) -> None:
    """Pairs, sizes and means by plain loops over keys and values."""
    found = views.step("image", batch, SOME, 1)
    keys, sizes, values = found["keys"], found["sizes"], torch.tensor(found["values"])
    assert found["tokens"] == 68 - 7
    best = {}
    for a in range(4, 61, 2):
        scores = {
            b: float(F.cosine_similarity(torch.tensor(keys[a]), torch.tensor(keys[b]), 0)) for b in range(5, 61, 2)
        }
        best[a] = max(scores.values()), max(scores, key=lambda b, scores=scores: scores[b])
    assert {pair["a"]: pair["b"] for pair in found["pairs"]} == {a: b for a, (_, b) in best.items()}
    ranked = sorted(best, key=lambda a: -best[a][0])
    assert [pair["a"] for pair in found["pairs"] if pair["merges"]] == ranked[:7]
    assert sum(sizes) == 68
    assert sorted(set(found["target"])) == list(range(54))
    assert found["groups"] == [*range(4), *views.result("image", batch, SOME)["groups"][0]]
    with vitrail.merge(views.model, r=7):
        tokens = vitrail.record(views.model, batch, "tokens", layers=0).tokens[0][0]
    assert values.shape == (61, 4)
    assert tokens.shape == (68, 32)
    assert views.step("image", batch, Setting("tome", "r", 0), 1)["merges"] == 0
    with pytest.raises(UnsupportedInput, match="tome"):
        views.step("image", batch, Setting("kmeans", "r", 7), 1)


def test_registers_say_where_there_are_no_artifacts(views: ModelViews, batch: torch.Tensor) -> None:
    with pytest.raises(UnsupportedInput, match="no artifacts"):
        views.registers("image", batch, 2)
    with pytest.raises(vitrail.errors.NotApplied):
        vitrail.TestTimeRegisters.of(views.model)


def test_the_model_is_left_as_it_was(views: ModelViews, batch: torch.Tensor) -> None:
    before = {name: value.clone() for name, value in views.model.state_dict().items()}
    views.result("another", batch, SOME)
    with pytest.raises(vitrail.errors.NotApplied):
        vitrail.Merging.of(views.model)
    assert all(torch.equal(value, before[name]) for name, value in views.model.state_dict().items())


def test_threads_do_not_mix(views: ModelViews) -> None:
    """Each thread gets the answer of its own image and setting."""
    fresh = views_of(views.model, cache=Cache(0))  # nothing is kept
    jobs = [
        (f"{seed} {r}", fresh.batch(picture(seed=seed)), Setting("tome", "r", r)) for seed in (1, 2) for r in (0, 9)
    ]
    expected = {job[0]: fresh.result(*job)["groups"] for job in jobs}
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda job=job: found.update({job[0]: fresh.result(*job)["groups"]}))
        for job in jobs * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


@pytest.mark.parametrize(
    "given",
    [
        None, [], {"method": "tome", "by": "r", "value": 1.5}, {"by": "r", "value": -1}, {"by": "r", "value": True},
        {"by": "keep", "value": 0}, {"by": "keep", "value": 2}, {"by": "gflops", "value": 1}, {"method": "/etc/passwd"},
        {"method": {"name": "tome"}}, {"schedule": "sideways"}, {"value": float("nan")}, {"path": "x"},
        {"by": "r", "value": 1e300},
    ],
)  # fmt: skip
def test_other_settings_are_refused(given: Any) -> None:
    with pytest.raises(InvalidOption):
        Setting.parse(given)


def test_cache_lets_the_least_recently_used_go() -> None:
    cache = Cache(3 * size_of(torch.zeros(100)))
    for name in "abc":
        cache.put(name, torch.zeros(100))
    cache.find("a")
    cache.put("d", torch.zeros(100))
    assert [name for name in "abcd" if cache.find(name) is not None] == ["a", "c", "d"]
    assert cache.bytes <= cache.max_bytes
    cache.put("huge", torch.zeros(1000))
    assert cache.find("huge") is None
    assert len(cache) == 3
    assert cache.get("e", lambda: {"x": [1.0] * 3}) == {"x": [1.0] * 3}
