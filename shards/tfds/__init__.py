"""Datasets that TensorFlow Datasets (TFDS) has prepared: their description, their shards and the examples in these."""
