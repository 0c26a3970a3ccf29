"""Augmentation of whole batches on the device.

Not torchvision's transforms: every number is drawn beforehand from one generator, for the batch over all processes, so
that a step gives the same bits for any number of processes and when a run resumes; and a batch is a few GPU kernels.
"""
