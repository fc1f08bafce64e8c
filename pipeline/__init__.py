"""The part of Patchline that computes with tensors: data, models, evaluation, inspection, checkpoints and training."""
