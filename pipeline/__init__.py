"""Tensors in motion: data, models, evaluation, inspection, checkpoints, training.

Each of its folders imports only those to its left: data, models < evaluation < inspection < checkpoints < training; of
shards/, no folder at all.
"""
