"""Methods that cluster the tokens: every group may have many members, also of even positions alone."""

from vitrail.merging.methods.clustering.agglomerative import Agglomerative
from vitrail.merging.methods.clustering.dpc_knn import DPCKNN
from vitrail.merging.methods.clustering.kmeans import KMeans

__all__ = ["DPCKNN", "Agglomerative", "KMeans"]
