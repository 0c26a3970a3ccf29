"""Training: drop path, checkpointing, LoRA, and several processes."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vitrail
from tests.extras import always
from tests.leaving import leave
from tests.surgery.models import ALL, FEW, distance, run, trunk_blocks
from vitrail.errors import BrokenPass


def gradients(model: nn.Module, images: torch.Tensor, case) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(model, images, case).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a, b, tolerance=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", [name for name in FEW if "torchvision" not in name])  # it has no checkpointing
def test_checkpointing_gives_the_same_gradients(name):
    case = ALL[name]
    model, images = case.model().train(), case.images()
    vitrail.merge(model, r=2)
    plain = gradients(model, images, case)
    if isinstance(model, transformers.PreTrainedModel):
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert_same_gradients(gradients(model, images, case), plain)
    else:
        model.set_grad_checkpointing(True)
        assert_same_gradients(gradients(model, images, case), plain)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
def test_reentrant_checkpointing_around_blocks_raises_with_advice():
    case = ALL["timm-registers"]
    model, tokens = case.model(), torch.randn(2, 21, 32, dtype=torch.float64, requires_grad=True)
    vitrail.merge(model, r=2)
    tokens = torch.utils.checkpoint.checkpoint(model.blocks[0], tokens, use_reentrant=True)
    tokens = torch.utils.checkpoint.checkpoint(model.blocks[1], tokens, use_reentrant=True)
    with pytest.raises(BrokenPass, match="use_reentrant=False"):
        tokens.sum().backward()


def test_hidden_states_under_checkpointing_keep_their_gradients():
    case = ALL["hf-registers-head"]
    model, images = case.model().train(), case.images()
    vitrail.merge(model, r=2)

    def of_hidden_states():
        model.zero_grad()
        states = model(images, output_hidden_states=True).hidden_states
        sum(state.square().mean() for state in states).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = of_hidden_states()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same_gradients(of_hidden_states(), plain)


def test_drop_path_and_dropout_act_as_in_the_library():
    case = ALL["timm-registers"]
    plain = case.model(torch.float32)
    for block in plain.blocks:
        block.drop_path1.drop_prob = 0.5  # an Identity ignores it
    from timm.layers import DropPath

    for block in plain.blocks:
        block.drop_path1, block.drop_path2 = DropPath(0.5), DropPath(0.5)
        block.attn.attn_drop.p = block.attn.proj_drop.p = 0.2
    plain.train()
    merged = copy.deepcopy(plain)
    vitrail.merge(merged, r=0)
    images = case.images(torch.float32)
    torch.manual_seed(1)
    wanted = plain(images)
    torch.manual_seed(1)
    assert torch.equal(merged(images), wanted)
    torch.manual_seed(2)
    assert not torch.equal(merged(images), wanted)


def test_augmented_rotary_coordinates_are_those_of_the_pass():
    """Jittered positions are known to the model's table alone; with nothing merged away they must still rotate."""
    case = ALL["eva-dinov3"]
    model, images = case.model(), case.images()
    model.rope.jitter_coords, model.rope.shift_coords, model.rope.aug_active = 1.5, 0.2, True
    model.train()
    # merge only in the last layer: everything before it must be the plain model, bit by bit
    depth = len(model.blocks)
    outputs = []
    for r in ([0] * depth, [0] * (depth - 1) + [2], [2] + [0] * (depth - 1)):
        with vitrail.merge(model, r=r):
            torch.manual_seed(3)
            outputs.append(model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True))
    assert torch.equal(outputs[0][depth - 2], outputs[1][depth - 2])
    assert bool(outputs[2][-1].isfinite().all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:peft.*")
@pytest.mark.parametrize("name", ["timm-registers", "hf-vit-head"])
def test_lora_by_peft_in_either_order(name):
    peft = pytest.importorskip("peft")
    case = ALL[name]
    targets = ["qkv"] if name.startswith("timm") else ["q_proj", "v_proj", "query", "value"]  # by version
    settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)

    def lora(model):
        torch.manual_seed(5)
        return peft.get_peft_model(model, copy.deepcopy(settings)).eval()

    images = case.images(torch.float32)
    first = lora(case.model(torch.float32))
    vitrail.merge(first, r=2)
    second = case.model(torch.float32)
    vitrail.merge(second, r=2)
    without = run(second, images, case)
    second = lora(second)
    assert distance(run(first, images, case), run(second, images, case)) < 1e-5
    assert distance(run(first, images, case), without) > 1e-3


def _distributed(rank: int, world: int, address: str, jobs: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    for job in jobs:
        JOBS[job](rank)
    leave()


def _ddp(rank: int) -> None:
    case = ALL["timm-registers"]
    images = case.images(batch=4)
    alone = case.model()
    vitrail.merge(alone, r=2)
    wanted = gradients(alone, images, case)
    model = case.model()
    vitrail.merge(model, r=2)
    ours = gradients(DistributedDataParallel(model), images[2 * rank : 2 * rank + 2], case)
    assert_same_gradients({name.removeprefix("module."): grad for name, grad in ours.items()}, wanted)


def _fsdp(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    case = ALL["hf-registers-head"]
    images = case.images()
    alone = case.model()
    plain = run(alone, images, case)
    vitrail.merge(alone, r=2)
    wanted = run(alone, images, case)
    for merge_first in (True, False):
        model = case.model()
        if merge_first:
            merging = vitrail.merge(model, r=2)
        for block in trunk_blocks(model):
            fully_shard(block)
        fully_shard(model)
        if not merge_first:
            merging = vitrail.merge(model, r=2)
        out = run(model, images, case)
        assert distance(out, wanted) < 1e-9
        out.sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads
        assert all(bool(grad.full_tensor().isfinite().all()) for grad in grads)
        merging.remove()
        assert distance(run(model, images, case), plain) < 1e-9
        with vitrail.merge(model, r=2):
            assert distance(run(model, images, case), wanted) < 1e-9


def _fsdp_mixed(rank: int) -> None:
    """Mixed precision rebuilds every block's arguments to cast them."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name in ("timm-registers", "eva-eva02"):
        case = ALL[name]
        images = case.images(torch.float32)
        for merge_first in (True, False):
            model = case.model(torch.float32)
            if merge_first:
                merging = vitrail.merge(model, r=2)
            for block in trunk_blocks(model):
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            if not merge_first:
                merging = vitrail.merge(model, r=2)
            with merging.track() as trace:
                out = run(model, images, case)
            assert bool(out.isfinite().all())
            assert trace.sizes.sum(1).tolist() == [trace.layout.num_tokens] * 2
            merging.remove()
            assert isinstance(trunk_blocks(model)[0], FSDPModule)


JOBS = {"ddp": _ddp, "fsdp": _fsdp, "fsdp-mixed-precision": _fsdp_mixed}
OFTEN = ("ddp", "fsdp-mixed-precision")


def test_accelerate_hooks_after_merging():
    accelerate = pytest.importorskip("accelerate")
    case = ALL["hf-vit-head"]
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    wanted = run(model, images, case)
    for block in trunk_blocks(model):
        accelerate.hooks.add_hook_to_module(block, accelerate.hooks.AlignDevicesHook("cpu"))
    assert torch.equal(run(model, images, case), wanted)


@pytest.mark.skipif(sys.platform == "win32", reason="gloo and spawn as used here need a POSIX system")
@pytest.mark.parametrize("jobs", always([OFTEN], [OFTEN, ("fsdp",)]))
def test_two_processes(jobs, tmp_path):
    mp.spawn(_distributed, args=(2, f"file://{tmp_path}/rendezvous", jobs), nprocs=2)
