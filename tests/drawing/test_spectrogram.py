"""Drawings of sounds: the lowest band below, axes at the right places, padding in gray."""

import numpy as np
import pytest
import torch

from vitrail.data import Spectrogram
from vitrail.data.media.sampling import mel_filters
from vitrail.drawing.spectrogram import HEIGHT, LEFT, MARGIN, PADDING, TITLE, WIDTH, _ticks, draw_sound

TOP = MARGIN + TITLE + MARGIN // 2
"""Upper edge of the first panel."""


@pytest.mark.parametrize("mel", ["htk", "slaney", "kaldi"])
def test_bands_of_frequencies(mel: str) -> None:
    """The filter of a band is largest at the frequency that the axis names for it."""
    sampling = Spectrogram(mel=mel)  # type: ignore[arg-type]
    filters = mel_filters(32, 8192, 16000, 20.0, 8000.0, mel)  # type: ignore[arg-type]
    peaks = filters.argmax(1) * 16000 / 8192
    bands = [sampling.band_of(float(hertz), 32) for hertz in peaks]
    assert bands == pytest.approx(range(32), abs=0.15)


def test_low_bands_are_below_and_groups_follow() -> None:
    values = torch.zeros(8, 10)
    values[0] = 5.0  # the lowest band is loud
    groups = np.arange(4)[:, None].repeat(5, 1)
    drawn = np.asarray(draw_sound(values, groups, Spectrogram()))
    panel = drawn[TOP : TOP + HEIGHT, LEFT : LEFT + WIDTH]
    assert (panel[-5, 500] > panel[5, 500]).any()
    assert (panel[5] == panel[5, 0]).all()
    second = drawn[drawn.shape[0] // 2 + TOP :][:HEIGHT, LEFT : LEFT + WIDTH]
    colors = {tuple(second[HEIGHT - 40 - 80 * row, 100]) for row in range(4)}
    assert len(colors) == 2  # the lowest group alone is brighter
    assert tuple(second[HEIGHT - 40, 100]) != tuple(second[40, 100])


def test_padding_is_gray_where_only_whole_windows_count() -> None:
    values = torch.rand(8, 20) - 9
    values[:, 12:] = 0.0
    for whole in (True, False):
        drawn = np.asarray(draw_sound(values, np.zeros((2, 4), int), Spectrogram(whole=whole)))
        assert (tuple(drawn[TOP + 10, LEFT + WIDTH - 10]) == PADDING) is whole
    drawn = np.asarray(draw_sound(torch.zeros(8, 20), np.zeros((2, 4), int), Spectrogram(whole=True)))
    assert tuple(drawn[TOP + 10, LEFT + 10]) != PADDING  # silence is no padding


def test_ticks() -> None:
    assert [text for _, text in _ticks(0.96)][:3] == ["0.0 s", "0.1 s", "0.2 s"]
    assert [time for time, _ in _ticks(10.24)] == pytest.approx([0, 2, 4, 6, 8, 10])
    assert len(list(_ticks(3600.0))) <= 11
