"""What has changed in the fields of jobs since the first records were written, so that an old RUN/job.yaml replays.

Each one's default is what a job did before it existed. A new field of a job goes in here, or records of older versions
are refused (tests/jobs/test_later_fields.py replays some); one whose default does something new first needs a default
that does what was done before, and a recipe or a flag that asks for the new thing.
"""

from collections.abc import Mapping

LATER_FIELDS: Mapping[str, tuple[str, ...]] = {  # by the name of their class
    "TrainingJob": ("label_smoothing", "ema_decay", "threads"),
    "DataConfig": ("mix", "randaugment", "mixup", "reading", "allow_other_decoder"),
    "AugmentConfig": ("antialias", "scaled_decode"),
    "EvaluationTransform": ("antialias",),
    "ModelConfig": (
        "resnet_units",
        "resnet_factor",
        "pooling",
        "position",
        "position_std",
        "layer_norm_epsilon",
        "gelu",
        "resnet_epsilons",
    ),
    "OptimizerConfig": ("decay_scale", "head_decay"),
    "EngineConfig": ("compile", "activation_checkpointing"),
    "PackJob": ("labels_file", "limits", "dedup", "resize", "description", "licence", "run_dir"),
    "IndexJob": ("description", "licence"),
    "EvaluateJob": ("threads", "json"),
    "FlatSource": ("labels_csv", "file_column", "label_column", "separator"),
    "VerifyJob": ("workers", "run_dir"),
}

RENAMED_FIELDS: Mapping[str, Mapping[str, str]] = {  # by the name of their class: the name of then, the name of now
    "TrainingJob": {"average_factor": "ema_decay"},
}
