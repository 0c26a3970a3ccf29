"""Stability of training: gradient and residual norms by layer, and spikes of the loss.

monitor     measures while a model trains (``diagnostics="stability"``), and writes to the log of the run
result      reads the log: spikes, and which layers LayerScale holds back
plot        draws it
"""
