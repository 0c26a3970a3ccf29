"""Every combination of roles builds, runs, compiles, saves and has the right gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.extras import always
from tests.models.mixes import FULLEST, MIXES, SINGLE, built, random_images
from tests.models.oracle import features_of
from vitrail.heads import Output
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenSpec


def answers(output: Output) -> list[Tensor]:
    return [*output.by_role.values(), *([] if output.logits is None else [output.logits])]


@pytest.mark.parametrize("name", MIXES)
def test_output_follows_the_layout(name: str) -> None:
    config = MIXES[name]
    model = built(config)
    with torch.no_grad():
        output = model.forward_output(random_images(config))
    layout = model.layout()
    assert output.features.shape == (2, layout.num_tokens, config.width)
    assert model.num_prefix_tokens == layout.num_special == sum(spec.count for spec in config.tokens)
    assert [span.name for span in layout.special] == [spec.name for spec in config.tokens]
    outputs = {spec.name: spec.outputs(config.num_classes) for spec in config.tokens}
    assert {key: value.shape[1] for key, value in output.by_role.items() if key != "patch"} == {
        key: number for key, number in outputs.items() if number
    }
    plain = model(random_images(config))
    tasks = any(spec.role is Role.TASK for spec in config.tokens)
    assert isinstance(plain, Output) if tasks else plain.shape == (2, config.num_classes)


@pytest.mark.parametrize("name", MIXES)
def test_features_equal_the_reference(name: str) -> None:
    model = built(MIXES[name])
    x = random_images(model.config)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), features_of(model, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SINGLE)
def test_gradients_reach_the_trainable_parameters(name: str) -> None:
    config = MIXES[name]
    model = built(config)
    output = model.forward_output(random_images(config))
    torch.stack([part.square().sum() for part in answers(output)]).sum().backward()
    idle = {key for key, value in model.named_parameters() if value.grad is None or value.grad.abs().max() < 1e-12}
    # A key's bias moves all scores of a query alike, which softmax does not see.
    shifts = {key for key in idle if key.endswith(("attn.k.bias", "attn.proj_l.bias"))}
    assert idle - shifts == unread(model) - shifts


def unread(model: ViT) -> set[str]:
    """Return parameters that no head depends on: invisible registers, and a last stage without heads."""
    config = model.config
    asking = [spec for spec in config.tokens if config.gathers(spec)]
    silent = {f"tokens.{spec.name}" for spec in config.tokens if spec.role is Role.REGISTER and not spec.visible}
    if asking and not any(spec.outputs(config.num_classes) for spec in asking):
        silent |= {f"tokens.{spec.name}" for spec in asking}
        silent |= {key for key, _ in model.named_parameters() if key.startswith("blocks_token_only.")}
    return silent


@pytest.mark.parametrize("name", SINGLE)
def test_saves_and_loads_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = built(MIXES[name], torch.float32)
    model.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config
    x = random_images(model.config, dtype=torch.float32)
    with torch.no_grad():
        for ours, theirs in zip(answers(model.forward_output(x)), answers(again.forward_output(x)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", always(FULLEST[:1], MIXES))  # test_vit.py has a mixed one, too
def test_compiles_as_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = built(MIXES[name])
    x = random_images(model.config)
    compiled = torch.compile(model.forward_output, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ours, theirs in zip(answers(compiled(x)), answers(model.forward_output(x)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


READERS = {
    "register": TokenSpec("reader", Role.REGISTER, count=2, visible=False),
    "task": TokenSpec("reader", Role.TASK, classes=3, visible=False),
    "late": TokenSpec("reader", Role.TASK, classes=3, visible=False, enters=1),
    "gathering": TokenSpec("reader", Role.TASK, count=2, classes=3, visible=False, enters=-1),
}


@pytest.mark.parametrize("talking", [False, True], ids=["heads", "talking-heads"])
@pytest.mark.parametrize("reader", READERS)
def test_an_invisible_token_changes_nothing_else(reader: str, talking: bool) -> None:
    spec = READERS[reader]
    others = (
        TokenSpec("cls", Role.CLASS),
        TokenSpec("registers", Role.REGISTER, count=2, enters=1),
        TokenSpec("late", Role.TASK, classes=2, enters=-1),
    )
    small = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 2, "num_classes": 5}
    options = {**small, "class_attention": 2, "talking_heads": talking, "qk_norm": True}
    without = built(ViTConfig(**options, tokens=others))
    model = built(ViTConfig(**options, tokens=(others[0], spec, *others[1:])))
    shared = without.state_dict()
    own = model.state_dict()
    position = own["pos_embed"]
    if position.shape != shared["pos_embed"].shape:
        shared["pos_embed"] = torch.cat([shared["pos_embed"][:, :1], position[:, 1:2], shared["pos_embed"][:, 1:]], 1)
    model.load_state_dict({**own, **shared})
    x = random_images(model.config)
    where = [index for span, at in model.layout().spans() if span.name != "reader" for index in at]
    with torch.no_grad():
        features = model.forward_features(x)
        torch.testing.assert_close(features[:, where], without.forward_features(x), rtol=1e-11, atol=1e-11)
        model.tokens["reader"].mul_(-50)
        again = model.forward_features(x)
    assert torch.equal(again[:, where], features[:, where])
    assert not torch.allclose(again, features)


@pytest.mark.parametrize(("std", "apart"), [(0.0, False), (0.02, True)])
def test_equal_tokens_stay_equal_and_others_diverge(std: float, apart: bool) -> None:
    """Tokens with equal values, positions and losses cannot diverge; a std of 0.02 suffices."""
    tokens = (TokenSpec("cls", Role.CLASS, count=2, std=std, position=False),)
    config = ViTConfig(image_size=16, patch_size=4, width=24, depth=2, heads=2, num_classes=5, tokens=tokens)
    model = ViT(config).double()
    x, labels = random_images(config, batch=8), torch.arange(8) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    one, other = model.tokens["cls"][0].detach()
    assert one.norm() > 1e-2  # it has learned
    if apart:
        assert torch.cosine_similarity(one, other, 0) < 0.9
    else:
        assert (one - other).abs().max() < 1e-14
