"""CUDA graphs: recording and replaying them, and `vitrail.capture`, a model that runs from them."""
