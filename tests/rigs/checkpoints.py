"""The checkpoints of a run as its ranks see them, with the run's own ledger."""

from pathlib import Path

from pipeline.checkpoints.checkpoint import Checkpoints, Fragment
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.saves import Saves, lay_out
from pipeline.checkpoints.writer.copies import InlineWriter
from pipeline.ranks.world import World
from pipeline.training.reporting.ledger import last_line, last_saved
from shards.store import Store, open_store


def checkpoints_of(run_dir: Path, world: World, *, store: Store | None = None) -> Checkpoints:
    """Those in `store`, or else in the run directory."""
    return Checkpoints(
        store or open_store(f"{run_dir}/checkpoints"),
        world,
        run_dir=run_dir,
        recorded=lambda: last_saved(run_dir),
        has_records=lambda: bool(last_line(run_dir)),
    )


def saved_at_once(checkpoints: Checkpoints, fragments: list[Fragment], draft: CheckpointManifest) -> CheckpointManifest:
    """The manifest of a checkpoint that is written and committed while the caller waits. Collective."""
    saves = Saves(checkpoints, InlineWriter(checkpoints.store), Retention(keep_newest=2))
    saves.begin(lay_out(fragments), draft)
    saved = saves.wait()
    assert saved, "it was under way"
    assert not saved.fault
    return checkpoints.manifest(saved.id)
