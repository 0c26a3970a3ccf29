"""Added tokens: output unchanged until opened, gates, saving, and removal without a trace."""

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

import vitrail
from tests.adapters.test_vitrail import lively, random_images
from tests.parity.models.cases import Case
from tests.surgery.models import ALL, FEW, distance, flops_that_run, run
from vitrail.errors import AlreadyApplied, InvalidOption, ModelLoadError, NotApplied, UnsupportedInput, UnsupportedModel
from vitrail.models import create_model
from vitrail.runtime.side_tokens import receiving
from vitrail.tokens import Role, TokenSpec

somewhere = pytest.mark.parametrize("name", FEW)


def build(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Case]:
    case = ALL[name]
    return case.model(dtype), case.images(dtype), case


def small(**options) -> nn.Module:
    """Return a timm ViT in which every branch contributes."""
    made = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 5, **options}
    return lively(timm.create_model("vit_tiny_patch16_224", **made))


def mix(model: nn.Module, **more) -> vitrail.AddedTokens:
    return vitrail.add_tokens(model, registers=2, tasks={"breed": 3}, num_classes=5, **more)


@pytest.mark.parametrize("name", ALL)
def test_output_is_unchanged_until_opened_and_removal_restores_the_model(name):
    model, images, case = build(name, torch.float32)
    before, keys = run(model, images, case), list(model.state_dict())
    classes, attributes = [type(part) for part in model.modules()], [set(vars(part)) for part in model.modules()]
    added = mix(model, classes=1)
    with receiving() as found:
        assert distance(run(model, images, case), before) <= (0 if case.bit_equal else 5e-6)
    assert found[0].shape == (2, 4, found[0].shape[2])
    assert set(keys) < set(model.state_dict())
    added.open(0.0)
    assert distance(run(model, images, case), before) > 1e-5
    added.close()
    assert distance(run(model, images, case), before) <= (0 if case.bit_equal else 5e-6)
    added.remove()
    assert torch.equal(run(model, images, case), before)
    assert list(model.state_dict()) == keys
    assert [type(part) for part in model.modules()] == classes
    assert [set(vars(part)) for part in model.modules()] == attributes


def reference(model: nn.Module, tokens: nn.Module, images: Tensor, gates: list[float]) -> tuple[Tensor, Tensor]:
    """Run timm's blocks on one long sequence, with a matrix of biases on the attention scores."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    own = x.shape[1]
    x = torch.cat([x, *(tokens.values[spec.name].expand(len(x), -1, -1) for spec in tokens.specs)], 1)
    for block, gate in zip(model.blocks, gates, strict=True):
        bias = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        bias[:, own:] = gate
        bias.fill_diagonal_(0)
        h = block.norm1(x)
        q, k, v = block.attn.qkv(h).unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        x = x + block.ls1(block.attn.proj((weights @ v).transpose(1, 2).flatten(2)))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    return model.forward_head(model.norm(x[:, :own])), x[:, own:]


@pytest.mark.parametrize("gates", [[-torch.inf] * 3, [-1.0, 0.5, -3.0], [0.0, 0.0, 0.0]])
def test_equals_one_long_sequence_with_biased_scores(gates):
    model, images = small(init_values=0.1, reg_tokens=1), random_images()
    added = mix(model)
    if max(gates) > -torch.inf:
        added.open()
        added.tokens.gates.data = torch.tensor(gates, dtype=torch.float64)
    logits, side = reference(model, added.tokens, images, gates)
    output = added(images)
    assert distance(output.logits, logits) < 1e-12
    assert distance(output.features, added.tokens.norm(side)) < 1e-12
    heads = added.tokens.heads
    assert distance(output.by_role["breed"], heads["breed"](output.features[:, 2])) < 1e-12


def test_gradients_equal_those_of_the_long_sequence():
    gates = [-1.0, 0.5, -3.0]
    results = []
    for written_out in (False, True):
        model, images = small(), random_images()
        torch.manual_seed(0)
        added = mix(model)
        added.open()
        added.tokens.gates.data = torch.tensor(gates, dtype=torch.float64)
        if written_out:
            logits, side = reference(model, added.tokens, images, added.tokens.gates)
            features = added.tokens.norm(side)
        else:
            logits, _, features, _ = added(images)
        (logits.square().sum() + features.square().sum()).backward()
        results.append({name: weight.grad for name, weight in model.named_parameters()})
    ours, theirs = results
    assert all(distance(ours[name], grad) < 1e-9 for name, grad in theirs.items() if grad is not None)
    assert ours["vitrail_tokens.gates"].abs().min() > 0


def test_opening_hardly_changes_the_output():
    model, images = small(), random_images()
    before = model(images)
    added = mix(model)
    added.open()
    assert 0 < distance(model(images), before) < 1e-3


def test_gradients_reach_trainable_parameters_only():
    model, images = small(), random_images()
    added = vitrail.add_tokens(model, registers=2, tasks={"breed": 3})
    model(images).sum().backward()
    assert added.tokens.values["registers"].grad is None  # no token attends to them yet
    assert added.tokens.gates.grad is None
    model.zero_grad()
    added(images).by_role["breed"].square().sum().backward()
    assert added.tokens.values["breed"].grad.abs().sum() > 0
    assert added.tokens.values["registers"].grad.abs().sum() == 0  # closed for the other added tokens, too
    assert added.tokens.heads["breed"].weight.grad.abs().sum() > 0
    added.open()
    model.zero_grad()
    model(images).square().sum().backward()
    for value in (*added.tokens.values.values(), added.tokens.gates):
        assert value.grad.abs().min() > 0


def test_parameter_groups():
    model = small()
    decayed = TokenSpec("memory", Role.REGISTER, decay=True)
    added = vitrail.add_tokens(model, registers=2, tasks={"breed": 3}, tokens=[decayed])
    groups = {group["name"]: group for group in added.trainable()}
    assert list(groups) == ["tokens", "tokens, decay", "heads", "heads, no decay"]
    assert groups["tokens"]["weight_decay"] == 0
    assert groups["tokens, decay"]["params"] == [added.tokens.values["memory"]]
    assert "weight_decay" not in groups["heads"]
    added.open()
    every = added.trainable(model=True)
    assert [group["name"] for group in every][2] == "gates"
    listed = [weight for group in every for weight in group["params"]]
    assert {id(weight) for weight in listed} == {id(weight) for weight in model.parameters()}
    assert len(listed) == len(list(model.parameters()))
    spared = {id(weight) for group in every if group.get("weight_decay") == 0.0 for weight in group["params"]}
    assert {id(model.pos_embed), id(model.cls_token), id(model.blocks[0].norm1.weight)} <= spared
    torch.optim.AdamW(every, lr=1e-3)
    assert not any(group["name"] == "heads, no decay" for group in _registers_alone().trainable())


def _registers_alone() -> vitrail.AddedTokens:
    return vitrail.add_tokens(small(), registers=1)


@somewhere
def test_merged_before_and_after(name):
    model, images, case = build(name)
    with vitrail.merge(model, r=2):
        alone = run(model, images, case)
    with mix(model) as added:
        with vitrail.merge(model, r=2) as merging:
            merged = run(model, images, case)
            with receiving() as later:
                run(model, images, case)
            assert merging.is_active
        assert added.is_active
        added.open(0.0)
        assert distance(run(model, images, case), alone) > 1e-5
        values = copy.deepcopy(added.tokens.state_dict())
    assert distance(merged, alone) < 1e-12
    with vitrail.merge(model, r=2):
        added = mix(model)
        added.tokens.load_state_dict(values)
        added.close()
        with receiving() as found:
            assert distance(run(model, images, case), alone) < 1e-12
        assert distance(found[0], later[0]) < 1e-12
        added.remove()
        assert distance(run(model, images, case), alone) < 1e-12


def test_added_tokens_attend_to_a_merged_token_by_its_size():
    """Merging equal pairs of patches without positions changes no token."""
    model = small(pos_embed="none", depth=4)
    grid = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    images = grid.repeat_interleave(8, 2).repeat_interleave(16, 3)
    added = mix(model)
    for gate in (None, -1.0):
        if gate is not None:
            added.open(gate)
        before = added(images)
        with vitrail.merge(model, r=[0, 4, 0, 0]) as merging:
            after = added(images)
            assert merging.tokens_per_layer()[-1] == 13
        assert distance(after.features, before.features) < 1e-10
        assert distance(after.logits, before.logits) < 1e-10


@pytest.mark.parametrize("opened", [False, True])
def test_talking_heads_take_added_tokens(opened):
    options = {"image_size": 32, "patch_size": 8, "width": 32, "heads": 4, "depth": 3, "num_classes": 4}
    model, images = lively(create_model("cait_xxs24", **options)), random_images()
    before = model(images)
    added = mix(model)
    assert distance(added(images).logits, before) < 1e-12
    if opened:
        added.open(0.0)
    output = added(images)
    output.features.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    # a token of weight zero equals one that no token attends to
    if opened:
        added.open(-600.0)
        far = added(images)
        added.close()
        assert distance(far.logits, before) < 1e-12
        assert distance(added(images).features, far.features) < 1e-12


def test_tokens_enter_at_their_layer():
    """A token that enters before the last block equals one in a model of that block alone."""
    model, images = small(), random_images()
    with vitrail.add_tokens(model, registers=1, tokens=[TokenSpec("late", Role.REGISTER, enters=2)]) as added:
        values = added.tokens.values["late"].detach().clone()
        with receiving() as found:
            model(images)
        before = vitrail.record(model, images).tokens[1]
    assert distance(before[:, 2], torch.ones(1)) == 1  # not there yet
    block = model.blocks[2]
    x = torch.cat([before[:, :1], before[:, 3:], values.expand(3, -1, -1)], 1)
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    weights = (q[:, :, -1:] @ k.transpose(-2, -1) / 4).softmax(-1)
    late = x[:, -1:] + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
    late = late + block.mlp(block.norm2(late))
    assert distance(found[0][:, 1:], late) < 1e-12


def test_recording():
    model, images = small(reg_tokens=1), random_images()
    what = ("tokens", "q", "k", "v", "attention")
    plain = vitrail.record(model, images, what, queries=range(18))
    late = TokenSpec("late", Role.TASK, classes=3, enters=1)
    added = vitrail.add_tokens(model, registers=2, tokens=[late])
    seen = vitrail.record(model, images, what, queries=range(21))
    own = [0, 1, *range(5, 21)]
    assert seen.layout == added.layout
    assert seen.layout.indices(Role.TASK, "late") == range(4, 5)
    for layer in range(3):
        assert distance(seen.tokens[layer][:, own], plain.tokens[layer]) < 1e-12
        assert distance(seen.k[layer][:, :, own], plain.k[layer]) < 1e-12
        assert distance(seen.attention[layer][:, :, own][..., own], plain.attention[layer]) < 1e-12
        assert seen.attention[layer][:, :, own][..., 2:5].abs().max() == 0
    assert seen.tokens[0][:, 4].abs().max() == 0
    assert seen.tokens[1][:, 4].abs().max() > 0
    with receiving() as found:
        model(images)
    assert distance(seen.tokens[2][:, 2:5], found[0]) < 1e-12
    added.open(0.0)
    rows = vitrail.record(model, images, "attention", queries=range(21)).attention[2]
    assert distance(rows.sum(-1), torch.ones(3, 2, 21, dtype=torch.float64)) < 1e-12
    assert rows[:, :, own][..., 2:5].min() > 0
    with pytest.raises(InvalidOption, match="added tokens"):
        vitrail.record(model, images, "mlp")


def test_counted():
    model = small()
    plain = vitrail.count(model)
    added = mix(model)
    closed = vitrail.count(model)
    assert closed.flops == flops_that_run(lambda: added(random_images(batch=1))) // 2
    added.open()
    assert vitrail.count(model).flops == flops_that_run(lambda: added(random_images(batch=1))) // 2
    assert plain.flops < closed.flops < vitrail.count(model).flops
    assert vitrail.count(model).tokens == plain.tokens + 3


@pytest.mark.parametrize("opened", [False, True])
def test_state_saves_and_loads(tmp_path, opened):
    model, images = small(), random_images()
    added = mix(model, distillation=True)
    if opened:
        added.open(-2.0)
    output = added(images)

    again = small()
    twin = mix(again, distillation=True)
    again.load_state_dict(model.state_dict())
    assert twin.is_open is opened
    assert torch.equal(twin(images).features, output.features)

    added.save(tmp_path / "tokens.safetensors")
    third = small()
    loaded = vitrail.AddedTokens.load(third, tmp_path / "tokens.safetensors")
    assert loaded.specs == added.specs
    assert torch.equal(loaded(images).logits, output.logits)
    assert torch.equal(loaded(images).by_role["distillation"], output.by_role["distillation"])

    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = vitrail.AddedTokens.of(copied)
        assert other.is_open is opened
        assert torch.equal(other(images).features, output.features)
        assert other.tokens is not added.tokens
        other.remove()
        assert added.is_active


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "tokens.safetensors"
    mix(small()).save(path)
    deeper = small(depth=4)
    keys = list(deeper.state_dict())
    with pytest.raises(ModelLoadError, match="gates is"):
        vitrail.AddedTokens.load(deeper, path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ModelLoadError, match="has no added tokens"):
        vitrail.AddedTokens.load(deeper, path)
    with pytest.raises(ModelLoadError):
        vitrail.AddedTokens.load(deeper, tmp_path / "none")
    with pytest.raises(ModelLoadError, match="could not write"):
        mix(small()).save(tmp_path / "no" / "such.safetensors")
    assert list(deeper.state_dict()) == keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no tokens to add"),
        ({"registers": -1}, "registers is the number"),
        ({"registers": True}, "registers is the number"),
        ({"classes": 1.5}, "classes is the number"),
        ({"distillation": 2}, "at most one"),
        ({"tasks": ["breed"]}, "names with numbers of outputs"),
        ({"tasks": {"breed": 0}}, "number of outputs"),
        ({"tasks": {"two words": 3}}, "Python identifier"),
        ({"tasks": {"breed": 3}, "tokens": [TokenSpec("breed", Role.TASK, classes=3)]}, "more than once: breed"),
        ({"distillation": True, "tokens": [TokenSpec("more", Role.DISTILLATION)]}, "at most one distillation"),
        ({"registers": 1, "num_classes": 0}, "num_classes is 1 or more"),
        ({"tokens": [TokenSpec("t", Role.TASK, classes=2, enters=3)]}, "expected a block, 0 to 2"),
        ({"tokens": [TokenSpec("t", Role.TASK, classes=2, enters=-1)]}, "expected a block, 0 to 2"),
        ({"tokens": [TokenSpec("t", Role.TASK, classes=2, position=True)]}, "no position"),
        ({"tokens": ["t"]}, "TokenSpec objects"),
        ({"tokens": None}, "list of TokenSpec"),
        ({"tokens": torch.tensor(float("nan"))}, "list of TokenSpec"),
        ({"tokens": TokenSpec("t", Role.TASK, classes=2)}, "list of TokenSpec"),
        ({"tokens": [TokenSpec("t", Role.TASK, classes=2, visible=False)]}, "hidden until opened"),
    ],
)
def test_invalid_options_change_nothing(options, message):
    model = small()
    keys, kinds = list(model.state_dict()), [type(part) for part in model.modules()]
    with pytest.raises(InvalidOption, match=message):
        vitrail.add_tokens(model, **options)
    assert list(model.state_dict()) == keys
    assert [type(part) for part in model.modules()] == kinds


def test_mixes_with_the_models_own_tokens_are_refused():
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, embed_dim=32, num_heads=2)
    with pytest.raises(InvalidOption, match="already has a distillation token"):
        vitrail.add_tokens(distilled, distillation=True)
    # timm itself ignores registers on a distilled model
    assert vitrail.add_tokens(distilled, registers=4).layout.indices(Role.REGISTER) == range(2, 6)
    roles = [TokenSpec("cls", Role.CLASS), TokenSpec("breed", Role.TASK, classes=3)]
    ours = create_model("vit_tiny_patch16", depth=1, tokens=roles)
    with pytest.raises(InvalidOption, match="already has tokens named 'breed'"):
        vitrail.add_tokens(ours, tasks={"breed": 3})
    headless = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    with pytest.raises(InvalidOption, match="set num_classes="):
        vitrail.add_tokens(headless, classes=1)
    with pytest.raises(UnsupportedModel):
        vitrail.add_tokens(nn.Linear(2, 2), registers=1)
    with pytest.raises(UnsupportedModel, match=r"torch\.nn\.Module"):
        vitrail.add_tokens("vit", registers=1)


def test_errors_of_a_second_addition_and_after_removal():
    model, images = small(), random_images()
    added = mix(model)
    with pytest.raises(AlreadyApplied, match="already has added tokens"):
        vitrail.add_tokens(model, registers=1)
    with pytest.raises(AlreadyApplied, match="already has added tokens"):
        vitrail.test_time_registers(model, neurons={0: [1]})
    assert "closed" in repr(added)
    assert "2 register 'registers'" in repr(added)
    added.remove()
    for call in (added.open, added.close, added.remove, added.trainable):
        with pytest.raises(NotApplied, match="was removed"):
            call()
    with pytest.raises(NotApplied, match="carries no AddedTokens"):
        vitrail.AddedTokens.of(model)
    with pytest.raises(NotApplied, match="was removed"):
        added(images)
    assert "removed" in repr(added)
    with mix(model) as added:
        for gate in (float("nan"), 21, True, "wide"):
            with pytest.raises(InvalidOption, match="gate is a number"):
                added.open(gate)


def test_a_mask_is_refused_and_removed_tokens_allow_it_again():
    model, images = small(), random_images()
    mask = torch.ones(17, 17, dtype=torch.bool)
    before = model.forward_features(images, attn_mask=mask)
    with mix(model), pytest.raises(UnsupportedInput, match="attention mask"):
        model.forward_features(images, attn_mask=mask)
    assert torch.equal(model.forward_features(images, attn_mask=mask), before)


def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for checkpointing in (False, True):
        model, images = small(), random_images()
        torch.manual_seed(0)
        added = mix(model)
        added.open(-1.0)
        model.set_grad_checkpointing(checkpointing)
        output = added(images)
        (output.logits.sum() + output.by_role["breed"].square().sum()).backward()
        grads.append([weight.grad for weight in model.parameters()])
    assert all(distance(a, b) < 1e-12 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("opened", "merged"),
    [
        (True, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, False), (False, True), (True, False))),
    ],
)
def test_compiles(opened, merged):
    model, images = small().float(), random_images().float()
    added = mix(model)
    if opened:
        added.open(-1.0)
    if merged:
        vitrail.merge(model, r=2)
    with torch.no_grad():
        expected = added(images)
        compiled = torch.compile(added, fullgraph=True, backend="aot_eager")(images)
    assert distance(compiled.logits, expected.logits) < 1e-5
    assert distance(compiled.features, expected.features) < 1e-5
    torch.compiler.reset()


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_model_delivers_its_added_tokens(first):
    model, images = small().float(), random_images().float()
    if first:
        model.compile(backend="eager")
    added = mix(model)
    expected = eagerly(added, images)
    if not first:
        model.compile(backend="eager")
    for _ in range(2):
        assert distance(added(images).features, expected) < 1e-5
    torch.compiler.reset()


def eagerly(added: vitrail.AddedTokens, images: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return added(images).features


def test_gates_keep_their_precision_and_learn():
    model, images = small().bfloat16(), random_images().bfloat16()
    added = mix(model)
    added.open()
    assert added.tokens.gates.dtype == torch.float32
    assert model.to(torch.float16).vitrail_tokens.gates.dtype == torch.float32
    model.bfloat16()
    optimizer = torch.optim.Adam(added.trainable(gate_lr=0.1), lr=1e-3)
    model(images).square().mean().backward()
    optimizer.step()
    assert (added.tokens.gates.detach() + 10).abs().min() > 0.05


def test_trainable_unfreezes_added_parameters():
    model = small()
    added = mix(model)
    model.requires_grad_(False)
    assert all(weight.requires_grad for group in added.trainable() for weight in group["params"])
    assert not added.tokens.gates.requires_grad
    assert [group["name"] for group in added.trainable(model=True)] == ["tokens", "heads", "heads, no decay"]
    added.open()
    assert added.tokens.gates.requires_grad
    added.close()
    assert not added.tokens.gates.requires_grad


def test_ddp_wraps_after_tokens_are_added(tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, images = small(), random_images()
        with pytest.raises(UnsupportedModel, match="add tokens first, then wrap"):
            mix(nn.parallel.DistributedDataParallel(model))
        mix(model)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        added = vitrail.AddedTokens.of(wrapped)
        for _ in range(2):  # DDP complains at the second step about what had no gradient in the first
            output = added(images)
            (output.logits.sum() + output.by_role["breed"].sum()).backward()
    finally:
        dist.destroy_process_group()


def test_added_tokens_are_saved_separately(tmp_path):
    model = create_model("vit_tiny_patch16", image_size=32, patch_size=8, width=32, heads=2, depth=2, num_classes=3)
    own = list(model.state_dict())
    added = mix(model)
    model.save_pretrained(tmp_path / "model")  # the model alone, and the tokens beside it
    assert list(vitrail.ViT.from_pretrained(tmp_path / "model").state_dict()) == own
    assert vitrail.AddedTokens.of(vitrail.load(tmp_path / "model")).specs == added.specs
    added.save(tmp_path / "tokens.safetensors")
    added.remove()
    model.save_pretrained(tmp_path / "model")
    again = vitrail.ViT.from_pretrained(tmp_path / "model")
    assert vitrail.AddedTokens.load(again, tmp_path / "tokens.safetensors").specs == added.specs
