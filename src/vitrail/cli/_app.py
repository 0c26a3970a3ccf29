"""The Typer application. A command is one file, imported when it runs: the help of all must start fast."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitrail.cli._shared import console, options
from vitrail.cli._shared.ranks import exit_at_once
from vitrail.errors import VitrailError

GROUPS = {
    "Look": {
        "demo": "Show a trained model's predictions while its tokens merge; takes seconds, without a download.",
        "web": "Open a page in the browser on which tokens merge under a slider, or write it as plain files.",
        "merge": "Merge a model's tokens on your images, and draw the groups as stained glass.",
    },
    "Make it faster": {
        "bench": "Measure how fast merging makes a model, and how much of the possible speed-up that is.",
        "tune": "Find the largest merge within a tolerance, or the best within a budget, on your images.",
    },
    "Find artifact tokens": {
        "inspect": "Find artifact tokens in a model: whether, where, from which layer on, and what they encode.",
        "compare": "Compare two reports, or two models, which are inspected on the same images first.",
        "survey": "Find artifact tokens in several models or all checkpoints of a run: when do they appear?",
    },
    "Train": {
        "train": "Train a model: labels, tasks, distillation, registers, merging, in one recipe.",
        "stability": "Show how stable a training run was: gradients and residual branches by layer, loss spikes.",
        "evaluate": "Evaluate a trained model: accuracy of each head and fused, calibration, confusion, throughput.",
    },
    "Use at scale": {
        "embed": "Compute features of every image of a dataset, to a file; resumable, on one machine or a cluster.",
        "predict": "Write the most likely classes of every image of a dataset to a file.",
        "serve": "Serve a model over HTTP: classes and embeddings of images, in shared batches, within limits.",
        "export": "Export a merged model to a file that runs without Vitrail, and verify it.",
    },
}
"""What each command does, by what the user does. Its file has the function of its name, whose docstring says more."""

COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of the errors of options and arguments; typer exports its subclasses alone."""

STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def _made(function: Callable[..., None], **settings: Any) -> Any:
    """Return a function as a command by itself."""
    alone = typer.Typer(**STYLE)
    alone.command(**settings)(function)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """The commands; each is imported when it runs or shows its own help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command of the first argument, imported, and the other arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            module = import_module(f"vitrail.cli.{name}")
            function = getattr(module, name)
            examples = "\n\n".join(["Examples:", *module.EXAMPLES])
            command = _made(function, help=f"{COMMANDS[name]}\n\n{getdoc(function)}", epilog=examples)
            command.params += _made(options.of_all_commands).params
            console.use_options(command.params)
            rest = options.with_json_files(rest) if name in options.JSON_FILES else rest
            rest = options.with_present_names(rest, {one for given in command.params for one in given.opts})
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an error of usage repeats the value that was given, of any length, so it is cut."""
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            error.message = str(VitrailError(error.message))  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="vitrail",
    cls=Commands,
    help="Merge, inspect, train and benchmark the tokens of Vision Transformers.",
    no_args_is_help=True,
    **{**STYLE, "add_completion": True},
)
for _group, _commands in GROUPS.items():
    for _name, _summary in _commands.items():
        app.command(_name, help=_summary, rich_help_panel=_group)(lambda: None)  # replaced by the command itself


def main() -> None:
    """Run the command line."""
    with exit_at_once():
        app(prog_name="vitrail")


def _show_version(wanted: bool) -> None:
    if wanted:
        from vitrail import __version__

        console.say(f"vitrail {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Parse options of all commands."""
