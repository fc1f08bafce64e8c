"""What a rank is doing now, as its main thread says and its heartbeat (heartbeat.py) sees."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.training.settings.job import HangConfig

_TIMES_LONGEST = 3.0
_TIMES_JOINING = 2.0  # the ranks meet, with a message of their own if one is missing, then they connect


class Phase(StrEnum):
    """What a rank does, in the order in which the phases of a step follow each other."""

    STARTING = "starting"
    JOINING = "joining the other ranks"
    WAITING_FOR_DATA = "waiting for data"
    COMPUTING = "forward and backward"
    EVALUATING = "evaluating"
    SAVING = "saving"
    FINISHING = "finishing"
    ENDED = "ended"


ORDER = tuple(Phase)
_OF_A_STEP = (Phase.WAITING_FOR_DATA, Phase.COMPUTING, Phase.EVALUATING)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place in a run at which a rank is. `step`, from 1 on, and `batch` of an evaluation; 0: none yet. `is_first`:
    something of this kind is done for the first time, and may compile."""

    phase: Phase
    step: int = 0
    batch: int = 0
    is_first: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts places: the lowest is the furthest behind."""
        return self.step, ORDER.index(self.phase), self.batch

    @property
    def is_repeated(self) -> bool:
        """Whether it is a place of a step other than the first: how long such places take says what is usual."""
        return self.phase in _OF_A_STEP and not self.is_first

    def words(self) -> str:
        """Such as `step 17, evaluating batch 3`."""
        batch = f" batch {self.batch}" if self.batch else ""
        return f"step {self.step}, {self.phase}{batch}" if self.step else f"{self.phase}{batch}"


class RankProgress:
    """How far a rank is: its main thread says it, and other threads read it. `attempt`: the token of the attempt, once
    it is known; a rewind begins another one. `asked_by`: the first signal that asked the run to stop. `is_done`: the
    run has made all its steps. `stopped_writer`: tells the process id of the rank's checkpoint writer if it is stopped,
    else 0."""

    def __init__(self) -> None:
        self.place, self.attempt = Place(phase=Phase.STARTING), ""
        self.asked_by, self.is_done = "", False
        self.stopped_writer: Callable[[], int] = int
        self._num_steps = self._num_evaluations = 0

    def step_begins(self, step: int) -> None:
        """A step begins: its data is waited for."""
        self._num_steps += 1
        self.place = Place(phase=Phase.WAITING_FOR_DATA, step=step, is_first=self._num_steps == 1)

    def enters(self, phase: Phase, *, batch: int = 0) -> None:
        """Another phase of the same step. `batch`: of an evaluation, from 1 on; 0: the evaluation begins."""
        if phase is Phase.EVALUATING and not batch:
            self._num_evaluations += 1
        is_first = self._num_evaluations == 1 and batch < 2 if phase is Phase.EVALUATING else self._num_steps < 2
        self.place = Place(phase=phase, step=self.place.step, batch=batch, is_first=is_first)


def limit_seconds(place: Place, config: HangConfig, *, longest_seconds: float) -> float:
    """How long a rank may stand at a place. `longest_seconds`: the longest that it has stood at one in a step."""
    if place.is_repeated:
        return max(config.step_seconds, _TIMES_LONGEST * longest_seconds)
    if place.phase is Phase.JOINING:
        return _TIMES_JOINING * config.join_seconds
    return max(config.step_seconds, config.other_seconds)
