"""Saved changes: `vitrail.json` and back, other models refused, damaged files, and the library's own files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitrail
from tests.surgery.models import ALL, run
from vitrail.errors import InvalidOption, ModelLoadError, NotApplied, UntrainedMethod
from vitrail.surgery.saving import FILE, Settings, read_settings, weights_hash
from vitrail.tuning import Tuning

TIMM = ALL["timm-registers"]
HF = ALL["hf-deit-head"]
LIBRARIES = ["timm-registers", "eva-eva02", "hf-deit-head", "clip-projection", "torchvision-vit", "open_clip-tower"]


def merged(model: nn.Module, **options: Any) -> vitrail.Merging:
    return vitrail.merge(model, **{"r": 2, **options})


def tensors_of(folder: Path) -> Path:
    (file,) = folder.glob("vitrail-*.safetensors")
    return file


@pytest.mark.parametrize("name", LIBRARIES)
def test_merging_comes_back(name: str, tmp_path: Path) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    handle = vitrail.merge(model, keep=0.5, schedule="decreasing", order="original", method="energy")
    handle.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    other = case.model()
    assert not torch.equal(run(other, images, case), run(model, images, case))
    assert vitrail.load(tmp_path, other) is other
    assert vitrail.Merging.of(other).config == handle.config
    assert torch.equal(run(other, images, case), run(model, images, case))


@pytest.mark.parametrize(
    "options",
    [{"r": [2, 0, 1]}, {"gflops": 1e-3}, {"protect": [True] * 5}, {"method": {"name": "tome", "features": "values"}}],
    ids=lambda options: next(iter(options)),
)
def test_options_come_back(options: dict[str, Any], tmp_path: Path) -> None:
    model = TIMM.model()
    layout = vitrail.adapters.find(model).adapter.layout(model)
    if "protect" in options:
        options = {"r": 1, "protect": torch.arange(layout.num_patches) < 5}
    elif "r" in options:
        options = {"r": [1] + [0] * (len(model.blocks) - 1)}
    elif "gflops" in options:
        options = {"gflops": vitrail.count(model).flops / 1e9 * 0.9}
    else:
        options = {"r": 1, **options}
    handle = vitrail.merge(model, **options)
    handle.save(tmp_path)
    assert vitrail.Merging.of(vitrail.load(tmp_path, TIMM.model())).config == handle.config


def train_a_little(model: nn.Module, images: Tensor) -> None:
    for _ in range(2):
        output = model(images)
        (output.square().mean() + vitrail.Merging.of(model).loss()).backward()
    model.eval()


def test_learned_method_comes_back(tmp_path: Path) -> None:
    model, images = TIMM.model(), TIMM.images()
    handle = vitrail.merge(model.train(), r=2, method="dtem")
    with pytest.raises(UntrainedMethod, match="never trained"):
        handle.save(tmp_path)
    assert not list(tmp_path.iterdir())
    train_a_little(model, images)
    with torch.no_grad():
        for weight in handle.method.parameters():
            weight.add_(torch.randn_like(weight))
    handle.save(tmp_path)
    other = vitrail.load(tmp_path, TIMM.model())
    assert vitrail.Merging.of(other).method.is_trained
    assert torch.equal(other(images), model(images))


def test_restorer_and_foresight_come_back(tmp_path: Path) -> None:
    model, images = TIMM.model(torch.float32), TIMM.images(torch.float32, batch=8)
    handle = merged(model, restore="residual", foresight={"layer": 0, "hidden": 3})
    handle.train_foresight(images, layers=1, steps=2)
    handle.calibrate_restorer(images)
    handle.save(tmp_path)
    other = vitrail.load(tmp_path, TIMM.model(torch.float32))
    again = vitrail.Merging.of(other)
    assert again.config == handle.config
    assert torch.equal(again.restorer.encode, handle.restorer.encode)
    assert torch.equal(other(images), model(images))


def test_added_tokens_and_merging_together(tmp_path: Path) -> None:
    model, images = TIMM.model(), TIMM.images()
    added = vitrail.add_tokens(model, registers=2, tasks={"breed": 3})
    added.open(-1.0)
    handle = merged(model)
    handle.save(tmp_path)
    other = vitrail.load(tmp_path, TIMM.model())
    again = vitrail.AddedTokens.of(other)
    assert again.is_open
    assert vitrail.Merging.of(other).config == handle.config
    expected, found = added(images), again(images)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.by_role["breed"], expected.by_role["breed"])


def test_registers_at_test_time(tmp_path: Path) -> None:
    model, images = TIMM.model(), TIMM.images()
    handle = vitrail.test_time_registers(model, neurons={0: (1, 7), 2: (3,)}, registers=2)
    handle.save(tmp_path)
    other = vitrail.load(tmp_path, TIMM.model())
    assert vitrail.TestTimeRegisters.of(other).config == handle.config
    assert torch.equal(other(images), model(images))


def test_an_ablation_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="not saved"):
        vitrail.ablate(TIMM.model(), how="zero", layers=[0]).save(tmp_path)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "class": (lambda: HF.model(), "they are for a VisionTransformer"),
    "parameters": (lambda: _without_head(TIMM.model()), "names or shapes"),
    "tokens": (lambda: ALL["timm-own"].model() if "timm-own" in ALL else _deeper(), "they are for"),
}


def _without_head(model: Any) -> nn.Module:
    model.reset_classifier(3)
    return model


def _deeper() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=2).double()


@pytest.mark.parametrize("what", REFUSED)
def test_another_base_is_refused_with_the_reason(what: str, tmp_path: Path) -> None:
    merged(TIMM.model()).save(tmp_path)
    make, reason = REFUSED[what]
    model = make()
    keys = list(model.state_dict())
    with pytest.raises(ModelLoadError, match=reason):
        vitrail.load(tmp_path, model)
    with pytest.raises(NotApplied):
        vitrail.Merging.of(model)
    assert list(model.state_dict()) == keys


def test_config_of_the_library_is_compared(tmp_path: Path) -> None:
    import transformers

    def model(**options: Any) -> nn.Module:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **sizes, **options))

    merged(model()).save(tmp_path)
    vitrail.load(tmp_path, model())
    with pytest.raises(ModelLoadError, match="config differs"):
        vitrail.load(tmp_path, model(hidden_act="relu"))


def test_weights_are_compared_where_asked(tmp_path: Path) -> None:
    merged(TIMM.model()).save(tmp_path)
    other = TIMM.model()
    vitrail.load(tmp_path, copy.deepcopy(other), check="weights")
    with torch.no_grad():
        other.norm.weight[0] += 1
    vitrail.load(tmp_path, copy.deepcopy(other))
    with pytest.raises(ModelLoadError, match="weights are others"):
        vitrail.load(tmp_path, other, check="weights")
    vitrail.load(tmp_path, _without_head(TIMM.model()), check=None)
    with pytest.raises(InvalidOption, match="check"):
        vitrail.load(tmp_path, other, check="all")  # type: ignore[arg-type]


def test_hash_of_weights() -> None:
    model = TIMM.model(torch.float32).half()
    assert weights_hash(model) == weights_hash(copy.deepcopy(model).float())
    merging = merged(copy.deepcopy(model))
    assert weights_hash(merging.model) == weights_hash(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.blocks[1].mlp.fc1.weight[0, 0] += 1
    assert weights_hash(changed) != weights_hash(model)


def damage_json(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**values, **changes}))


def _cut(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-40])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (_cut, "damaged"),
    "empty": (lambda folder: (folder / FILE).write_text(""), "damaged"),
    "list": (lambda folder: (folder / FILE).write_text("[1]"), "not an object"),
    "deep": (lambda folder: (folder / FILE).write_text("[" * 100_000), "damaged"),
    "binary": (lambda folder: (folder / FILE).write_bytes(b"\x80\x04\x95\xff"), "damaged"),
    "format": (lambda folder: damage_json(folder, format=7), "format 7"),
    "change": (lambda folder: damage_json(folder, changes={"exec": {}}), "unknown change 'exec'"),
    "changes": (lambda folder: damage_json(folder, changes=3), "not objects"),
    "base": (lambda folder: damage_json(folder, base={"model": 3}), "base.model"),
    "option": (lambda folder: damage_json(folder, changes={"merge": {"r": 1, "model": 3}}), "unknown option 'model'"),
    "value": (lambda folder: damage_json(folder, changes={"merge": {"r": "many"}}), "r"),
    "method": (lambda folder: damage_json(folder, changes={"merge": {"r": 1, "method": "/tmp"}}), "/tmp"),
    "path": (lambda folder: damage_json(folder, tensors="../other.safetensors"), "not the name"),
    "missing": (lambda folder: tensors_of(folder).unlink(), "copy both files"),
    "content": (lambda folder: tensors_of(folder).write_bytes(b"x" * 100), "not what was written"),
    "count": (
        lambda folder: damage_json(folder, changes={"tokens": {"tokens": [{**SPEC, "count": 10**6}]}}),
        "do not fit",
    ),
    "registers": (
        lambda folder: damage_json(folder, changes={"registers": {"neurons": {"0": [1]}, "registers": 10**12}}),
        "registers must be",
    ),
    "neurons": (lambda folder: damage_json(folder, changes={"registers": {"neurons": 5}}), "neurons by layer"),
}
SPEC = {"name": "registers", "role": "register"}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_and_hostile_files(name: str, tmp_path: Path) -> None:
    model = TIMM.model()
    vitrail.add_tokens(model, registers=2).save(tmp_path)
    hurt, reason = DAMAGES[name]
    hurt(tmp_path)
    other, images = TIMM.model(), TIMM.images()
    before = other(images)
    with pytest.raises(ModelLoadError, match=reason):
        vitrail.load(tmp_path, other)
    assert torch.equal(other(images), before)
    assert "save_pretrained" not in vars(other)


def test_tensors_of_another_method(tmp_path: Path) -> None:
    model = TIMM.model()
    added = vitrail.add_tokens(model, registers=2)
    added.save(tmp_path)
    settings = Settings.read(tmp_path)
    wrong = {name: value[..., :1] for name, value in settings.tensors.items() if value.dim()}
    Settings(settings.changes, wrong, settings.base).write(tmp_path)
    with pytest.raises(ModelLoadError, match="do not fit"):
        vitrail.load(tmp_path, TIMM.model())


def test_a_failed_write_keeps_the_old_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.surgery.saving import settings as module

    model, images = TIMM.model(), TIMM.images()
    added = vitrail.add_tokens(model, registers=2)
    added.open(0.0)
    added.save(tmp_path)
    before, real = model(images), module.write_bytes
    with torch.no_grad():
        added.tokens.values["registers"].add_(1)

    def full(path: Path, data: bytes) -> None:
        if path.name == FILE:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(ModelLoadError, match="No space left"):
        added.save(tmp_path)
    assert torch.equal(vitrail.load(tmp_path, TIMM.model())(images), before)
    monkeypatch.undo()
    added.save(tmp_path)
    assert tensors_of(tmp_path)  # the old ones are gone
    assert torch.equal(vitrail.load(tmp_path, TIMM.model())(images), model(images))


def test_save_pretrained_of_transformers(tmp_path: Path) -> None:
    import transformers

    model, images = HF.model(torch.float32), HF.images(torch.float32)
    before = model(images).logits
    handle = merged(model)
    added = vitrail.add_tokens(model, registers=2)
    added.open(0.0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for number, one in enumerate([model, *copies]):
        folder = tmp_path / str(number)
        one.save_pretrained(folder)
        assert not any("vitrail" in name for name in load_file(folder / "model.safetensors"))
        own = transformers.AutoModelForImageClassification.from_pretrained(folder)  # without Vitrail
        assert torch.equal(own(images).logits, before)
        again = vitrail.from_pretrained(folder)
        assert torch.equal(again(images).logits, model(images).logits)
        assert vitrail.Merging.of(again).config == handle.config
        assert torch.equal(vitrail.load(folder)(images).logits, model(images).logits)
    half = vitrail.from_pretrained(tmp_path / "0", dtype=torch.float16)
    assert next(half.parameters()).dtype == torch.float16
    assert vitrail.Merging.of(half).config == handle.config

    handle.remove()
    added.remove()
    assert "save_pretrained" not in vars(model)
    with torch.no_grad():
        model.classifier.weight.add_(1)
        next(model.vit.parameters() if hasattr(model, "vit") else model.deit.parameters()).add_(1)
    model.save_pretrained(tmp_path / "0")  # over a merged one: its vitrail.json is out of date
    with pytest.raises(ModelLoadError, match="weights are others"):
        vitrail.from_pretrained(tmp_path / "0")


def test_save_pretrained_of_our_models(tmp_path: Path) -> None:
    config = vitrail.ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, num_classes=3)
    model, images = vitrail.ViT(config).eval(), torch.randn(2, 3, 16, 16)
    before = model(images)
    merged(model, unmerge=False)
    model.save_pretrained(tmp_path)
    assert torch.equal(vitrail.ViT.from_pretrained(tmp_path)(images), before)
    assert torch.equal(vitrail.load(tmp_path)(images), model(images))


def test_a_loaded_model_is_found_by_its_name(tmp_path: Path) -> None:
    model = vitrail.load_model("vitrail:tiny")
    merged(model).save(tmp_path)
    images = torch.randn(1, *vitrail.adapters.input_spec(model).shape)
    assert torch.equal(vitrail.load(tmp_path)(images), model(images))
    with torch.no_grad():
        model.norm.weight.add_(1)
    vitrail.Merging.of(model).save(tmp_path)
    with pytest.raises(ModelLoadError, match="weights are others"):
        vitrail.load(tmp_path)
    merged(TIMM.model()).save(tmp_path / "unnamed")
    with pytest.raises(ModelLoadError, match="pass it"):
        vitrail.load(tmp_path / "unnamed")


def test_unwritable_and_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="writable"):
        merged(TIMM.model()).save(tmp_path / "file")
    with pytest.raises(ModelLoadError, match="no such file"):
        vitrail.load(tmp_path, TIMM.model())
    with pytest.raises(ModelLoadError, match="no vitrail"):
        vitrail.from_pretrained(tmp_path)


def test_one_parser_for_text_files_and_directories(tmp_path: Path) -> None:
    text = read_settings("keep=0.5,schedule=decreasing,proportional=false,method=tome,method.features=values")
    assert text.changes["merge"] == {
        "keep": 0.5, "schedule": "decreasing", "proportional": False, "method": {"name": "tome", "features": "values"},
    }  # fmt: skip
    assert read_settings("r=8/4/0").changes["merge"] == {"r": [8, 4, 0]}
    assert read_settings({"r": 2}).changes["merge"] == {"r": 2}
    handle = merged(TIMM.model())
    handle.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / FILE, str(tmp_path / "saved")):
        assert read_settings(path).changes["merge"] == handle.config
    tuning = Tuning(
        {"r": [1, 0, 2], "method": "energy", "proportional": True}, "greedy", "kl", 0.1, 0.0, None, 1, 2, 1.5, 1.0, 8,
        4, 4, (), 1.0, False, "cpu",
    )  # fmt: skip
    tuning.save(tmp_path / "tune.json")
    assert read_settings(str(tmp_path / "tune.json")).changes["merge"] == tuning.config
    model = ALL["timm-registers"].model()
    if len(model.blocks) == 3:
        assert vitrail.Merging.of(vitrail.load(tmp_path / "tune.json", model)).r == [1, 0, 2]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("8", "no value"), ("", "expected text"), ("rr=8", "Did you mean 'r'"), ("r=8,keep=0.5", "exactly one"),
        ("schedule=decreasing", "exactly one"), ("method.features=values,r=1", "its name"),
    ],
)  # fmt: skip
def test_text_that_is_none(given: str, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        read_settings(given)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        read_settings(str(tmp_path / "tune.json"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ModelLoadError, match="neither"):
        read_settings(str(tmp_path / "other.json"))
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelLoadError, match="damaged"):
        read_settings(tmp_path / "a.safetensors")
