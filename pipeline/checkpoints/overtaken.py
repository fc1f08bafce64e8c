"""Whether an attempt may still commit: not once a later one has taken over the run, or the run was deleted.

This needs the names of the attempts' records only: one listing and one request, however often the run was started.
"""

from pathlib import Path

from pipeline.checkpoints.attempt_record import ATTEMPTS, record_path, token_from_path
from pipeline.checkpoints.fence import token_order
from pipeline.checkpoints.gone import gone_message
from shards.store import Store


def why_over(store: Store, own: str, *, run_dir: Path) -> str:
    """Why the attempt with the token `own` must end; empty if it may go on."""
    tokens = [token for path in store.list(f"{ATTEMPTS}/") if (token := token_from_path(path))]
    later = max([t for t in tokens if token_order(t) > token_order(own)], key=token_order, default="")
    if later:
        return (
            f"attempt {own} of {run_dir} ends here: a later one, {later}, took over the run; "
            "leave the run to it, or end it and start again"
        )
    if not run_dir.is_dir():
        return gone_message(run_dir)
    if not store.exists(record_path(own)):  # not from the listing, which may be late
        return gone_message(f"{store.url}/{record_path(own)}")
    return ""
