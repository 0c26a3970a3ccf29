"""One small model of each kind, for the tests of surgery."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.models.cases import Case, outputs_of
from tests.parity.models.open_clip_towers import CASES as OPEN_CLIP
from tests.parity.models.timm_beit import CASES as BEIT
from tests.parity.models.timm_eva import CASES as EVA
from tests.parity.models.timm_relpos import CASES as RELPOS
from tests.parity.models.timm_vit import CASES as VIT
from tests.parity.models.torchvision_vit import CASES as TORCHVISION
from tests.parity.models.transformers_aimv2 import CASES as AIMV2
from tests.parity.models.transformers_audio import CASES as AUDIO
from tests.parity.models.transformers_beit import CASES as HF_BEIT
from tests.parity.models.transformers_clip import CASES as CLIP
from tests.parity.models.transformers_dinov3 import CASES as DINOV3
from tests.parity.models.transformers_relatives import CASES as RELATIVES
from tests.parity.models.transformers_video import CASES as VIDEO
from tests.parity.models.transformers_vit import CASES as TRANSFORMERS
from tests.parity.models.transformers_vjepa2 import CASES as VJEPA2
from vitrail.adapters import find

ALL: dict[str, Case] = {
    **{f"timm-{name}": case for name, case in VIT.items()},
    **{f"eva-{name}": case for name, case in EVA.items()},
    **{f"beit-{name}": case for name, case in BEIT.items()},
    **{f"relpos-{name}": case for name, case in RELPOS.items()},
    **{f"hf-{name}": case for name, case in TRANSFORMERS.items()},
    **{f"clip-{name}": case for name, case in CLIP.items()},
    **{f"aimv2-{name}": case for name, case in AIMV2.items()},
    **{f"hf_beit-{name}": case for name, case in HF_BEIT.items()},
    **{f"dinov3-{name}": case for name, case in DINOV3.items()},
    **{f"audio-{name}": case for name, case in AUDIO.items()},
    **{f"video-{name}": case for name, case in {**VIDEO, **VJEPA2}.items()},
    **{f"relatives-{name}": case for name, case in RELATIVES.items()},
    **{f"torchvision-{name}": case for name, case in TORCHVISION.items()},
    **{f"open_clip-{name}": case for name, case in OPEN_CLIP.items()},
}
FEW = [
    "timm-registers",
    "timm-map",
    "eva-eva02",
    "eva-dinov3",
    "eva-mixed-xy",
    "beit-own",
    "hf-deit-head",
    "hf-registers-head",
    "clip-projection",
    "clip-siglip",
    "torchvision-vit",
    "open_clip-tower",
]


def run(model: nn.Module, images: Tensor, case: Case) -> Tensor:
    """Return a model's main output."""
    return main_output(model(images, **case.call))


def main_output(result: Any) -> Tensor:
    return next(iter(outputs_of(result).values()))


def flops_that_run(call: Callable[[], Any]) -> int:
    """Return what torch counts while a function runs, with attention as matrix products: versions know few kernels."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value of the second."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def trunk_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model of any library."""
    return list(find(model).blocks)


def leaving(model: nn.Module, images: Tensor, **call: Any) -> list[Tensor]:
    """Return the outputs of all blocks, taken by hooks."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for block in trunk_blocks(model)
    ]
    with torch.no_grad():
        model(images, **call)
    for hook in hooks:
        hook.remove()
    return found


def count_parameters_with_gradient(model: nn.Module) -> int:
    return sum(parameter.grad is not None for parameter in model.parameters())


def half(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    return case.model(torch.float32).to(dtype), case.images(torch.float32).to(dtype)
