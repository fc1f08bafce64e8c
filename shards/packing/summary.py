"""The summary at the end of packing: what is in the dataset, what is not, and why."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from shards.index import KINDS, read_quarantine
from shards.manifest import QUARANTINE_PATH, Manifest
from shards.output.quantities import duration, plural, size
from shards.output.terminal import printable_name
from shards.packing.deal import read_dropped
from shards.packing.plan import DROPPED_PATH
from shards.store import Store

_EXAMPLES = 3


def packed_words(store: Store, manifest: Manifest, *, seconds: float) -> str:
    """Images, classes, shards, bytes and time; what was left out, three reasons, and where the list is."""
    num_bytes = sum(shard.num_bytes for shard in manifest.shards)
    images = f"{plural(manifest.num_samples, 'image')} of {plural(manifest.num_classes, 'class')}"
    shards = plural(len(manifest.shards), "shard")
    lines = [f"{store.url}: {images} in {shards}, {size(num_bytes)}, in {duration(seconds)}"]
    if manifest.num_quarantined:
        lines += _left_out(read_quarantine(store.read(QUARANTINE_PATH)))
        lines.append(f"the list: {store.url}/{QUARANTINE_PATH}")
    return "\n".join(lines)


def refused_words(store: Store) -> str:
    """The same from the plan alone, for a source with too many refused images to be packed."""
    lines = _left_out(read_dropped(store.read(DROPPED_PATH)))
    return "\n".join([*lines, f"the list: {store.url}/{DROPPED_PATH}"])


def _left_out(table: pa.Table) -> list[str]:
    counts = {kind: int(pc.sum(pc.equal(table["kind"], kind)).as_py() or 0) for kind in KINDS}
    words = {
        "refused": f"{counts['refused']:,} refused",
        "duplicate": plural(counts["duplicate"], "duplicate"),
        "evaluation": f"{counts['evaluation']:,} of evaluation sets",
    }
    said = ", ".join(words[kind] for kind in KINDS if counts[kind])
    refused = table.filter(pc.equal(table["kind"], "refused"))
    return [f"left out: {said}", *_examples(refused.slice(0, _EXAMPLES).to_pylist(), refused.num_rows)]


def _examples(rows: Sequence[dict[str, str]], number: int) -> list[str]:
    lines = [printable_name(f"  {row['source']}: {row['reason']}") for row in rows]
    return [*lines, f"  and {number - len(rows):,} more"] if number > len(rows) else lines
