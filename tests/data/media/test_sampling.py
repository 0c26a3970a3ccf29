"""Frames and spectrograms: the chosen frames, and transformers' filter banks as the oracle."""

import math
from typing import Any

import pytest
import torch

from tests.data.media_files import tone
from vitrail.data import FrameSampling, InputSpec, Spectrogram
from vitrail.data.media.sampling import mel_filters
from vitrail.errors import InvalidOption


def test_chosen_frames() -> None:
    assert FrameSampling().choose(5, 9, 25.0) == [0, 2, 4, 6, 8]
    assert FrameSampling().choose(1, 9, 25.0) == [4]
    assert FrameSampling("segments").choose(3, 12, 25.0) == [2, 6, 10]
    assert FrameSampling("rate", 5.0).choose(3, 101, 25.0) == [45, 50, 55]
    assert FrameSampling("rate", 1.0).choose(4, 26, 25.0) == [0, 0, 25, 25]
    for sampling in (FrameSampling(), FrameSampling("segments"), FrameSampling("rate", 7.0)):
        for count in (1, 2, 3, 17):
            found = sampling.choose(8, count, 30.0)
            assert len(found) == 8
            assert found == sorted(found)
            assert set(found) <= set(range(count))


@pytest.mark.parametrize("given", [{"frames": "all"}, {"frames": "rate"}, {"rate": 2.0}, {"frames": "rate", "rate": 0}])
def test_wrong_frame_sampling(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"frames|rate"):
        FrameSampling(**given)


@pytest.mark.parametrize(
    "given",
    [{"rate": 0}, {"window": 0}, {"low": 9000.0}, {"high": 9000.0}, {"mel": "bark"}, {"floor": 0}, {"hop": 1e-6}],
)
def test_wrong_spectrogram(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(given))):
        Spectrogram(**given)


def test_kaldi_equals_the_feature_extractor_of_ast() -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle")
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=120)
    draw = torch.Generator().manual_seed(0)
    for seconds in (0.7, 1.5):  # padded, cropped
        sound = 0.1 * torch.randn(int(16000 * seconds), generator=draw)
        expected = extractor(sound.numpy(), sampling_rate=16000, return_tensors="pt")["input_values"][0]
        found = Spectrogram.kaldi().compute(sound, 32, 120)[0].T
        assert torch.allclose((found - extractor.mean) / (2 * extractor.std), expected, atol=1e-3)


@pytest.mark.parametrize(("mel", "norm"), [("htk", None), ("slaney", "slaney")])
def test_filters_equal_those_of_transformers(mel: Any, norm: Any) -> None:
    utils = pytest.importorskip("transformers.audio_utils", reason="the oracle")
    expected = utils.mel_filter_bank(257, 24, 20.0, 8000.0, 16000, norm=norm, mel_scale=mel).T
    assert torch.allclose(
        mel_filters(24, 512, 16000, 20.0, 8000.0, mel).double(), torch.from_numpy(expected), atol=1e-6
    )


@pytest.mark.parametrize("hertz", [300.0, 1000.0, 3000.0])
def test_a_tone_is_in_its_band(hertz: float) -> None:
    found = Spectrogram(low=0.0).compute(torch.from_numpy(tone(hertz)), 40, 50)
    assert found.shape == (1, 40, 50)
    top = math.log1p(8000 / 700)
    assert abs(found[0, :, 25].argmax().item() - (math.log1p(hertz / 700) / top * 41 - 1)) <= 1


def test_short_sounds_are_padded_with_silence_around_their_center() -> None:
    found = Spectrogram().compute(torch.from_numpy(tone(1000, 0.2)), 40, 64)
    loud = (found[0].max(0).values > 0).nonzero().flatten().tolist()
    assert (found[0, :, :18] == -6).all()
    assert (found[0, :, -18:] == -6).all()
    assert abs((loud[0] + loud[-1]) / 2 - 31.5) <= 1


def test_frames_and_samples_of_a_spectrogram_belong_together() -> None:
    for one in (Spectrogram(), Spectrogram.kaldi()):
        for frames in (1, 7, 64):
            assert one.frames(one.samples(frames) / one.rate) == frames


def test_specification_keeps_its_sampling_through_plain_values() -> None:
    from dataclasses import asdict

    for spec in (
        InputSpec((8, 32, 32), modality="video", sampling=FrameSampling("rate", 4.0), axes="TCHW"),
        InputSpec((40, 64), (0.0,), (1.0,), "audio", scale=1, sampling=Spectrogram(8000), axes="TF"),
        InputSpec((32, 32)),
    ):
        assert InputSpec.from_dict(asdict(spec)) == spec


def test_axes_in_the_order_of_the_model() -> None:
    video = InputSpec((4, 6, 8), modality="video", axes="TCHW")
    values = torch.randn(2, 3, 4, 6, 8)
    assert video.shape == (4, 3, 6, 8)
    assert torch.equal(video.arranged(values), values.transpose(1, 2))
    assert torch.equal(video.plain(video.arranged(values)), values)
    audio = InputSpec((6, 8), (0.0,), (1.0,), "audio", axes="TF")
    values = torch.randn(2, 1, 6, 8)
    assert audio.shape == (8, 6)
    assert torch.equal(audio.arranged(values), values[:, 0].transpose(1, 2))
    assert torch.equal(audio.plain(audio.arranged(values)), values)
    with pytest.raises(InvalidOption, match="axes"):
        InputSpec((4, 6, 8), modality="video", axes="THW")
