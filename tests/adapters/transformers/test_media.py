"""Models of transformers for sounds and clips: from files on, with the preprocessing that they were saved with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import vitrail
from tests.data.media_files import tone, write_clip, write_sound
from tests.oracle import describe, run
from tests.parity.models.cases import Case
from tests.parity.models.transformers_audio import CASES as AUDIO
from tests.parity.models.transformers_video import CASES as VIDEO
from tests.parity.models.transformers_video import videomae
from vitrail import Role
from vitrail.adapters.registry import input_spec
from vitrail.data import Spectrogram
from vitrail.data.media.audio import Sound
from vitrail.data.media.video import Clip
from vitrail.errors import InvalidOption, UnsupportedInput

pytest.importorskip("soundfile", reason="sounds need soundfile")
pytest.importorskip("av", reason="video clips need PyAV")


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
        middle = model(inputs, output_hidden_states=True).hidden_states[-2]
    assert torch.allclose(recording.norms[1], middle.norm(dim=-1), rtol=1e-5)
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


@pytest.mark.parametrize(
    "case", [AUDIO["ast-head"], VIDEO["videomae-head"], VIDEO["vivit-head"]], ids=lambda one: one.name
)
def test_hidden_states_of_a_merged_model_have_full_length(case: Case) -> None:
    model, inputs = case.model(), case.images()
    expected = run(describe(model, inputs), 3)
    with torch.no_grad(), vitrail.merge(model, r=3):
        states = model(inputs, output_hidden_states=True).hidden_states
    assert states[-1].shape == expected.hidden[-1].shape  # in older versions behind the last norm
    for state, hidden in zip(states[1:-1], expected.hidden[:-1], strict=True):
        assert torch.allclose(state, hidden, rtol=0, atol=1e-9)


def test_spectrograms_of_another_shape_are_refused_by_name() -> None:
    model = AUDIO["ast"].model(torch.float32)
    for wrong in (torch.randn(2, 24, 40), torch.randn(2, 1, 40, 24)):
        with pytest.raises(UnsupportedInput, match=r"spectrograms \(B, T, F\)|it takes \(40, 24\)"):
            vitrail.record(model, wrong, "norms")
    with vitrail.merge(model, r=2) as merging, pytest.raises(InvalidOption, match="24 × 40"):
        merging.tokens_per_layer((24, 80))


@pytest.mark.parametrize(
    ("case", "special", "tokens"),
    [(AUDIO["ast-head"], 2, 26), (VIDEO["videomae-head"], 0, 48), (VIDEO["vivit-head"], 1, 25)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_tokens_and_registers_are_added(case: Case, special: int, tokens: int) -> None:
    model, inputs = case.model(), case.images()
    plain = model(inputs).logits
    with vitrail.add_tokens(model, registers=2) as added:
        assert torch.allclose(model(inputs).logits, plain, rtol=0, atol=1e-12)
        assert vitrail.record(model, inputs, "norms").norms[2].shape == (2, tokens + 2)
        added.open()
        assert (model(inputs).logits - plain).abs().max() > 1e-6
    with vitrail.test_time_registers(model, neurons={1: [3, 4]}):
        layout = vitrail.record(model, inputs, "norms").layout
        assert layout.indices(Role.REGISTER) == range(special, special + 1)
        assert (model(inputs).logits - plain).abs().max() > 1e-6
    assert torch.equal(model(inputs).logits, plain)


def test_methods_that_read_pixels_need_patches_that_do_not_overlap() -> None:
    model, sounds = AUDIO["ast"].model(torch.float32), AUDIO["ast"].images(torch.float32)
    with vitrail.merge(model, r=2, method="edges"), pytest.raises(UnsupportedInput, match="do not overlap"):
        model(sounds)
    apart = AUDIO["ast-apart"].model(torch.float32)
    plain = apart(sounds).last_hidden_state
    with vitrail.merge(apart, r=2, method="edges"):
        assert (apart(sounds).last_hidden_state - plain).abs().max() > 1e-3


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(3):
        write_clip(folder / f"{number}.mp4", 9 + number, (32, 32))
    return folder


PROCESSORS = {
    "videomae-head": ("VideoMAEVideoProcessor", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}),
    "vivit-head": ("VivitVideoProcessor", {"image_mean": [0.1, 0.2, 0.3]}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_clips_reach_a_model_as_its_video_processor_makes_them(name: str, tmp_path: Path, clips: Path) -> None:
    VIDEO[name].model(torch.float32).save_pretrained(tmp_path)
    kind, options = PROCESSORS[name]
    if not hasattr(hf, kind):
        pytest.skip(f"this version of transformers has no {kind}")
    processor = getattr(hf, kind)(**options)
    processor.save_pretrained(tmp_path)
    spec = input_spec(vitrail.load_model(f"hf:{tmp_path}"))
    clip = Clip(clips / "0.mp4")
    frames = clip.values(spec)
    expected = processor(frames.transpose(0, 1), do_resize=False, do_center_crop=False, return_tensors="pt")
    assert torch.allclose(clip.tensor(spec), expected["pixel_values"][0], atol=1e-5)


def test_statistics_of_clips_are_optional(tmp_path: Path) -> None:
    VIDEO["vivit-head"].model(torch.float32).save_pretrained(tmp_path)
    plain = (tmp_path / "preprocessor_config.json").write_text
    frames = torch.randint(0, 256, (1, 3, 6, 16, 16), generator=torch.Generator().manual_seed(0))

    def normalized() -> torch.Tensor:
        return input_spec(vitrail.load_model(f"hf:{tmp_path}")).normalize(frames).transpose(1, 2)

    assert torch.allclose(normalized(), (frames / 127.5 - 1 - 0.5) / 0.5, atol=1e-5)
    plain(json.dumps({"offset": False, "rescale_factor": 1 / 255}))  # an image processor's
    assert torch.allclose(normalized(), (frames / 255 - 0.5) / 0.5, atol=1e-5)
    plain(json.dumps({"do_normalize": False}))
    assert torch.allclose(normalized(), frames / 127.5 - 1, atol=1e-5)


@pytest.mark.parametrize("name", PROCESSORS)
def test_recorded_merged_and_inspected_from_clips(name: str, tmp_path: Path, clips: Path) -> None:
    VIDEO[name].model(torch.float32).save_pretrained(tmp_path)
    model = vitrail.load_model(f"hf:{tmp_path}")
    spec = input_spec(model)
    inputs = torch.stack([Clip(path).tensor(spec) for path in sorted(clips.iterdir())])
    assert inputs.shape == (3, 6, 3, 16, 16)
    recording = vitrail.record(model, clips, ("norms", "embedding"))
    assert recording.layout.grid == ((3, 4, 2) if "vivit" in name else (3, 4, 4))
    with torch.no_grad():
        last = model(inputs, output_hidden_states=True).hidden_states[-1]
        plain = model(inputs).logits
    assert torch.allclose(recording.norms[2], last.norm(dim=-1), rtol=1e-5)
    report = vitrail.inspect(model, clips)
    assert report.norms["per_layer"][2]["mean"] == pytest.approx(
        float(recording.norms[2][:, recording.layout.num_special :].mean()), rel=1e-5
    )
    with vitrail.merge(model, r=4) as merging, torch.no_grad():
        tokens = recording.layout.num_tokens
        assert merging.tokens_per_layer((6, 16, 16)) == [tokens - 4, tokens - 8, tokens - 12]
        assert vitrail.count(model, inputs).flops < vitrail.count(model, inputs).flops_unmerged
        assert (model(inputs).logits - plain).abs().max() > 1e-5
    assert torch.equal(model(inputs).logits, plain)


def test_masked_patches_of_videomae_are_refused_while_it_is_changed(tmp_path: Path) -> None:
    model = videomae(hf.VideoMAEForPreTraining, decoder_hidden_size=16, decoder_num_attention_heads=2).eval()
    clips = VIDEO["videomae"].images(torch.float32)
    hidden = torch.arange(48).expand(2, -1) % 3 > 0
    plain = model(clips, hidden).logits
    with vitrail.merge(model, r=2), pytest.raises(UnsupportedInput, match="bool_masked_pos"):
        model(clips, hidden)
    assert torch.equal(model(clips, hidden).logits, plain)
    model.save_pretrained(tmp_path)
    loaded = vitrail.load_model(f"hf:{tmp_path}")
    assert isinstance(loaded, hf.VideoMAEModel)
    with torch.no_grad(), vitrail.merge(loaded, r=0):
        assert torch.equal(loaded(clips).last_hidden_state, model.videomae(clips).last_hidden_state)
