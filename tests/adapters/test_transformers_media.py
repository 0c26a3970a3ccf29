"""Models of transformers for sounds and clips: from files on, with the preprocessing that they were saved with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import vitrail
from tests.data.media_files import tone, write_sound
from tests.oracle import describe, run
from tests.parity.models_transformers_audio import CASES as AUDIO
from vitrail import Role
from vitrail.adapters import find
from vitrail.adapters.registry import input_spec
from vitrail.data import Spectrogram
from vitrail.data.audio import Sound
from vitrail.errors import InvalidOption, UnsupportedInput

pytest.importorskip("soundfile", reason="sounds need soundfile")


@pytest.fixture
def saved_ast(tmp_path: Path) -> Path:
    """A saved AST with its feature extractor, of statistics that are not the default."""
    model = AUDIO["ast-head"].model(torch.float32)
    extractor = hf.ASTFeatureExtractor(num_mel_bins=24, max_length=40, mean=-3.0, std=3.5)
    extractor.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number, hertz in enumerate((300, 700, 1500, 2600)):
        write_sound(folder / f"{number}.wav", tone(hertz, 0.3 + 0.2 * number, rate=16000), 16000)
    return folder


def test_sounds_reach_ast_as_its_feature_extractor_makes_them(saved_ast: Path, sounds: Path) -> None:
    spec = input_spec(vitrail.load_model(f"hf:{saved_ast}"))
    assert (spec.shape, spec.argument) == ((40, 24), "input_values")
    extractor = hf.ASTFeatureExtractor.from_pretrained(saved_ast)
    for path in sorted(sounds.iterdir()):
        sound = Sound(path)
        expected = extractor(sound.samples(16000).numpy(), sampling_rate=16000, return_tensors="np")["input_values"][0]
        np.testing.assert_allclose(sound.tensor(spec).numpy(), expected, atol=2e-3)


def test_statistics_are_optional(saved_ast: Path) -> None:
    options = {"sampling_rate": 8000, "do_normalize": False}
    (saved_ast / "preprocessor_config.json").write_text(json.dumps(options))
    spec = input_spec(vitrail.load_model(f"hf:{saved_ast}"))
    assert (spec.mean, spec.std, spec.sampling) == ((0.0,), (1.0,), Spectrogram.kaldi(8000))
    (saved_ast / "preprocessor_config.json").unlink()
    spec = input_spec(vitrail.load_model(f"hf:{saved_ast}"))
    usual = hf.ASTFeatureExtractor(num_mel_bins=24)
    assert (spec.mean, spec.std) == ((usual.mean,), (2 * usual.std,))


def test_recorded_merged_and_inspected_from_sound_files(saved_ast: Path, sounds: Path) -> None:
    model = vitrail.load_model(f"hf:{saved_ast}")
    spec = input_spec(model)
    inputs = torch.stack([Sound(path).tensor(spec) for path in sorted(sounds.iterdir())])
    recording = vitrail.record(model, sounds, ("norms", "attention"))
    assert recording.layout == vitrail.TokenLayout.of(Role.CLASS, Role.DISTILLATION, grid=(1, 4, 6))
    with torch.no_grad():
        last = model(inputs, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(recording.norms[2], last.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(recording.attention[2].sum(-1), torch.ones(4, 2, 2))
    with vitrail.merge(model, r=4) as merging:
        assert merging.tokens_per_layer((24, 40)) == [22, 18, 14]
        assert torch.equal(vitrail.record(model, sounds, "norms").norms[0][:, :2], recording.norms[0][:, :2])
        groups = vitrail.record(model, inputs.numpy(), "norms").norms[2]
        assert groups.shape == (4, 26)
        assert len(groups[0].unique()) <= 14
    report = vitrail.inspect(model, sounds, probes=False, discovery=False)
    assert (report.data["images"], report.layout["grid"]) == (4, [1, 4, 6])
    assert report.norms["per_layer"][2]["mean"] == pytest.approx(float(recording.norms[2][:, 2:].mean()), rel=1e-5)


def test_hidden_states_of_a_merged_ast_have_full_length() -> None:
    case = AUDIO["ast-head"]
    model, sounds = case.model(), case.images()
    expected = run(describe(model, sounds), 3)
    with torch.no_grad(), vitrail.merge(model, r=3):
        states = model(sounds, output_hidden_states=True).hidden_states
    for state, hidden in zip(states[1:], expected.hidden, strict=True):
        assert torch.allclose(state, hidden, rtol=0, atol=1e-9)


def test_spectrograms_of_another_shape_are_refused_by_name() -> None:
    model = AUDIO["ast"].model(torch.float32)
    for wrong in (torch.randn(2, 24, 40), torch.randn(2, 1, 40, 24)):
        with pytest.raises(UnsupportedInput, match=r"spectrograms \(B, T, F\)|it takes \(40, 24\)"):
            vitrail.record(model, wrong, "norms")
    with vitrail.merge(model, r=2) as merging, pytest.raises(InvalidOption, match="24 × 40"):
        merging.tokens_per_layer((24, 80))


def test_tokens_and_registers_are_added_to_ast() -> None:
    case = AUDIO["ast-head"]
    model, sounds = case.model(), case.images()
    plain = model(sounds).logits
    with vitrail.add_tokens(model, registers=2) as added:
        assert torch.allclose(model(sounds).logits, plain, rtol=0, atol=1e-12)
        assert vitrail.record(model, sounds, "norms").norms[2].shape == (2, 28)
        added.open()
        assert (model(sounds).logits - plain).abs().max() > 1e-6
    found = find(model)
    with vitrail.test_time_registers(model, neurons={1: [3, 4]}):
        layout = vitrail.record(model, sounds, "norms").layout
        assert layout.indices(Role.REGISTER) == range(2, 3)
        assert model(sounds).logits.shape == plain.shape
    assert found.trunk is model.base_model
    assert torch.equal(model(sounds).logits, plain)


def test_methods_that_read_pixels_need_patches_that_do_not_overlap() -> None:
    model, sounds = AUDIO["ast"].model(torch.float32), AUDIO["ast"].images(torch.float32)
    with vitrail.merge(model, r=2, method="edges"), pytest.raises(UnsupportedInput, match="do not overlap"):
        model(sounds)
    apart = AUDIO["ast-apart"].model(torch.float32)
    plain = apart(sounds).last_hidden_state
    with vitrail.merge(apart, r=2, method="edges"):
        assert (apart(sounds).last_hidden_state - plain).abs().max() > 1e-3
