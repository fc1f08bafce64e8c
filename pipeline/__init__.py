"""Tensors in motion: data, models, training, evaluation."""
