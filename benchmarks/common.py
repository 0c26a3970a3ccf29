"""Shared by the benchmark scripts: rows with targets, one process per row, and result files.

Results are JSON files named DATE-MACHINE-COMMIT.json, each with a Markdown table of the same name.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from vitrail.bench import MODES, BenchConfig, run  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Target:
    """One row of the table of targets: what to measure, and the ratios to reach; None for no target.

    ``flops_share`` is the least speed-up as a share of the ratio of multiply-adds.
    """

    title: str
    config: BenchConfig
    floor: float | None = None
    goal: float | None = None
    efficiency: float | None = None
    eager_efficiency: float | None = None
    flops_share: float | None = None

    def missed(self, result: Mapping[str, Any]) -> list[str]:
        """Return the targets that a result does not reach."""
        wanted = {
            "speedup": ("speed-up floor", self.floor),
            "efficiency": ("efficiency", self.efficiency),
            "eager_efficiency": ("eager efficiency", self.eager_efficiency),
        }
        missed = [
            f"{label} {least:g}"
            for name, (label, least) in wanted.items()
            if least is not None and (result.get(name) is None or result[name] < least)
        ]
        if self.flops_share is not None and (result.get("speedup") or 0) < self.flops_share * result["flops_ratio"]:
            missed.append(f"{self.flops_share:g} of the FLOP ratio {result['flops_ratio']:.2f}")
        if self.goal is not None and (result.get("speedup") or 0) < self.goal:
            missed.append(f"goal {self.goal:g}")
        return missed


def main(rows: Mapping[str, Target], description: str | None, script: str, arguments: Sequence[str]) -> int:
    """Measure the chosen rows, each in its own process, and write the results."""
    options = _parser(rows, description).parse_args(arguments)
    if options.child:
        return _child(rows[options.child], options)
    if options.join:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.join]
        say(save(join(parts), rows, options.out))
        return 0
    chosen = options.rows or list(rows)
    unknown = [name for name in chosen if name not in rows]
    if unknown:
        say(f"no row named {', '.join(unknown)}; there are {', '.join(rows)}")
        return 2
    found: dict[str, Any] = {}
    for name in chosen:
        say(f"{name}: {rows[name].title}")
        found[name] = {**_in_child(script, name, options), "command": _command(script, name, options)}
        data = {"commit": options.commit or commit(), "rows": found}
        path = save(data, rows, options.out)  # after each row: a later one may time out
    say(path.with_suffix(".md").read_text(encoding="utf-8"))
    say(path)
    return int(any("error" in row for row in found.values()))


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the rows of several files; if a row is repeated, the later file wins."""
    commits = {part["commit"] for part in parts}
    rows = {name: row for part in parts for name, row in part["rows"].items()}
    return {"commit": "+".join(sorted(commits)), "rows": rows}


def save(data: Mapping[str, Any], rows: Mapping[str, Target], folder: Path) -> Path:
    """Write the JSON file and its table, and return the path.

    Rows already in the file (same day, machine and commit) stay unless they were measured again.
    """
    machines = [row["machine"] for row in data["rows"].values() if "machine" in row]
    date = min((machine["date"] for machine in machines), default="")[:10] or time.strftime("%Y-%m-%d", time.gmtime())
    device = machines[0]["device"] if machines else "unknown"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{date}-{slug(device)}-{data['commit']}.json"
    if path.exists():
        data = join([json.loads(path.read_text(encoding="utf-8")), data])
    whole = {"date": date, "machine": machines[0] if machines else None, **data}
    for target, text in ((path, json.dumps(whole, indent=1) + "\n"), (path.with_suffix(".md"), markdown(whole, rows))):
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    return path


def markdown(data: Mapping[str, Any], rows: Mapping[str, Target]) -> str:
    """Return the Markdown table of results."""
    machine = data["machine"] or {"device": "unknown machine", "python": "?", "versions": {}}
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"# {data['date']}, {machine['device']}, {data['commit']}",
        "",
        "| row | unmerged | sliced | merged | speed-up (floor, goal) | efficiency (target) | eager efficiency (target) "
        "| ready | peak MB, unmerged → merged | error, equal groups | missed |",
        "| --- |" + " ---: |" * 9 + " --- |",
    ]
    for name, result in data["rows"].items():
        target = rows[name]
        if "error" in result:
            lines.append(f"| {target.title} |" + " – |" * 9 + f" {result['error']} |")
        else:
            lines.append("| " + " | ".join(_cells(target, result)) + " |")
    lines += [
        "",
        "Times are the medians of each variant's best mode, in ms. Error: merged outputs against the reference in the "
        "same dtype, relative; equal groups: patches whose group has exactly the same members. Ready: the slowest of "
        "the merged modes, including the compiler's start where it compiles.",
        "",
        f"Python {machine['python']}, {versions}.",
        "",
        *(f"- `{command}`" for command in dict.fromkeys(row["command"] for row in data["rows"].values())),
        "",
    ]
    return "\n".join(lines)


def commit() -> str:
    """Return the commit of the checkout, with ``-dirty`` if there are changes."""
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip()


def slug(text: str) -> str:
    """Return a name that is safe in file names."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def say(text: object) -> None:
    """Print and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _cells(target: Target, result: Mapping[str, Any]) -> list[str]:
    best = [
        min((row for row in result["rows"] if row["variant"] == variant), key=lambda row: row["ms"], default=None)
        for variant in ("unmerged", "sliced", "merged")
    ]
    start = result["startup_s"] or 0
    ready = max(
        row["ready_s"] + (start if _mode(row) not in ("eager", "graph") else 0)
        for row in result["rows"]
        if row["variant"] == "merged"
    )
    peaks = [None if row is None else row["peak_mb"] for row in (best[0], best[2])]
    check = result["check"]
    return [
        target.title,
        *("–" if row is None else f"{row['ms']:.4g} ({_mode(row)})" for row in best),
        f"{_or(result['speedup'], '.2f')} ({_or(target.floor)}, {_or(target.goal)})",
        f"{_or(result['efficiency'], '.2f')} ({_or(target.efficiency)})",
        f"{_or(result['eager_efficiency'], '.2f')} ({_or(target.eager_efficiency)})",
        f"{ready:.1f} s",
        "–" if None in peaks else " → ".join(f"{peak:.0f}" for peak in peaks),
        "–" if check is None else f"{_or(check['error'], '.1e')}, {check['equal_groups']:.1%}",
        ", ".join(target.missed(result)) or "none",
    ]


def _mode(row: Mapping[str, Any]) -> str:
    mode: str = row["mode"] if "mode" in row else row["form"]  # "form" in results from before 0.3
    return mode


def _or(value: float | None, spec: str = "g") -> str:
    return "–" if value is None else format(value, spec)


def _command(script: str, name: str, options: argparse.Namespace) -> str:
    """Return the command that measures a row again."""
    return " ".join(["benchmarks/" + Path(script).name, name, *_passed_on(options)])


def _in_child(script: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one row in a new process: a cold start, with a timeout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, script, "--child", name, "--json", str(path), *_passed_on(options)]
        try:
            code = subprocess.run(command, timeout=options.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {options.timeout:g} s"}
        if code or not path.exists():
            return {"error": f"ended with code {code}"}
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


def _passed_on(options: argparse.Namespace) -> list[str]:
    given = ["--seconds", str(options.seconds), "--limit", str(options.limit), "--attention", options.attention]
    given += ["--modes", options.modes] if options.modes else []
    given += ["--warm"] if options.warm else []
    return given + (["--autocast"] if options.autocast else [])


def _child(target: Target, options: argparse.Namespace) -> int:
    began = time.perf_counter()
    config = replace(
        target.config,
        seconds=options.seconds,
        limit=options.limit,
        attention=options.attention,
        modes=tuple(options.modes.split(",")) if options.modes else target.config.modes,
        cold=not options.warm,
        autocast=options.autocast and target.config.dtype != "fp32",
    )
    result = run(config, tell=lambda text: say(f"  {time.perf_counter() - began:6.1f} s  {text}"))
    for row in result.rows:
        say(f"  {row.variant:9} {row.mode:15} {row.ms:9.3f} ms ±{row.spread:.1%}, ready {row.ready_s:.1f} s")
    data = {**result.to_dict(), "target": {**asdict(target), "config": None}}
    options.json.write_text(json.dumps(data), encoding="utf-8")
    return 0


def _parser(rows: Mapping[str, Target], description: str | None) -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:14} {target.title}" for name, target in rows.items())
    parser = argparse.ArgumentParser(
        description=f"{description}\n\nRows:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure; all by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to measure a row (20)")
    parser.add_argument("--limit", type=float, default=300.0, help="prepare no further mode after this time (300)")
    parser.add_argument("--timeout", type=float, default=570.0, help="stop a row's process after this time (570)")
    parser.add_argument("--modes", help=f"comma-separated modes instead of the row's own: {', '.join(MODES)}")
    parser.add_argument(
        "--forms", dest="modes", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )  # the old name of --modes
    parser.add_argument("--attention", default="auto", help="backend of PyTorch's attention: auto, flash, cudnn, …")
    parser.add_argument("--autocast", action="store_true", help="weights in float32, computation in the row's dtype")
    parser.add_argument("--warm", action="store_true", help="keep the compiler's caches instead of starting empty")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results (benchmarks/results)")
    parser.add_argument("--commit", help="name of the checkout, if it is not a git repository")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="merge result files, measure nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    return parser
