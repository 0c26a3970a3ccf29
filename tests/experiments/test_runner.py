"""The runner and its command: rows, kills, failures, searches, models of other arms, generated READMEs."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.__main__ import NAMES, app, load_study
from experiments.common import runner as runner_module
from experiments.common.datasets import Data, reduced_images
from experiments.common.plots import description
from experiments.common.readme import section, with_plots, write_readme
from experiments.common.results import RESULTS, SEARCH, add_row, best_point, read_rows, rows_of, run_key, unpack
from experiments.common.runner import Runner
from experiments.common.study import Arm, RunOf, Study
from experiments.common.tables import difference
from vitrail._atomic_files import directory_lock
from vitrail.errors import ImageError, InvalidOption
from vitrail.training import Event
from vitrail.training.interrupt import Interrupted, Stop

FOLDERS = Path(runner_module.__file__).resolve().parents[1]

TOY = Study(
    name="toy",
    question="Does it run?",
    data=reduced_images,
    base={
        "model": "vit_tiny_patch16", "options": {"width": 16, "depth": 1, "heads": 1}, "preset": "tiny",
        "image_size": 32, "patch_size": 16, "epochs": 1, "batch_size": 32,
    },
    arms=(Arm("plain"), Arm("registers", tokens="cls,register=2")),
    reference="plain",
    seeds=(0, 1),
)  # fmt: skip


def reproducible(row: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a row that must be reproducible."""
    return {name: row[name] for name in ("key", "arm", "seed", "accuracy", "correct", "loss", "parameters")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """Train some arms of a study at the reduced size by its command."""
    out = tmp_path_factory.mktemp("class_tokens")
    arguments = ["class_tokens", "--reduced", "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--arms", r"(1 × std .02|2 × std (0|\.02))$"])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 10, result.output
    again = CliRunner().invoke(app, [*arguments, "--arms", r"(1 × std .02|2 × std (0|\.02))$"])
    assert again.exit_code == 0, again.output
    assert again.output.startswith(f"class_tokens: all 10 runs exist in {out / 'class_tokens'}.")
    return load_study("class_tokens").at_reduced_size(), out / "class_tokens"


def test_accuracy_equals_the_share_of_correct_predictions(finished: tuple[Study, Path]) -> None:
    """The accuracy of `evaluate` equals the mean of the stored predictions."""
    rows = read_rows(finished[1] / RESULTS)
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for arm in ("1 × std .02", "2 × std 0", "2 × std .02") for seed in (0, 1)
    ]
    for row in rows:
        assert row["correct"].keys() == row["accuracy"].keys() == {"fused", "cls"}
        for name, packed in row["correct"].items():
            assert unpack(packed, row["count"]).mean() == pytest.approx(row["accuracy"][name])
        assert row["count"] == len(reduced_images().validation)
        assert row["seconds"] > 0
        assert row["versions"].keys() == {"python", "torch", "vitrail"}


def test_equal_class_tokens_stay_equal_and_others_do_not(finished: tuple[Study, Path]) -> None:
    for row in read_rows(finished[1] / RESULTS):
        if row["arm"] == "2 × std 0":
            assert row["apart"] == 0
            assert row["disagree"] == 0
            assert [one["outputs"] for one in row["over_training"]] == pytest.approx([1.0, 1.0])
        elif row["arm"] == "2 × std .02":
            assert row["apart"] > 0.3
            assert row["outputs_by_layer"][-1] < 0.999
            assert [one["epoch"] for one in row["over_training"]] == [1, 2]
        else:
            assert "apart" not in row


def test_best_point_of_the_search_is_used(finished: tuple[Study, Path]) -> None:
    study, out = finished
    tried = read_rows(out / SEARCH)
    assert [row["arm"] for row in tried] == ["1 × std .02"] * 2 + ["2 × std .02"] * 2
    for row in read_rows(out / RESULTS):
        arm = study.arm(row["arm"])
        own = [one for one in tried if one["arm"] == (arm.tuned_as or arm.name)]
        assert row["point"] == max(own, key=lambda one: one["held"])["point"] == best_point(study, arm, out)
        assert row["fields"]["lr"] == row["point"]["lr"]
    with pytest.raises(InvalidOption, match=r"not finished for arm '4 × std \.02'"):
        best_point(study, study.arm("4 × std 0"), out)


def test_readme_is_generated_from_the_rows(finished: tuple[Study, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = finished
    rows = rows_of(study, out)
    (out / "README.md").write_text("Before\n\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    write_readme(study, out)
    page = (out / "README.md").read_text()
    plots = "\n\n".join(f"![{description(out / name)}]({name})" for name in ("accuracy.png", "cosines.png"))
    assert "validation accuracy, % (band: 95 % interval of the mean over seeds)](accuracy.png)" in plots
    assert "cosine between class tokens by epoch, at the end: 2 × std 0 = " in plots
    assert page == f"Before\n\n<!-- results -->\n{section(study, rows)}\n\n{plots}\n<!-- /results -->\nafter\n"
    mean = sum(100 * row["accuracy"]["fused"] for row in rows[2:4]) / 2
    found = difference(rows[2:4], rows[:2], "fused")
    assert found is not None
    line = next(line for line in page.splitlines() if line.startswith("| 2 × std 0 |"))
    assert f"| {mean:.2f} ± " in line
    assert f"{100 * found.mean:+.2f}".replace("-", "−") in line
    for name in ("accuracy.png", "cosines.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert rows_of(replace(study, base={**study.base, "epochs": 3}), out) == []  # rows of other settings


def test_missing_readme_is_created_and_one_without_markers_is_kept(
    finished: tuple[Study, Path], tmp_path: Path
) -> None:
    study, out = finished
    own = tmp_path / "own"
    own.mkdir()
    for name in (RESULTS, SEARCH):
        shutil.copy(out / name, own / name)
    assert write_readme(study, own)
    assert (
        (own / "README.md").read_text().startswith(f"# class_tokens\n\n{study.question}\n\n<!-- results -->\n| arm |")
    )
    (own / "README.md").write_text("no markers here")
    with pytest.raises(InvalidOption, match="exactly once"):
        write_readme(study, own)
    assert (own / "README.md").read_text() == "no markers here"


def test_truncated_row_is_skipped(tmp_path: Path) -> None:
    add_row(tmp_path / SEARCH, {"arm": "2 × std 0"})
    whole = (tmp_path / SEARCH).read_bytes()
    (tmp_path / SEARCH).write_bytes(whole + whole[: whole.index("×".encode()) + 1])
    assert read_rows(tmp_path / SEARCH) == [{"arm": "2 × std 0"}]
    add_row(tmp_path / SEARCH, {"arm": "4 × std 0"})
    assert [row["arm"] for row in read_rows(tmp_path / SEARCH)] == ["2 × std 0", "4 × std 0"]


@pytest.mark.parametrize("option", [[], ["--plot"]])
@pytest.mark.parametrize("line", ["123", "null", "{}", '{"arm": "1 × std 0", "key": "x"}'])
def test_invalid_row_is_reported_with_file_and_line(line: str, option: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "class_tokens" / (RESULTS if option else SEARCH)
    rows.parent.mkdir()
    rows.write_text(f'{{"error": "nothing goes", "key": "y"}}\n{line}\n', encoding="utf-8")
    result = CliRunner().invoke(app, ["class_tokens", "--reduced", "--device", "cpu", "--out", str(tmp_path), *option])
    assert (result.exit_code, f"{rows}, line 2: expected a row with " in result.output) == (2, True), result.output
    assert rows.read_text(encoding="utf-8").splitlines()[1] == line
    assert [path.name for path in rows.parent.iterdir()] == [rows.name]


def test_rows_of_other_settings_are_reported(finished: tuple[Study, Path]) -> None:
    study, out = finished
    page = out / "README.md"
    page.write_text("<!-- results -->\nas it was\n<!-- /results -->\n")
    with pytest.raises(InvalidOption, match="all 6 rows are of other settings"):
        write_readme(load_study(study.name), out)
    assert page.read_text() == "<!-- results -->\nas it was\n<!-- /results -->\n"


def test_study_that_cannot_be_listed_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "sounds").mkdir(parents=True)
    result = CliRunner().invoke(app, ["tasks/", "--plot", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "tasks/pets: folder" in result.output
    assert "tasks/sounds: 0 rows in" in result.output


@pytest.mark.parametrize("library", ["matplotlib", "scipy.stats"])
def test_missing_library_is_named(
    library: str, finished: tuple[Study, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, out = finished
    shutil.copytree(out, tmp_path / study.name)
    before = sorted(path.name for path in (tmp_path / study.name).iterdir())
    monkeypatch.setitem(sys.modules, library, None)
    result = CliRunner().invoke(app, [study.name, "--reduced", "--plot", "--out", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert f"{library} is not installed; run pip install -e '.[train," in result.output
    assert sorted(path.name for path in (tmp_path / study.name).iterdir()) == before


def test_killed_study_resumes_with_the_same_rows(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    lines: list[str] = []

    def kill_after_two(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise Killed

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Runner(TOY, whole, device="cpu").run()
    with pytest.raises(Killed):
        Runner(TOY, parts, device="cpu", log=kill_after_two).run()
    text = (parts / RESULTS).read_text()
    assert len(text.splitlines()) == 2
    (parts / RESULTS).write_text(text + text.splitlines()[0][:40])  # killed while writing a row
    again: list[str] = []
    Runner(TOY, parts, device="cpu", log=again.append).run()
    assert [line.partition(" ")[0] for line in again] == ["3/4", "4/4"]
    assert [reproducible(row) for row in read_rows(parts / RESULTS)] == [
        reproducible(row) for row in read_rows(whole / RESULTS)
    ]
    Runner(TOY, parts, device="cpu", log=again.append).run()
    assert len(again) == 2
    assert not list((parts / "runs").rglob("*.safetensors"))  # unneeded models are deleted


def test_long_run_resumes_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(TOY, base={**TOY.base, "epochs": 4}, arms=TOY.arms[:1], seeds=(0,), save_every=1)
    calls, train = [], runner_module.train

    def cut_off(**given: Any) -> Any:
        def tell(event: Event) -> None:
            if event.kind == "epoch" and event.values["epoch"] == 2:
                raise KeyboardInterrupt

        calls.append(given["resume"])
        return train(**given, on_event=tell if len(calls) == 1 else None)

    Runner(study, tmp_path / "whole", device="cpu").run()
    monkeypatch.setattr(runner_module, "train", cut_off)
    with pytest.raises(KeyboardInterrupt):
        Runner(study, tmp_path / "parts", device="cpu").run()
    Runner(study, tmp_path / "parts", device="cpu").run()
    assert calls == [False, True]
    one, other = (read_rows(tmp_path / name / RESULTS) for name in ("whole", "parts"))
    assert [reproducible(row) for row in one] == [reproducible(row) for row in other]
    assert len(one) == 1


def test_failed_run_is_a_row_and_the_others_continue(tmp_path: Path) -> None:
    arms = (Arm("bad", tokens="nonsense"), Arm("plain"))
    study = replace(TOY, arms=arms, seeds=(0,))
    for _ in range(2):  # only failed runs are retried
        runner = Runner(study, tmp_path, device="cpu")
        runner.run()
        assert runner.failed == 1
    rows = read_rows(tmp_path / RESULTS)
    assert [(row["arm"], "error" in row) for row in rows] == [("bad", True), ("plain", False), ("bad", True)]
    assert "nonsense" in rows[0]["error"]
    assert [row["arm"] for row in rows_of(study, tmp_path)] == ["plain"]


def test_repeated_error_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: Any) -> Any:
        raise InvalidOption("nothing goes")

    monkeypatch.setattr(runner_module, "train", fail)
    study = load_study("class_tokens").at_reduced_size()
    result = CliRunner().invoke(app, ["class_tokens", "--reduced", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    jobs = len(study.points()) * len({arm.tuned_as or arm.name for arm in study.arms})
    assert len(lines) == jobs + 1
    assert result.output.count("nothing goes") == 1
    assert "InvalidOption" in lines[0]
    assert [line.partition("the same error, ")[2] for line in lines[1:-1]] == [
        f"{number} runs so far" for number in range(2, jobs + 1)
    ]
    assert lines[-1] == f"{jobs} runs failed with one error; see their rows."
    assert all("nothing goes" in row["error"] for row in read_rows(tmp_path / "class_tokens" / SEARCH))
    both = CliRunner().invoke(app, ["class_tokens", "depth", "--reduced", "--device", "cpu", "--out", str(tmp_path)])
    *runs, _ = both.output.splitlines()
    assert {line.split()[0] for line in runs} == {"class_tokens", "depth"}  # lines name their study


@pytest.mark.parametrize(
    ("given", "message"), [(["--data", "nowhere"], "VITRAIL_DATA"), (["--device", "tpu"], "expected one of cpu, cuda")]
)
def test_error_that_affects_all_runs_is_not_a_failed_run(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "nowhere"))
    load_study("class_tokens").data.cache_clear()  # type: ignore[attr-defined]
    result = CliRunner().invoke(app, ["class_tokens", *given, "--out", str(tmp_path)])
    assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), result.output
    assert not list(tmp_path.iterdir())


def test_several_processes_share_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs claimed by another process are skipped, waited for, and done if the other process did not finish them."""
    keys = [run_key(TOY, TOY.arms[0], seed, {}, tmp_path) for seed in TOY.seeds]
    folders = [tmp_path / "runs" / "claimed" / f"runs-{key}" for key in keys]
    waited: list[list[int]] = []
    with ExitStack() as other:
        for folder in folders:
            folder.mkdir(parents=True)
            other.enter_context(directory_lock(folder))

        def wait(seconds: float) -> None:
            rows = read_rows(tmp_path / RESULTS)
            waited.append([row["seed"] for row in rows])
            add_row(tmp_path / RESULTS, {**rows[0], "arm": "plain", "seed": 0, "key": keys[0]})
            other.close()

        monkeypatch.setattr(runner_module.time, "sleep", wait)
        runner = Runner(TOY, tmp_path, device="cpu")
        runner.run()
    assert waited == [[0, 1]]  # of the unclaimed arm
    assert (runner.existing, runner.tried, runner.unfinished) == (1, 3, 0)
    assert [(row["arm"], row["seed"]) for row in read_rows(tmp_path / RESULTS)[2:]] == [("plain", 0), ("plain", 1)]


def test_run_that_failed_in_another_process_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [run_key(TOY, arm, seed, {}, tmp_path) for arm in TOY.arms for seed in TOY.seeds]
    calls = 0

    def fail(**given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:  # another process fails the second run meanwhile
            add_row(tmp_path / RESULTS, {"key": keys[1], "arm": "plain", "error": "there, too"})
        raise InvalidOption("nothing goes")

    monkeypatch.setattr(runner_module, "train", fail)
    runner = Runner(TOY, tmp_path, device="cpu")
    runner.run()
    assert (calls, runner.failed, runner.failed_elsewhere) == (3, 3, 1)
    again = Runner(TOY, tmp_path, device="cpu")
    again.run()
    assert (calls, again.failed, again.failed_elsewhere) == (7, 4, 0)  # earlier failures are retried


def test_run_of_another_process_does_not_count_as_unfinished(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "claimed" / f"runs-{run_key(TOY, TOY.arms[0], TOY.seeds[0], {}, tmp_path)}"
    folder.mkdir(parents=True)
    with directory_lock(folder):
        runner = Runner(TOY, tmp_path, seconds=0, device="cpu")
        runner.run()
    assert (runner.unfinished, runner.tried) == (3, 0)


def test_no_run_starts_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = runner_module.evaluate

    def evaluate(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*args, **options)

    monkeypatch.setattr(runner_module, "evaluate", evaluate)
    with Stop.listening() as stop, pytest.raises(Interrupted, match="Repeat the command"):
        Runner(TOY, tmp_path, device="cpu", stop=stop).run()
    assert [row["arm"] for row in read_rows(tmp_path / RESULTS)] == ["plain"]


def test_no_run_starts_after_the_time_limit(tmp_path: Path) -> None:
    runner = Runner(TOY, tmp_path, seconds=0, device="cpu")
    runner.run()
    assert runner.unfinished == 4
    assert not (tmp_path / RESULTS).exists()


def test_search_does_not_use_the_validation_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"validation set accessed: {name}")

    calls: list[dict[str, Any]] = []
    train = runner_module.train
    monkeypatch.setattr(runner_module, "train", lambda **given: (calls.append(given), train(**given))[1])
    data = Data(reduced_images().train, Untouchable())  # type: ignore[arg-type]
    study = replace(TOY, data=lambda: data, search={"lr": [1e-3, 2e-3], "drop_path": [0.0, 0.1]}, draws=2)
    Runner(study, tmp_path, device="cpu").search("plain")
    assert [given["validation"] for given in calls] == [0.1, 0.1]
    assert all(given["data"] is data.train for given in calls)
    points = [row["point"] for row in read_rows(tmp_path / SEARCH)]
    assert points == study.points()
    assert points[0] != points[1]


def test_arm_can_use_the_model_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Arm("taught", tokens="cls,distillation", teacher=RunOf("plain"))
    study = replace(TOY, arms=(taught, *TOY.arms), seeds=(1,))
    teachers: list[str | None] = []
    train = runner_module.train

    def recording_train(**given: Any) -> Any:
        teachers.append(given.get("teacher"))
        return train(**given)

    monkeypatch.setattr(runner_module, "train", recording_train)
    Runner(study, tmp_path, device="cpu").run("taught")
    (last,) = (tmp_path / "runs/runs").glob("plain-1-*/last")
    assert teachers == [None, str(last)]
    rows = read_rows(tmp_path / RESULTS)
    assert [row["arm"] for row in rows] == ["plain", "taught"]
    assert rows[1]["fields"]["teacher"] == {"run_of": "plain"}
    assert set(rows[1]["accuracy"]) == {"fused", "cls", "distillation"}
    assert {path.name for path in last.parent.iterdir()} >= {"last", "config.yaml"}
    with pytest.raises(InvalidOption, match="nobody among them"):
        replace(TOY, arms=(Arm("plain", teacher=RunOf("nobody")),))
    with pytest.raises(InvalidOption, match="arm 'plain' of study 'toy' has no epochs"):
        replace(TOY, base={"model": "vit_tiny_patch16"})


def test_one_model_can_teach_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Arm("taught", tokens="cls,distillation", teacher=RunOf("plain", seed=0))
    study = replace(TOY, arms=(TOY.arm("plain"), taught), seeds=(0, 1), reference="plain")
    trained: list[tuple[int, str | None]] = []
    train = runner_module.train

    def recording_train(**given: Any) -> Any:
        trained.append((given["seed"], given.get("teacher")))
        return train(**given)

    monkeypatch.setattr(runner_module, "train", recording_train)
    Runner(study, tmp_path, device="cpu").run()
    (first,) = (tmp_path / "runs/runs").glob("plain-0-*/last")
    assert trained == [(0, None), (1, None), (0, str(first)), (1, str(first))]
    trained.clear()
    Runner(study, tmp_path / "one", device="cpu").run("taught", (1,))
    assert [(row["arm"], row["seed"]) for row in read_rows(tmp_path / "one" / RESULTS)] == [("plain", 0), ("taught", 1)]
    assert len(trained) == 2
    rows = read_rows(tmp_path / RESULTS)
    assert rows[-1]["fields"]["teacher"] == {"run_of": "plain", "seed": 0}
    own = replace(study, arms=(study.arms[0], Arm("taught", tokens="cls,distillation", teacher=RunOf("plain"))))
    keys = [run_key(some, some.arm("taught"), 1, {}, tmp_path) for some in (study, own)]
    assert keys[0] == rows[-1]["key"]
    assert keys[0] != keys[1]


def test_arm_can_be_evaluated_at_another_size(tmp_path: Path) -> None:
    """Both rows are of the same training, evaluated at different sizes."""
    study = replace(TOY, arms=(Arm("plain"), Arm("larger", size=64)), seeds=(0,))
    Runner(study, tmp_path, device="cpu").run()
    plain, larger = read_rows(tmp_path / RESULTS)
    assert plain["parameters"] == larger["parameters"]
    assert plain["loss"] != larger["loss"]
    assert Arm("plain", size=64).at_reduced_size().size is None


def test_invalid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke: Callable[..., Any] = CliRunner().invoke
    assert "expected class_tokens" in " ".join(invoke(app, ["none"]).output.split())
    wrong = invoke(app, ["class_tokens", "--reduced", "--arms", "none", "--out", str(tmp_path)])
    assert (wrong.exit_code, "matches none of" in wrong.output) == (2, True)
    for arguments, message in (
        (["--seeds", "²"], "--seeds ²: expected integers"),
        (["--out", str(tmp_path / "file" / "below")], "file is a file"),
        (["--plot", "--out", str(tmp_path / "nowhere")], "does not exist"),
        (["--plot", "--seeds", "0"], "without --arms and --seeds"),
        (["--seconds", "nan"], "--seconds nan: expected a number"),
        (["--seconds", "-5"], "--seconds -5.0: expected a number"),
        (["--arms", "[red]none[/b]", "--out", str(tmp_path)], "--arms '[red]none[/b]' matches none of"),
        (["--seeds", "0,7", "--out", str(tmp_path)], "--seeds 0, 7: expected some of 0, 1"),
        (["--out", "/proc/nowhere"], "/proc/nowhere: No such file or directory. Expected a writable path"),
    ):
        (tmp_path / "file").touch()
        wrong = invoke(app, ["class_tokens", "--reduced", *arguments])
        words = " ".join(wrong.output.replace("│", "").split())
        assert (wrong.exit_code, message in words) == (2, True), wrong.output
    assert not (tmp_path / "class_tokens").exists()
    result = invoke(
        app, ["class_tokens", "--reduced", "--seconds", "0", "--arms", "^1 × std .02$", "--out", str(tmp_path)]
    )
    runs = 2 + 2  # at both points of the search, then with both seeds
    assert (result.exit_code, f"class_tokens: {runs} runs remain" in result.output) == (3, True), result.output
    result = invoke(app, ["long_distillation", "--reduced", "--tune", "--out", str(tmp_path)])
    assert (result.exit_code, "has no search" in result.output) == (0, True), result.output
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    study = load_study("class_tokens")
    study.data.cache_clear()  # type: ignore[attr-defined]
    with pytest.raises(ImageError, match="VITRAIL_DATA"):
        study.data()


@pytest.mark.parametrize("name", NAMES)
def test_readme_agrees_with_the_rows(name: str) -> None:
    """Tables are generated: `python -m experiments NAME --plot` rewrites them."""
    study, folder = load_study(name), FOLDERS / name
    assert study.name == name
    rows = rows_of(study, folder)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert study.question in " ".join(readme.split())
    (found,) = re.findall(r"<!-- results -->\n(.*?)\n<!-- /results -->", readme, re.DOTALL)
    assert found == with_plots(section(study, rows), folder)
    for file in (RESULTS, SEARCH):
        keys = [row["key"] for row in read_rows(folder / file) if "error" not in row]
        assert len(set(keys)) == len(keys)
        json.dumps(read_rows(folder / file))
