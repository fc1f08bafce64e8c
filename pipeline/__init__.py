"""Everything that computes with tensors: data, models, evaluation, inspection, checkpoints and training."""
