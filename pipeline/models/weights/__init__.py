"""Our weights folder: safetensors, labels, pixels and how they fit a model."""
