"""Which versions of DeepSpeed a run trusts: those that the engine and state.py were tested with, and one by name.

They read and overwrite DeepSpeed's flat partitions, which are no public interface: another version may lay them out in
another way and still train, on wrong numbers.
"""

from importlib.metadata import version

from pipeline.training.settings.job import EngineConfig
from shards.config_values import shown_value
from shards.errors import UserError

TESTED = ("0.19.8",)


def deepspeed_version() -> str:
    """The installed version, without what a build of one's own adds to it (0.19.8+cu130: 0.19.8)."""
    return version("deepspeed").partition("+")[0]


def refuse_untested_deepspeed(config: EngineConfig, installed: str) -> None:
    """UserError unless this version is a tested one, or the one that the job allows by name."""
    if installed in TESTED or config.allow_deepspeed == installed:
        return
    todo = f"install {TESTED[-1]} (pip install deepspeed=={TESTED[-1]}), or accept this one"
    allowed = f"; engine.allow_deepspeed is {shown_value(config.allow_deepspeed)}" if config.allow_deepspeed else ""
    raise UserError(
        f"DeepSpeed {installed} is installed{allowed}; tested: {', '.join(TESTED)}. Another version may lay its states "
        f"out in another way: {todo} with --engine.allow-deepspeed {installed}, which also checks its gradients before "
        "the first step"
    )
