"""The public interface: every name of ``vitrail`` and of its packages, so that a change of it is visible in a diff."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import vitrail

PUBLIC = {
    "vitrail": (
        "Ablation AddedTokens Assignment CapturedModel Context Count Embeddings Merging Method Recording Reduction "
        "RegisterNeurons Report Role TestTimeRegisters ToMe TokenLayout TokenSpan TokenSpec Trace ViT ViTConfig ablate "
        "add_tokens capture class_names compare count create_model embed errors find_register_neurons from_pretrained "
        "from_timm inspect list_methods list_models load load_method load_model look_ahead merge predict "
        "read_embeddings record register_adapter register_method test_time_registers to_timm tune"
    ),
    "vitrail.adapters": (
        "ADAPTERS BlockAdapter BlockCall BlockNames Found InputSpec LIBRARIES Library MlpNames ModelRequest NamedBlock "
        "Position RelativeBias Rotary TrunkAdapter VisualTokens find head_outputs image_model input_spec known_block "
        "load_model register_adapter size_options supported"
    ),
    "vitrail.analysis": (
        "attention discovery downstream features norms probes redundancy residuals result roles statistics survey"
    ),
    "vitrail.bench": (
        "BenchConfig BenchResult Check Failure MODES ModelTimes Row Timed VARIANTS copy_model run time_models"
    ),
    "vitrail.cli": "app main",
    "vitrail.data": (
        "Arrays Batch Clip Dataset FrameSampling InputSpec MAX_PIXELS Sample Sound Source Spectrogram as_rgb "
        "check_image find_images open_dataset read_image samples to_tensor"
    ),
    "vitrail.embedding": "Column Embedder Embeddings Predictor Progress embed predict read_embeddings survey_norms",
    "vitrail.drawing": "contact_sheet draw_groups stained_glass",
    "vitrail.export": "Comparison ExportError ExportResult export",
    "vitrail.heads": "AttentionPool DecoderHead DenseHead Heads Output",
    "vitrail.merging": (
        "Assignment Context FEATURES METHODS MergeState Method ModelShape Prune Random Reduction Room Schedule "
        "Solution ToMe as_method list_methods match proportional_attention register_method"
    ),
    "vitrail.models": (
        "MODELS ViT ViTConfig create_model from_timm list_models load_timm_state_dict timm_state_dict to_timm"
    ),
    "vitrail.report": "Comparison Report ReportError compare inspect",
    "vitrail.serve": "Answer Batcher Limits Overloaded ServedModel ServingError Stopped",
    "vitrail.surgery": (
        "Ablation AddedTokens Count Handle Merging Payoff Recording RegisterNeurons TestTimeRegisters Trace ablate "
        "add_tokens count find_register_neurons from_pretrained load load_method look_ahead merge record "
        "test_time_registers"
    ),
    "vitrail.tokens": "Role TokenLayout TokenSpan TokenSpec check_specs span_names token_names",
    "vitrail.training": (
        "Arrays Config Evaluation Event Labels PRESETS Run Stability evaluate load_trained read_log read_stability "
        "train"
    ),
    "vitrail.tuning": "Candidate QUALITIES Quality SEARCHES Tolerance Tuning tune",
}

SHADOWING: dict[str, set[str]] = {"vitrail.cli": {"app"}, "vitrail.report": {"compare", "inspect"}}
"""Names that still shadow a module; no more may be added."""

ERRORS = (
    "AlreadyApplied BrokenPass Diverged EmbeddingError ExportError ImageError ImageTooLarge InvalidOption MediaError "
    "ModelLoadError NotApplied ReportError SaturatedWarning ServingError TrainingError UnsupportedInput "
    "UnsupportedModel UntrainedMethod VitrailError VitrailWarning"
)


def packages() -> list[str]:
    found = pkgutil.iter_modules(vitrail.__path__, "vitrail.")
    return ["vitrail", *(module.name for module in found if module.ispkg)]


def get(module: ModuleType, name: str) -> object:
    """Return a public name, which may be a module that is not loaded yet."""
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{module.__name__}.{name}")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(PUBLIC[name].split())
    assert all(get(module, public) is not None for public in module.__all__)


@pytest.mark.filterwarnings("ignore:vitrail.pictures is deprecated:DeprecationWarning")
def test_no_other_package_has_public_names() -> None:
    assert {name for name in packages() if hasattr(importlib.import_module(name), "__all__")} == set(PUBLIC)


def test_errors() -> None:
    kinds = {name for name, value in vars(vitrail.errors).items() if isinstance(value, type)}
    assert kinds == set(ERRORS.split())
    bases = (vitrail.errors.VitrailError, vitrail.errors.VitrailWarning)
    for name in kinds:
        assert issubclass(getattr(vitrail.errors, name), bases)
        assert f"─ {name} " in vitrail.errors.__doc__ or f" {name}\n" in vitrail.errors.__doc__


@pytest.mark.parametrize("name", PUBLIC)
def test_no_public_name_shadows_a_module(name: str) -> None:
    module = importlib.import_module(name)
    modules = {inner.name for inner in pkgutil.iter_modules(module.__path__)}
    public = {public for public in module.__all__ if not isinstance(get(module, public), ModuleType)}
    assert public & modules <= SHADOWING.get(name, set())
