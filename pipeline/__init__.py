"""Tensors in motion: data, models, training, evaluation.

Each of its folders imports only those to its left: data, models < evaluation < training; of shards/, no folder at all.
"""
