"""The served model: scores and embeddings are those of the model's own library, one pass for both."""

import timm
import torch
import transformers as hf
from PIL import Image

import vitrail
from tests.parity.models import redraw
from vitrail.data import to_tensor
from vitrail.serve import ServedModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}


def inputs(count: int = 3) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, 32, 32))


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    redraw(model.eval(), 1)
    return model


@torch.no_grad()
def test_timm_classifier() -> None:
    model = drawn(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7))
    served, images = ServedModel(model, "timm"), inputs()
    answers = served(images)
    batch = torch.stack(images)
    features = model.forward_features(batch)
    torch.testing.assert_close(
        torch.stack([one.embedding for one in answers]), model.forward_head(features, pre_logits=True)
    )
    torch.testing.assert_close(torch.stack([one.scores["label"] for one in answers]), model(batch).softmax(1))
    assert (served.width, served.classes, served.is_classifier) == (192, {}, True)


@torch.no_grad()
def test_timm_model_without_a_head_and_with_two() -> None:
    plain = drawn(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0))
    images = inputs()
    served = ServedModel(plain, "features")
    torch.testing.assert_close(torch.stack([one.embedding for one in served(images)]), plain(torch.stack(images)))
    assert not served.is_classifier
    assert served(images)[0].scores == {}

    distilled = drawn(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=7))
    answers = ServedModel(distilled, "distilled")(images)
    tokens = distilled.forward_features(torch.stack(images))
    torch.testing.assert_close(torch.stack([one.embedding for one in answers]), tokens[:, :2].mean(1))
    torch.testing.assert_close(answers[0].scores["label"], distilled(torch.stack(images))[0].softmax(0))


@torch.no_grad()
def test_transformers_classifier_names_its_classes() -> None:
    names = {0: "cat", 1: "dog", 2: "eel"}
    config = hf.Dinov2Config(**{**IMAGES, "mlp_ratio": 2}, id2label=names, label2id={v: k for k, v in names.items()})
    model = drawn(hf.Dinov2ForImageClassification(config))
    served, images = ServedModel(model, "dinov2"), inputs()
    assert served.classes == vitrail.class_names(model) == {"label": ("cat", "dog", "eel")}
    answers = served(images)
    states = model.dinov2(torch.stack(images)).last_hidden_state
    torch.testing.assert_close(
        torch.stack([one.embedding for one in answers]), torch.cat([states[:, 0], states[:, 1:].mean(1)], 1)
    )
    torch.testing.assert_close(answers[1].scores["label"], model(torch.stack(images)).logits[1].softmax(0))


def test_placeholders_are_no_class_names() -> None:
    assert vitrail.class_names(hf.ViTForImageClassification(hf.ViTConfig(**IMAGES, num_labels=5))) == {}


@torch.no_grad()
def test_transformers_model_without_a_head() -> None:
    model, images = drawn(hf.ViTModel(hf.ViTConfig(**IMAGES), add_pooling_layer=False)), inputs()
    answers = ServedModel(model, "vit")(images)
    states = model(torch.stack(images)).last_hidden_state
    torch.testing.assert_close(torch.stack([one.embedding for one in answers]), states[:, 0])


@torch.no_grad()
def test_vitrail_model_with_tasks() -> None:
    tokens = [
        vitrail.TokenSpec("cls", "class"),
        vitrail.TokenSpec("color", "task", classes=2),
    ]
    config = vitrail.ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, num_classes=3, tokens=tokens)
    model = drawn(vitrail.ViT(config))
    model._vitrail_labels = {"classes": {"label": ["a", "b", "c"], "color": ["red", "blue"]}}
    served, images = ServedModel(model, "tasks"), inputs()
    answers = served(images)
    output = model.forward_output(torch.stack(images))
    torch.testing.assert_close(torch.stack([one.embedding for one in answers]), output.features[:, 0])
    torch.testing.assert_close(answers[2].scores["color"], output.by_role["color"][2].softmax(0))
    torch.testing.assert_close(answers[2].scores["label"], output.logits[2].softmax(0))


@torch.no_grad()
def test_merged_model_answers_the_same_alone_and_in_a_batch() -> None:
    model = drawn(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=7)).double()
    images = list(torch.randn(5, 3, 64, 64, dtype=torch.float64))
    unmerged = ServedModel(model, "unmerged")(images)
    vitrail.merge(model, r=3)
    served = ServedModel(model, "merged")
    assert served.merging is not None
    assert served.merging["r"] == 3
    together = served(images)
    for image, answer, before in zip(images, together, unmerged, strict=True):
        torch.testing.assert_close(served([image])[0].embedding, answer.embedding, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(answer.embedding, before.embedding, rtol=1e-3)


def test_preprocessing_is_that_of_every_command() -> None:
    served = ServedModel(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "timm")
    image = Image.effect_noise((50, 40), 80).convert("RGB")
    assert torch.equal(served.prepare(image), to_tensor([image], served.spec)[0])
    assert served.spec.size == (32, 32)
