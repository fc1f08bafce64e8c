"""Fields of jobs that were added or renamed after the first records were written, so that an old RUN/job.yaml replays.

The default of an added field is what jobs did before it existed. Add every new field here, or older records are refused
(tests/jobs/test_later_fields.py replays some). If a new field should change what jobs do, its default still keeps the
old behaviour; recipes and flags turn the new one on.
"""

from collections.abc import Mapping

_PICTURES = ("norms_every_steps", "similarity_every_steps")  # they change what is shown, not what is trained
LATER_FIELDS: Mapping[str, tuple[str, ...]] = {  # by the name of their class
    "TrainingJob": ("label_smoothing", "ema_decay", "threads", "hang", "guard", "loggers", "fewshot", *_PICTURES),
    "DataConfig": (
        "mix",
        "randaugment",
        "mixup",
        "reading",
        "allow_other_decoder",
        "label_weights",
        "subset",
        "held_out",
    ),
    "AugmentConfig": ("antialias", "scaled_decode", "resize_pixels", "filter", "exif"),
    "EvaluationTransform": ("antialias", "filter", "exif"),
    "EvaluationConfig": ("also",),
    "InitialConfig": ("resample",),
    "ModelConfig": (
        "resnet_units",
        "resnet_factor",
        "pooling",
        "position",
        "position_at",
        "position_std",
        "layer_norm_epsilon",
        "gelu",
        "resnet_epsilons",
        "stochastic_depth",
        "masked_patches",
    ),
    "OptimizerConfig": ("decay_scale", "head_decay", "layer_decay", "freeze_backbone"),
    "ScheduleConfig": ("cooldown_steps", "timescale", "stair_steps", "stair_factor"),
    "CheckpointConfig": (
        *("asynchronous", "when_busy", "max_failed"),
        *("every_seconds", "auto_interval", "failures_per_node_day", "keep_best"),
    ),
    "EngineConfig": (
        *("compile", "activation_checkpointing", "reduce_precision", "check_gradients", "allow_deepspeed"),
        "deterministic",
    ),
    "PackJob": ("labels_file", "limits", "dedup", "resize", "unlabeled", "description", "licence", "run_dir"),
    "IndexJob": ("description", "licence"),
    "EvaluateJob": ("threads", "json", "label_weights", "class_map", "real", "subset", "held_out", "examples"),
    "FewshotInTraining": ("subset", "held_out"),
    "FlatSource": ("labels_csv", "file_column", "label_column", "separator"),
    "VerifyJob": ("workers", "run_dir"),
}

RENAMED_FIELDS: Mapping[str, Mapping[str, str]] = {  # by the name of their class: former name, name of today
    "TrainingJob": {"average_factor": "ema_decay"},
}
