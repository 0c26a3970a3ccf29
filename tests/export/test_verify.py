"""Verification: wrong files are rejected, near-ties are not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.export.models import EXAMPLES
from vitrail.export import ExportError, _export, export
from vitrail.export._trace import PlainModel, named_tensors, trace
from vitrail.export._verify import check_tokens, compare


class Fake:
    """A file with given errors, one per batch, and values of given shapes."""

    def __init__(
        self, errors: tuple[float, ...] = (), values: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = ()
    ):
        self.errors, self.shapes, self.seen = list(errors), values, []

    def run(self, images: Tensor) -> dict[str, Tensor]:
        self.seen.append(images)
        wrong = double(images)["output"].clone()
        wrong[-1, 0] += self.errors.pop(0) * wrong[-1].abs().max()
        return {"output": wrong}

    def values(self) -> Iterator[tuple[tuple[str, ...], tuple[int | None, ...]]]:
        yield from self.shapes


def double(images: Tensor) -> dict[str, Tensor]:
    return {"output": 2 * images}


def test_relative_error() -> None:
    fake = Fake((0.5,))
    found = compare(double, fake, (3, 4), torch.float32, tolerance=1.0, draws=1)
    assert found.batch == 3
    assert found.max_rel == pytest.approx(0.5, rel=1e-5)
    assert found.max_abs == pytest.approx(float(fake.seen[0][-1].abs().max()), rel=1e-5)


def test_near_ties_are_drawn_again() -> None:
    fake = Fake((0.5, 0.2, 1e-5))
    found = compare(double, fake, (2, 4), torch.float32, tolerance=1e-4, draws=5)
    assert (found.draws, len(fake.seen)) == (3, 3)
    assert not torch.equal(fake.seen[0], fake.seen[1])


@pytest.mark.parametrize("wrong", [0.5, float("nan"), float("inf")])
def test_wrong_outputs(wrong: float) -> None:
    with pytest.raises(ExportError, match=r"differ from the model's.*allowed is 0\.0001"):
        compare(double, Fake((wrong,) * 5), (2, 4), torch.float32, tolerance=1e-4, draws=5)


def test_wrong_shapes_names_and_failures() -> None:
    def other(images: Tensor) -> dict[str, Tensor]:
        return {"output": images[:, :2]}

    def renamed(images: Tensor) -> dict[str, Tensor]:
        return {"logits": images}

    with pytest.raises(ExportError, match=r"shape \(2, 4\); expected .* shape \(2, 2\)"):
        compare(other, Fake((0.0,)), (2, 4), torch.float32, 1e-4, 1)
    with pytest.raises(ExportError, match="returns output; expected logits"):
        compare(renamed, Fake((0.0,)), (2, 4), torch.float32, 1e-4, 1)
    with pytest.raises(ExportError, match=r"fails for batch size 2 \(IndexError"):
        compare(double, Fake(), (2, 4), torch.float32, 1e-4, 1)


def test_check_tokens() -> None:
    values = (
        (("", "model", "model.0.attn"), (9, 17, 8)),
        (("", "model", "model.0.mlp", "model.0.mlp.fc1"), (9, 14, 32)),
        (("", "model", "model.0.mlp"), (3,)),
        (("", "model", "model.1.mlp.fc2"), (9, 11, 8)),
        (("", "model", "model.1.mlp.fc2"), (18, 7, 8)),
        (("", "model", "model.1.mlp2"), (9, 99, 8)),
    )
    readers, expected = [["model.0.mlp"], ["model.1.mlp"]], [{14}, {7, 11}]
    check_tokens(Fake(values=values), readers, expected)
    check_tokens(Fake(values=values[:3]), [["model.0.mlp"], []], expected)  # nothing to look at
    check_tokens(Fake(values=values), readers, [{14}, set()])  # runs as it is
    with pytest.raises(ExportError, match="7, 11 tokens leave block 1, expected 8, 11"):
        check_tokens(Fake(values=values), readers, [{14}, {8, 11}])
    with pytest.raises(ExportError, match=r"block 1 \(found: nothing\)"):
        check_tokens(Fake(values=values[:3]), readers, expected)
    with pytest.raises(ExportError, match="14, 17 tokens leave block 0"):
        check_tokens(Fake(values=(*values, (("model.0.mlp",), (9, 17, 8)))), readers, expected)


def test_unmerged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of merged and unmerged models may be close; the number of tokens is not."""

    def unmerged(plain: PlainModel, *rest: object) -> torch.export.ExportedProgram:
        with_merging = vitrail.Merging.of(plain)
        config = with_merging.config
        with_merging.remove()
        try:
            return trace(plain, *rest)
        finally:
            vitrail.merge(plain, **config)

    monkeypatch.setattr(_export, "trace", unmerged)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")
    with pytest.raises(ExportError, match="17 tokens leave block 0, expected 14"):
        export(EXAMPLES["timm class token"].merged(), path, tolerance=10.0)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_bytes() == b"old"


def test_file_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(plain: PlainModel, *rest: object) -> torch.export.ExportedProgram:
        return trace(PlainModel(nn.Linear(4, 2).eval()), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(_export, "trace", other)
    with pytest.raises(ExportError, match="differ from the model's"):
        export(nn.Linear(4, 2).eval(), tmp_path / "model.pt2", example=torch.zeros(1, 4))
    assert not list(tmp_path.iterdir())


def test_output_names() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert list(named_tensors(one)) == ["output"]
    assert list(named_tensors((one, (two,)))) == ["output_0", "output_1_0"]
    assert list(named_tensors({"logits": one, "hidden": (one, two), "none": None})) == [
        "logits",
        "hidden_0",
        "hidden_1",
    ]
    with pytest.raises(ExportError, match=r"returned a str"):
        named_tensors("logits")


SIZES = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 1, "heads": 2}


def test_each_task_is_an_output(tmp_path: Path) -> None:
    """Also if one head serves all tasks, as parts of one tensor."""
    classes = '{"classes": {"colour": ["red", "blue"], "shape": ["disc", "ring", "star"]}}'
    counts = {"colour": 2, "shape": 3}
    tasks = [vitrail.TokenSpec(name, vitrail.Role.TASK, classes=count) for name, count in counts.items()]
    shared = vitrail.create_model("vit_tiny_patch16", num_classes=5, **SIZES)
    apart = vitrail.create_model("vit_tiny_patch16", num_classes=0, tokens=tasks, **SIZES)
    for name, made in (("shared", shared), ("apart", apart)):
        made.save_pretrained(tmp_path / name)
        (tmp_path / name / "labels.json").write_text(classes, encoding="utf-8")
        model = vitrail.load_model(f"vitrail:{tmp_path / name}")
        result = export(model, tmp_path / f"{name}.pt2", batch=2)
        assert result.outputs == {task: (2, count) for task, count in counts.items()}
        images = torch.randn(2, 3, 16, 16)
        got = torch.export.load(tmp_path / f"{name}.pt2").module()(images)
        output = model.forward_output(images)
        wanted = {"colour": output.logits[:, :2], "shape": output.logits[:, 2:]} if name == "shared" else output.by_role
        for task in counts:
            torch.testing.assert_close(got[task], wanted[task], atol=1e-5, rtol=1e-4)
