"""The served model: scores and embeddings are those of the model's own library, one pass for both."""

import io
from pathlib import Path

import timm
import torch
import transformers as hf
from PIL import Image

import vitrail
from tests.parity.models.cases import redraw
from vitrail.data import InputSpec
from vitrail.serve import ServedModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}


def pixels(count: int = 3, side: int = 32) -> list[torch.Tensor]:
    return list(torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8))


def batch_of(images: list[torch.Tensor], spec: InputSpec) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    return (torch.stack(images) / 255 - mean) / std


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    redraw(model.eval(), 1)
    return model


def check(served: ServedModel, embeddings: torch.Tensor, images: list[torch.Tensor], **logits: torch.Tensor) -> None:
    """Compare answers with embeddings (B, D) and logits (B, C) of each label column."""
    answers = served(images)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.stack([one.embedding for one in answers]), embeddings, **close)
    assert served.width == embeddings.shape[1]
    assert list(answers[0].scores) == list(logits) == list(served.classes)
    for name, wanted in logits.items():
        torch.testing.assert_close(torch.stack([one.scores[name] for one in answers]), wanted.softmax(1), **close)


@torch.no_grad()
def test_timm_classifier() -> None:
    model = drawn(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7))
    served, images = ServedModel(model, "timm"), pixels()
    batch = batch_of(images, served.spec)
    check(served, model.forward_features(batch)[:, 0], images, label=model(batch))
    assert served.classes == {"label": tuple("0123456")}


@torch.no_grad()
def test_timm_model_without_a_head_and_with_two() -> None:
    plain, images = drawn(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)), pixels()
    served = ServedModel(plain, "features")
    check(served, plain(batch_of(images, served.spec)), images)
    distilled = drawn(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=7))
    served = ServedModel(distilled, "distilled")
    batch = batch_of(images, served.spec)
    check(served, distilled.forward_features(batch)[:, 0], images, label=distilled(batch))


@torch.no_grad()
def test_transformers_classifier_names_its_classes() -> None:
    names = {0: "cat", 1: "dog", 2: "eel"}
    config = hf.Dinov2Config(**{**IMAGES, "mlp_ratio": 2}, id2label=names, label2id={v: k for k, v in names.items()})
    model, images = drawn(hf.Dinov2ForImageClassification(config)), pixels()
    served = ServedModel(model, "dinov2")
    batch = batch_of(images, served.spec)
    check(served, model.dinov2(batch).last_hidden_state[:, 0], images, label=model(batch).logits)
    assert served.classes == {"label": ("cat", "dog", "eel")}


@torch.no_grad()
def test_transformers_model_without_a_head() -> None:
    model, images = drawn(hf.ViTModel(hf.ViTConfig(**IMAGES), add_pooling_layer=False)), pixels()
    served = ServedModel(model, "vit")
    check(served, model(batch_of(images, served.spec)).last_hidden_state[:, 0], images)


@torch.no_grad()
def test_vision_tower_of_clip() -> None:
    text = {**SIZES, "vocab_size": 12, "max_position_embeddings": 16}
    clip = drawn(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=16)))
    served, images = ServedModel(clip, "clip"), pixels()
    check(served, clip.vision_model(batch_of(images, served.spec)).pooler_output, images)


@torch.no_grad()
def test_vitrail_model_with_tasks() -> None:
    tokens = [vitrail.TokenSpec("cls", "class"), vitrail.TokenSpec("color", "task", classes=2)]
    config = vitrail.ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=3, tokens=tokens)
    model, images = drawn(vitrail.ViT(config)), pixels()
    model._vitrail_labels = {"classes": {"label": ["a", "b", "c"], "color": ["red", "blue"]}}
    served = ServedModel(model, "tasks")
    output = model.forward_output(batch_of(images, served.spec))
    check(served, output.features[:, 0], images, label=output.logits, color=output.by_role["color"])


@torch.no_grad()
def test_merged_model_answers_the_same_alone_and_in_a_batch() -> None:
    model = drawn(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=7)).double()
    images = pixels(5, 64)
    unmerged = ServedModel(model, "unmerged")(images)
    vitrail.merge(model, r=3)
    served = ServedModel(model, "merged")
    assert served.merging is not None
    assert served.merging["r"] == 3
    together = served(images)
    for image, answer, before in zip(images, together, unmerged, strict=True):
        torch.testing.assert_close(served([image])[0].embedding, answer.embedding, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(answer.embedding, before.embedding, rtol=1e-3)


@torch.no_grad()
def test_answers_are_those_of_embed_and_predict(tmp_path: Path) -> None:
    """The commands are the oracle for preprocessing, too: an image that is not square, with JPEG's scaled decoding."""
    files, data = [], []
    for number in range(2):
        file = io.BytesIO()
        Image.effect_noise((500, 300 + 50 * number), 80).convert("RGB").save(file, "JPEG")
        files.append(tmp_path / f"{number}.jpg")
        files[-1].write_bytes(file.getvalue())
        data.append(file.getvalue())
    model = drawn(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7))
    vitrail.merge(model, r=1)
    table = vitrail.embed(model, tmp_path, dtype="float32")
    served = ServedModel(model, "timm")
    answers = served([served.prepare(one, "image") for one in data])
    wanted = torch.as_tensor(table["class"])
    torch.testing.assert_close(torch.stack([one.embedding for one in answers]), wanted, rtol=1e-4, atol=1e-5)
