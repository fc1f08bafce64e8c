"""Reports a run on rank 0 while it trains: the live line, a line in the log at each event, metrics.jsonl, TensorBoard.

Rates come from the ledger's accounts, which separate training time from the time for saving and evaluating.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from pipeline.data.position import Skipped, data_step_of
from pipeline.data.training_data import TrainingData
from pipeline.evaluation.scores import Scores
from pipeline.inspection.weight_pictures import picture
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.reporting.ledger import Account, Ledger
from pipeline.training.reporting.loggers import following
from pipeline.training.reporting.metrics import Metrics
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.settings.job import TrainingJob
from shards.config_values import flattened
from shards.files.local_files import read_local_text
from shards.output.progress import Fact, Ticker, as_log_line
from shards.output.quantities import clock

WINDOW_SECONDS = 30.0
_MARK_SECONDS = 0.25  # least training time between two marks
log = logging.getLogger(__name__)
_MOST_RECORD_BYTES = 16 << 20
_SIZES = ("model.patch", "model.depth", "model.width")
_OF_ONE_DECAY = {"rsqrt": ("schedule.timescale",), "staircase": ("schedule.stair_steps", "schedule.stair_factor")}
_COMPARED = (
    *("data.url", "model.name", "model.image_size", *_SIZES, "model.dropout"),
    *("model.stochastic_depth", "model.stochastic_depth_rates"),
    *("tokens.patch_dropout", "tokens.whole_steps", "tokens.image_sizes", "tokens.size_steps", "tokens.patch_sizes"),
    *("optimizer.sam_rho", "model.distillation_token", "teacher.weights", "teacher.target", "teacher.share"),
    "teacher.temperature",
    *("model.masked_patches", "model.masked_target", "model.masked_share", "initial.weights", "steps", "global_batch"),
    *("schedule.learning_rate", "schedule.decay", "schedule.timescale", "schedule.stair_steps"),
    *("schedule.stair_factor", "schedule.warmup_steps", "schedule.cooldown_steps", "schedule.final_learning_rate"),
    *("optimizer.name", "optimizer.weight_decay", "optimizer.layer_decay", "optimizer.freeze_backbone", "loss"),
    *("clip_norm", "label_smoothing", "ema_decay", "data.label_weights", "data.mixup.alpha"),
    *("data.mixup.cutmix_alpha", "data.randaugment.num_ops", "data.augment.three_augment"),
    *("data.augment.color_jitter", "data.augment.repeats", "engine.precision", "seed"),
)
NUM_IMAGES = 16  # images of the first batch that TensorBoard shows
_RATES = ("bytes", "requests", "retries", "hedges")  # counts that are also shown as rates


@dataclass(frozen=True, kw_only=True)
class LaunchMark:
    """The seconds of the ledger's accounts when `step` was launched. `at`: the monotonic time."""

    step: int
    at: float
    compute: float
    data_wait: float
    aside: float  # checkpoints and evaluations

    @property
    def training(self) -> float:
        """The seconds that the steps themselves took."""
        return self.compute + self.data_wait


class Throughput:
    """Measures how fast training is, from marks of its last 30 seconds. The slow first step of a process soon stops
    counting."""

    def __init__(self, seconds: Mapping[Account, float], *, step: int) -> None:
        self._seconds = seconds
        self._start = self._line = self._mark(step)
        self._marks = deque([self._start])
        self._last = self._start
        self._launched: deque[LaunchMark] = deque()

    @property
    def at(self) -> float:
        """The monotonic time at which the step whose outcome was read last was launched."""
        return self._last.at

    def launched(self, step: int) -> None:
        """Records that `step` has just been launched, which ends its time, no matter when its outcome is read."""
        self._launched.append(self._mark(step))

    def step(self) -> None:
        """Counts the oldest launched step, whose outcome has been read."""
        self._last = self._launched.popleft()
        marks = self._marks
        if marks[0] is self._start:
            marks[0] = self._last if self._last.step > self._start.step + 1 else self._start
        if self._last.training - marks[-1].training >= _MARK_SECONDS or len(marks) == 1:
            marks.append(self._last)
        while len(marks) > 2 and self._last.training - marks[1].training >= WINDOW_SECONDS:
            marks.popleft()

    def step_seconds(self) -> float:
        """Returns the seconds per training step, over the last 30 s."""
        return _step_seconds(self._marks[0], self._last) or _step_seconds(self._start, self._last)

    def seconds_left(self, steps: int) -> float:
        """Returns the seconds until step `steps`, assuming that checkpoints and evaluations take as much time per step
        as so far."""
        done = max(1, self._last.step - self._start.step)
        aside = (self._last.aside - self._start.aside) / done
        return (steps - self._last.step) * (self.step_seconds() + aside)

    def since_line(self, *, global_batch: int) -> dict[str, float]:
        """Returns images_per_second, step_seconds and data_wait_share of the steps since the last call."""
        before, self._line = self._line, self._last
        step_seconds = _step_seconds(before, self._last)
        wait = self._last.data_wait - before.data_wait
        return {
            "images_per_second": global_batch / max(step_seconds, 1e-9),
            "step_seconds": step_seconds,
            "data_wait_share": wait / max(self._last.training - before.training, 1e-9),
        }

    def _mark(self, step: int) -> LaunchMark:
        seconds = self._seconds
        aside = seconds["checkpoint"] + seconds["evaluation"]
        compute, wait = seconds["compute"], seconds["data_wait"]
        return LaunchMark(step=step, at=time.monotonic(), compute=compute, data_wait=wait, aside=aside)


def _step_seconds(first: LaunchMark, last: LaunchMark) -> float:
    return (last.training - first.training) / max(1, last.step - first.step)


@contextmanager
def open_reporter(
    job: TrainingJob,
    ledger: Ledger,
    data: TrainingData,
    *,
    step: int,
    skipped: Skipped = (),
    utilisation: Utilisation | None = None,
) -> Iterator["Reporter"]:
    """Opens a run's reporter from `step` on, and shows the job's record and settings in TensorBoard. `skipped`: the
    data steps that the run leaves out."""
    run_dir = Path(job.run_dir)
    with closing(Metrics(run_dir, step=step)) as metrics:
        text, settings = _text(run_dir / RECORD_FILE), settings_of(job)
        metrics.show_job(text, settings)
        epoch_samples = data.datasets[0].num_samples if len(data.datasets) == 1 else 0
        reporter = Reporter(
            job,
            metrics,
            ledger,
            step=step,
            epoch_samples=epoch_samples,
            label_names=data.label_names,
            skipped=skipped,
            utilisation=utilisation,
        )
        with following(job, text=text, settings=settings, is_done=lambda: reporter.is_done):
            yield reporter
            reporter.write_rest()  # not after an error: another process may have taken over the run and its files


def _text(record: Path) -> str:
    """Returns the job's record, which this run has just written; empty if it is missing."""
    try:
        return read_local_text(record, most_bytes=_MOST_RECORD_BYTES)
    except FileNotFoundError:
        return ""


def settings_of(job: TrainingJob) -> dict[str, str | int | float]:
    """Returns the settings by which runs are compared, under the names of the job's fields."""
    fields = flattened(asdict(job))
    fields["data.url"] = job.data.url or " + ".join(url for url, _ in job.data.mix)
    fields["schedule.stair_steps"] = " ".join(map(str, job.schedule.stair_steps))
    fields["tokens.image_sizes"] = " ".join(map(str, job.tokens.image_sizes))
    fields["tokens.size_steps"] = " ".join(map(str, job.tokens.size_steps))
    fields["tokens.patch_sizes"] = " ".join(map(str, job.tokens.patch_sizes))
    if not job.model.is_bit:  # sizes from the job or from the model's name
        fields |= {f"model.{name}": getattr(job.model.size, name) for name in ("patch", "depth", "width")}
    others = {name for names in _OF_ONE_DECAY.values() for name in names} - {*_OF_ONE_DECAY.get(job.schedule.decay, ())}
    left_out = others | (set(_SIZES) if job.model.is_bit else set())
    shown = {name: fields[name] for name in _COMPARED if name not in left_out}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in shown.items()}


class Reporter:
    """Reports a run on rank 0; a context manager around its loop. `epoch_samples`: the number of samples per epoch, 0
    if datasets are mixed. `save_interval_seconds`: the seconds between two checkpoints, 0 if they do not follow the
    clock. `utilisation`: computes what a step costs."""

    def __init__(
        self,
        job: TrainingJob,
        metrics: Metrics,
        ledger: Ledger,
        *,
        step: int,
        epoch_samples: int,
        label_names: tuple[str, ...] = (),
        skipped: Skipped = (),
        utilisation: Utilisation | None = None,
    ) -> None:
        self.job, self.metrics, self.epoch_samples, self.label_names = job, metrics, epoch_samples, label_names
        self.skipped, self.utilisation = skipped, utilisation
        self._ticker, self._stack = Ticker(), ExitStack()
        self._throughput = Throughput(ledger.seconds, step=step)
        self._step, self._saved, self._line_step = step, step, 0
        self._loss = self._rate = self.save_interval_seconds = 0.0
        self._once: dict[str, float] = {}
        self._scores: Scores | None = None
        self._traffic: tuple[float, dict[str, float]] | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._ticker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def shows(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Shows the first images as the model gets them: [n, height, width, 3] with values of 0 to 255, and labels [n,
        most labels per image], padded with numbers below 0."""
        own = [[self.label_names[label] for label in row if label >= 0] for row in labels.tolist()]
        self.metrics.show_images(self._step + 1, images, [", ".join(names) for names in own])

    def shows_positions(self, step: int, levels_TUHW: torch.Tensor) -> None:
        """Shows how similar the position embeddings are after a step: the levels of their similarities."""
        self.metrics.show_picture("weights/position_similarity", step, picture(levels_TUHW))

    def launched(self, step: int) -> None:
        """Notes that a step was launched. Its outcome is passed to `step` later."""
        self._throughput.launched(step)

    def step(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        rate: float,
        traffic: dict[str, float],
        scores: Scores | None,
        of_others: Mapping[str, float] | None = None,
        guard: Mapping[str, float] | None = None,
        norms: Mapping[str, float] | None = None,
        ranks: Mapping[str, float] | None = None,
    ) -> None:
        """Reports the outcome of the oldest launched step. `rate`: the learning rate. `of_others`: further scores, such
        as scores on other held-out datasets. `guard`: the guard's values. `norms`: the norms by group; a step with
        scores or norms always gets a line of metrics. `ranks`: values about the ranks' times.
        """
        self._throughput.step()
        self._step, self._loss, self._rate = step, loss, rate
        self._scores = scores or self._scores
        _tell(step, scores, of_others or {}, on=self.job.scored_on)
        if step % self.job.log_every_steps == 0 or step == self.job.steps or scores or of_others or norms:
            values = {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
            values |= {f"data/{name}": value for name, value in traffic.items()} | self._data_rates(traffic)
            values |= scores.values("test_") if scores else {}
            values |= of_others or {}
            if self.save_interval_seconds:
                values["checkpoint/interval_seconds"] = self.save_interval_seconds
            values |= self._throughput.since_line(global_batch=self.job.global_batch)
            values |= self.utilisation.values(values["step_seconds"], step=step) if self.utilisation else {}
            more = {**(guard or {}), **(norms or {}), **(ranks or {})}
            self.metrics.write(step, values | self._epoch() | more | self._once)
            self._once, self._line_step = {}, step
        self._ticker.tick(self.facts)

    def scored_late(self, step: int, scores: Scores | None, of_others: Mapping[str, float]) -> None:
        """Reports the scores of a step that was reported without them because its evaluation was given up."""
        self._scores = scores or self._scores
        _tell(step, scores, of_others or {}, on=self.job.scored_on)
        self.metrics.amend(step, (scores.values("test_") if scores else {}) | dict(of_others))

    def saved(self, step: int, values: dict[str, float]) -> None:
        """Reports that a checkpoint is committed, in the live line or as a line in the log. `values`: values for the
        next line of metrics."""
        self._saved = step
        self._once |= values
        if not self._ticker.is_live:
            which = "checkpoint" if step == self._step else f"checkpoint of step {step:,}"
            log.info("%s, %s saved", as_log_line(self.facts()[:-1]), which)

    def not_saved(self, num_failed: int) -> None:
        """Reports that a checkpoint could not be written. `num_failed`: how many failed so far."""
        self._once |= {"checkpoint/failed": float(num_failed)}

    def not_scored(self, num_failed: int) -> None:
        """Reports that measurements of an evaluation failed. `num_failed`: how many failed so far."""
        self._once |= {"evaluation/failed": float(num_failed)}

    def write_rest(self) -> None:
        """Adds to the last line the values kept for the next one, such as those of the last commit. Called at the end
        of a run."""
        if self._once and self._line_step:
            self.metrics.amend(self._line_step, self._once)
        self._once = {}
        self.metrics.settle()

    @property
    def is_done(self) -> bool:
        """Whether the last step of the run has been reported."""
        return self._step == self.job.steps

    def facts(self) -> list[Fact]:
        """Returns the facts that the live line shows."""
        job, scores = self.job, self._scores
        count = f"step {self._step:,}/{job.steps:,}"
        accuracy = (
            (f"{job.scored_on} accuracy {scores.accuracy:.3f}", f"acc {scores.accuracy:.3f}") if scores else ("", "")
        )
        epoch = f"{self._epoch().get('epoch', 0):.1f}" if self.epoch_samples else ""
        images = f"{job.global_batch / max(self._throughput.step_seconds(), 1e-9):,.0f}"
        left = self._throughput.seconds_left(job.steps)
        cost = self.utilisation.words(self._throughput.step_seconds(), step=self._step) if self.utilisation else ""
        return [
            Fact(full=count, short=f"{self._step}/{job.steps}", weight=3),
            Fact(full=f"loss {self._loss:.4f}", short=f"loss {self._loss:.3f}", weight=3),
            Fact(full=accuracy[0], short=accuracy[1], weight=2),
            Fact(full=f"learning rate {self._rate:.2g}", short=f"lr {self._rate:.2g}"),
            Fact(full=f"epoch {epoch}" if epoch else "", short=f"epoch {epoch}" if epoch else ""),
            Fact(full=f"{images} images/s", short=f"{images} img/s", weight=2),
            Fact(full=cost, short=cost, weight=0),
            Fact(full=f"{clock(left)} left", short=f"{clock(left)} left", weight=3),
            Fact(full=f"saved {self._saved:,}" if self._saved else "", short="", weight=0),
        ]

    def _epoch(self) -> dict[str, float]:
        if not self.epoch_samples:
            return {}
        return {"epoch": data_step_of(self._step, self.skipped) * self.job.global_batch / self.epoch_samples}

    def _data_rates(self, traffic: dict[str, float]) -> dict[str, float]:
        """Returns rates per second since the previous line; empty for the first line of a process."""
        now, before = self._throughput.at, self._traffic
        self._traffic = now, traffic
        if before is None:
            return {}
        seconds = max(now - before[0], 1e-9)
        return {f"data/{name}_per_second": (traffic[name] - before[1][name]) / seconds for name in _RATES}


def _tell(step: int, scores: Scores | None, values: Mapping[str, float], *, on: str) -> None:
    """Logs the scores after a step: the model's, the averaged weights', and the few-shot accuracy."""
    if scores:
        log.info("step %d: %s accuracy %.3f, loss %.3g", step, on, scores.accuracy, scores.loss)
    if "test_ema_accuracy" in values:
        accuracy, loss = values["test_ema_accuracy"], values["test_ema_loss"]
        log.info("step %d: %s accuracy of the averaged weights %.3f, loss %.3g", step, on, accuracy, loss)
    fewshot = {name.removeprefix("fewshot/"): value for name, value in values.items() if name.startswith("fewshot/")}
    if fewshot:
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in fewshot.items())
        log.info("step %d: few-shot accuracy, %s", step, shown)
