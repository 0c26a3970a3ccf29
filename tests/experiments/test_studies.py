"""Studies at their reduced size: rows that agree with themselves, kills, failures, searches, models of other arms."""

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

from experiments.__main__ import NAMES, app, study_called
from experiments.common import running
from experiments.common.choosing import best_point, run_key
from experiments.common.data import Data, few
from experiments.common.pages import EVIDENCE, section, with_plots, write_pages
from experiments.common.rows import RESULTS, SEARCH, add_row, read_rows, unpack
from experiments.common.running import Runner
from experiments.common.study import Arm, RunOf, Study
from experiments.common.tables import difference, rows_of
from vitrail._atomic_files import held
from vitrail.errors import ImageError, InvalidOption
from vitrail.training import Event
from vitrail.training.interrupt import Interrupted, Stop

FOLDERS = Path(running.__file__).resolve().parents[1]

TOY = Study(
    name="toy",
    question="Does it run?",
    data=few,
    base={
        "model": "vit_tiny_patch16", "options": {"width": 16, "depth": 1, "heads": 1}, "preset": "tiny",
        "image_size": 32, "patch_size": 16, "epochs": 1, "batch_size": 32,
    },
    arms=(Arm("plain"), Arm("registers", tokens="cls,register=2")),
    reference="plain",
    seeds=(0, 1),
)  # fmt: skip


def silent(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row must be the same each time."""
    return {name: row[name] for name in ("key", "arm", "seed", "accuracy", "correct", "loss", "parameters")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """The first study, some of its arms, trained by its command at the reduced size."""
    out = tmp_path_factory.mktemp("class_tokens")
    arguments = ["class_tokens", "--reduced", "--device", "cpu", "--out", str(out)]
    said = CliRunner().invoke(app, [*arguments, "--arms", r"(1 × std .02|2 × std (0|\.02))$"])
    assert said.exit_code == 0, said.output
    assert len(said.output.splitlines()) == 10, said.output
    again = CliRunner().invoke(app, [*arguments, "--arms", r"(1 × std .02|2 × std (0|\.02))$"])
    assert again.exit_code == 0, again.output
    there = f"all 10 runs that were asked for are there, in {out / 'class_tokens'}. --plot writes the pages."
    assert again.output == f"class_tokens: {there}\n"
    return study_called("class_tokens").small(), out / "class_tokens"


def test_accuracy_is_the_share_of_the_pictures_that_are_right(finished: tuple[Study, Path]) -> None:
    """Two ways through the model: `evaluate` counts, the other one notes every picture."""
    rows = read_rows(finished[1] / RESULTS)
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for arm in ("1 × std .02", "2 × std 0", "2 × std .02") for seed in (0, 1)
    ]
    for row in rows:
        assert row["correct"].keys() == row["accuracy"].keys() == {"fused", "cls"}
        for name, packed in row["correct"].items():
            assert unpack(packed, row["count"]).mean() == pytest.approx(row["accuracy"][name])
        assert row["count"] == len(few().validation)
        assert row["seconds"] > 0
        assert row["versions"].keys() == {"python", "torch", "vitrail"}


def test_equal_tokens_stay_equal_and_others_do_not(finished: tuple[Study, Path]) -> None:
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


def test_the_best_point_of_the_search_is_used(finished: tuple[Study, Path]) -> None:
    study, out = finished
    tried = read_rows(out / SEARCH)
    assert [row["arm"] for row in tried] == ["1 × std .02"] * 2 + ["2 × std .02"] * 2
    for row in read_rows(out / RESULTS):
        arm = study.arm(row["arm"])
        own = [one for one in tried if one["arm"] == (arm.tuned_as or arm.name)]
        assert row["point"] == max(own, key=lambda one: one["held"])["point"] == best_point(study, arm, out)
        assert row["fields"]["lr"] == row["point"]["lr"]
    with pytest.raises(InvalidOption, match=r"not finished for the arm '4 × std \.02'"):
        best_point(study, study.arm("4 × std 0"), out)


def test_the_page_is_made_from_the_rows(finished: tuple[Study, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    study, out = finished
    rows = rows_of(study, out)
    (out / "README.md").write_text("Before\n\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    write_pages(study, out, evidence=None)
    page = (out / "README.md").read_text()
    plots = "![accuracy](accuracy.png)\n\n![cosines](cosines.png)"
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


def test_a_folder_without_a_page_gets_one_and_pages_without_marks_stay(
    finished: tuple[Study, Path], tmp_path: Path
) -> None:
    study, out = finished
    own = tmp_path / "own"
    own.mkdir()
    for name in (RESULTS, SEARCH):
        shutil.copy(out / name, own / name)
    page = tmp_path / "evidence.md"
    page.write_text("nothing is marked here")
    with pytest.raises(InvalidOption, match=f"<!-- results class_tokens --> .* in {page}, once"):
        write_pages(study, own, evidence=page)
    assert {path.name for path in own.iterdir()} == {RESULTS, SEARCH}
    assert write_pages(study, own, evidence=None)
    assert (
        (own / "README.md").read_text().startswith(f"# class_tokens\n\n{study.question}\n\n<!-- results -->\n| arm |")
    )


def test_a_row_cut_off_inside_of_a_letter_is_left_out(tmp_path: Path) -> None:
    add_row(tmp_path / SEARCH, {"arm": "2 × std 0"})
    whole = (tmp_path / SEARCH).read_bytes()
    (tmp_path / SEARCH).write_bytes(whole + whole[: whole.index("×".encode()) + 1])
    assert read_rows(tmp_path / SEARCH) == [{"arm": "2 × std 0"}]
    add_row(tmp_path / SEARCH, {"arm": "4 × std 0"})
    assert [row["arm"] for row in read_rows(tmp_path / SEARCH)] == ["2 × std 0", "4 × std 0"]


@pytest.mark.parametrize("option", [[], ["--plot"]])
@pytest.mark.parametrize("line", ["123", "null", "{}", '{"arm": "1 × std 0", "key": "x"}'])
def test_what_is_no_row_is_told_by_file_and_line(line: str, option: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "class_tokens" / (RESULTS if option else SEARCH)
    rows.parent.mkdir()
    rows.write_text(f'{{"error": "nothing goes", "key": "y"}}\n{line}\n', encoding="utf-8")
    said = CliRunner().invoke(app, ["class_tokens", "--reduced", "--device", "cpu", "--out", str(tmp_path), *option])
    assert (said.exit_code, f"{rows}, line 2: expected a row with " in said.output) == (2, True), said.output
    assert rows.read_text(encoding="utf-8").splitlines()[1] == line
    assert [path.name for path in rows.parent.iterdir()] == [rows.name]


def test_rows_of_other_settings_are_not_taken_for_none(finished: tuple[Study, Path]) -> None:
    study, out = finished
    page = out / "README.md"
    page.write_text("<!-- results -->\nas it was\n<!-- /results -->\n")
    with pytest.raises(InvalidOption, match="6 rows are there, all of other settings"):
        write_pages(study_called(study.name), out, evidence=None)
    assert page.read_text() == "<!-- results -->\nas it was\n<!-- /results -->\n"


def test_one_study_that_cannot_be_shown_does_not_keep_the_others(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "sounds").mkdir(parents=True)
    said = CliRunner().invoke(app, ["tasks/", "--plot", "--out", str(tmp_path)])
    assert said.exit_code == 2
    assert "tasks/pets: there is no folder" in said.output
    assert "tasks/sounds: 0 rows in" in said.output


@pytest.mark.parametrize("library", ["matplotlib", "scipy.stats"])
def test_a_library_that_is_missing_is_named(
    library: str, finished: tuple[Study, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, out = finished
    shutil.copytree(out, tmp_path / study.name)
    before = sorted(path.name for path in (tmp_path / study.name).iterdir())
    monkeypatch.setitem(sys.modules, library, None)
    said = CliRunner().invoke(app, [study.name, "--reduced", "--plot", "--out", str(tmp_path)])
    assert said.exit_code == 2, said.output
    assert f"{library} is not installed, and studies need it: pip install -e '.[train," in said.output
    assert sorted(path.name for path in (tmp_path / study.name).iterdir()) == before


def test_a_killed_study_goes_on_and_gives_the_same_rows(tmp_path: Path) -> None:
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
        Runner(TOY, parts, device="cpu", say=kill_after_two).run()
    text = (parts / RESULTS).read_text()
    assert len(text.splitlines()) == 2
    (parts / RESULTS).write_text(text + text.splitlines()[0][:40])  # the kill came while a row was written
    again: list[str] = []
    Runner(TOY, parts, device="cpu", say=again.append).run()
    assert [line.partition(" ")[0] for line in again] == ["3/4", "4/4"]
    assert [silent(row) for row in read_rows(parts / RESULTS)] == [silent(row) for row in read_rows(whole / RESULTS)]
    Runner(TOY, parts, device="cpu", say=again.append).run()
    assert len(again) == 2
    assert not list((parts / "runs").rglob("*.safetensors"))  # models that nobody needs are not kept


def test_a_long_run_goes_on_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(TOY, base={**TOY.base, "epochs": 4}, arms=TOY.arms[:1], seeds=(0,), save_every=1)
    asked, train = [], running.train

    def cut_off(**given: Any) -> Any:
        def tell(event: Event) -> None:
            if event.kind == "epoch" and event.values["epoch"] == 2:
                raise KeyboardInterrupt

        asked.append(given["resume"])
        return train(**given, on_event=tell if len(asked) == 1 else None)

    Runner(study, tmp_path / "whole", device="cpu").run()
    monkeypatch.setattr(running, "train", cut_off)
    with pytest.raises(KeyboardInterrupt):
        Runner(study, tmp_path / "parts", device="cpu").run()
    Runner(study, tmp_path / "parts", device="cpu").run()
    assert asked == [False, True]
    one, other = (read_rows(tmp_path / name / RESULTS) for name in ("whole", "parts"))
    assert [silent(row) for row in one] == [silent(row) for row in other]
    assert len(one) == 1


def test_one_failure_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    arms = (Arm("bad", tokens="nonsense"), Arm("plain"))
    study = replace(TOY, arms=arms, seeds=(0,))
    for _ in range(2):  # what failed is tried again, what went well is not
        runner = Runner(study, tmp_path, device="cpu")
        runner.run()
        assert runner.failed == 1
    rows = read_rows(tmp_path / RESULTS)
    assert [(row["arm"], "error" in row) for row in rows] == [("bad", True), ("plain", False), ("bad", True)]
    assert "nonsense" in rows[0]["error"]
    assert [row["arm"] for row in rows_of(study, tmp_path)] == ["plain"]


def test_one_error_of_several_runs_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: Any) -> Any:
        raise InvalidOption("nothing goes")

    monkeypatch.setattr(running, "train", fail)
    study = study_called("class_tokens").small()
    said = CliRunner().invoke(app, ["class_tokens", "--reduced", "--device", "cpu", "--out", str(tmp_path)])
    assert said.exit_code == 1
    lines = said.output.splitlines()
    jobs = len(study.points()) * len({arm.tuned_as or arm.name for arm in study.arms})
    assert len(lines) == jobs + 1
    assert said.output.count("nothing goes") == 1
    assert "InvalidOption" in lines[0]
    assert [line.partition("the same error, ")[2] for line in lines[1:-1]] == [
        f"{number} runs so far" for number in range(2, jobs + 1)
    ]
    assert lines[-1] == f"{jobs} runs failed, with one error; their rows say why."
    assert all("nothing goes" in row["error"] for row in read_rows(tmp_path / "class_tokens" / SEARCH))
    both = CliRunner().invoke(app, ["class_tokens", "depth", "--reduced", "--device", "cpu", "--out", str(tmp_path)])
    *runs, _ = both.output.splitlines()
    assert {line.split()[0] for line in runs} == {"class_tokens", "depth"}  # whose run is whose


@pytest.mark.parametrize(
    ("given", "told"), [(["--data", "nowhere"], "VITRAIL_DATA"), (["--device", "tpu"], "expected one of cpu, cuda")]
)
def test_what_is_wrong_for_all_runs_is_no_failed_run(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "nowhere"))
    study_called("class_tokens").data.cache_clear()  # type: ignore[attr-defined]
    said = CliRunner().invoke(app, ["class_tokens", *given, "--out", str(tmp_path)])
    assert (said.exit_code, told in " ".join(said.output.split())) == (2, True), said.output
    assert not list(tmp_path.iterdir())


def test_several_processes_share_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another one is at is passed over; it is waited for, and done where the other one did not do it."""
    keys = [run_key(TOY, TOY.arms[0], seed, {}, tmp_path) for seed in TOY.seeds]
    folders = [tmp_path / "runs" / "claimed" / f"runs-{key}" for key in keys]
    waited: list[list[int]] = []
    with ExitStack() as other:
        for folder in folders:
            folder.mkdir(parents=True)
            other.enter_context(held(folder))

        def wait(seconds: float) -> None:
            rows = read_rows(tmp_path / RESULTS)
            waited.append([row["seed"] for row in rows])
            add_row(tmp_path / RESULTS, {**rows[0], "arm": "plain", "seed": 0, "key": keys[0]})
            other.close()

        monkeypatch.setattr(running.time, "sleep", wait)
        runner = Runner(TOY, tmp_path, device="cpu")
        runner.run()
    assert waited == [[0, 1]]  # of the arm that nobody was at
    assert (runner.there, runner.tried, runner.left) == (1, 3, 0)
    assert [(row["arm"], row["seed"]) for row in read_rows(tmp_path / RESULTS)[2:]] == [("plain", 0), ("plain", 1)]


def test_what_fails_by_another_process_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [run_key(TOY, arm, seed, {}, tmp_path) for arm in TOY.arms for seed in TOY.seeds]
    asked = 0

    def fail(**given: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:  # another process tries the second run meanwhile
            add_row(tmp_path / RESULTS, {"key": keys[1], "arm": "plain", "error": "there, too"})
        raise InvalidOption("nothing goes")

    monkeypatch.setattr(running, "train", fail)
    runner = Runner(TOY, tmp_path, device="cpu")
    runner.run()
    assert (asked, runner.failed, runner.elsewhere) == (3, 3, 1)
    again = Runner(TOY, tmp_path, device="cpu")
    again.run()
    assert (asked, again.failed, again.elsewhere) == (7, 4, 0)  # what failed before is tried again


def test_what_another_process_is_at_is_not_left(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "claimed" / f"runs-{run_key(TOY, TOY.arms[0], TOY.seeds[0], {}, tmp_path)}"
    folder.mkdir(parents=True)
    with held(folder):
        runner = Runner(TOY, tmp_path, seconds=0, device="cpu")
        runner.run()
    assert (runner.left, runner.tried) == (3, 0)


def test_asked_to_stop_while_a_run_ends_no_other_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = running.evaluate

    def evaluate(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*args, **options)

    monkeypatch.setattr(running, "evaluate", evaluate)
    with Stop.listening() as stop, pytest.raises(Interrupted, match="Give the same command again"):
        Runner(TOY, tmp_path, device="cpu", stop=stop).run()
    assert [row["arm"] for row in read_rows(tmp_path / RESULTS)] == ["plain"]


def test_no_run_begins_that_would_end_too_late(tmp_path: Path) -> None:
    runner = Runner(TOY, tmp_path, seconds=0, device="cpu")
    runner.run()
    assert runner.left == 4
    assert not (tmp_path / RESULTS).exists()


def test_the_search_never_sees_the_validation_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the validation set was asked for {name}")

    asked: list[dict[str, Any]] = []
    train = running.train
    monkeypatch.setattr(running, "train", lambda **given: (asked.append(given), train(**given))[1])
    data = Data(few().train, Untouchable())  # type: ignore[arg-type]
    study = replace(TOY, data=lambda: data, search={"lr": [1e-3, 2e-3], "drop_path": [0.0, 0.1]}, draws=2)
    Runner(study, tmp_path, device="cpu").tune("plain")
    assert [given["validation"] for given in asked] == [0.1, 0.1]
    assert all(given["data"] is data.train for given in asked)
    points = [row["point"] for row in read_rows(tmp_path / SEARCH)]
    assert points == study.points()
    assert points[0] != points[1]


def test_an_arm_can_learn_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Arm("taught", tokens="cls,distillation", teacher=RunOf("plain"))
    study = replace(TOY, arms=(taught, *TOY.arms), seeds=(1,))
    teachers: list[str | None] = []
    train = running.train

    def told(**given: Any) -> Any:
        teachers.append(given.get("teacher"))
        return train(**given)

    monkeypatch.setattr(running, "train", told)
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
    with pytest.raises(InvalidOption, match="the arm 'plain' of the study 'toy' has no epochs"):
        replace(TOY, base={"model": "vit_tiny_patch16"})


def test_one_model_may_teach_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = Arm("taught", tokens="cls,distillation", teacher=RunOf("plain", seed=0))
    study = replace(TOY, arms=(TOY.arm("plain"), taught), seeds=(0, 1), reference="plain")
    trained: list[tuple[int, str | None]] = []
    train = running.train

    def told(**given: Any) -> Any:
        trained.append((given["seed"], given.get("teacher")))
        return train(**given)

    monkeypatch.setattr(running, "train", told)
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


def test_an_arm_may_be_evaluated_at_another_size(tmp_path: Path) -> None:
    """Both rows are of the same training; the pictures are then shown larger."""
    study = replace(TOY, arms=(Arm("plain"), Arm("larger", size=64)), seeds=(0,))
    Runner(study, tmp_path, device="cpu").run()
    plain, larger = read_rows(tmp_path / RESULTS)
    assert plain["parameters"] == larger["parameters"]
    assert plain["loss"] != larger["loss"]
    assert Arm("plain", size=64).small().size is None


def test_wrong_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say: Callable[..., Any] = CliRunner().invoke
    assert "expected class_tokens" in " ".join(say(app, ["none"]).output.split())
    wrong = say(app, ["class_tokens", "--reduced", "--arms", "none", "--out", str(tmp_path)])
    assert (wrong.exit_code, "matches none of" in wrong.output) == (2, True)
    for arguments, told in (
        (["--seeds", "²"], "--seeds ²: expected whole numbers"),
        (["--out", str(tmp_path / "file" / "below")], "file is a file"),
        (["--plot", "--out", str(tmp_path / "nowhere")], "there is no folder"),
        (["--plot", "--seeds", "0"], "expected neither --arms nor --seeds"),
        (["--seconds", "nan"], "--seconds nan: expected a number"),
        (["--seconds", "-5"], "--seconds -5.0: expected a number"),
        (["--arms", "[red]none[/b]", "--out", str(tmp_path)], "--arms '[red]none[/b]' matches none of"),
        (["--seeds", "0,7", "--out", str(tmp_path)], "--seeds 0, 7: expected some of 0, 1"),
        (["--out", "/proc/nowhere"], "/proc/nowhere: No such file or directory. Expected a place"),
    ):
        (tmp_path / "file").touch()
        wrong = say(app, ["class_tokens", "--reduced", *arguments])
        words = " ".join(wrong.output.replace("│", "").split())
        assert (wrong.exit_code, told in words) == (2, True), wrong.output
    assert not (tmp_path / "class_tokens").exists()
    said = say(app, ["class_tokens", "--reduced", "--seconds", "0", "--arms", "^1 × std .02$", "--out", str(tmp_path)])
    runs = 2 + 2  # at both points of the search, then with both seeds
    assert (said.exit_code, f"class_tokens: {runs} runs are left" in said.output) == (3, True), said.output
    said = say(app, ["long_distillation", "--reduced", "--tune", "--out", str(tmp_path)])
    assert (said.exit_code, "it has no search" in said.output) == (0, True), said.output
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    study = study_called("class_tokens")
    study.data.cache_clear()  # type: ignore[attr-defined]
    with pytest.raises(ImageError, match="VITRAIL_DATA"):
        study.data()


@pytest.mark.parametrize("name", NAMES)
def test_pages_say_what_the_rows_say(name: str) -> None:
    """No number of a table is typed by hand: `python -m experiments NAME --plot` rewrites these sections."""
    study, folder = study_called(name), FOLDERS / name
    assert study.name == name
    rows = rows_of(study, folder)
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert study.question in " ".join(readme.split())
    expected = {
        "results": (readme, with_plots(section(study, rows), folder)),
        f"results {name}": (EVIDENCE.read_text(encoding="utf-8"), section(study, rows, details=False)),
    }
    for mark, (page, text) in expected.items():
        (found,) = re.findall(rf"<!-- {mark} -->\n(.*?)\n<!-- /{mark} -->", page, re.DOTALL)
        assert found == text
    for file in (RESULTS, SEARCH):
        keys = [row["key"] for row in read_rows(folder / file) if "error" not in row]
        assert len(set(keys)) == len(keys)
        json.dumps(read_rows(folder / file))
