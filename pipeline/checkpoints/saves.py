"""The saves of a run, one at a time, on all ranks together.

A save begins with a copy of each rank's state, laid out as one safetensors file of fragments. Then every rank writes
its file, and rank 0 commits once the ranks have agreed that all files are there. Agreeing needs no extra collective:
the sums that each step reduces anyway carry the state of the save. Only `wait` makes extra reductions; it is called
when training cannot continue before the save has ended.

    writing      each rank reports written, failed or overtaken; the sums decide once all ranks have reported
    committing   all files are written; rank 0 reports committed, failed or overtaken
    nothing      no save is running; late sums may still report on the previous save

All ranks see the same sums at the same step, so they are always in the same phase.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from pipeline.checkpoints.attempts import attempt_to_json, record_path
from pipeline.checkpoints.checkpoint import Checkpoints, Fragment
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import CheckpointId, CheckpointManifest, manifest_to_json
from pipeline.checkpoints.rank_file_out import Piece
from pipeline.checkpoints.writer_messages import CommitOrder, SaveResult, Write
from pipeline.models.weights.safetensors import parts_of
from pipeline.models.weights.safetensors_head import SafetensorsHead, head_of
from pipeline.ranks.collectives import gather_json, sums
from pipeline.ranks.world import World
from shards.errors import WillNotSucceedError

WRITTEN, FAILED, COMMITTED, OVERTAKEN = "save/written", "save/failed", "save/committed", "save/overtaken"
NAMES = (WRITTEN, FAILED, COMMITTED, OVERTAKEN)
_WAIT_SECONDS = 10.0  # how long to wait for an answer before the ranks reduce their flags again
_FLAGS = {"written": WRITTEN, "failed": FAILED, "committed": COMMITTED, "overtaken": OVERTAKEN}


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """A rank's file, laid out but not copied: its head, the engine's live tensors that follow the head, and the place
    of each in the file."""

    head: SafetensorsHead
    views: tuple[torch.Tensor, ...]
    pieces: tuple[Piece, ...]

    def parts(self) -> Iterator[memoryview]:
        """Yields the file's bytes in order, one tensor at a time, so that no more than one is copied out of a GPU at
        once."""
        return parts_of(self.head, self.views)


def lay_out(fragments: list[Fragment]) -> RankFile:
    """Lays out the safetensors file of these fragments. Raises ValueError if a slot has a wrong type or length."""
    named = [(fragment, slot, view) for fragment in fragments for slot, view in fragment.slots.items()]
    for fragment, slot, view in named:
        if view.dtype not in (torch.float32, torch.bfloat16) or view.numel() != fragment.length:
            raise ValueError(
                f"{slot} of {fragment.name} is {view.dtype} {list(view.shape)}; allowed: {fragment.length} float32 or "
                "bfloat16"
            )
    head = head_of({f"{slot}:{fragment.name}": (fragment.length,) for fragment, slot, _ in named})
    return RankFile(
        head=head,
        views=tuple(view for _, _, view in named),
        pieces=tuple((f.name, slot, head.offsets[f"{slot}:{f.name}"], f.start, f.length) for f, slot, _ in named),
    )


class SavePhase(Enum):
    """The phase of a save, the same on all ranks."""

    NOTHING = "no save is running"
    WRITING = "the ranks write their files"
    COMMITTING = "rank 0 commits"


class StepDecision(Enum):
    """What the sums of a step decide about the save."""

    OPEN = "nothing yet"
    WRITTEN = "all files are written"
    COMMITTED = "the checkpoint exists"
    FAILED = "it does not"
    OVERTAKEN = "this attempt is over"


def verdict(phase: SavePhase, sums: Mapping[str, float], *, num_ranks: int) -> StepDecision:
    """Returns what these sums over `num_ranks` ranks decide in this phase."""
    if phase is SavePhase.WRITING:
        if sums[WRITTEN] + sums[FAILED] + sums[OVERTAKEN] < num_ranks:
            return StepDecision.OPEN
        return _bad(sums) or StepDecision.WRITTEN
    if phase is SavePhase.COMMITTING:
        return StepDecision.COMMITTED if sums[COMMITTED] else _bad(sums) or StepDecision.OPEN
    return StepDecision.OPEN


def _bad(sums: Mapping[str, float]) -> StepDecision | None:
    return StepDecision.OVERTAKEN if sums[OVERTAKEN] else StepDecision.FAILED if sums[FAILED] else None


class RankWriter(Protocol):
    """Writes a rank's files, in the background or inline."""

    @property
    def is_waited_for(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    def write(self, order: Write, laid_out: RankFile) -> None: ...

    def commit(self, order: CommitOrder) -> None: ...

    def answers(self, *, seconds: float = 0.0) -> list[SaveResult]: ...

    def order_update(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended. `fault` is empty if the checkpoint is committed. `is_deleted`: whether somebody has deleted all
    checkpoints of the run, so that its state must be saved again. `seconds`: the time from the save's beginning until
    all ranks knew how it ended."""

    id: CheckpointId
    fault: str
    is_deleted: bool = False
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Save:
    """The save that is running. `number`: the number that its answers carry. `began`: when it began, by the monotonic
    clock."""

    number: int
    began: float
    draft: CheckpointManifest


class Saves:
    """Begins saves and follows them. `retention` says which checkpoints stay after a commit; it may be changed at any
    time."""

    def __init__(self, checkpoints: Checkpoints, writer: RankWriter, retention: Retention) -> None:
        self.checkpoints, self.writer, self.retention = checkpoints, writer, retention
        self.phase = SavePhase.NOTHING
        self._save: _Save | None = None
        self._num_begun = 0  # saves are numbered, so that the writer can tell them apart
        self._answer: SaveResult | None = None
        self._failed = ""  # the folder of the newest save, if not all of its files were written
        self._maybe_committed = ""  # the folder of the newest commit, which may have succeeded despite a bad answer

    @property
    def is_under_way(self) -> bool:
        """Whether a save is running; the same on all ranks."""
        return self._save is not None

    @property
    def step(self) -> int:
        """The step of the save that is running; 0 if there is none."""
        return self._save.draft.id.step if self._save else 0

    def begin(self, laid_out: RankFile, draft: CheckpointManifest) -> None:
        """Copies this rank's state and has it written. No other save may be running. Not collective, but all ranks must
        call it at the same step."""
        if self._save:
            raise AssertionError(f"a save begins while that of step {self.step} is running ({self.phase.value})")
        self._num_begun += 1
        self._save = _Save(number=self._num_begun, began=time.monotonic(), draft=draft)
        self._answer, self.phase = None, SavePhase.WRITING
        order = Write(
            save=self._num_begun,
            url=self.checkpoints.store.url,
            folder=draft.id.folder,
            record=record_path(draft.id.attempt),
            rank=self.checkpoints.world.rank,
            failed=self._failed,
        )
        self.writer.write(order, laid_out)

    def flags(self) -> Mapping[str, float]:
        """Returns what this rank adds to the sums of a step, by the names in NAMES."""
        self._listen()
        said = _FLAGS[self._answer.what] if self._answer else ""
        return {name: float(name == said) for name in NAMES}

    def advance(self, found: Mapping[str, float]) -> Saved | None:
        """Takes the sums of a step, and returns how the save ended, or None if it is still running. Raises
        WillNotSucceedError if this attempt is over, unless all checkpoints were deleted and the state can be saved
        again. Collective only if the save was not committed."""
        save, world = self._save, self.checkpoints.world
        decided = verdict(self.phase, found, num_ranks=world.num_ranks)
        if save is None or decided is StepDecision.OPEN:
            return None
        if decided is StepDecision.WRITTEN:
            self._answer, self.phase, self._maybe_committed = None, SavePhase.COMMITTING, save.draft.id.folder
            if world.is_first:
                self.writer.commit(self._commit_order(save))
            return None
        self._failed = "" if save.draft.id.folder == self._maybe_committed else save.draft.id.folder
        own, self._answer, self._save, self.phase = self._answer, None, None, SavePhase.NOTHING
        fault = "" if decided is StepDecision.COMMITTED else _fault_of_all(own, world)
        is_deleted = decided is StepDecision.OVERTAKEN
        if is_deleted:
            if not self.checkpoints.register_again():
                raise WillNotSucceedError(fault)
            fault = "the run's checkpoints were deleted"
        return Saved(id=save.draft.id, fault=fault, is_deleted=is_deleted, seconds=time.monotonic() - save.began)

    def wait(self) -> Saved | None:
        """Waits until the running save has ended, and returns how it ended; None if no save is running. Collective."""
        ended = None
        while self.is_under_way and ended is None:
            if self._answer is None and self._is_asked:
                self._listen(seconds=_WAIT_SECONDS)
            flags = self.flags()
            found = sums([flags[name] for name in NAMES], device=self.checkpoints.world.device)
            ended = self.advance(dict(zip(NAMES, found, strict=True)))
        return ended

    def settle(self) -> None:
        """Waits until this rank's writer has nothing left to do, such as deleting old checkpoints."""
        while self.writer.is_busy:
            self._listen(seconds=_WAIT_SECONDS)

    @property
    def _is_asked(self) -> bool:
        """Whether this rank's writer has something to do in this phase."""
        return self.phase is SavePhase.WRITING or self.checkpoints.world.is_first

    def _listen(self, *, seconds: float = 0.0) -> None:
        if not self.writer.is_busy:
            return
        for answer in self.writer.answers(seconds=seconds):
            if self._save and answer.what in _FLAGS and answer.save == self._save.number:
                self._answer = answer

    def _commit_order(self, save: _Save) -> CommitOrder:
        return CommitOrder(
            save=save.number,
            url=self.checkpoints.store.url,
            draft=manifest_to_json(save.draft).decode(),
            attempt=attempt_to_json(self.checkpoints.attempt).decode(),
            num_ranks=self.checkpoints.world.num_ranks,
            run_dir=str(self.checkpoints.run_dir),
            retention=self.retention,
        )


def _fault_of_all(own: SaveResult | None, world: World) -> str:
    """Returns why a save failed, with the reasons of all ranks. Collective."""
    mine = own.message if own and own.what in ("failed", "overtaken") else ""
    return "; ".join(dict.fromkeys(filter(None, gather_json(mine, device=world.device))))
