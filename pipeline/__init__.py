"""Tensors in motion: data, models, evaluation, inspection, checkpoints, training."""
