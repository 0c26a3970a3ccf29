"""Evaluation: correct values, merged and unmerged, and an unchanged model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import vitrail
from tests.data.files import table
from tests.extras import always
from tests.leaving import leave
from tests.training.models import ANIMALS, CLASS, DISTILLATION, TASKS, Net, task, tiny
from vitrail.analysis import result as base
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.surgery import Merging
from vitrail.tokens import TokenSpec
from vitrail.training import Evaluation, evaluate, train
from vitrail.training.evaluation.evaluator import evaluate_model, merged_as
from vitrail.training.objective.self_distillation import balanced

DRAW = torch.Generator().manual_seed(0)
IMAGES, LABELS = torch.randn(20, 3, 16, 16, generator=DRAW), torch.randint(3, (20, 1), generator=DRAW)


class Fed:
    """A data loader of integer images."""

    classes = ANIMALS

    def __init__(self, rows: slice = slice(None)) -> None:
        self.images = torch.randint(256, (20, 3, 16, 16), generator=torch.Generator().manual_seed(1)).byte()[rows]
        self.labels = torch.randint(3, (20, 1), generator=torch.Generator().manual_seed(2))[rows]

    def sweep(self, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for start in range(0, len(self.images), batch):
            rows = slice(start, start + batch)
            yield self.images[rows], self.labels[rows], torch.arange(20)[rows]


def prepare(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def test_heads_alone_and_fused() -> None:
    model = tiny(CLASS, DISTILLATION, TokenSpec("register", "register", 2)).eval()
    feed = Fed()
    found = evaluate_model(model, feed, prepare=prepare, batch=8, seconds=0)
    output = model.forward_output(prepare(feed.images))
    for name, logits in (("fused", output.logits), *output.by_role.items()):
        assert found.accuracy[name] == pytest.approx((logits.argmax(1) == feed.labels[:, 0]).double().mean().item())
    assert set(found.accuracy) == {"fused", "cls", "distillation"}
    assert found.count == 20
    assert found.loss == pytest.approx(
        torch.nn.functional.cross_entropy(output.logits, feed.labels[:, 0]).item(), rel=1e-5
    )
    assert found.confusion["fused"].sum() == 20
    assert found.score == found.accuracy["fused"]
    assert found.disagreement is not None
    assert found.disagreement.heads == ("cls", "distillation")
    differs = (output.by_role["cls"].argmax(1) != output.by_role["distillation"].argmax(1)).double().mean()
    assert found.disagreement.argmax[0, 1] == pytest.approx(differs.item())
    assert found.images_per_s is None
    assert set(found.collapse["within"]) == {"register"}
    assert set(found.collapse["between"]) == {"class, distillation", "class, register", "distillation, register"}
    assert found.outliers["verdict"] in ("artifacts", "none", "uncertain")
    assert found.outliers["num_images"] == 20
    assert found.notes == ()
    json.dumps(found.to_dict())
    assert "confusion" not in found.summary()


def test_copies_of_a_class_token_are_found_out() -> None:
    model = tiny(TokenSpec("cls", "class", 2))
    with torch.no_grad():
        model.tokens["cls"][:, 1] = model.tokens["cls"][:, 0]
        model.pos_embed[:, 1] = model.pos_embed[:, 0]
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0)
    assert found.collapse["within"]["class"] == pytest.approx(1)
    assert found.disagreement is not None
    assert found.disagreement.heads == ("cls[0]", "cls[1]")
    assert found.disagreement.argmax.max() == 0
    assert any("(tokens)" in pair for pair in found.collapse["pairs"])


def test_tasks_and_their_control() -> None:
    labels = torch.stack([torch.randint(2, (20,)), torch.randint(4, (20,))], 1)
    model = tiny(task("colour", 2), task("shape", 4), num_classes=0).eval()
    found = evaluate_model(model, [(IMAGES, labels)], classes=TASKS, seconds=0)
    output = model.forward_output(IMAGES).by_role
    hits = [(output[name].argmax(1) == labels[:, i]).double().mean().item() for i, name in enumerate(TASKS)]
    assert found.accuracy == pytest.approx(dict(zip(("task.colour", "task.shape"), hits, strict=True)))
    assert found.score == pytest.approx(sum(hits) / 2)
    assert found.confusion["task.shape"].shape == (4, 4)
    control = tiny(num_classes=6).eval()
    logits = control(IMAGES)
    found = evaluate_model(control, [(IMAGES, labels)], classes=TASKS, seconds=0, look=0)
    assert found.accuracy["task.shape"] == pytest.approx(
        (logits[:, 2:].argmax(1) == labels[:, 1]).double().mean().item()
    )
    assert found.accuracy["task.shape.cls"] == found.accuracy["task.shape"]
    assert (found.collapse, found.outliers) == ({}, {})


@pytest.mark.parametrize("shared", [False, True])
def test_data_may_have_labels_for_some_of_the_tasks(shared: bool) -> None:
    model = (tiny(num_classes=6) if shared else tiny(task("colour", 2), task("shape", 4), num_classes=0)).eval()
    labels = torch.stack([torch.randint(2, (20,)), torch.randint(4, (20,))], 1)
    both = evaluate_model(model, [(IMAGES, labels)], classes=TASKS, seconds=0, look=0)
    some = {"shape": TASKS["shape"]}
    found = evaluate_model(model, [(IMAGES, labels[:, 1])], classes=some, known=TASKS, seconds=0, look=0)
    assert found.accuracy == {name: share for name, share in both.accuracy.items() if name.startswith("task.shape")}
    assert torch.equal(found.confusion["task.shape"], both.confusion["task.shape"])
    assert found.classes == {"task.shape": TASKS["shape"]}
    turned = {"shape": TASKS["shape"], "colour": TASKS["colour"]}  # columns in another order are the same columns
    again = evaluate_model(model, [(IMAGES, labels.flip(1))], classes=turned, known=TASKS, seconds=0, look=0)
    assert again.accuracy == both.accuracy


def test_one_task_is_evaluated_by_its_name_where_the_data_has_no_other(tmp_path: Path) -> None:
    colors, shapes = [number % 2 for number in range(12)], [number % 3 for number in range(12)]
    whole = table(tmp_path / "whole.parquet", 12, colour=colors, shape=shapes)
    part = table(tmp_path / "part.parquet", 12, shape=shapes)
    options = {"width": 32, "depth": 1, "heads": 2}
    common = {"preset": "tiny", "epochs": 1, "batch_size": 4, "validation": None, "device": "cpu", "image_size": 16}
    for heads in ("tokens", "shared"):
        run = train(
            data=str(whole), tasks=["colour", "shape"], heads=heads, patch_size=8, options=options,
            model="vit_tiny_patch16", out=str(tmp_path / heads), **common,
        )  # fmt: skip
        both = evaluate(run.folder, whole, device="cpu", seconds=0, look=0)
        found = evaluate(run.folder, part, labels=["shape"], device="cpu", seconds=0, look=0)
        assert found.accuracy["task.shape"] == both.accuracy["task.shape"]
        assert torch.equal(found.confusion["task.shape"], both.confusion["task.shape"])
        assert list(found.classes) == ["task.shape"]
    with pytest.raises(InvalidOption, match=r"was not trained with the column 'size', only with colour"):
        evaluate(run.folder, part, labels=["size"], device="cpu")


@pytest.mark.parametrize("seconds", [-1, 1e38, float("nan")])
def test_a_time_that_does_not_end_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidOption, match="seconds"):
        evaluate(tiny(), [(IMAGES, LABELS)], seconds=seconds)


def test_a_plain_net_has_no_tokens_to_inspect() -> None:
    net = Net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = evaluate_model(net, [(IMAGES, LABELS[:, 0])], classes=ANIMALS, seconds=0)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    logits = net.eval()(IMAGES)
    assert found.accuracy["class"] == pytest.approx((logits.argmax(1) == LABELS[:, 0]).double().mean().item())
    assert (found.collapse, found.outliers, found.notes, found.disagreement) == ({}, {}, (), None)


def test_timm_distilled_models_have_logits_per_head() -> None:
    timm = pytest.importorskip("timm")
    name = "deit_tiny_distilled_patch16_224"
    model = timm.create_model(name, num_classes=3, depth=2, img_size=16, patch_size=4, embed_dim=24)
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0)
    features = model.eval().forward_features(IMAGES)
    for head, logits in (("class", model.head(features[:, 0])), ("distillation", model.head_dist(features[:, 1]))):
        assert found.accuracy[head] == pytest.approx((logits.argmax(1) == LABELS[:, 0]).double().mean().item())
    assert found.disagreement is not None


def test_merged_and_removed() -> None:
    model = tiny(CLASS, TokenSpec("register", "register", 2)).train()
    model.blocks[0].eval()
    before, kinds = model.state_dict(), [type(part) for part in model.modules()]
    plain = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0, look=0)
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, merge={"r": 5}, seconds=0)
    assert plain.merge is None
    assert found.merge is not None
    assert found.merge["r"] == 5
    with vitrail.merge(model, r=5):
        expected = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0, look=0)
    assert found.loss == expected.loss != plain.loss
    assert expected.merge == found.merge
    assert [type(part) for part in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.blocks[0].training


def test_an_existing_merging_is_suspended_and_its_handle_stays_valid() -> None:
    model = tiny().eval()
    alone = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0, look=0).loss
    handle = vitrail.merge(model, r=5)
    merged = model(IMAGES)
    none = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, merge={"r": 0}, seconds=0, look=0)
    assert none.loss == pytest.approx(alone, rel=1e-6)
    assert handle.is_active
    assert Merging.of(model).r == [5, 5]
    assert torch.equal(model(IMAGES), merged)
    with pytest.raises(InvalidOption), merged_as(model, {"r": -1}):
        pass
    assert handle.is_active
    handle.r = 2
    handle.remove()
    assert evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0, look=0).loss == alone


def test_an_error_restores_the_model() -> None:
    model = tiny().train()

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield IMAGES, LABELS
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        evaluate_model(model, broken(), classes=ANIMALS, merge={"r": 4})
    assert model.training
    assert type(model).__name__ == "ViT"
    assert not any(part._forward_hooks for part in model.modules())


def test_throughput_is_of_the_model_alone() -> None:
    calls = []
    model = tiny()
    model.register_forward_hook(lambda *_: calls.append(1))
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0.05, look=0)
    assert found.images_per_s is not None
    assert found.images_per_s > 0
    assert len(calls) >= 8  # three to warm up, five samples or more
    assert found.batch == 20


def test_precision_is_of_products_alone() -> None:
    model = tiny()
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, dtype=torch.bfloat16, seconds=0, look=0)
    full = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0, look=0)
    assert (found.dtype, full.dtype) == ("bfloat16", "float32")
    assert found.loss == pytest.approx(full.loss, rel=0.05)
    assert found.loss != full.loss
    assert next(model.parameters()).dtype == torch.float32


def test_weights_that_are_not_numbers_are_noted() -> None:
    model = tiny(CLASS, DISTILLATION)
    with torch.no_grad():
        model.tokens["cls"].fill_(torch.nan)
    found = evaluate_model(model, [(IMAGES, LABELS)], classes=ANIMALS, seconds=0)
    assert any(note.startswith("disagreement") for note in found.notes)
    assert any(note.startswith("roles") for note in found.notes)
    assert found.to_dict()["loss"] is None


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ([], {"classes": ANIMALS}, UnsupportedInput, "no samples"),
        ([(IMAGES, LABELS)], {}, InvalidOption, "need classes"),
        (Fed(), {}, InvalidOption, "prepare"),
        (Fed(), {"prepare": prepare, "batch": 0}, InvalidOption, "batch"),
        (3, {"classes": ANIMALS}, UnsupportedInput, "data loader"),
        (Fed(), {"prepare": prepare, "classes": {"label": ("a", "b")}}, InvalidOption, "3 outputs"),
    ],
)
def test_refused(data: object, options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        evaluate_model(tiny(), data, **options)  # type: ignore[arg-type]


def _part(rank: int, store: str, out: str, empty: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = tiny(CLASS, DISTILLATION)
    feed = Fed(slice(0, 20 if empty else 13) if rank == 0 else slice(20 if empty else 13, 20))
    found = evaluate_model(model, feed, prepare=prepare, batch=4, seconds=0, look=0)
    torch.manual_seed(0)
    headless = evaluate_model(tiny(num_classes=0), feed, prepare=prepare, batch=4, seconds=0, look=0)
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.save(
        {"neighbours": headless.accuracy["neighbours"], "balanced": balanced(logits[3 * rank : 3 * rank + 3]),
         "accuracy": found.accuracy, "loss": found.loss, "count": found.count, "confusion": found.confusion,
         "differ": found.disagreement.argmax if found.disagreement else None},
        f"{out}-{rank}",
    )  # fmt: skip
    leave()


@pytest.mark.parametrize("empty", always([True], [False, True]))
def test_ranks_add_up(tmp_path: Path, empty: bool) -> None:
    mp.spawn(_part, (str(tmp_path / "store"), str(tmp_path / "found"), empty), nprocs=2)
    torch.manual_seed(0)
    model = tiny(CLASS, DISTILLATION)
    alone = evaluate_model(model, Fed(), prepare=prepare, seconds=0, look=0)
    torch.manual_seed(0)
    headless = evaluate_model(tiny(num_classes=0), Fed(), prepare=prepare, seconds=0, look=0)
    together = balanced(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    for rank in range(2):
        found = torch.load(f"{tmp_path / 'found'}-{rank}")
        assert found["count"] == 20
        assert found["accuracy"] == pytest.approx(alone.accuracy)
        assert found["loss"] == pytest.approx(alone.loss)
        assert torch.equal(found["confusion"]["fused"], alone.confusion["fused"])
        torch.testing.assert_close(found["differ"], alone.disagreement.argmax)  # type: ignore[union-attr]
        assert found["neighbours"] == pytest.approx(headless.accuracy["neighbours"])
        torch.testing.assert_close(found["balanced"], together[3 * rank : 3 * rank + 3])


def test_correctness_is_known_per_image() -> None:
    torch.manual_seed(0)
    model, feed = tiny(CLASS, DISTILLATION), Fed(slice(0, 20))
    found = evaluate_model(model, feed, prepare=prepare, batch=6, seconds=0, look=0)
    with torch.no_grad():
        output = model.eval()(prepare(feed.images)).argmax(1)
    assert torch.equal(found.right["fused"], output == feed.labels[:, 0])
    assert {name: one.double().mean().item() for name, one in found.right.items()} == pytest.approx(found.accuracy)
    assert "right" not in found.to_dict()


def test_a_summary_excludes_the_confusion_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of nine million numbers would take seconds, and the loop logs a summary at each evaluation."""
    table = torch.zeros(30, 30)
    found = Evaluation(1, {"fused": 1.0}, {}, 0.0, {}, {"fused": table}, {"fused": ("a",) * 30})
    seen: list[object] = []
    plain = base.plain
    monkeypatch.setattr(base, "plain", lambda value: (seen.append(value), plain(value))[1])
    summary = found.summary()
    assert not any(value is table for value in seen)
    assert summary.keys().isdisjoint({"confusion", "classes"})
    found.to_dict()
    assert any(value is table for value in seen)


def test_non_finite_predictions_are_reported() -> None:
    torch.manual_seed(0)
    model, images = tiny(CLASS), torch.randn(6, 3, 16, 16)
    images[1:3] = float("nan")
    labels = torch.zeros(6, 1, dtype=torch.long)
    found = evaluate_model(model, [(images, labels)], classes=ANIMALS, seconds=0, look=0)
    assert any(note.startswith("2 predictions are not finite") for note in found.notes)
    fine = evaluate_model(model, [(images[3:], labels[3:])], classes=ANIMALS, seconds=0, look=0)
    assert not fine.notes
