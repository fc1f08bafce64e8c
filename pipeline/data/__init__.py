"""The loader: planned reads -> decode -> augment -> batches of uint8 images."""
