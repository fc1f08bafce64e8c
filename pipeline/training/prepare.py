"""Checks that a job fits its data and its ranks, and then that all ranks are about to run the same thing.

`prepare` runs before the ranks are joined, and `refuse_other_runs` makes their first exchange. Without this exchange, a
node with an old installation or an old copy of the dataset would make the ranks train a wrong model, and nobody would
notice. The ranks exchange a digest of everything that must be equal, 64 bytes per rank. If the digests differ, they
exchange the values themselves, and all end with the same message.
"""

import hashlib
import json
import logging
import platform
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.attempts import list_committed
from pipeline.data.config import Share
from pipeline.data.position import WITHOUT_EFFECT
from pipeline.data.stream import PlannedStream, plan_stream
from pipeline.data.training_data import TrainingData
from pipeline.evaluation.config import FewshotInTraining
from pipeline.evaluation.fewshot import FewshotData, chosen_data, open_splits
from pipeline.models.build import initial_of, shapes_of
from pipeline.models.weights.fit import fit_weights, has_other_patches
from pipeline.models.weights.folder import Weights
from pipeline.models.weights.safetensors import TensorByName
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.rendezvous import ranks_words
from pipeline.ranks.world import World, bf16_of
from pipeline.training.decisions import Decision, Undecided, decide_classes, will_compile
from pipeline.training.fitting.fit import budget_of
from pipeline.training.reporting.loggers import refuse_unusable_loggers
from pipeline.training.settings.job import TrainingJob
from pipeline.training.teacher import Teacher, open_teacher
from pipeline.training.zero.batch_plan import plan_batch, shared_lanes
from pipeline.training.zero.loading import deepspeed_version, refuse_untested_deepspeed
from shards.class_names import class_name
from shards.config_values import flattened, shown, shown_value
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.files.looks import is_there
from shards.host_copy import LocalRanks
from shards.store import Store, open_store
from shards.ulimits import has_address_limit, memory_todo

log = logging.getLogger(__name__)
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy")
_ROOMS = ("shards", "pipeline", "jobs", "patchline")
_CODE = "code "
_MISSING = "missing"

_MOST_LINES, _MOST_FILES = 20, 3

Facts = Mapping[str, str]


def refuse_other_head(job: TrainingJob, data: TrainingData) -> None:
    """Raises UserError if the job keeps the head of the weights that it starts from, and the number or the names of
    that head's classes differ from the data's. Classes without names, as in some imported heads, are not compared by
    name."""
    if job.initial.new_head or job.model.masked_patches:
        return
    labels, num_classes = _initial_weights(job).labels, job.model.num_classes
    others = [
        (number, was, now)
        for number, (was, now) in enumerate(zip(labels, data.label_names, strict=False))
        if class_name(was) not in (now, f"unnamed {number}")
    ]
    if len(labels) == num_classes and not others:
        return
    what = f"has {len(labels)} classes, the model {num_classes}"
    if others:
        number, was, now = others[0]
        what = f"calls class {number} {shown_value(was)}, {data.url} {shown_value(now)} ({len(others)} differ)"
    raise UserError(
        f"the head of the weights at {job.initial.weights!r}, which --initial.no-new-head keeps, {what}; "
        "give --initial.new-head, or a dataset of the same classes"
    )


@dataclass(frozen=True, kw_only=True)
class Prepared(Undecided):
    """A job that fits its data and its ranks. Its number of classes is filled in, the datasets are open, and the batch
    and the stream are planned.

    `teacher`: the model to learn from, on the host. `decisions`: the decisions made so far. `extend`: whether the job
    may have more steps than the run that it continues.
    """

    run_dir: Path
    store: Store
    stream: PlannedStream
    held_out: dict[str, Dataset]
    fewshot: FewshotData | None
    teacher: Teacher | None
    extend: bool
    decisions: tuple[Decision, ...]


def prepare(job: TrainingJob, world: World, *, extend: bool = False) -> Prepared:
    """Checks the job, opens its datasets and plans its batches. Raises UserError if the job cannot run as it is."""
    _refuse_missing(job)
    if world.is_first and has_address_limit():
        log.warning("%s: libraries that get no more memory may crash without a message", memory_todo())
    refuse_untested_deepspeed(job.engine, deepspeed_version())
    if world.is_first and job.tokens.patch_sizes and job.model.size.patch not in job.tokens.patch_sizes:
        log.warning(
            "evaluations, and with them the best checkpoint, and the run's weights have patches of %d px, which no "
            "step draws (%s px); give one of these as --model.patch, or score the run with other patches by: patchline "
            "import %s --patch N --out DIR",
            job.model.size.patch,
            ", ".join(map(str, job.tokens.patch_sizes)),
            shlex.quote(job.run_dir),
        )
    plan = plan_batch(
        job.global_batch,
        micro_batch=job.micro_batch,
        num_ranks=world.num_ranks,
        lanes=job.data.lanes,
        pairs=job.data.mixup.is_on,
    )
    ranks = LocalRanks(launch=world.launch, num_ranks=world.num_local_ranks)
    stream = plan_stream(
        job.data,
        seed=job.seed,
        image_size=job.model.image_size,
        share=Share(global_batch=job.global_batch, rank=world.rank, num_ranks=world.num_ranks),
        num_cores=world.num_threads,
        num_local_ranks=world.num_local_ranks,
        ranks=ranks,
    )
    sizes = tuple(zip(job.tokens.size_steps, job.tokens.image_sizes, strict=True))
    stream = replace(stream, sizes=sizes)
    held_out = _held_out(job, stream.data, ranks=ranks, say=world.is_first)
    job, classes = decide_classes(job, stream.data, list(held_out.values()), say=world.is_first)
    stop = Path(job.run_dir) / "STOP"
    if is_there(stop):
        raise UserError(f"{stop} exists and keeps the run stopped; delete it to continue")
    refuse_unusable_loggers(job.loggers, Path(job.run_dir), opens=world.is_first)
    store = open_store(job.checkpoint.url or str(Path(job.run_dir) / "checkpoints"))
    if wrong := shared_lanes(job.data.lanes, job.data.window_blocks, num_ranks=world.num_ranks):
        if not list_committed(store):
            raise UserError(wrong)
        if world.is_first:
            log.warning("the run goes on, slower than it could: %s", wrong)
    if job.initial.weights and not list_committed(store):
        refuse_other_head(job, stream.data)
        starting_weights(job)  # raises if they do not fit the model
    fewshot = _fewshot(job.fewshot, ranks)
    # Before the teacher is read, which a run on a CPU has in the memory that is counted here.
    budget = budget_of(world, read_ahead_bytes=stream.most_read_ahead_bytes + _batches_bytes(job, world))
    if teacher := open_teacher(job, stream.data.label_names, say=world.is_first):
        job = replace(job, teacher=replace(job.teacher, sha256=teacher.sha256))
    elif job.model.distillation_token and not job.initial.weights and world.is_first:
        log.warning(
            "the distillation token has no teacher, so the mean of both heads learns the labels; DeiT's recipes have "
            "--teacher.weights WEIGHTS --teacher.target hard --teacher.share 0.5"
        )
    ranks.is_starting = False
    return Prepared(
        job=job,
        world=world,
        run_dir=Path(job.run_dir),
        store=store,
        plan=plan,
        budget=replace(budget, teacher=teacher.config if teacher else None),
        stream=stream,
        held_out=held_out,
        fewshot=fewshot,
        teacher=teacher,
        is_compiled=will_compile(job.engine, world),
        extend=extend,
        decisions=(classes,),
    )


def starting_weights(job: TrainingJob, *, say: bool = False) -> TensorByName:
    """Returns a function from a tensor's name to its values at the start of a run without a checkpoint: the weights
    that the job names, fitted to its model, or else initial values. `say`: whether to log what was assumed about the
    weights' file, and whether the patch embedding is resized."""
    shapes = shapes_of(job.model)

    def scratch(name: str) -> Any:
        return initial_of(job.model, name, shapes[name], seed=job.seed)

    if not job.initial.weights:
        return scratch
    weights, initial = _initial_weights(job, say=say), job.initial
    resizes = initial.patch == "resize"
    if say and resizes and has_other_patches(weights.config, job.model):
        source, model = weights.config, job.model
        log.info(
            "the patch embedding of %s is resized from %d x %d to %d x %d px, for a grid of %d x %d patches",
            *(initial.weights, source.size.patch, source.size.patch, model.size.patch, model.size.patch, *model.grid),
        )
    return fit_weights(
        weights, job.model, initial=scratch, new_head=initial.new_head, mode=initial.resample, resize_patches=resizes
    )


def _initial_weights(job: TrainingJob, *, say: bool = False) -> Weights:
    """Opens the weights that the job starts from. A job without such weights does not load the readers of other
    libraries' formats."""
    from pipeline.models.conversion.open_any import open_for_use  # noqa: PLC0415

    return open_for_use(job.initial.weights, say=say)


def _held_out(job: TrainingJob, data: TrainingData, *, ranks: LocalRanks, say: bool) -> dict[str, Dataset]:
    """Returns the datasets to score on, by name; the dataset that decides which model is best has an empty name. `say`:
    whether to log which part of the data is trained on (if it is not all of it), and to warn if the run also trains on
    the images that decide which model is best."""
    if say and data.part_text:
        log.info("%s", data.part_text)
    part = data.held_out
    others = {
        name: open_dataset(url, ranks=ranks) for name, url in job.evaluation.sets(has_held_out=part is not None).items()
    }
    found = ({"": part} if part else {}) | others
    if say and "" in found and is_trained_on(found[""], data):
        log.warning(
            "--evaluation.url %s is what the run trains on, so its accuracy says nothing about new images; give a "
            "dataset of images that were set aside, or --data.held-out.share 0.1",
            found[""].url,
        )
    return found


def is_trained_on(scored: Dataset, data: TrainingData) -> bool:
    """Returns whether a dataset, or a part of it, is also trained on. A held-out part counts as another dataset."""
    return scored.fingerprint in data.fingerprints


def _fewshot(config: FewshotInTraining, ranks: LocalRanks) -> FewshotData | None:
    """Returns the images for few-shot scores; None if the job wants none. Raises UserError if settings of the few-shot
    images or of their interval are given without `fewshot.url`."""
    if not config.url:
        if config != replace(
            FewshotInTraining(), shots=config.shots, seeds=config.seeds, l2=config.l2, probe=config.probe
        ):
            raise UserError(
                "fewshot.test-url, .subset, .held-out and .every-steps say nothing without fewshot.url; give it, too"
            )
        return None
    return chosen_data(*open_splits(config, group="fewshot", ranks=ranks), config)


def _batches_bytes(job: TrainingJob, world: World) -> int:
    """Returns the bytes of all batches that the ranks of this host hold or prepare."""
    num_images = (job.data.steps_ahead + 2) * job.global_batch // world.num_ranks * world.num_local_ranks
    return 3 * job.model.image_size**2 * num_images


def _refuse_missing(job: TrainingJob) -> None:
    if job.optimizer.freeze_backbone and not job.initial.weights:
        raise UserError(
            "optimizer.freeze_backbone is on, but the run starts from scratch: its backbone would stay random; give "
            "--initial.weights RUN/weights, or --optimizer.no-freeze-backbone"
        )
    if not job.run_dir:
        raise UserError("--run-dir is missing: give the run directory as --run-dir")
    if not (job.data.url or job.data.mix):
        raise UserError(
            "--data.url is missing: give the dataset as --data.url, or several as --data.mix URL WEIGHT URL WEIGHT ..."
        )


def refuse_other_runs(prepared: Prepared) -> None:
    """Raises UserError, the same on every rank, if another rank is about to run something else. Collective."""
    if prepared.world.num_ranks > 1:
        refuse_disagreement(facts_to_agree(prepared), device=prepared.world.device)


def refuse_disagreement(facts: Facts, *, device: torch.device) -> None:
    """Raises UserError, the same on every rank, unless the facts are equal on all ranks. Collective."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if len(set(gather_json(digest, device=device))) == 1:
        return
    lines = disagreements(gather_json(dict(facts), device=device))
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    listed = "\n".join(f"  {line}" for line in [*lines[:_MOST_LINES], *more])
    raise UserError(
        f"the ranks are not about to run the same thing:\n{listed}\n"
        "Start all ranks with the same command, from the same installation, on the same data"
    )


def disagreements(facts: Sequence[Facts]) -> list[str]:
    """Returns a line for every fact that differs: which ranks have which value, the rarest value first. Pure. `facts`:
    the facts of each rank, in rank order."""
    names = dict.fromkeys(name for each in facts for name in each)
    different = [name for name in names if len({each.get(name) for each in facts}) > 1]
    files = [name for name in different if name.startswith(_CODE)]
    lines = [f"{name}: {_groups(facts, [name])}" for name in different if name not in files]
    if files:
        some = ", ".join(name.removeprefix(_CODE) for name in files[:_MOST_FILES])
        others = f" and {len(files) - _MOST_FILES} other files" if len(files) > _MOST_FILES else ""
        lines.append(f"code, in {some}{others}: {_groups(facts, files)}")
    return lines


def facts_to_agree(prepared: Prepared) -> dict[str, str]:
    """Returns everything that must be the same on every rank, by the names that the message gives."""
    job, held_out = prepared.job, prepared.held_out
    facts: dict[str, object] = {"python": platform.python_version()}
    facts |= {name: version(name) for name in _LIBRARIES}
    if job.engine.precision == "auto":  # the precision then depends on each rank's device
        facts["bf16"] = bf16_of(prepared.world.device).reason
    if job.engine.compile == "auto":
        facts["torch.compile"] = "works" if prepared.is_compiled else "is not used"
    if job.engine.float8 != "off" and find_spec("torchao"):
        facts["torchao"] = version("torchao")
    if job.engine.fused_mlp and find_spec("quack"):
        facts["quack-kernels"] = version("quack-kernels")
    facts |= {name: value for name, value in flattened(prepared.stream.start.to_json()).items() if _is_of_data(name)}
    facts["held-out dataset"] = None
    facts |= {f"held-out dataset {name}".strip(): one.fingerprint for name, one in held_out.items()}
    if fewshot := prepared.fewshot:
        facts |= {"few-shot dataset": fewshot.train.fingerprint, "few-shot test dataset": fewshot.test.fingerprint}
    facts |= flattened(asdict(job))
    return {name: shown(value) for name, value in facts.items()} | code_facts(Path(__file__).resolve().parents[2])


def _is_of_data(name: str) -> bool:
    """Returns whether a field of a position describes the data. All other fields are also in the job."""
    return name not in WITHOUT_EFFECT and name.partition(".")[0] in (
        "dataset",
        "subset",
        "held_out",
        "mix",
        "decoder",
        "order_version",
    )


def code_facts(root: Path) -> dict[str, str]:
    """Returns the crc32 of each of this project's Python files, by path. `root`: the folder that holds the packages."""
    paths = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    return {_CODE + path.relative_to(root).as_posix(): f"{zlib.crc32(path.read_bytes()):08x}" for path in paths}


def _groups(facts: Sequence[Facts], names: Sequence[str]) -> str:
    """Returns text such as `ranks 3, 7: 2.12.0; the other 14: 2.13.0`. The values of several facts are shown as one
    digest."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        values = [each.get(name, _MISSING) for name in names]
        value = values[0] if len(values) == 1 else f"{zlib.crc32(json.dumps(values).encode()):08x}"
        ranks_of.setdefault(value, []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda group: (len(group[1]), -group[1][0]))
    last_value, last_ranks = groups[-1]
    words = [f"{ranks_words(ranks)}: {value}" for value, ranks in groups[:-1]]
    last = f"the other {len(last_ranks)}" if len(last_ranks) > 1 else ranks_words(last_ranks)
    return "; ".join([*words, f"{last}: {last_value}"])
