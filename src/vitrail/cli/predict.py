"""``vitrail predict``: the most likely classes of every image of a dataset, to a file."""

from __future__ import annotations

from typing import Annotated

import typer

from vitrail.cli._shared import options, whole_datasets
from vitrail.cli._shared.ranks import command
from vitrail.embedding import Predictor

EXAMPLES = (
    "vitrail predict timm:vit_small_patch16_224 photos/ -o labels.csv",
    "vitrail predict runs/pets photos/ -o labels.parquet --top 3 --merge r=8",
    "vitrail predict vitrail:audio sounds/ -o digits.csv",
    "vitrail predict hf:google/vit-base-patch16-224 s3://bucket/shards/ -o labels/ --engine ray --address auto",
)


def predict(
    ctx: typer.Context,
    model: options.Model,
    data: whole_datasets.Data,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE", help="Output: .csv, .parquet, or a directory of shards.")
    ],
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes to name.")] = 5,
    merge: options.Merge = None,
    size: options.Size = None,
    fit: whole_datasets.Fit = "crop",
    exact_decoding: whole_datasets.Exact = False,
    precision: whole_datasets.Precision = None,
    batch: whole_datasets.Batch = None,
    workers: whole_datasets.Workers = None,
    limit: options.Limit = 0,
    overwrite: whole_datasets.Overwrite = False,
    engine: whole_datasets.Engine = "local",
    address: whole_datasets.Address = None,
    actors: whole_datasets.Actors = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    seed: whole_datasets.Seed = 0,
) -> None:
    """Write one row for each image: its position in the data, its file name, and classes with their probabilities.

    Names of classes are those of a model trained by `vitrail train`, of a Hugging Face config, or of ImageNet for
    timm's published heads; otherwise numbers. A command that was interrupted computes the rest when it runs again.
    Unreadable images are listed in a side file; the exit code is then 1.
    """
    with command(interrupted=whole_datasets.INTERRUPTED):
        whole_datasets.run(Predictor, ctx.params, "predict", {"top": top})
