"""``time_models``: models of any kind by turns, what is left of them, and what is refused."""

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.bench.models import CountingClock, tiny
from tests.surgery.models import ALL, FEW, main_output
from vitrail.bench import FORMS, copy_model, time_models
from vitrail.bench.forms import inference
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.models import create_model
from vitrail.surgery import Merging, merge

PICTURES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
WAYS: list[dict[str, Any]] = [
    {},
    {"proportional": False},
    {"order": "original"},
    {"unmerge": False},
    {"method": "random"},
    {"method": "prune"},
    {"protect": torch.eye(4, dtype=torch.bool)},
]


class Plain(nn.Module):
    """No ViT; keeps a list of the first values of what it was given, which its copies share."""

    seen: ClassVar[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.flatten()[0]))
        return x


def merged(**options: Any) -> nn.Module:
    model = tiny()
    merge(model, r=2, **options)
    return model


@pytest.mark.usefixtures("no_inductor")
def test_models_take_turns_and_stay_as_they_were() -> None:
    models = {"unmerged": tiny(), "merged": merged(), "at random": merged(method="random").train()}
    before = {name: [value.clone() for value in model.state_dict().values()] for name, model in models.items()}
    forms = {name: ("eager", "blocks") if name == "merged" else ("eager",) for name in models}
    found = time_models(models, PICTURES, forms=forms, seconds=1.0, clock=CountingClock())
    assert list(found) == list(models)
    for name, times in found.items():
        assert tuple(times.forms) == forms[name]
        assert times.failed == {}
        for one in times.forms.values():
            assert (one.seconds, one.images_per_s, one.spread, one.samples) == (0.25, 8.0, 0.0, 5)
        assert times.best in times.forms.values()
    for name, model in models.items():
        after = model.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before[name], after, strict=True))
        assert all(part._compiled_call_impl is None for part in model.modules())
    assert not any(hasattr(part, "_vitrail_plan") for part in models["unmerged"].modules())
    assert Merging.of(models["merged"]).tokens_per_layer() == [15, 13, 11]
    assert [model.training for model in models.values()] == [False, False, True]


@pytest.mark.usefixtures("no_inductor")
@pytest.mark.parametrize(
    ("options", "form"), [*((way, "eager") for way in WAYS), *((way, "blocks") for way in WAYS[:2])], ids=str
)
def test_what_is_timed_is_the_merged_model(options: dict[str, Any], form: str) -> None:
    model = merged(**options)
    step = inference(form, copy_model(model, share=True), [PICTURES], "default").step
    torch.manual_seed(0)
    with torch.inference_mode():
        expected = model(PICTURES)
    torch.manual_seed(0)
    assert torch.allclose(step(0), expected, atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_a_copy_of_a_merged_model_is_merged_and_has_its_weights(name: str) -> None:
    case = ALL[name]
    model, pictures = case.model().eval(), case.images()
    merging = merge(model, r=2)
    copied = copy_model(model, share=True)
    assert all(mine is theirs for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    with torch.inference_mode():
        expected = main_output(model(pictures, **case.call))
        assert torch.equal(main_output(copied(pictures, **case.call)), expected)
        merging.remove()
        assert torch.equal(main_output(copied(pictures, **case.call)), expected)
        assert not torch.equal(main_output(model(pictures, **case.call)), expected)


@pytest.mark.usefixtures("no_inductor")
def test_each_model_may_have_forms_of_its_own() -> None:
    models = {("unmerged", 0): tiny(), ("merged", 2): merged()}
    forms = {("merged", 2): "eager", ("unmerged", 0): ["blocks", "eager"]}
    found = time_models(models, PICTURES, forms=forms, seconds=1.0, clock=CountingClock())
    assert {name: list(times.forms) for name, times in found.items()} == {
        ("unmerged", 0): ["blocks", "eager"],
        ("merged", 2): ["eager"],
    }


def test_a_form_that_fails_says_why_and_the_others_go_on() -> None:
    models = {"plain": Plain(), "vit": tiny()}
    pictures = torch.randn(2, 3, 32, 32)  # too small for the ViT
    found = time_models(models, pictures, forms=("eager", "blocks"), seconds=1.0, clock=CountingClock())
    assert list(found["plain"].forms) == ["eager"]
    assert found["plain"].failed["blocks"].startswith("UnsupportedModel: Plain is not a supported model")
    assert list(found["vit"].failed) == ["eager", "blocks"]
    assert "32" in found["vit"].failed["eager"]
    assert (found["vit"].forms, found["vit"].best) == ({}, None)


def test_batches_take_turns() -> None:
    batches = [torch.full((2, 1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    Plain.seen.clear()
    time_models({"plain": Plain()}, batches, seconds=1.0, clock=CountingClock())
    assert set(Plain.seen[-5:]) == {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"image_size": (16, 32), "patch_size": 8, "in_chans": 1}, (2, 1, 16, 32)),
        ({"image_size": (4, 16, 16), "patch_size": (2, 8, 8)}, (2, 3, 4, 16, 16)),
    ],
    ids=["sounds", "clips"],
)
def test_sounds_and_clips_in_a_short_dtype(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    model = create_model("vit_tiny_patch16", width=32, heads=2, depth=2, num_classes=4, **options).bfloat16()
    merge(model, r=1)
    found = time_models({"merged": model}, torch.randn(shape).bfloat16(), seconds=1.0, clock=CountingClock())
    assert found["merged"].failed == {}
    assert found["merged"].forms["eager"].images_per_s == 8.0


def test_real_times_are_plausible() -> None:
    found = time_models({"unmerged": tiny(), "merged": merged()}, PICTURES, seconds=0.05)
    for times in found.values():
        one = times.forms["eager"]
        assert 0 < one.seconds < 60
        assert one.images_per_s == pytest.approx(2 / one.seconds)
        assert one.spread >= 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": {}}, "models are at least one, by name"),
        ({"models": Plain()}, "got Plain"),
        ({"models": {"a": "timm:vit"}}, "model 'a' is a str; expected a torch.nn.Module"),
        (
            {"models": {"a": nn.Linear(1, 1, device="meta")}},
            "model 'a' is on meta, and the pictures on cpu; move one to the other",
        ),
        ({"pictures": []}, "pictures are a tensor, or several in a sequence; got nothing"),
        ({"pictures": None}, "got NoneType"),
        ({"pictures": PICTURES[0]}, "pictures are a batch, such as (8, 3, 224, 224); got (3, 64, 64)"),
        ({"pictures": PICTURES[:0]}, "got (0, 3, 64, 64)"),
        ({"pictures": [PICTURES, PICTURES[:1]]}, "batches that take turns have one shape, dtype and device"),
        ({"forms": ()}, "forms is one of eager, graph"),
        ({"forms": ("quick",)}, "got 'quick'"),
        ({"forms": ("eager", "eager")}, "got 'eager', 'eager'"),
        ({"forms": {"b": ("eager",)}}, "forms by name are for 'b', and the models are 'a'"),
        ({"forms": {"a": ()}}, "got nothing"),
        *(({"forms": ("eager", form)}, "CUDA graphs need a CUDA device") for form in FORMS if "graph" in form),
        ({"seconds": 0}, "seconds is a time above 0, in seconds; got 0"),
        ({"seconds": True}, "got True"),
        ({"compile_mode": "fastest"}, "compile_mode is one of"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(given: dict[str, Any], message: str) -> None:
    Plain.seen.clear()
    with pytest.raises((InvalidOption, UnsupportedInput), match=re.escape(message)):
        time_models(**{"models": {"a": Plain()}, "pictures": PICTURES, **given})
    assert Plain.seen == []
