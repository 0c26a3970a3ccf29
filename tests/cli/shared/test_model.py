"""Models by name: errors when one cannot be loaded, and use of the Hub."""

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants

from vitrail.adapters import hub
from vitrail.adapters.registry import library
from vitrail.cli._shared.model import load
from vitrail.errors import ModelLoadError, UnsupportedInput
from vitrail.models import create_model

MODEL = "timm:vit_tiny_patch16_224"


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the Hub is reachable, without using the network."""
    monkeypatch.setattr(hub, "unreachable", lambda: None)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Let timm build models, and raise a given error if pretrained weights are requested."""
    create = timm.create_model

    def make(error: Exception) -> None:
        def refuse(name: str, pretrained: bool = False, **options: Any) -> torch.nn.Module:
            if pretrained:
                raise error
            return create(name, pretrained=False, **options)

        monkeypatch.setattr("timm.create_model", refuse)

    return make


def message(name: str, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(name, "merge", device="cpu", **options)
    text = str(caught.value)
    assert ".." not in text
    assert "pretrained=" not in text
    return text


# ---------------------------------------------------------------- what to do


def test_weights_out_of_reach_suggest_random_ones(no_weights: Callable[[Exception], None]) -> None:
    no_weights(OSError("the network\nis unreachable."))
    text = message(MODEL, size=(64, 64))
    assert text.startswith(f"{MODEL}: its trained weights could not be loaded (the network is unreachable)")
    assert "Check the network, or add --random-weights" in text


def test_missing_pretrained_weights_are_not_a_network_error(no_weights: Callable[[Exception], None]) -> None:
    no_weights(RuntimeError("No pretrained weights exist for this one."))
    text = message(MODEL)
    assert "(No pretrained weights exist for this one)" in text
    assert "--random-weights" in text
    assert "network" not in text


def test_without_network_the_message_explains_it(
    no_weights: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights(OSError("a long story about offline modes"))
    monkeypatch.setattr(hub, "unreachable", lambda: "hub.example")
    text = message(MODEL)
    assert "its trained weights could not be loaded (hub.example cannot be reached)" in text
    assert "--random-weights" in text
    text = message("hf:nobody/never-fetched")
    assert "hub.example cannot be reached" in text
    assert "hf:DIRECTORY" in text
    assert "--random-weights" not in text


def test_models_that_cannot_be_merged_or_built_do_not_suggest_random_weights(
    no_weights: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weights(OSError("unreachable"))
    assert message("timm:resnet18").startswith("timm:resnet18: ResNet is not a supported model")

    def broken(*args: object, **kwargs: object) -> None:
        raise TypeError("an unexpected argument")

    monkeypatch.setattr("timm.create_model", broken)
    text = message(MODEL)
    assert "an unexpected argument" in text
    assert "--random-weights" not in text


def test_directories_suggest_random_weights_only_where_they_have_a_model(tmp_path: Path) -> None:
    from transformers import ViTConfig

    (tmp_path / "empty").mkdir()
    text = message(f"hf:{tmp_path / 'empty'}")
    assert "--random-weights" not in text
    assert "written by save_pretrained" in text
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "--random-weights" not in message(f"hf:{tmp_path / 'broken'}")

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTConfig(**sizes, image_size=32, patch_size=8, architectures=["ViTModel"]).save_pretrained(tmp_path / "bare")
    name = f"hf:{tmp_path / 'bare'}"
    text = message(name)
    assert text.startswith(f"{name}: its trained weights could not be loaded (")
    assert "Add --random-weights" in text
    assert load(name, "merge", random=True, device="cpu").weights == "random"


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    for folder in (f"{tmp_path}/none", "./none", "a/b/none"):
        for random in (False, True):
            assert f"there is no directory {folder}." in message(f"hf:{folder}", random=random)


def test_a_size_without_an_option(no_weights: Callable[[Exception], None]) -> None:
    assert message("timm:resnet18", random=True, size=(64, 64)).startswith("timm:resnet18: ResNet is not a supported")
    create = timm.create_model

    def refuse(name: str, **options: Any) -> torch.nn.Module:
        if "img_size" in options:
            raise TypeError("unexpected img_size")
        return create(name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm.create_model", refuse)
        text = message(MODEL, random=True, size=(64, 64))
        assert "unexpected img_size" in text
        assert "Leave --image-size out" in text


def test_no_status_line_without_a_terminal(saved_vit: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as bars

    load(f"hf:{saved_vit}", "merge", device="cpu")
    assert "Loading weights" not in capfd.readouterr().err
    assert bars.is_progress_bar_enabled()


def test_a_name_without_its_library_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ViTConfig

    assert message("vit_tiny_patch16_224").endswith(". Did you mean timm:vit_tiny_patch16_224?")
    assert message("vit_tiny_patch16_224", random=True).endswith(". Did you mean timm:vit_tiny_patch16_224?")
    assert message("facebook/deit-tiny").endswith(". Did you mean hf:facebook/deit-tiny?")
    monkeypatch.chdir(tmp_path)
    ViTConfig(num_hidden_layers=1, architectures=["ViTModel"]).save_pretrained("my-vit")
    assert message("my-vit").endswith(". Did you mean hf:my-vit?")
    for name in ("no_such_model", "resnet18", "nolib:vit_tiny_patch16_224", ""):
        text = message(name)
        assert "timm:NAME" in text
        assert "Did you mean" not in text


# ---------------------------------------------------------------- models that do not take images

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "sound": (
        {"in_chans": 1, "image_size": (16, 24), "patch_size": (8, 4)},
        {"mean": [1.0], "std": [2.0], "scale": 1.0},
        "takes spectrograms or other arrays, 1 × 16 × 24, and vitrail demo is for models that take images.",
    ),
    "clip": (
        {"image_size": (4, 16, 16), "patch_size": (2, 8, 8)},
        {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": 255},
        "takes video clips, 3 × 4 × 16 × 16, and",
    ),
    "never trained": (
        {"in_chans": 2, "image_size": 16, "patch_size": 8},
        None,
        "takes sounds, 2 × 16",
    ),
    "numbers": (
        {"image_size": 16, "patch_size": 8},
        {"mean": [0.0] * 3, "std": [9.0] * 3, "scale": 1.0},
        "takes spectrograms or other arrays, 3 × 16 × 16, and",
    ),
    "bytes": ({"image_size": 16, "patch_size": 8}, {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": 255}, ""),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_models_without_image_input_report_their_input(kind: str, tmp_path: Path) -> None:
    options, expects, message = SHAPES[kind]
    create_model("vit_tiny_patch16", width=16, depth=1, heads=1, **options).save_pretrained(tmp_path)
    if expects is not None:
        (tmp_path / "labels.json").write_text(json.dumps({"classes": {}, "preprocessing": expects}))
    if message:
        with pytest.raises(UnsupportedInput) as caught:
            load(str(tmp_path), "demo", device="cpu")
        text = str(caught.value)
        assert text.startswith(f"{tmp_path} {message}")
        assert "vitrail.training.evaluate" in text
    else:
        assert load(str(tmp_path), "demo", device="cpu").spec.modality == "image"
    if kind in ("clip", "never trained"):
        assert load(str(tmp_path), "inspect", device="cpu").spec.modality in ("video", "audio")
    loaded = load(str(tmp_path), "bench", device="cpu")  # which runs on random inputs
    sides = options["image_size"]
    assert loaded.spec.shape == (options.get("in_chans", 3), *((sides, sides) if isinstance(sides, int) else sides))


# ---------------------------------------------------------------- asking the Hub


def test_only_names_that_need_it_use_the_hub(tmp_path: Path) -> None:
    timm_library, hf = library("timm"), library("hf")
    assert timm_library.uses_hub("vit_tiny_patch16_224", pretrained=True)
    assert not timm_library.uses_hub("vit_tiny_patch16_224", pretrained=False)
    assert timm_library.uses_hub("hf-hub:somebody/model", pretrained=False)
    assert not timm_library.uses_hub("local-dir:here", pretrained=True)
    assert hf.uses_hub("somebody/model", pretrained=False)
    assert not hf.uses_hub(str(tmp_path), pretrained=True)


def test_an_unreachable_hub_is_detected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real function, on this machine only
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.unreachable() is None
    assert hub.unreachable() == "127.0.0.1"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # no requests are made
    assert hub.unreachable() is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy.example"})
    assert hub.unreachable() is None


def test_the_hub_library_is_quiet_and_restored_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    logger = logging.getLogger("huggingface_hub.utils._http")
    level = logger.getEffectiveLevel()
    with hub.quiet(offline=True):
        assert constants.is_offline_mode()
        assert not logger.isEnabledFor(logging.WARNING)
        logger.warning("Retrying in 1s [Retry 1/5].")
    assert capsys.readouterr().err == ""
    assert not constants.is_offline_mode()
    assert logger.getEffectiveLevel() == level
    monkeypatch.setenv("HF_HUB_VERBOSITY", "warning")  # set by the user
    with hub.quiet(offline=False):
        assert logger.getEffectiveLevel() == level


def test_without_network_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "hub.example")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "hub.example cannot be reached" in message(MODEL)
