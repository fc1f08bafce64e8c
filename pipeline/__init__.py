"""Tensors in motion: data, models, evaluation, checkpoints, training.

Each of its folders imports only those to its left: data, models < evaluation < checkpoints < training; of shards/, no
folder at all.
"""
