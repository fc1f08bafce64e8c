"""The part of Patchline that computes with tensors: data, models, evaluation, inspection, checkpoints and training."""

DISTRIBUTION = "patchline"  # `patchline.refuse_others` looks for this line
