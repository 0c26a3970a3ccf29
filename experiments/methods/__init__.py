"""Merging methods compared: accuracy and fidelity over measured throughput and FLOPs."""
