"""CHAIN.yaml: the steps of a chain of jobs, for `patchline submit CHAIN.yaml`. slurm/chain.example.yaml shows it."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from jobs.cluster.settings import refuse_wrong_limit
from jobs.mistakes import similar
from jobs.record import read_config
from jobs.submittable import SUBMITTED, submitted_stage
from shards.errors import UserError
from shards.schema.config_values import Range, refuse_wrong_values, shown_value

STATE = "chain"  # the folder of the chain's own state, in the folder of the chain
INPUTS = ("data", "weights", "run")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_FLAG = re.compile(r"--[a-z][a-z0-9_.-]*(=.*)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One step: a stage, what it works on, and the jobs that it gets."""

    name: str
    """Its name: small letters, digits, - and _. What it writes goes to FOLDER/NAME."""
    stage: str
    """pack, verify, pretrain, finetune, evaluate, fewshot or report."""
    recipe: str = ""
    """The recipe, as on the command line."""
    flags: tuple[str, ...] = ()
    """More flags of the stage, such as --steps=1000."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Several runs of the step that differ in these flags: an array of jobs, each in FOLDER/NAME/NUMBER."""
    sweep: tuple[str, ...] = ()
    """Words of `patchline sweep`, such as --schedule.learning-rate, '.003', '.01', --select-on, URL."""
    data: str = ""
    """The step whose dataset it takes."""
    weights: str = ""
    """The step whose weights it takes; if that has variants, this step has one run for each."""
    run: str = ""
    """The step whose run is reported."""
    after: tuple[str, ...] = ()
    """The steps that must be complete before; empty: the one before it."""
    nodes: Annotated[int, Range(1, 100_000)] = 1
    """Nodes of each job."""
    time: str = ""
    """Time limit of each job; empty: that of the cluster's settings."""
    cpus: Annotated[int, Range(0, 4096, zero="the cluster's")] = 0
    """CPUs of each process; packing uses as many workers."""
    tasks: Annotated[int, Range(1, 1_000_000)] = 1
    """Tasks that share a packing: an array of jobs."""
    at_once: Annotated[int, Range(0, 1_000_000, zero="all")] = 0
    """Tasks or variants that run at the same time."""
    links: Annotated[int, Range(1, 1000)] = 1
    """Jobs in a row that continue a training run where requeueing is forbidden."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="steps.")
        if not _NAME.fullmatch(self.name) or self.name == STATE:
            raise UserError(
                f"name is {shown_value(self.name)}; allowed: small letters, digits, - and _, a letter first, at most "
                f"32 of them, and not {STATE!r}"
            )
        takes = submitted_stage(self.stage).takes
        for name in INPUTS:
            if getattr(self, name) and name not in takes:
                raise UserError(
                    f"step {self.name}: {self.stage} takes no `{name}:`; allowed: {', '.join(takes) or 'none'}"
                )
        for flag in (*self.flags, *(flag for variant in self.variants for flag in variant)):
            if not _FLAG.fullmatch(flag):
                raise UserError(f"step {self.name}: flags has {shown_value(flag)}; allowed: --name=value or --switch")
        if self.time:
            refuse_wrong_limit(self.time, what=f"step {self.name}: time")
        for name, stages in (("tasks", ("pack",)), ("links", ("pretrain", "finetune"))):
            if getattr(self, name) > 1 and self.stage not in stages:
                raise UserError(
                    f"step {self.name}: {name} is of {' and '.join(stages)}, not of {self.stage}; leave it out"
                )
        if self.sweep and (self.stage not in ("pretrain", "finetune") or self.variants or self.links > 1):
            raise UserError(f"step {self.name}: sweep is of pretrain and finetune, without variants and links")
        if self.variants and self.links > 1:
            raise UserError(
                f"step {self.name}: links is of one run, not of variants; leave it out: the gate submits again each "
                "variant that is not complete"
            )
        if self.variants and not SUBMITTED[self.stage].has_ranks:
            raise UserError(f"step {self.name}: {self.stage} has no variants; write a step for each")
        if self.nodes > 1 and not SUBMITTED[self.stage].has_ranks:
            raise UserError(f"step {self.name}: {self.stage} runs on one node; leave out `nodes`, or use `tasks`")


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """A chain: its folder and its steps."""

    folder: str = ""
    """Folder of the chain, on storage that all nodes share: its state is in FOLDER/chain, a step's output in
    FOLDER/NAME."""
    rounds: Annotated[int, Range(0, 100)] = 3
    """How often in a row what is missing of a step is submitted again without anything new."""
    steps: tuple[StepConfig, ...] = ()
    """The steps, each after those that it needs."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if not self.folder or "://" in self.folder or not self.folder.isprintable():
            raise UserError(f"folder is {shown_value(self.folder)}; give a folder that all nodes share")
        if not self.steps:
            raise UserError("steps is missing: the list of steps, as in `patchline example chain.yaml`")
        known: list[str] = []
        for step in self.steps:
            if step.name in known:
                raise UserError(f"two steps have the name {step.name}; give each its own")
            for other in (*step.after, *(getattr(step, name) for name in INPUTS)):
                if other and other not in known:
                    near = similar(other, known)
                    meant = f"did you mean {near[0]}? " if near else ""
                    raise UserError(
                        f"step {step.name} names {shown_value(other)}; {meant}allowed: a step before it: "
                        f"{', '.join(known) or 'there is none'}"
                    )
            known.append(step.name)


def read_chain(path: Path) -> ChainConfig:
    """The chain in a YAML file. UserError, with the line, for what is wrong."""
    example = "the output of `patchline example chain.yaml`"
    of_step = tuple(each.name for each in fields(StepConfig) if each.name not in ("name", "stage"))
    optional = {"StepConfig": of_step, "ChainConfig": ("rounds",)}
    return read_config(
        path, ChainConfig, example=example, todo=f"give a chain, such as your copy of {example}", optional=optional
    )
