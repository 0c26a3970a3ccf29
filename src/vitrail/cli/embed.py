"""``vitrail embed``: features of every image of a dataset, to a file."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from vitrail.cli._shared import options, whole_datasets
from vitrail.cli._shared.ranks import command
from vitrail.embedding import Embedder

EXAMPLES = (
    "vitrail embed timm:vit_small_patch14_dinov2 photos/ -o features.parquet --image-size 224",
    "vitrail embed hf:facebook/dinov2-base pets.parquet -o features.npy --merge r=8 --dtype float32",
    "vitrail embed vitrail:tiny photos/ -o features/ --tokens class,mean,patches@3 --merge tune.json",
    "vitrail embed vitrail:audio sounds/ -o sounds.parquet",
    "vitrail embed timm:vit_base_patch16_clip_224 s3://bucket/photos/ -o s3://bucket/features/ --engine ray",
)


def embed(
    ctx: typer.Context,
    model: options.Model,
    data: whole_datasets.Data,
    out: Annotated[
        str,
        typer.Option("-o", "--out", metavar="FILE", help="Output: .parquet, .npy, .lance, or a directory of shards."),
    ],
    tokens: Annotated[
        str,
        typer.Option(
            metavar="COLUMNS",
            help="class, mean (of the patches), patches, output; class@5 behind block 5. By default class, or mean.",
        ),
    ] = "",
    merge: options.Merge = None,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="How features are stored.")] = "float16",
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
    """Write one row for each image: its position in the data, its file name, and its features.

    Model, digest of the weights, merge setting and versions are in the file, and `vitrail.read_embeddings` refuses to
    mix files of different settings. A command that was interrupted, or killed, computes the rest when it runs again.
    Unreadable images are listed in a side file; the exit code is then 1.
    """
    with command(interrupted=whole_datasets.INTERRUPTED):
        whole_datasets.run(Embedder, ctx.params, "embed", {"tokens": tokens, "dtype": dtype})
