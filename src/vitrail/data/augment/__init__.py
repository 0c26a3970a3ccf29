"""Augmentation of whole batches on the device.

Not torchvision's transforms: every number is drawn beforehand from one generator, for the global batch, so that a
step gives the same bits for any world size and when a run resumes; and a batch is a few GPU kernels.
"""
