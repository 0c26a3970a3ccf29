"""Data loaders for training and evaluation: in memory on the device, or streamed by worker processes.

Not ``torch.utils.data.DataLoader`` alone: a step's samples are a function of the seed and the step's number, so that a
run resumes exactly at any step with any world size, and datasets that fit are decoded once. Loaders crop
images to a centered square in bytes, for augmentation on the device; :mod:`vitrail.data.batches` resizes whole images,
with masks and boxes, and normalizes them for a model.
"""
