"""The guard: notices loss spikes and non-finite losses and gradients, and ends a run that does not recover.

Every decision depends only on values that all ranks share and on the losses that checkpoints carry. So all ranks decide
alike, and a resumed run decides like an unbroken one. Each finding becomes a line in RUN/guard.jsonl, a file that is
only appended to.

Whether a loss is a spike depends on its robust z-score over the losses before it:

    z = (loss - median) / max(1.4826 MAD, 1 % of the median)

MAD is the median of the distances from the median; 1.4826 MAD estimates the standard deviation of normal noise
(Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). A few earlier spikes hardly change the median or the
MAD. Without the lower bound of 1 %, every small change of a loss that hardly varies would be a spike. Only a rise is a
spike.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.data.position import StreamPosition, data_step_of
from pipeline.training.settings.job import GuardConfig, TrainingJob
from pipeline.training.step import StepResult
from shards.errors import WillNotSucceedError
from shards.files.local_files import append_or_say

_NORMAL = 1.4826  # MADs in a standard deviation
_LEAST_SCALE = 0.01  # the least scale, as a share of the median
_TINY = 1e-12  # the least scale if the median is 0
log = logging.getLogger(__name__)
FILE_NAME = "guard.jsonl"
LastSaved = Callable[[], int | None]  # waits for running saves, returns the newest checkpoint's step; collective


@dataclass(frozen=True, kw_only=True)
class SpikeVerdict:
    """How far a loss is from the losses before it. `median`, `mad` and `z` are NaN if it was not compared: too few
    losses precede it, it is not finite, or the guard is off."""

    loss: float
    median: float = math.nan
    mad: float = math.nan
    z: float = math.nan
    is_spike: bool = False


def judge(loss: float, losses: Sequence[float], *, config: GuardConfig) -> SpikeVerdict:
    """Returns the verdict on a loss that follows `losses`, which are finite. A non-finite loss is not a spike."""
    if config.on_spike == "off" or len(losses) < config.min_history or not math.isfinite(loss):
        return SpikeVerdict(loss=loss)
    middle = median(losses)
    mad = median(abs(each - middle) for each in losses)
    z = (loss - middle) / max(_NORMAL * mad, _LEAST_SCALE * abs(middle), _TINY)
    return SpikeVerdict(loss=loss, median=middle, mad=mad, z=z, is_spike=z >= config.spike_z)


def with_loss(losses: tuple[float, ...], loss: float, *, config: GuardConfig) -> tuple[float, ...]:
    """Returns the latest losses with this one added, if it is finite. Returns no losses if the guard does not look for
    spikes."""
    if config.on_spike == "off":
        return ()
    return (*losses, loss)[-config.spike_window :] if math.isfinite(loss) else losses[-config.spike_window :]


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step with a spike or a non-finite loss or gradient, and the evidence. Its batch is batch `data_step` of the
    sample order, positions `first_position` to `end_position` - 1. The top of this file explains `median`, `mad` and
    `z`. `was_skipped`: whether the optimiser skipped the update."""

    kind: Literal["spike", "non_finite"]
    step: int
    data_step: int
    first_position: int
    end_position: int
    loss: float
    median: float
    mad: float
    z: float
    grad_norm: float
    learning_rate: float
    was_skipped: bool

    def words(self) -> str:
        """Returns the finding as text, to which messages add what was done about it."""
        if self.kind == "spike":
            history = f"z {self.z:.1f}, median {self.median:.4g}, MAD {self.mad:.3g}"
            return f"step {self.step}: the loss {self.loss:.4g} is a spike ({history})"
        return f"step {self.step}: the loss {self.loss:.4g} or its gradient (norm {self.grad_norm:.4g}) is not finite"


def add_finding(run_dir: str, finding: BadStep, *, action: str, **more: int) -> None:
    """Appends a finding, and what was done about it, to RUN/guard.jsonl. Called on rank 0."""
    line = {**asdict(finding), "action": action, **more}
    append_or_say(Path(run_dir) / FILE_NAME, line, what=finding.words())


def add_alarm(run_dir: str, *, step: int, kind: str, reason: str, action: str = "skipped") -> None:
    """Appends anything else that went wrong, and what was done about it, to RUN/guard.jsonl. Called on rank 0."""
    line = {"kind": kind, "step": step, "action": action, "reason": reason}
    append_or_say(Path(run_dir) / FILE_NAME, line, what=reason)


class RewindNeededError(Exception):
    """The run must continue from an earlier checkpoint, without the data around the finding."""

    def __init__(self, finding: BadStep) -> None:
        super().__init__(finding.words())
        self.finding = finding


class NonFiniteGuard:
    """Counts updates, and ends a run with too many bad ones in a row. An update is bad if it was skipped, or made from
    a non-finite loss. `num_updates`: the number of updates that the optimiser has made in the whole run.
    `skipped_in_a_row`: the number of bad updates since the last good one. `says`: whether this rank logs bad
    updates."""

    def __init__(self, job: TrainingJob, *, num_updates: int, says: bool) -> None:
        self.num_updates, self.most_skipped, self.says = num_updates, job.max_skipped_updates, says
        self.skipped_in_a_row = 0

    def count(self, step: int, *, loss: float, was_skipped: bool, last_saved: LastSaved) -> None:
        """Counts one more update. Raises WillNotSucceedError after too many bad ones in a row. `last_saved`: see
        LastSaved."""
        self.num_updates += not was_skipped
        if not was_skipped and math.isfinite(loss):
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.says:
            what = "skipped, its gradient is not finite" if was_skipped else "made from a loss that is not finite"
            log.warning("step %d: the update was %s (loss %s)", step, what, loss)
        if self.skipped_in_a_row > self.most_skipped:
            self.refuse(step, last_saved=last_saved)

    @property
    def is_sound(self) -> bool:
        """Whether the latest update was good. After a bad one the model may be lost, and must not replace a good
        checkpoint."""
        return self.skipped_in_a_row == 0

    def refuse(self, step: int, *, last_saved: LastSaved) -> None:
        """Raises WillNotSucceedError if the latest update was bad."""
        if self.is_sound:
            return
        raise WillNotSucceedError(
            f"{self.skipped_in_a_row} updates in a row, up to step {step}, had a non-finite gradient or loss; "
            f"{_last_good(last_saved())}; lower --schedule.learning-rate or set --clip-norm, and run the command again"
        )


def _last_good(saved_step: int | None) -> str:
    return "no checkpoint is there" if saved_step is None else f"the last good checkpoint is of step {saved_step}"


class Guard:
    """Judges every step of a run that starts at `position`, from the checkpoint `found` if there is one. `losses`: the
    latest losses. `says`: whether this rank logs findings and writes them to RUN/guard.jsonl."""

    def __init__(
        self, job: TrainingJob, *, found: CheckpointManifest | None, position: StreamPosition, says: bool
    ) -> None:
        self.job, self.config, self.position, self.says = job, job.guard, position, says
        self.losses = found.losses if found else ()
        self.updates = NonFiniteGuard(job, num_updates=found.num_updates if found else 0, says=says)
        self._judged: deque[SpikeVerdict] = deque()  # verdicts given before the update
        self._num_discarded = 0  # updates left out in a row
        self._z = math.nan

    @property
    def discard(self) -> Callable[[float], bool] | None:
        """A function that the step calls with each loss before its update; it returns whether to leave the update out.
        None if losses are judged after the update."""
        return self._judge_first if self.config.on_spike == "skip" else None

    def _judge_first(self, loss: float) -> bool:
        self._judged.append(self._judge(loss))
        return self._judged[-1].is_spike

    def count(self, result: StepResult, *, last_saved: LastSaved) -> None:
        """Judges the outcome of a step. Raises RewindNeededError if the run must go back, and WillNotSucceedError after
        too many bad steps in a row. `last_saved`: see LastSaved."""
        is_judged = self.discard is not None
        verdict = self._judged.popleft() if is_judged else self._judge(result.loss)
        is_dropped = is_judged and verdict.is_spike
        is_finite = is_dropped or (math.isfinite(result.loss) and not result.was_skipped)
        self._z = verdict.z
        self._num_discarded = self._num_discarded + 1 if is_dropped else 0
        if verdict.is_spike or not is_finite:
            self._act(self._finding(result, verdict), is_dropped=is_dropped)
        if not is_dropped:
            was_skipped = result.was_skipped
            self.updates.count(result.step, loss=result.loss, was_skipped=was_skipped, last_saved=last_saved)
        elif self._num_discarded > self.job.max_skipped_updates:
            raise WillNotSucceedError(
                f"{self._finding(result, verdict).words()}, and so are the {self._num_discarded - 1} steps before it: "
                f"none of them made an update, and --max-skipped-updates is {self.job.max_skipped_updates}; "
                f"{_last_good(last_saved())}. "
                f"{self.job.run_dir}/guard.jsonl lists them; lower --schedule.learning-rate, or raise --guard.spike-z"
            )

    def values(self) -> dict[str, float]:
        """Returns the guard's values for a line of metrics.jsonl."""
        skipped = self.position.skipped
        if self.config.on_spike == "off" and not skipped:
            return {}
        num_steps = sum(one.end - one.first for one in skipped)
        values = {"guard/rewinds": float(len(skipped)), "guard/skipped_steps": float(num_steps)}
        return values if math.isnan(self._z) else values | {"guard/z": self._z}

    def _judge(self, loss: float) -> SpikeVerdict:
        verdict = judge(loss, self.losses, config=self.config)
        self.losses = with_loss(self.losses, loss, config=self.config)
        return verdict

    def _act(self, finding: BadStep, *, is_dropped: bool) -> None:
        reaction = self.config.on_spike if finding.kind == "spike" else self.config.on_non_finite
        if reaction == "rewind":
            raise RewindNeededError(finding)
        if not self.says:
            return
        if finding.kind == "spike":
            log.warning("%s%s", finding.words(), "; no update was made from it" if is_dropped else "")
        action = "no update" if is_dropped or finding.was_skipped else "none"
        add_finding(self.job.run_dir, finding, action=action)

    def _finding(self, result: StepResult, verdict: SpikeVerdict) -> BadStep:
        data_step = data_step_of(result.step - 1, self.position.skipped)
        return BadStep(
            kind="spike" if verdict.is_spike else "non_finite",
            step=result.step,
            data_step=data_step,
            first_position=data_step * self.job.global_batch,
            end_position=(data_step + 1) * self.job.global_batch,
            loss=result.loss,
            median=verdict.median,
            mad=verdict.mad,
            z=verdict.z,
            grad_norm=result.grad_norm,
            learning_rate=result.rate,
            was_skipped=result.was_skipped,
        )
