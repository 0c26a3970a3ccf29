"""Merging inside the Trainer of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import vitrail
from vitrail.errors import InvalidOption
from vitrail.training.transformers_callback import MergeCallback

pytest.importorskip("accelerate", reason="the Trainer needs it")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}


def build() -> Any:
    torch.manual_seed(0)
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=2))


def trainer(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    samples = [{"pixel_values": torch.randn(3, 32, 32), "labels": index % 2} for index in range(8)]
    arguments = hf.TrainingArguments(
        str(folder), per_device_train_batch_size=4, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        **{"max_steps": 6, "save_strategy": "no", **options},
    )  # fmt: skip
    return hf.Trainer(
        model or build(), arguments, train_dataset=samples, eval_dataset=samples, callbacks=list(callbacks)
    )


class Lengths(hf.TrainerCallback):
    """Counts the tokens that really leave the last block in every step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        last = vitrail.Merging.of(model).found.blocks[-1].mlp
        last.register_forward_hook(lambda module, args, output: self.seen.append(args[0].shape[1]))


def test_r_rises_and_logs_say_how_many_tokens_are_left(tmp_path: Path) -> None:
    ramp, lengths = MergeCallback(r=3, over=0.5, stages=2), Lengths()
    run = trainer(tmp_path, ramp, lengths)
    run.train()
    assert lengths.seen == [14, 14, 11, 8, 8, 8]
    losses = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["tokens"] for entry in losses] == lengths.seen
    merging = vitrail.Merging.of(run.model)
    assert merging.r == [3, 3, 3]
    assert losses[-1]["gflops"] == merging.flops() / 1e9
    assert run.evaluate()["tokens"] == 8


def test_same_steps_as_training_a_merged_model(tmp_path: Path) -> None:
    """A callback that merges fully from the start equals plain use of a merged model, bit for bit."""
    plain = build()
    vitrail.merge(plain, r=3)
    first = trainer(tmp_path / "plain", model=plain)
    second = trainer(tmp_path / "callback", MergeCallback(r=3))
    for run in (first, second):
        run.train()
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    unmerged = trainer(tmp_path / "unmerged")
    unmerged.train()
    assert not all(torch.equal(ours[name], value) for name, value in unmerged.model.state_dict().items())


def test_checkpoints_resume_at_their_step_and_load_without_merging(tmp_path: Path) -> None:
    """Only the settings are compared: Trainer 5.22 does not read back the weights of a ViT, merged or not."""
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    whole = trainer(tmp_path, MergeCallback(r=3, over=0.5, stages=2), **options)
    whole.train()
    theirs = {name: value.clone() for name, value in whole.model.state_dict().items()}
    lengths = Lengths()
    resumed = trainer(tmp_path, MergeCallback(r=3, over=0.5, stages=2), lengths, max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert lengths.seen == [11, 8, 8, 8]
    loaded = hf.ViTForImageClassification.from_pretrained(tmp_path / "checkpoint-6")
    assert type(loaded.vit).__module__.startswith("transformers.")
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.state_dict().items())


def test_share_of_a_ramp() -> None:
    ramp = MergeCallback(r=8, over=0.5, stages=4)
    assert [ramp.share_at(step, 16) for step in range(10)] == [0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0]
    assert MergeCallback(r=8).share_at(0, 16) == 1.0


@pytest.mark.parametrize("wrong", [{"over": 1.5}, {"stages": 0}])
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        MergeCallback(r=8, **wrong)
