"""Embed and label whole datasets: shards in, shards out, resumable, on one machine or a Ray cluster.

embed, predict           features, or the most likely classes, of every image, as a table in memory or in a file
read_embeddings          read files back; files of different settings are refused
Embeddings               the table: numpy arrays by column, names, settings
survey_norms             norms of all tokens of a dataset of any size
Embedder, Predictor      the cores that know no engine: a batch in, columns out
"""

from vitrail.embedding.embedder import Column, Embedder
from vitrail.embedding.norm_survey import survey_norms
from vitrail.embedding.predictor import Predictor
from vitrail.embedding.run import Progress, embed, predict
from vitrail.embedding.table import Embeddings, read_embeddings

__all__ = [
    "Column",
    "Embedder",
    "Embeddings",
    "Predictor",
    "Progress",
    "embed",
    "predict",
    "read_embeddings",
    "survey_norms",
]
