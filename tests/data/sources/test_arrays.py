"""Arrays: tensors as samples, their labels, and how they are normalized."""

from typing import Any

import numpy as np
import pytest
import torch

from vitrail.data import Arrays, InputSpec, open_dataset
from vitrail.data.augment.arrays import ArrayAugment
from vitrail.data.augment.images import Augment
from vitrail.data.loading.order import generator
from vitrail.errors import InvalidOption


def test_a_subset_is_normalized_by_its_own_rows() -> None:
    values = (
        torch.randn(10, 2, 4, 6, generator=generator("cpu", 0)).double() * 3 + torch.arange(2.0).view(2, 1, 1) * 1e4
    )
    values[:, 1] = 7
    kept, _ = open_dataset(Arrays(values, [0, 1] * 5), labeled=True).split(0.3, 0)
    found = kept.statistics()
    rows = values[kept._rows]
    assert found is not None
    assert found.mean == pytest.approx((rows[:, 0].mean().item(), 7))
    assert found.std == pytest.approx((rows[:, 0].std(correction=0).item(), 1))  # a constant channel is left at zero
    assert found.normalize(rows)[:, 1].abs().max() == 0
    with pytest.raises(InvalidOption, match="channel 1 has values that are not finite"):
        open_dataset(Arrays(values * torch.tensor([1, torch.inf]).view(2, 1, 1), [0] * 10), labeled=True).statistics()


def test_bytes_with_three_channels_are_preprocessed_as_images() -> None:
    values = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    expects = open_dataset(Arrays(values, [0, 1, 0, 1]), labeled=True).statistics()
    assert expects is not None
    as_pictures = Augment("none", 8, expects.mean, expects.std).plain(values)  # type: ignore[arg-type]
    assert torch.equal(ArrayAugment("light", expects).plain(values), as_pictures)
    assert open_dataset(Arrays(values[:, :2], [0] * 4), labeled=True).statistics() == InputSpec.of_arrays(
        (0.5, 0.5), (0.5, 0.5), 255
    )


def test_labels_and_names() -> None:
    values = np.zeros((4, 1, 2, 2), dtype=np.float32)
    values.flags.writeable = False
    assert Arrays(values[:, :, ::-1], [0] * 4)._values.data_ptr() != values.ctypes.data
    assert (
        Arrays(values, [0] * 4)._values.data_ptr() == values.ctypes.data
    )  # not copied: it may be a memory-mapped file
    arrays = Arrays(values, {"tone": np.array([2, 0, -1, 1]), "voice": ["b", "a", "a", None]})
    assert repr(arrays) == "Arrays(4 × (1, 2, 2), float32, tone: 3 classes, voice: 2 classes)"
    tones = open_dataset(arrays, labels=("tone",), labeled=True)
    assert (tones.labels[:, 0].tolist(), tones.num_unlabeled, tones.name(2)) == ([2, 0, 1], 1, "number 3")
    both = open_dataset(arrays, labels=("voice", "tone"), labeled=True)
    assert both.labels.tolist() == [[1, 2], [0, 0]]
    named = Arrays(values, ["cat", "dog", "cat", "dog"], classes=["eel", "dog", "cat"], names=list("wxyz"))
    dataset = open_dataset(named, labeled=True)
    assert dataset.classes == {"label": ("eel", "dog", "cat")}
    assert (dataset.labels[:, 0].tolist(), dataset.names) == ([2, 1, 2, 1], tuple("wxyz"))
    known = open_dataset(named, classes={"label": ("dog", "cat")}, labeled=True)
    assert known.labels[:, 0].tolist() == [1, 0, 1, 0]
    assert open_dataset(Arrays(values, [0, 1, 1, 0], classes=["x", "y"]), labeled=True).classes == {"label": ("x", "y")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"values": torch.zeros(2, 4, 4)}, r"got torch.float32 of shape \(2, 4, 4\)"),
        ({"values": torch.zeros(2, 1, 4, 4, dtype=torch.int16)}, "got torch.int16"),
        ({"values": [[1]]}, "got list of shape"),
        ({"values": np.zeros((2, 1, 4, 4), dtype=">f4")}, "got >f4"),
        ({"values": torch.zeros(0, 1, 4, 4), "labels": []}, "one sample or more"),
        ({"labels": [0]}, "label has 1, for 2 samples"),
        ({"labels": 3}, "label is int"),
        ({"labels": {}}, "one class for each sample"),
        ({"labels": ["a", "b"], "classes": ["a"]}, "label has 'b'"),
        ({"labels": {"x": [0, 1]}, "classes": {"y": ["a"]}}, "the same columns"),
        ({"names": ["a"]}, "names: 1 for 2 samples"),
    ],
)
def test_invalid_arrays(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Arrays(**({"values": torch.zeros(2, 1, 4, 4), "labels": [0, 1]} | given))
