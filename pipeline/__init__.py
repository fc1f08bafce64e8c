"""Patchline's tensors in motion: data, models, evaluation, inspection, checkpoints, training."""
