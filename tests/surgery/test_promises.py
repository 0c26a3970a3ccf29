"""Promises for every supported model, whatever runs between its blocks."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import vitrail
from tests.extras import always
from tests.surgery.models import ALL, FEW, distance, half, run, trunk_blocks
from vitrail.errors import BrokenPass
from vitrail.models import create_model

everywhere = pytest.mark.parametrize("name", ALL)
somewhere = pytest.mark.parametrize("name", FEW)


@everywhere
def test_special_tokens_stay_alone_and_every_patch_has_a_group(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    merging = vitrail.merge(model, r=2)
    with merging.track() as trace:
        run(model, images, case)
    layout, assignment = trace.layout, trace.latest.assignment
    special = layout.num_special
    assert assignment.target[:, :special].tolist() == [list(range(special))] * 2
    assert torch.equal(trace.sizes[:, :special], torch.ones(2, special))
    assert int(trace.groups.min()) >= special
    assert torch.equal(trace.sizes.sum(1), torch.full((2,), float(layout.num_tokens)))
    for sizes, groups in zip(trace.sizes, trace.groups, strict=True):
        assert torch.equal(groups.bincount(minlength=len(sizes)), sizes.long() * (torch.arange(len(sizes)) >= special))
    tokens = torch.randn(2, trace.sizes.shape[1], 3)
    assert trace.unmerge(tokens).shape == (2, layout.num_tokens, 3)
    assert trace.sizes.shape[1] == merging.tokens_per_layer(case.size)[-1]


@everywhere
def test_a_batch_equals_its_single_images(name):
    case = ALL[name]
    model, images = case.model(), case.images(batch=3)
    vitrail.merge(model, r=3)
    together = run(model, images, case)
    alone = torch.cat([run(model, image[None], case) for image in images])
    assert distance(alone, together) < 1e-7


@somewhere
def test_copies_and_pickles_are_merged_models_of_their_own(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    plain = run(model, images, case)
    merging = vitrail.merge(model, r=2)
    merged = run(model, images, case)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, images, case), merged)
        handle = vitrail.Merging.of(other)
        assert handle.config == merging.config
        handle.r = 0
        assert torch.equal(run(model, images, case), merged)
        handle.remove()
        assert distance(run(other, images, case), plain) < 5e-6
        assert torch.equal(run(model, images, case), merged)
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert torch.equal(run(model, images, case), merged)


@somewhere
def test_whole_models_are_saved_and_loaded_by_torch(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(run(loaded, images, case), run(model, images, case))


@somewhere
def test_two_threads_share_nothing(name):
    case = ALL[name]
    model = case.model(torch.float32)
    merging = vitrail.merge(model, r=2)
    batches = [case.images(torch.float32) * scale for scale in (1.0, -2.0)]
    with torch.no_grad():
        wanted = [run(model, images, case) for images in batches]
    barrier, failures, traces = threading.Barrier(2), [], {}

    def work(index):
        for _ in range(10):
            barrier.wait()
            with torch.no_grad(), merging.track() as trace:
                if not torch.equal(run(model, batches[index], case), wanted[index]):
                    failures.append(index)
                traces[index] = trace
            if len(trace.passes) != 1:
                failures.append((index, "saw another thread's pass"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not torch.equal(traces[0].groups, traces[1].groups)


@somewhere
def test_a_model_called_from_within_itself(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    wanted, inner = run(model, images, case), []
    block = trunk_blocks(model)[1]

    def call_again(*_):
        handle.remove()
        inner.append(run(model, -images, case))

    handle = block.register_forward_pre_hook(call_again)
    assert torch.equal(run(model, images, case), wanted)
    assert torch.equal(inner[0], run(model, -images, case))


@somewhere
def test_hooks_see_and_may_replace_tokens(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    wanted, seen = run(model, images, case), []
    for block in trunk_blocks(model):
        block.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]) or out.clone())
        block.register_forward_pre_hook(lambda module, args: (args[0].clone(), *args[1:]))
    assert torch.equal(run(model, images, case), wanted)
    assert seen[0] - seen[1] == 2


LONG = (
    "eva-dinov3",
    "eva-eva02",
    "eva-mixed-xy",
    "hf-deit-head",
    "hf-registers-head",
    "clip-projection",
    "timm-map",
    "open_clip-tower",
)
"""Like others that are compiled, here or block by block, and slower."""


@pytest.mark.parametrize(
    ("name", "unmerge"),
    [
        *(pytest.param(name, True, marks=[pytest.mark.slow] if name in LONG else []) for name in FEW),
        pytest.param(FEW[0], False, marks=pytest.mark.slow),
    ],
)
def test_compiles_as_one_graph(name, unmerge):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    merging = vitrail.merge(model, r=2, unmerge=unmerge)
    wanted = run(model, images, case)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(run(compiled, images, case), wanted) < 1e-5
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert distance(run(compiled, images, case), wanted) < 1e-5
    merging.r = 3
    changed = run(compiled, images, case)
    assert distance(changed, run(model, images, case)) < 1e-5
    assert changed.shape != wanted.shape or distance(changed, wanted) > 1e-4
    with merging.track() as trace:
        assert distance(run(compiled, images, case), changed) < 1e-5
    assert len(trace.passes) == 1


@pytest.mark.parametrize("name", always(["eva-dinov3"], FEW))
def test_compiles_block_by_block(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    torch._dynamo.reset()
    with torch.no_grad():  # as one graph is also traced for its gradients, above
        wanted = run(model, images, case)
        for block in trunk_blocks(model):
            block.compile(fullgraph=True, backend="aot_eager")
        assert distance(run(model, images, case), wanted) < 1e-5


@pytest.mark.parametrize("position", always(["learned"], ["learned", "rotary"]))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
def test_blocks_between_the_first_and_the_last_are_compiled_once(position):
    torch._dynamo.reset()
    size = {"image_size": 64, "patch_size": 8, "width": 16, "heads": 1, "num_classes": 2}
    model = create_model("vit_tiny_patch16", **size, depth=9, position=position).train()
    vitrail.merge(model, r=3)
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert counter.frame_count == 5  # first, second, then for any even and any odd number of tokens, last


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("schedule", ["constant", "decreasing"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_of_a_gpu_learn_the_same(schedule):
    torch._dynamo.reset()
    size = {"image_size": 128, "patch_size": 8, "width": 128, "heads": 2, "num_classes": 4}
    model = create_model("vit_tiny_patch16", **size, depth=9).train().to("cuda", torch.bfloat16)
    images = torch.randn(4, 3, 128, 128, device="cuda", dtype=torch.bfloat16)
    vitrail.merge(model, r=15, schedule=schedule)
    found = []
    for compiled in (False, True):
        for block in model.blocks if compiled else ():
            block.compile()
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            out = model(images)
            grads = torch.autograd.grad(out.float().square().sum(), list(model.parameters()))
        found.append((out, torch.cat([grad.flatten().float() for grad in grads])))
    (eager, wanted), (out, grad) = found
    assert distance(out.float(), eager.float()) < 0.05
    assert torch.nn.functional.cosine_similarity(grad, wanted, dim=0) > 0.99


@somewhere
def test_gradients_flow_in_training_mode(name):
    case = ALL[name]
    model, images = case.model(torch.float32).train(), case.images(torch.float32)
    vitrail.merge(model, r=2)
    run(model, images, case).square().mean().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert all(
        any(part in name for name in reached for part in parts) for parts in (("norm", "ln_"), ("mlp", "intermediate"))
    )
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    named = [pair for block in trunk_blocks(model) for pair in block.named_parameters()]
    weights = [parameter.grad for name, parameter in named if "mlp" in name and parameter.dim() > 1]
    assert all(bool(grad.abs().sum() > 0) for grad in weights)


@pytest.mark.parametrize("name", [name for name in FEW if "mixed" not in name])  # timm's own are float32 only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    case = ALL[name]
    reference = run(case.model(torch.float32), case.images(torch.float32), case)
    model, images = half(case, dtype)
    vitrail.merge(model, r=2)
    merged = run(model, images, case)
    assert merged.dtype == dtype
    assert bool(merged.isfinite().all())
    assert merged.shape == reference.shape


@somewhere
def test_autocast(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    merging = vitrail.merge(model, r=2)
    with torch.autocast("cpu", dtype=torch.bfloat16), merging.track() as trace:
        merged = run(model, images, case)
    assert trace.sizes.dtype == torch.float32
    assert bool(merged.isfinite().all())
    assert trace.sizes.sum(1).tolist() == [trace.layout.num_tokens] * 2


@somewhere
def test_inference_mode(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    with torch.no_grad():
        wanted = run(model, images, case)
    with torch.inference_mode():
        assert torch.equal(run(model, images, case), wanted)


class LowRank(nn.Module):
    """A linear layer with a low-rank update, in place of a plain one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["timm-registers", "hf-deit-head", "eva-dinov3"])
def test_a_part_replaced_later_is_seen(name):
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    before = run(model, images, case)
    for block in trunk_blocks(model):
        owner, part = (block.mlp, "fc1") if hasattr(block, "mlp") else (block.intermediate, "dense")
        setattr(owner, part, LowRank(getattr(owner, part)))
    after = run(model, images, case)
    assert distance(after, before) > 1e-4
    vitrail.Merging.of(model).remove()
    assert "base.weight" in " ".join(model.state_dict())


def test_tokens_without_their_state_are_an_error():
    case = ALL["timm-registers"]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    tokens = torch.randn(2, 21, 32)
    with pytest.raises(BrokenPass, match=r"block 1 .*without the state"):
        model.blocks[1](tokens)
    with pytest.raises(BrokenPass, match=r"from block 0.*in order"):
        model.blocks[2](model.blocks[0](tokens))
    other = case.model(torch.float32)
    vitrail.merge(other, r=2)
    with pytest.raises(BrokenPass, match="of another model"):
        other.blocks[1](model.blocks[0](tokens))
    assert run(model, images, case).shape == (2, 5)


def test_blocks_called_by_themselves_follow_a_change_of_r():
    case = ALL["timm-registers"]
    model = case.model(torch.float32)
    merging = vitrail.merge(model, r=2, unmerge=False)
    tokens = torch.randn(2, 21, 32)
    assert model.blocks(tokens).shape[1] == 21 - 2 * 3
    merging.r = 1
    assert model.blocks(tokens).shape[1] == 21 - 3
