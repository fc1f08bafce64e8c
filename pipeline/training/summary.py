"""Makes the lines that a run logs when it starts and when it is done, short enough for a terminal with 80 columns."""

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.stored import read_best
from pipeline.data.transform import why_no_crop_decoder
from pipeline.models.config import SMOKE
from pipeline.ranks.world import World
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan
from shards.errors import InvalidDataError
from shards.files.local_files import Line, is_number, is_step, read_lines
from shards.output.quantities import duration, plural, short_count
from shards.output.terminal import command_lines, printable_name

_COLUMNS = 80 - len("12:34:56 ")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy and loss on the held-out split after `step`. `averaged`: the accuracy of the averaged weights; None if
    they were not scored. `chance`: the share of the most frequent label; None if it is not known."""

    step: int
    accuracy: float
    loss: float
    averaged: float | None = None
    chance: float | None = None


def scores_of(run_dir: Path) -> list[Score]:
    """Returns all scores in a run's metrics.jsonl, in the order of the steps."""
    # Nearly all lines have no score; they are not parsed.
    lines = read_lines(run_dir / METRICS_FILE, is_usable=_is_score, containing=b'"test_accuracy"')
    return [
        Score(
            step=line["step"],
            accuracy=line["test_accuracy"],
            loss=line["test_loss"],
            averaged=_number(line, "test_ema_accuracy"),
            chance=_number(line, "test_chance"),
        )
        for line in lines.objects
    ]


def _number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if value is not None and is_number(value) else None


def _is_score(line: Line) -> bool:
    return is_step(line.get("step")) and all(is_number(line.get(name)) for name in ("test_accuracy", "test_loss"))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The lines at the start of a run. `resumed_step` is 0 if the run starts from initial weights or from scratch.
    `labels_per_image`: the mean number of labels of a training image."""

    job: TrainingJob
    world: World
    plan: BatchPlan
    resumed_step: int
    num_parameters: int
    num_images: int
    labels_per_image: float
    most_read_ahead_bytes: int

    def words(self) -> str:
        """Returns lines about the run's folder, how it starts, its model, its length, its data and its processes. A
        tiny model is called one. The sigmoid loss, whose first value differs from recipe to recipe, gets a line with
        that value."""
        job = self.job
        start = f"from {job.initial.weights}" if job.initial.weights else f"from scratch, seed {job.seed}"
        size = f"{job.model.image_size} px, {plural(job.model.num_classes, 'class')}"
        float8 = f" with {job.engine.float8} float8" if job.engine.float8 != "off" else ""
        engine = f"{job.engine.precision}{float8}, ZeRO-{job.engine.zero_stage}"
        lines = [
            f"{job.run_dir}: {f'continuing from step {self.resumed_step:,}' if self.resumed_step else start}",
            f"{job.model.name}, {short_count(self.num_parameters)} parameters, {size}; {engine}",
            *["a tiny model: it shows that the recipe runs, not how well it trains"] * job.model.name.endswith(SMOKE),
            *self._first_loss(),
            f"{plural(job.steps, 'step')} of {_batch(self.plan)}, {self._data()}",
            f"{self._processes()}, up to {self.most_read_ahead_bytes / 1e9:.2f} GB read ahead",
        ]
        if reason := why_no_crop_decoder():
            lines.append(f"JPEGs by simplejpeg: {reason} (patchline doctor)")
        return "\n".join(printable_name(line) for line in lines)

    def _first_loss(self) -> list[str]:
        job = self.job
        if job.loss != "sigmoid" or job.initial.weights or self.resumed_step or job.model.masked_patches:
            return []
        loss = first_sigmoid_loss(job, labels_per_image=self.labels_per_image)
        return [f"sigmoid loss summed over {plural(job.model.num_classes, 'class')}: starts near {loss:.4g}"]

    def _data(self) -> str:
        if self.job.data.mix:
            return f"of {len(self.job.data.mix)} mixed datasets"
        epochs = self.job.steps * self.job.global_batch / self.num_images
        return f"{epochs:.3g} epochs of the {self.num_images:,} in {self.job.data.url}"

    def _processes(self) -> str:
        world = self.world
        processes = f"{plural(world.num_ranks, 'process')} on {world.device.type}"
        threads = f" with {plural(world.num_threads, 'thread')}{' each' if world.num_ranks > 1 else ''}"
        return processes + threads if world.device.type == "cpu" else processes


def first_sigmoid_loss(job: TrainingJob, *, labels_per_image: float) -> float:
    """Returns the sigmoid loss of a head of zeros, whose logits all are `head_bias`: K ln 2 at 0, and 10 for each label
    of an image, plus a little for each class, at -10."""
    num_classes, logit, smoothing = job.model.num_classes, job.model.head_bias, job.label_smoothing
    targets = (1 - 2 * smoothing) * labels_per_image + smoothing * num_classes  # the sum of an image's targets
    softplus = max(logit, 0) + math.log1p(math.exp(-abs(logit)))
    return num_classes * softplus - targets * logit


def _batch(plan: BatchPlan) -> str:
    whole = plural(plan.global_batch, "image")
    if plan.num_ranks * plan.accumulation == 1:
        return whole
    return f"{whole} ({plan.micro_batch:,} x {plan.accumulation} x {plural(plan.num_ranks, 'process')})"


def num_parameters(shapes: Iterable[tuple[int, ...]]) -> int:
    """Returns the number of parameters in tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def closing_words(job: TrainingJob, *, steps: int, seconds: dict[str, float], weights: Path) -> str:
    """Returns lines that say how long the run took, its accuracy beside chance, where its weights are, which checkpoint
    was better if one was, and the next command.

    `seconds`: the ledger's record of all starts of the run.
    """
    training = seconds["compute"] + seconds["data_wait"]
    lines = [f"done: {plural(steps, 'step')} in {duration(seconds['total'])}"]
    if training > 0:  # unknown if the ledger was lost
        lines[0] += f", {steps * job.global_batch / training:,.0f} images/s while training"
    scores = scores_of(Path(job.run_dir))
    if scores:
        last, best = scores[-1], max(scores, key=lambda score: score.accuracy)
        chance = "" if last.chance is None else f" (chance {last.chance:.3f})"
        found = f"accuracy {last.accuracy:.3f}{chance}, loss {last.loss:.3g}"
        lines.append(f"{job.scored_on} {found}; best {best.accuracy:.3f} at step {best.step:,}")
        if last.averaged is not None:
            lines.append(f"{job.scored_on} accuracy {last.averaged:.3f} with the averaged weights, which are kept")
    lines.append(f"weights: {printable_name(str(weights))}, of step {steps:,}")
    lines += better_checkpoint(Path(job.run_dir), step=steps)
    lines.append(f"curves: tensorboard --logdir {printable_name(shlex.quote(job.run_dir))}")
    lines += command_lines("next: ", next_command(job, weights), columns=_COLUMNS)
    return "\n".join(lines)


def better_checkpoint(run_dir: Path, *, step: int) -> list[str]:
    """Returns lines that name the kept checkpoint that scored better than the weights of `step`, and the command that
    takes its weights. Returns no lines if there is no such checkpoint. If the run ends with averaged weights, their
    score is compared with the score of the checkpoint's raw weights, and the command takes the raw ones."""
    try:
        best = read_best(run_dir)
    except InvalidDataError:  # reported by commands that need best.json
        return []
    scores = [score for score in scores_of(run_dir) if score.step == step]
    if best is None or not scores or best.step == step:
        return []
    last = scores[-1].accuracy if scores[-1].averaged is None else scores[-1].averaged
    if best.accuracy <= last:
        return []
    raw = [] if scores[-1].averaged is None else ["--raw"]
    taken = ["patchline", "weights", str(run_dir), "--best", *raw, "--out", str(run_dir / "best")]
    better = f"better: step {best.step:,}, accuracy {best.accuracy:.3f} against {last:.3f}; its weights:"
    return [better, *command_lines("", taken, columns=_COLUMNS)]


def next_command(job: TrainingJob, weights: Path) -> list[str]:
    """Returns the command to run next: predict an image if the run has scores; otherwise evaluate on the test split, by
    convention the folder beside the data whose name ends in `-test`. A model that predicts colours of masked patches is
    not a classifier, so few-shot scores measure its representation."""
    if job.model.masked_patches:
        return ["patchline", "fewshot", str(weights), "--data.url", job.data.url or "URL"]
    if job.is_scored:
        return ["patchline", "predict", str(weights), "IMAGE"]
    beside = job.data.url.rstrip("/") + "-test"
    url = beside if job.data.url and ("://" in beside or Path(beside).is_dir()) else "URL"
    return ["patchline", "evaluate", str(weights), "--data.url", url]
