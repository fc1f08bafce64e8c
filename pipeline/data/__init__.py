"""Planned reads -> decode -> augment -> batches of uint8 images."""
