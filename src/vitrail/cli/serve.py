"""``vitrail serve``: a model over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

import vitrail
from vitrail._wording import counted
from vitrail.cli._shared import console, options, whole_datasets
from vitrail.cli._shared.model import load
from vitrail.cli._shared.prediction import cost_of
from vitrail.cli._shared.ranks import command
from vitrail.serve.limits import Limits
from vitrail.serve.model import ServedModel
from vitrail.serve.server import bound_socket, check_installed, run
from vitrail.surgery.saving import apply

DEFAULTS = Limits()

EXAMPLES = (
    "vitrail serve timm:vit_base_patch16_224 --merge r=8",
    "vitrail serve vitrail:runs/student --merge tune.json --port 9000 --batch-size 64",
    "vitrail serve vitrail:tiny --merge keep=0.5 --host 0.0.0.0 --queue 512 --timeout 5",
    "curl --data-binary @cat.jpg http://127.0.0.1:8000/predict",
)


def serve(
    model: options.Model,
    merge: options.Merge = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address; 0.0.0.0 for all of this machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 for any free one.")] = 8000,
    batch: Annotated[int, typer.Option("-b", "--batch-size", min=1, metavar="N", help="Most images in a batch.")] = (
        DEFAULTS.batch
    ),
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="MS", help="How long the first image of a batch waits for others.")
    ] = DEFAULTS.wait_ms,
    queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most requests, and most images, inside the server.")
    ] = (DEFAULTS.queue),
    images: Annotated[int, typer.Option(min=1, metavar="N", help="Most images in one request.")] = DEFAULTS.images,
    megabytes: Annotated[float, typer.Option("--max-mb", metavar="MB", help="Largest body of a request.")] = (
        DEFAULTS.megabytes
    ),
    upload_megabytes: Annotated[
        float, typer.Option("--uploads-mb", metavar="MB", help="Bodies of all requests together.")
    ] = DEFAULTS.upload_megabytes,
    megapixels: Annotated[float, typer.Option("--max-pixels", metavar="MP", help="Largest image, in megapixels.")] = (
        DEFAULTS.megapixels
    ),
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Time to answer a request that has arrived.")
    ] = DEFAULTS.seconds,
    read_timeout: Annotated[float, typer.Option(metavar="S", help="Time for the body of a request to arrive.")] = (
        DEFAULTS.read_seconds
    ),
    grace: Annotated[
        float, typer.Option(min=0, metavar="S", help="Time to finish accepted requests when the server stops.")
    ] = DEFAULTS.grace_seconds,
    decoders: Annotated[int, typer.Option(min=1, metavar="N", help="Threads that decode images.")] = DEFAULTS.decoders,
    size: options.Size = None,
    fit: whole_datasets.Fit = "crop",
    precision: whole_datasets.Precision = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
) -> None:
    """Answer POST /predict, /embed and /v1/embeddings, and GET /healthz, /metrics and /docs.

    Images of many requests run in one batch. Above the limits, requests are refused (503 with Retry-After, 413), so
    that memory stays bounded. SIGTERM or Ctrl-C finishes what is inside, then exits.
    """
    with command():
        check_installed()
        limits = Limits(
            batch=batch,
            wait_ms=wait,
            queue=queue,
            images=images,
            megabytes=megabytes,
            upload_megabytes=upload_megabytes,
            megapixels=megapixels,
            read_seconds=read_timeout,
            seconds=timeout,
            grace_seconds=grace,
            decoders=decoders,
        )
        with bound_socket(host, port) as opened:  # before the model is loaded, which may take long
            with console.status(f"Loading {model}"):
                loaded = load(model, "serve", random=random_weights, size=size, device=device)
                handles = {} if merge is None else apply(merge, loaded.model)
                served = ServedModel(loaded.model, model, size=loaded.size, precision=precision, fit=fit)
            if random_weights:
                console.note(f"{model} has random weights: its answers mean nothing.")
            merging = handles.get("merge")
            if not isinstance(merging, vitrail.Merging):
                console.say(f"{model}, not merged, on {loaded.device.type}")
            else:
                cost = cost_of(loaded, merging)
                console.say(
                    f"{model}, merged on {loaded.device.type}: {cost.flops_after / 1e9:.3g} of "
                    f"{cost.flops_before / 1e9:.3g} GFLOPs for an image"
                )

            def ready(url: str) -> None:
                console.say(f"Serving at {url} (Ctrl-C stops it)", style="bold")
                console.answer({"url": url})
                console.out.file.flush()

            lost = run(served, opened, limits, on_ready=ready, access_log=access_log)
        if lost:
            console.error(f"{counted(lost, 'request')} could not be answered within --grace {grace:g} s.")
            raise typer.Exit(1)
        console.say("Stopped; all requests were answered.")
