"""``vitrail bench``: output, files and errors."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.bench.models import FULL, result
from tests.cli.words import one_line
from vitrail.bench import MODES, BenchConfig, BenchResult
from vitrail.bench import sweep as sweeping
from vitrail.cli import app
from vitrail.cli._shared import console
from vitrail.cli.bench import COLUMNS
from vitrail.errors import UnsupportedInput

MODEL = "timm:vit_tiny_patch16_224"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[BenchConfig]:
    """Configurations passed to a fake benchmark."""
    configs: list[BenchConfig] = []

    def fake(config: BenchConfig, **options: Any) -> BenchResult:
        configs.append(config)
        return result(*FULL, config=config)

    measure_with(fake, monkeypatch)
    return configs


def measure_with(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the benchmark, on any device and without a model."""
    monkeypatch.setattr(sweeping, "run", fake)
    monkeypatch.setattr(BenchConfig, "check_here", lambda config: None)
    monkeypatch.setattr("vitrail.cli.bench.load", lambda name, command, **options: SimpleNamespace(model=name))


def test_real_benchmark(saved_vit: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = run(f"hf:{saved_vit}", "--r", 3, "--batch", 2, "--device", "cpu", "--seconds", "0.01", "-o", path)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    data = json.loads(lines[-1])
    assert json.loads(path.read_text(encoding="utf-8")) == data
    assert [(row["variant"], row["mode"]) for row in data["rows"]] == [
        *(("unmerged", "eager"), ("sliced", "eager"), ("merged", "eager")),
    ]
    times = {row["variant"]: row["ms"] for row in data["rows"]}
    assert data["speedup"] == pytest.approx(times["unmerged"] / times["merged"])
    assert data["efficiency"] == pytest.approx(times["sliced"] / times["merged"])
    assert data["rows"][0]["images_per_s"] == pytest.approx(2000 / times["unmerged"])
    assert data["rows"][0]["peak_mb"] is None
    assert data["tokens_per_layer"] == [14, 11]
    assert data["flops_before"] > data["flops_after"]
    assert data["config"]["pretrained"] is False
    assert lines[0].startswith(f"hf:{saved_vit}, 32 × 32, batch 2, r = 3, fp32, inference, random weights: 17 → 11")
    assert f"Speed-up {data['speedup']:.2f}: merged" in done.stdout
    assert f"Efficiency {data['efficiency']:.2f}: the same model" in done.stdout
    assert "Kernels of the merged model: " in done.stdout
    assert "Machine: " in done.stdout


def test_table(measured: list[BenchConfig]) -> None:
    done = run(MODEL, "-r", 16, "-b", 8, "--compile")
    text = done.stdout.splitlines()
    assert [name for name in COLUMNS if name in text[2]] == list(COLUMNS)
    row = next(line for line in text if "unmerged" in line and "compiled" in line)
    assert row.split() == ["unmerged", "compiled", "20", "±1%", "400", "0.4", "5", "0.50", "–"]
    assert max(len(line) for line in text[2:10]) <= 80


def test_options_reach_the_benchmark(measured: list[BenchConfig]) -> None:
    options = "--dtype bf16 --device cuda --size 384x512 --compile --graph --capture --blocks --pretrained --cold"
    more = "--no-check --seconds 3 --limit 60 --threads 2 --attention cudnn --schedule decreasing --no-proportional"
    done = run(MODEL, "--r", 16, "--batch", 256, *options.split(), *more.split())
    assert done.exit_code == 0, done.output
    assert measured == [
        BenchConfig(
            MODEL,
            r=16,
            batch=256,
            dtype="bf16",
            device="cuda",
            size=(384, 512),
            modes=MODES,
            pretrained=True,
            cold=True,
            check=False,
            seconds=3.0,
            limit=60.0,
            threads=2,
            attention="cudnn",
            schedule="decreasing",
            proportional=False,
        )
    ]
    run(MODEL, "--r", 16, "--train", "--dtype", "bf16", "--autocast", "--schedule", "0.5")
    assert (measured[1].train, measured[1].autocast, measured[1].schedule) == (True, True, 0.5)
    assert (measured[1].modes, measured[1].pretrained) == (("eager",), False)


def test_sweep(measured: list[BenchConfig], tmp_path: Path) -> None:
    done = run(MODEL, "--r", "0,4,8", "--batch", 8, "-o", tmp_path / "sweep.json")
    assert done.exit_code == 0, done.output
    assert [config.r for config in measured] == [0, 4, 8]
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["sweep"] == "r"
    assert [entry["config"]["r"] for entry in data["runs"]] == [0, 4, 8]
    assert json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8")) == data
    assert done.stdout.count("Speed-up 1.60") == 3
    assert done.stdout.count("Ready s:") == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["8", "149", "1", "12", "12.5", "1.60", "0.96"] in lines
    assert one_line(done.stdout).count("Unmerged: 20 ms, the median of 3 runs") == 1


def test_status_line_is_cleared(measured: list[BenchConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    for name in ("out", "err"):
        monkeypatch.setattr(console, name, Console(file=screen, force_terminal=True, color_system=None, width=120))
    assert run(MODEL, "--r", "0,4").exit_code == 0
    before = screen.getvalue().split(f"{MODEL}, 224 × 224, batch 64")[:-1]
    assert len(before) == 2
    assert all(text.endswith("\x1b[2K") for text in before)  # the line was cleared


def test_sweep_loads_its_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def load(name: str, command: str, **options: object) -> SimpleNamespace:
        calls.append((name, options))
        return SimpleNamespace(model="the model")

    def fake(config: BenchConfig, model: object, tell: Any) -> BenchResult:
        assert model == "the model"
        return result(*FULL, config=config)

    measure_with(fake, monkeypatch)
    monkeypatch.setattr("vitrail.cli.bench.load", load)
    done = run(MODEL, "--r", "0,4", "--pretrained", "--size", 64)
    assert done.exit_code == 0, done.output
    assert calls == [(MODEL, {"random": False, "size": (64, 64), "device": "cpu"})]
    run(MODEL, "--r", 4)
    assert calls[1] == (MODEL, {"random": True, "size": None, "device": "cpu"})


def test_interrupted_sweep_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(config: BenchConfig, **options: Any) -> BenchResult:
        if config.r == 8:
            raise KeyboardInterrupt
        return result(*FULL, config=config)

    measure_with(fake, monkeypatch)
    (tmp_path / "sweep.json").write_text("old")
    done = run(MODEL, "--r", "0,4,8,16", "-o", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.svg")
    assert done.exit_code == 130
    assert "Interrupted after 2 of 4 values of r" in one_line(done.stderr)
    data = json.loads(done.stdout.splitlines()[-1])
    assert [entry["config"]["r"] for entry in data["runs"]] == [0, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert (tmp_path / "sweep.json").read_text() == "old"


def test_unreachable_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vitrail.adapters.hub.unreachable", lambda: "hub.example")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    done = run(MODEL, "--r", 4, "--pretrained", "--device", "cpu")
    assert done.exit_code == 2
    assert "hub.example cannot be reached" in one_line(done.stderr)
    assert "--random-weights" in one_line(done.stderr)
    done = run("hf:nobody/never-fetched", "--r", 4, "--device", "cpu")
    assert done.exit_code == 2
    assert "it could not be loaded (hub.example cannot be reached)" in one_line(done.stderr)


def test_failed_sweep_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(config: BenchConfig, **options: Any) -> BenchResult:
        if config.batch > 8:
            raise UnsupportedInput("batch 64 does not fit")
        return result(*FULL, config=config)

    measure_with(fake, monkeypatch)
    done = run(MODEL, "--r", 4, "--batch", "1,8,64", "-o", tmp_path / "sweep.json")
    assert done.exit_code == 2
    assert "batch 64 does not fit" in done.stderr
    data = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert [entry["config"]["batch"] for entry in data["runs"]] == [1, 8]


def test_a_terminal_gets_no_json(measured: list[BenchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(console.out), "is_terminal", True)
    done = run(MODEL, "--r", 4, "-o", tmp_path / "bench.json")
    assert done.exit_code == 0
    assert not any(line.startswith("{") for line in done.stdout.splitlines())
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["config"]["r"] == 4


def test_plot_file(measured: list[BenchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.cli.bench.require_matplotlib", lambda kind: None)
    monkeypatch.setattr("vitrail.cli.bench.plot", lambda results, name, kind: f"{name} {kind} {len(results)}".encode())
    path = tmp_path / "sweep.SVG"
    done = run(MODEL, "--r", 4, "--batch", "1,8", "--plot", path)
    assert done.exit_code == 0, done.output
    assert path.read_text(encoding="utf-8") == "batch svg 2"
    assert str(path) in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--r", "4", "--dtype", "int8"], "dtype must be one of"),
        (["--r", "-4"], "--r '-4' is not a number of 0 or more"),
        (["--r", "4,"], "--r '4,' is not a number of 0 or more"),
        (["--r", "4,x"], "like --r 4,8,16"),
        (["--r", "4,4"], "repeats a value"),
        (["--r", "16,16,8,8"], "one number per layer, use Python"),
        (["--r", "4", "--batch", "0"], "--batch-size '0' is not a number of 1 or more"),
        (["--r", "4", "--batch", "many"], "--batch-size 'many' is not a number of 1 or more"),
        (["--r", "4,8", "--batch", "1,2"], "Sweep either --r or --batch"),
        (["--r", "4", "--plot", "x.png"], "--plot needs a sweep"),
        (["--r", "4", "--device", "cuda"], "no CUDA device"),
        (["--r", "4", "--device", "tpu"], "device must be one of cpu, cuda; got 'tpu'"),
        (["--r", "4", "--graph", "--device", "cpu"], "CUDA graphs need a CUDA device"),
        (["--r", "4", "--graph", "--train"], "--train does not work with CUDA graphs"),
        (["--r", "4", "--size", "big"], "'big' is not a size"),
        (["--r", "4", "--size", "70", "--device", "cpu"], "not a whole number of patches"),
        (["--r", "4", "--seconds", "0"], "--seconds 0.0: expected a number above 0"),
        (["--r", "4", "--threads", "0"], "threads must be an integer"),
        (["--r", "4", "--schedule", "steep", "--device", "cpu"], "schedule is one of"),
        (["--r", "4", "--attention", "quick"], "attention must be one of"),
        (["--r", "4", "-o", "no/such/folder/x.json"], "no file can be written there"),
        (["--r", "4", "-o", "/proc/x.json"], "Name another file with -o"),
        (["--r", "4", "--threads", "100000"], "threads is 100000, but"),
        (["--r", "4", "--batch", "100000000000", "--device", "cpu"], "Choose a smaller batch"),
        (["--r", "4,8", "--plot", "x.bmp"], "plots are png, svg, pdf files; got 'bmp'"),
        (["--batch", "4"], "Missing option"),
    ],
)
def test_errors(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run(MODEL, *arguments)
    assert done.exit_code == 2
    assert message in one_line(done.stderr)
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_unknown_models() -> None:
    for name, message in (("timm:no_such_vit", "timm has no model named"), ("vit", "a model is named timm:NAME")):
        done = run(name, "--r", 4, "--device", "cpu")
        assert done.exit_code == 2
        assert message in one_line(done.stderr)


def test_missing_matplotlib_stops_before_measuring(
    measured: list[BenchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("vitrail.drawing.plots.import_module", missing)
    done = run(MODEL, "--r", "4,8", "--plot", tmp_path / "x.png")
    assert done.exit_code == 2
    assert "need matplotlib" in one_line(done.stderr)
    assert measured == []


def test_unwritable_file(measured: list[BenchConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    done = run(MODEL, "--r", 4, "-o", tmp_path / "x.json")
    assert done.exit_code == 2
    assert "No space left on device" in one_line(done.stderr)
    assert "Name another file with -o" in one_line(done.stderr)
    assert json.loads(done.stdout.splitlines()[-1])["speedup"] == pytest.approx(1.6)


def test_fp16_on_cpu_notes(saved_vit: Path) -> None:
    done = run(f"hf:{saved_vit}", "--r", 2, "-b", 1, "--device", "cpu", "--dtype", "fp16", "--seconds", "0.01")
    assert done.exit_code == 0, done.output
    assert "Note: fp16 on a CPU" in done.stderr


def test_help() -> None:
    text = one_line(CliRunner().invoke(app, ["bench", "-h"]).stdout)
    assert "the others cut off for free" in text
    assert "speed does not depend" in text
    assert "Examples" in text
