"""The comparison of merging methods at its reduced size, against merged models and plain loops."""

import json
import math
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import vitrail
from experiments.common import datasets
from experiments.common.datasets import find_file, trimaps
from experiments.common.results import pack, read_rows, unpack
from experiments.methods.__main__ import app
from experiments.methods.dense import DENSE, Heads, boxes_of, score
from experiments.methods.learn import learn
from experiments.methods.measure import ACCURACY, KERNELS, SPEED, UNMERGED, compare, load_learned, logits_of, state_file
from experiments.methods.report import above_reference, choices, moonshot
from experiments.methods.settings import by_variant
from experiments.methods.subjects import SMALL, load_subject
from experiments.methods.tuning import CANDIDATES, LATENCY
from experiments.methods.variants import Budget, Unreachable, Variant, all_variants, mean_gflops, ordered, quiet
from tests.analysis.downstream.test_boundary import by_hand
from tests.moments import only_moments
from vitrail.analysis.downstream.decoder import fit_decoder
from vitrail.analysis.probes.linear import fit_classifier
from vitrail.tokens import TokenLayout

METHODS = "^(tome|ats|threshold|dynamicvit|edges, transport|tuned.*)$"
Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def short_times() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        only_moments(patch, MIN_ROUNDS=2)
        yield


def invoke(out: Path, command: str, *options: str) -> str:
    arguments = [command, "--reduced", "--device", "cpu", "--models", "vit_s", "--seeds", "0", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run everything for one model and some methods."""
    out = tmp_path_factory.mktemp("methods")
    for command in ("train", "learn", "measure", "tune", "dense", "time"):
        invoke(out, command, "--methods", METHODS)
    return out


def rows_by_key(out: Path, name: str) -> dict[tuple[str, float], Row]:
    return {(row["variant"], row["share"]): row for row in read_rows(out / name, ("key",))}


def test_every_method_and_budget_is_measured_and_timed(finished: Path) -> None:
    names = ("tome", "ats", "dynamicvit", "threshold")
    expected = {(UNMERGED, 1.0), (KERNELS, 1.0), *((name, share) for name in names for share in SMALL.shares),
                *((name, share) for name in CANDIDATES for share in SMALL.tuned)}  # fmt: skip
    accuracy, speed = rows_by_key(finished, ACCURACY), rows_by_key(finished, SPEED)
    if (LATENCY, *SMALL.latencies) in accuracy:  # on a small model merging may not save any time
        expected.add((LATENCY, *SMALL.latencies))
    assert set(accuracy) == expected
    assert set(speed) == expected - {(UNMERGED, 1.0)}
    for row in speed.values():
        assert row["failed"] == {}
        assert row["speed_up"] == pytest.approx(row["images_per_s"]["eager"] / row["unmerged_images_per_s"])
    dense = rows_by_key(finished, DENSE)
    assert set(dense) == {(UNMERGED, 1.0), *((name, 0.6) for name in ("tome", "threshold", "edges, transport"))}
    assert dense["edges, transport", 0.6]["config"]["restore"] == "transport"


def test_budgets_are_met(finished: Path) -> None:
    for (name, share), row in rows_by_key(finished, ACCURACY).items():
        if name not in (UNMERGED, KERNELS, LATENCY):
            slack = 0.12 if row["variant"] in ("ats", "threshold") else 0.05  # set on other images, of which few
            assert row["gflops"] == pytest.approx(share * row["unmerged_gflops"], rel=slack)
            assert row["static"] == (name not in ("ats", "threshold"))
            assert row["gflops_sd"] < 1e-12 or not row["static"]


@pytest.mark.parametrize("name", ["tome", "threshold", *CANDIDATES])
def test_rows_hold_what_a_merged_model_predicts(finished: Path, name: str) -> None:
    """Merge by the row's own settings, and compare each image in a plain loop."""
    row = rows_by_key(finished, ACCURACY)[name, 0.6]
    subject = load_subject("vit_s", 0, finished, SMALL, "cpu")
    reference = logits_of(subject.model, subject.inputs, 8)
    with quiet(), vitrail.merge(subject.model, **row["config"]):
        logits = logits_of(subject.model, subject.inputs, 8)
    correct = [int(one.argmax()) == int(target) for one, target in zip(logits, subject.targets, strict=True)]
    assert unpack(row["correct"], row["count"]).tolist() == correct
    assert row["accuracy"] == pytest.approx(sum(correct) / len(correct))
    total = 0.0
    for one, other in zip(logits.double().tolist(), reference.double().tolist(), strict=True):
        p, q = ([math.exp(value) / sum(map(math.exp, values)) for value in values] for values in (other, one))
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert row["kl"] == pytest.approx(total / len(logits), rel=1e-3, abs=1e-9)


def test_unmerged_and_kernels_alone_agree(finished: Path) -> None:
    rows = rows_by_key(finished, ACCURACY)
    assert rows[UNMERGED, 1.0]["agreement"] == rows[KERNELS, 1.0]["agreement"] == 1
    assert rows[UNMERGED, 1.0]["kl"] == 0
    assert rows[KERNELS, 1.0]["gflops"] == pytest.approx(rows[UNMERGED, 1.0]["gflops"])


def test_repeated_commands_do_nothing(finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.glob("*.jsonl")}
    for command in ("train", "learn", "measure", "tune", "dense", "time"):
        assert "/tome/" not in invoke(finished, command, "--methods", METHODS)
    for path, rows in before.items():
        again = path.read_bytes()
        added = [json.loads(line)["variant"] for line in again.removeprefix(rows).splitlines()]
        # a search by measured time may fail once and succeed the next time
        assert again.startswith(rows)
        assert set(added) <= {LATENCY}


def test_no_time_is_reported(tmp_path: Path, finished: Path) -> None:
    options = ["--reduced", "--device", "cpu", "--models", "vit_s", "--seeds", "0", "--states", str(finished)]
    result = CliRunner().invoke(app, ["measure", *options, "--out", str(tmp_path), "--seconds", "0"])
    assert result.exit_code == 3
    assert "out of time" in result.output


def test_readme_is_generated_from_the_rows(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need it")
    for path in finished.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    result = CliRunner().invoke(app, ["plot", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page, rows = (tmp_path / "README.md").read_text(encoding="utf-8"), rows_by_key(tmp_path, ACCURACY)
    line = next(line for line in page.splitlines() if line.startswith("| ats | 1 |"))
    lost = 100 * (rows["ats", 0.6]["accuracy"] - rows[UNMERGED, 1.0]["accuracy"])
    assert f"| ats | 1 | {lost:+.2f} (".replace("-", "−") in line
    assert f"| {rows['ats', 0.6]['gflops']:.3g} |" in line
    assert f"{rows_by_key(tmp_path, SPEED)['ats', 0.6]['speed_up']:.2f} |" in line
    dense = rows_by_key(tmp_path, DENSE)["tome", 0.6]
    base = rows_by_key(tmp_path, DENSE)[UNMERGED, 1.0]
    for prefix, title in (("", "linear head"), ("decoder_", "decoder")):
        table = page[page.index(f"masks of Pets, {title}") :]
        line = next(line for line in table.splitlines() if line.startswith("| tome | 60 % |"))
        cells = [cell.strip().replace("−", "-") for cell in line.split("|")]
        assert cells[3] == f"{100 * dense[f'{prefix}miou']:.2f}"
        lost = np.mean(dense[f"{prefix}miou_groups"]) - np.mean(base[f"{prefix}miou_groups"])
        assert float(cells[4].split()[0]) == pytest.approx(100 * lost, abs=0.006)
        assert cells[6] == f"{100 * dense[f'{prefix}boundary']:.2f}"
    timed = rows_by_key(tmp_path, SPEED)
    ratio = timed["threshold", 0.6]["images_per_s"]["eager"] / timed["tome", 0.6]["images_per_s"]["eager"]
    table = page[page.index("against a static schedule of the same mean FLOPs") :]
    assert next(line for line in table.splitlines() if line.startswith("| threshold | 60 %")).endswith(
        f"| {ratio:.2f} |"
    )
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"vit_s-{name}.png" for name in ("accuracy", "fidelity", "dense")
    }


def test_shipped_model_is_compared(tmp_path: Path) -> None:
    options = ["--reduced", "--device", "cpu", "--models", "tiny", "--methods", "^tome$", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["measure", *options])
    assert result.exit_code == 0, result.output
    rows = rows_by_key(tmp_path, ACCURACY)
    assert {share for name, share in rows if name == "tome"} == set(SMALL.fine)
    kl = [rows["tome", share]["kl"] for share in SMALL.fine]
    assert 0 < kl[0] < kl[1]


def test_comparison_counts_and_groups() -> None:
    reference = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]).repeat(20, 1)
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [3.0, 0.0]]).repeat(20, 1)
    row = compare(logits, reference, torch.tensor([0, 1, 1]).repeat(20))
    assert row["accuracy"] == pytest.approx(1 / 3)
    assert row["agreement"] == pytest.approx(2 / 3)
    p = 1 / (1 + math.exp(-2))
    kl = p * math.log(p / (1 / (1 + math.e))) + (1 - p) * math.log((1 - p) / (math.e / (1 + math.e)))
    assert row["kl"] == pytest.approx(kl / 3)
    assert row["kl_groups"] == [float(f"{kl * count / 25:.3g}") for count in (9, 8)]  # of 60 images 50 are in groups


def test_every_registered_method_has_a_rule() -> None:
    variants = all_variants()
    assert {variant.base for variant in variants} == set(vitrail.list_methods())
    assert len({variant.name for variant in variants}) == len(variants)
    assert variants[0].name == "tome"


def test_dial_meets_a_budget_or_says_that_it_cannot(finished: Path) -> None:
    subject = load_subject("vit_s", 0, finished, SMALL, "cpu")
    variants = {variant.name: variant for variant in all_variants()}
    budget = Budget(0.7 * subject.gflops, subject.tuning, 8)
    with quiet(), budget.merge(subject.model, variants["ats"]) as merging:
        assert mean_gflops(subject.model, merging, subject.tuning, 8) == pytest.approx(budget.gflops, rel=0.03)
    assert budget.position is not None
    with quiet(), pytest.raises(Unreachable, match="misses"):
        Budget(0.01 * subject.gflops, subject.tuning, 8).merge(subject.model, variants["mutual"])
    with pytest.raises(Unreachable, match="DIALS"):
        budget.merge(subject.model, Variant("mutual", "mutual"))
    with pytest.raises(vitrail.errors.NotApplied):
        vitrail.Merging.of(subject.model)


def test_learned_numbers_of_merges_are_scaled_to_a_budget(finished: Path) -> None:
    invoke(finished, "learn", "--methods", "^diffrate$")
    subject = load_subject("vit_s", 0, finished, SMALL, "cpu")
    variant = next(variant for variant in all_variants() if variant.name == "diffrate")
    method, _ = load_learned(state_file(finished / "learned", "vit_s", 0, variant), variant, subject.model)
    with vitrail.merge(subject.model, method=method) as merging:
        learned = np.array(merging.r)
    for share in (0.85, 0.6):
        budget = Budget(share * subject.gflops, subject.tuning, 8)
        with quiet(), budget.merge(subject.model, variant, method) as merging:
            counts = np.array(merging.r)
            assert merging.flops() / 1e9 == pytest.approx(budget.gflops, rel=0.03)
        assert np.abs(counts - learned * counts.sum() / learned.sum()).max() <= 1


def test_several_commands_run_in_order(finished: Path, tmp_path: Path) -> None:
    shown = invoke(tmp_path, "train,measure", "--methods", "^prune$")
    assert shown.index("vit_s-0  ") < shown.index("vit_s/0/prune/0.8")
    result = CliRunner().invoke(app, ["train,nothing", "--reduced"])
    assert result.exit_code == 2
    assert "separated by commas" in result.output


def setting(name: str, share: float, accuracy: float, seed: int = 0) -> Row:
    return {
        "key": f"{name}/{share}/{seed}", "model": "m", "seed": seed, "variant": name, "share": share, "count": 100,
        "gflops": share, "unmerged_gflops": 1.0, "accuracy": accuracy, "kl": 1 - accuracy,
        "correct": pack(row < round(100 * accuracy) for row in range(100)),
    }  # fmt: skip


def test_chosen_setting_is_the_least_merging_that_is_fast_enough() -> None:
    rows = [setting(UNMERGED, 1.0, 0.9), setting("tome", 0.8, 0.88), setting("tome", 0.5, 0.8),
            setting("tuned", 0.6, 0.89), setting("tuned", 0.5, 0.87), setting("tuned", 0.4, 0.7)]  # fmt: skip
    speeds = {("tome", 0.8): 1.2, ("tome", 0.5): 1.6, ("tuned", 0.6): 1.4, ("tuned", 0.5): 1.52, ("tuned", 0.4): 1.6}
    found = by_variant(rows, "m")
    assert above_reference(found, speeds, "tuned", [0.6, 0.5, 0.4]) == [True, True, False]
    text = moonshot(found, speeds)
    assert "50 % of the FLOPs, 1.52 times the speed and −3.00 (" in text
    assert "above ToMe's curve at 2 of 3" in text


def test_most_faithful_setting_for_a_speed() -> None:
    rows = [setting(UNMERGED, 1.0, 0.9), setting(KERNELS, 1.0, 0.9), setting("tome", 0.6, 0.85),
            setting("energy", 0.6, 0.88), setting("energy", 0.5, 0.8), setting("dtem", 0.6, 0.89)]  # fmt: skip
    speeds = {(KERNELS, 1.0): 1.3, ("tome", 0.6): 1.9, ("energy", 0.6): 1.6, ("energy", 0.5): 2.1, ("dtem", 0.6): 9.0}
    table = {
        cells[0]: cells[1:]
        for line in choices(by_variant(rows, "m"), speeds).splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) > 1
    }
    chosen = {need: cells[0] for need, cells in table.items() if "×" in need}
    assert chosen == {
        "1.25 × the throughput": KERNELS, "1.5 × the throughput": "energy", "1.75 × the throughput": "tome",
        "2 × the throughput": "energy", "2.25 × the throughput": "none",
    }  # fmt: skip
    assert table["1.5 × the throughput"][2:4] == ["60 %", "1.60"]
    assert table["1.5 × the throughput"][5:] == ["0.1200", "0.1500"]
    assert table["2 × the throughput"][6] == "–"  # ToMe has no setting that fast
    assert table["60 % of the FLOPs"][0] == "energy"
    assert table["50 % of the FLOPs"][5:] == ["0.2000", "–"]


def test_only_the_wanted_budgets_are_measured_and_timed(finished: Path, tmp_path: Path) -> None:
    options = ("--methods", "^(tome|prune)$", "--states", str(finished))
    invoke(tmp_path, "measure", *options, "--shares", "0.6")
    expected = {(UNMERGED, 1.0), (KERNELS, 1.0), ("tome", 0.6), ("prune", 0.6)}
    assert set(rows_by_key(tmp_path, ACCURACY)) == expected
    invoke(tmp_path, "measure", *options)
    invoke(tmp_path, "time", *options, "--shares", "0.6")
    assert set(rows_by_key(tmp_path, SPEED)) == expected - {(UNMERGED, 1.0)}
    result = CliRunner().invoke(app, ["measure", "--reduced", "--shares", "60"])
    assert result.exit_code == 2
    assert "between 0 and 1" in result.output


def test_one_budget_comes_first_and_slow_methods_last() -> None:
    variants = [Variant("slow", "agglomerative", slow=True), Variant("a", "tome"), Variant("b", "prune")]
    plan = [(variant.name, share) for variant, share in ordered(variants, lambda _: (0.85, 0.6))]
    assert plan == [("a", 0.6), ("b", 0.6), ("a", 0.85), ("b", 0.85), ("slow", 0.6), ("slow", 0.85)]


def test_control_of_fine_tuning_trains_without_merging(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other weight learns with fewer tokens; the control sees all of them in each step."""
    given: list[dict[str, Any]] = []
    merge = vitrail.merge

    def recorded(model: torch.nn.Module, *arguments: Any, **options: Any) -> vitrail.Merging:
        given.append(options)
        return merge(model, *arguments, **options)

    monkeypatch.setattr(vitrail, "merge", recorded)
    states = {}
    for name in ("tome, fine-tuned", "tome, fine-tuned unmerged"):
        variant = next(one for one in all_variants() if one.name == name)
        file, _ = learn("vit_s", 0, variant, finished, SMALL, "cpu")
        states[name] = load_file(file)
    with_method = [options for options in given if "method" in options]
    assert [set(options) for options in with_method] == [{"method", "gflops"}, {"method", "r"}]
    assert with_method[1]["r"] == 0
    merged, plain = states.values()
    assert merged.keys() == plain.keys()
    assert any(not torch.equal(merged[key], plain[key]) for key in merged)


def test_dense_scores_equal_a_plain_loop() -> None:
    """Heads that read the mask off the tokens: IoU, boxes and hits by hand."""
    generator = torch.Generator().manual_seed(0)
    covered = torch.rand(6, 4, 4, generator=generator) < 0.4
    masks = covered.repeat_interleave(4, 1).repeat_interleave(4, 2).float()
    tokens = torch.stack([covered.flatten(1).float(), torch.rand(6, 16, generator=generator)], 2)
    linear = fit_classifier(tokens.flatten(0, 1), covered.flatten().long(), penalties=(1e-3,))
    decoder = fit_decoder(tokens, masks > 0.5, (4, 4), classes=2, hidden=8, epochs=5)
    row = score(tokens, masks, Heads(linear, decoder, 0.0, (4, 4)))
    true = masks.numpy() > 0.5
    maps = torch.nn.functional.interpolate(
        linear.scores(tokens).transpose(1, 2).unflatten(2, (4, 4)), size=(16, 16), mode="bilinear"
    )
    decoded = decoder(tokens, TokenLayout((), (1, 4, 4)), (16, 16))
    for prefix, scores in (("", maps), ("decoder_", decoded)):
        found = (scores[:, 1] > scores[:, 0]).numpy()
        pairs = ((found, true), (~found, ~true))
        assert row[f"{prefix}miou"] == pytest.approx(np.mean([np.sum(a & b) / np.sum(a | b) for a, b in pairs]))
        by_image = [
            np.mean([np.sum(a & b) / max(1, np.sum(a | b)) for a, b in ((one, other), (~one, ~other))])
            for one, other in zip(found, true, strict=True)
        ]
        assert row[f"{prefix}image_miou"] == pytest.approx(np.mean(by_image))
        assert row[f"{prefix}miou_groups"] == pytest.approx(by_image, abs=1e-4)
        scored = [by_hand(torch.from_numpy(a), torch.from_numpy(b), 2)[2] for a, b in zip(found, true, strict=True)]
        assert row[f"{prefix}boundary"] == pytest.approx(np.mean(scored))
        assert row[f"{prefix}boundary_groups"] == pytest.approx(scored, abs=1e-4)
    assert row["miou"] > 0.6
    hits = []
    found = (maps[:, 1] > maps[:, 0]).numpy()
    for one, other in zip(boxes_of(torch.from_numpy(found)), boxes_of(torch.from_numpy(true)), strict=True):
        assert one is not None
        assert other is not None
        (a0, b0, a1, b1), (c0, d0, c1, d1) = one.tolist(), other.tolist()
        inside = max(0, min(a1, c1) - max(a0, c0)) * max(0, min(b1, d1) - max(b0, d0))
        hits.append(inside / ((a1 - a0) * (b1 - b0) + (c1 - c0) * (d1 - d0) - inside) >= 0.5)
    assert unpack(row["boxes"], 6).tolist() == hits
    assert row["box_recall"] == sum(hits) / 6


def test_box_of_a_mask() -> None:
    mask = torch.zeros(2, 5, 6, dtype=torch.bool)
    mask[0, 1:3, 2:6] = True
    first, second = boxes_of(mask)
    assert first is not None
    assert first.tolist() == [2, 1, 6, 3]
    assert second is None


def test_shards_replace_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, classes and masks from tar files, which need no pyarrow."""
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path))

    def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, BytesIO(data))

    def png(image: Image.Image) -> bytes:
        file = BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    for part, names in (("train", ("church", "tench")), ("val", ("parachute",))):
        with tarfile.open(tmp_path / f"imagenette-128-{part}.tar", "w") as tar:
            for number, name in enumerate(names):
                add(tar, f"{number}.png", png(Image.new("RGB", (8, 8), (100 * number, 0, 0))))
                add(tar, f"{number}.cls", name.encode())
    with tarfile.open(tmp_path / "pets-160-test.tar", "w") as tar:
        trimap = np.full((8, 8), 2, np.uint8)
        trimap[2:4, 4:8] = 1
        add(tar, "0.png", png(Image.new("RGB", (8, 8))))
        add(tar, "0.trimap.png", png(Image.fromarray(trimap)))
        add(tar, "0.json", json.dumps({"breed": 3, "species": 1}).encode())
    datasets.imagenette.cache_clear()
    try:
        data = datasets.imagenette()
        assert data.train.labels[:, 0].tolist() == [4, 0]
        assert data.validation.labels[:, 0].tolist() == [9]
        assert data.train.classes["label"][4] == "church"
        assert data.train.tensor(1, 8)[:, 0, 0].tolist() == [100, 0, 0]
    finally:
        datasets.imagenette.cache_clear()
    masks = trimaps(find_file("pets-160-test"), 8)
    assert masks.shape == (1, 8, 8)
    assert torch.equal(masks[0] > 0.5, torch.from_numpy(trimap == 1))
