"""Merged models beside what people use: pipelines, PEFT, accelerate, quantized weights, timm's training utilities."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as hf
from PIL import Image
from torch import nn

import vitrail
from tests.parity.models.cases import redraw
from vitrail.data import InputSpec, to_tensor

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
HEIGHT_WIDTH = {"height": 32, "width": 32}


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    model = hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=4)).eval()
    redraw(model, 2)
    if options:
        vitrail.merge(model, **options)
    return model


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def photo() -> Image.Image:
    return Image.effect_noise((32, 32), 90).convert("RGB")


@torch.no_grad()
def test_pipelines_of_a_classifier(photo: Image.Image) -> None:
    model = build(r=3)
    processor = hf.ViTImageProcessor(size=HEIGHT_WIDTH)
    batch = to_tensor([photo], InputSpec((32, 32)))
    classify = hf.pipeline("image-classification", model=model, image_processor=processor)
    wanted = model(batch).logits[0].softmax(0)
    found = {entry["label"]: entry["score"] for entry in classify(photo, top_k=4)}
    assert found == pytest.approx({f"LABEL_{index}": wanted[index].item() for index in range(4)}, abs=1e-5)
    extract = hf.pipeline("image-feature-extraction", model=model.vit, image_processor=processor)
    torch.testing.assert_close(torch.tensor(extract(photo)), model.vit(batch).last_hidden_state, rtol=1e-4, atol=1e-4)
    vitrail.Merging.of(model).remove()
    assert {entry["label"]: entry["score"] for entry in classify(photo, top_k=4)} != pytest.approx(found, abs=1e-4)


def tokenizer() -> Any:
    """Return a tokenizer of a few words, made without any file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<bos>", "<eos>", "<unk>", "This", "is", "a", "photo", "of", "cat", "dog", "."]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@torch.no_grad()
def test_pipeline_for_zero_shot_classification(photo: Image.Image) -> None:
    text = {**SIZES, "vocab_size": 12, "max_position_embeddings": 16, "pad_token_id": 0, "eos_token_id": 2}
    config = hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    clip = hf.CLIPModel(config).eval()
    redraw(clip, 3)
    processor = hf.CLIPImageProcessor(size=HEIGHT_WIDTH, crop_size=HEIGHT_WIDTH)
    words = tokenizer()
    classify = hf.pipeline("zero-shot-image-classification", model=clip, tokenizer=words, image_processor=processor)

    def scores() -> dict[str, float]:
        found = classify(photo, candidate_labels=["cat", "dog"])
        return {entry["label"]: entry["score"] for entry in found}

    before = scores()
    merging = vitrail.merge(clip, r=3)
    after = scores()
    ids = words(["This is a photo of cat.", "This is a photo of dog."], return_tensors="pt", padding=True)
    pixels = processor(photo, return_tensors="pt")["pixel_values"]
    logits = clip(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], pixel_values=pixels)
    wanted = logits.logits_per_image[0].softmax(0)
    assert after == pytest.approx({"cat": wanted[0].item(), "dog": wanted[1].item()}, abs=1e-5)
    assert after != before
    merging.remove()
    assert scores() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:peft.*")
@torch.no_grad()
def test_lora_is_saved_loaded_and_folded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, batch = build(r=3), images()
    base = model(batch).logits
    names = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    targets = sorted(names & {"q_proj", "v_proj", "query", "value"})
    settings = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["classifier"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, settings).eval()
    wanted = tuned(batch).logits
    assert (wanted - base).abs().max() > 0.01
    tuned.save_pretrained(tmp_path / "adapter")

    loaded = peft.PeftModel.from_pretrained(build(r=3), tmp_path / "adapter").eval()
    assert torch.equal(loaded(batch).logits, wanted)
    folded = loaded.merge_and_unload()
    torch.testing.assert_close(folded(batch).logits, wanted, rtol=1e-4, atol=1e-4)
    vitrail.Merging.of(folded).remove()
    folded.save_pretrained(tmp_path / "folded")
    plain = hf.ViTForImageClassification.from_pretrained(tmp_path / "folded").eval()
    assert torch.equal(plain(batch).logits, folded(batch).logits)
    vitrail.merge(plain, r=3)
    torch.testing.assert_close(plain(batch).logits, wanted, rtol=1e-4, atol=1e-4)


def test_accelerator_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    batch, labels = images(8), torch.arange(8) % 4

    def train(model: nn.Module, optimizer: Any, loader: Any, backward: Any) -> nn.Module:
        for pixels, answers in loader:
            backward(nn.functional.cross_entropy(model(pixels).logits, answers))
            optimizer.step()
            optimizer.zero_grad()
        return model

    def parts() -> Any:
        model = build(r=3).train()
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch, labels), batch_size=4)
        return model, torch.optim.SGD(model.parameters(), 0.01), data

    wanted = train(*parts(), lambda loss: loss.backward()).state_dict()
    model = train(*(prepared := accelerator.prepare(*parts())), accelerator.backward)
    found = accelerator.unwrap_model(model)
    assert vitrail.Merging.of(found).r == [3, 3, 3]
    assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        prepared[0].classifier.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(found.classifier.weight, wanted["classifier.weight"])


@pytest.mark.parametrize(
    "kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
)
@torch.no_grad()
def test_quantized_weights_in_either_order(kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config, batch = getattr(quantization, kind)(), images()
    exact = build(r=3)(batch).logits
    first = build(r=3)
    quantization.quantize_(first.vit, config)
    second = build()
    quantization.quantize_(second.vit, config)
    plain = second(batch).logits
    merging = vitrail.merge(second, r=3)
    assert torch.equal(first(batch).logits, second(batch).logits)
    assert 0 < (first(batch).logits - exact).norm() < 0.5 * exact.norm()
    assert not torch.equal(second(batch).logits, plain)
    merging.remove()
    assert torch.equal(second(batch).logits, plain)


def test_quantized_merge_is_that_of_the_rounded_weights() -> None:
    """The oracle: the same model with weights rounded to the same int8 grid, in ordinary linear layers."""
    quantization = pytest.importorskip("torchao.quantization")
    model, rounded, batch = build(r=3), build(r=3), images()
    quantization.quantize_(model.vit, quantization.Int8WeightOnlyConfig())
    weights = {name: part.weight for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    with torch.no_grad():
        for name, part in rounded.named_modules():
            if isinstance(part, nn.Linear) and hasattr(weights[name], "dequantize"):
                part.weight.copy_(
                    weights[name].dequantize() if type(weights[name]) is not nn.Parameter else part.weight
                )
        torch.testing.assert_close(model(batch).logits, rounded(batch).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_bitsandbytes_in_either_order() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is no dependency of the tests")

    def quantized(model: nn.Module) -> nn.Module:
        for name, part in list(model.vit.named_modules()):
            if isinstance(part, nn.Linear):
                made = bnb.nn.Linear4bit(part.in_features, part.out_features, compute_dtype=torch.float32)
                made.weight, made.bias = bnb.nn.Params4bit(part.weight.data, requires_grad=False), part.bias
                owner, _, attribute = name.rpartition(".")
                setattr(model.vit.get_submodule(owner), attribute, made.to("cpu"))
        return model

    batch, exact = images(), build(r=3)(images()).logits
    first, second = quantized(build(r=3)), quantized(build())
    vitrail.merge(second, r=3)
    assert torch.equal(first(batch).logits, second(batch).logits)
    assert 0 < (first(batch).logits - exact).norm() < 0.5 * exact.norm()


def test_loop_like_that_of_timm() -> None:
    """Optimizer with layer decay, mixup, clipping, averaged weights and schedule; two loops agree, merged or not."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    def train(r: int | None, checkpointing: bool) -> tuple[nn.Module, nn.Module, list[float]]:
        torch.manual_seed(0)
        np.random.seed(0)  # mixup draws from it
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=4)
        if r is not None:
            vitrail.merge(model, r=r)
        model.set_grad_checkpointing(checkpointing)
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
        scheduler = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, warmup_lr_init=1e-5)
        mixup, averaged = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=4), ModelEmaV3(model, decay=0.5)
        losses = []
        for step in range(4):
            mixed, targets = mixup(images(8), torch.arange(8) % 4)
            with torch.autocast("cpu", torch.bfloat16):
                loss = SoftTargetCrossEntropy()(model(mixed).float(), targets)
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            averaged.update(model)
            scheduler.step(step + 1)
            losses.append(loss.item())
        return model, averaged.module, losses

    unmerged, _, before = train(None, False)
    model, averaged, losses = train(3, False)
    assert losses[-1] < losses[0]
    assert losses != before
    assert train(0, False)[2] == pytest.approx(before, rel=2e-2)
    assert train(3, True)[2] == pytest.approx(losses, rel=1e-3)
    assert model.state_dict().keys() == unmerged.state_dict().keys()
    assert vitrail.Merging.of(averaged).r == [3, 3, 3]
    with torch.no_grad():
        seen = averaged.eval()(images())
        assert torch.equal(copy.deepcopy(averaged)(images()), seen)
