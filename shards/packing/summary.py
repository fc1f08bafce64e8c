"""The summary at the end of packing: what is in the dataset, what is not, and why."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from shards.class_names import listed, near_equal
from shards.index import KINDS, read_labels, read_quarantine
from shards.manifest import LABELS_PATH, QUARANTINE_CSV_PATH, QUARANTINE_PATH, Manifest
from shards.output.quantities import duration, plural, size
from shards.output.terminal import printable_name
from shards.store import Store

_EXAMPLES = 20
_MOST_GROUPS = 5
_LABELS = "each class its own folder (pack folder), or labels by --source.label-pattern or in a table"


def packed_words(store: Store, manifest: Manifest, *, seconds: float) -> str:
    """Images, classes, shards, bytes and time; what was left out, twenty reasons, and where the list is."""
    num_bytes = int(manifest.shard_column("num_bytes").sum())
    images = f"{plural(manifest.num_samples, 'image')} of {plural(manifest.num_classes, 'class')}"
    shards = plural(len(manifest.shards), "shard")
    lines = [f"{store.url}: {images} in {shards}, {size(num_bytes)}, in {duration(seconds)}"]
    lines += empty_words(store, manifest)
    if manifest.num_quarantined:
        quarantine = read_quarantine(store.read(QUARANTINE_PATH))
        lines += _left_out(quarantine)
        lines.append(f"the list: {store.url}/{QUARANTINE_CSV_PATH}, and for programs {QUARANTINE_PATH}")
    return "\n".join(lines)


def empty_words(store: Store, manifest: Manifest) -> list[str]:
    """Which classes have no image; no lines if all have some."""
    labels = read_labels(store.read(LABELS_PATH))
    empty = labels.filter(pc.equal(labels["num_samples"], 0))["name"].to_pylist()
    lines = [f"without any image: {class_words(empty)}"] if empty else []
    if empty and manifest.num_classes - len(empty) == 1:
        lines.append("only one class has images, so there is nothing to tell it from")
    return lines


def class_words(names: Sequence[str]) -> str:
    """The number of classes and their names, the first and the last five if they are many."""
    return printable_name(f"{plural(len(names), 'class')} ({listed(names)})")


def class_warnings(names: Sequence[str], *, todo: str = _LABELS) -> Iterator[str]:
    """What is probably wrong with these classes: one alone, or names that are nearly equal."""
    if len(names) == 1:
        yield printable_name(f"there is only one class, {names[0]!r}, so there is nothing to tell it from; give {todo}")
    groups = near_equal(names)
    for group in groups[:_MOST_GROUPS]:
        shown = ", ".join(repr(name) for name in group)
        yield printable_name(f"the classes {shown} differ only in case, spaces or similar characters; are they one?")
    if len(groups) > _MOST_GROUPS:
        yield f"{len(groups) - _MOST_GROUPS:,} more groups of classes have such names"


def refused_words(store: Store, dropped: pa.Table) -> str:
    """The same from the plan's dropped images alone, for a source with too many to be packed."""
    return "\n".join([*_left_out(dropped), f"the list: {store.url}/{QUARANTINE_CSV_PATH}"])


def _left_out(table: pa.Table) -> list[str]:
    counts = {kind: int(pc.sum(pc.equal(table["kind"], kind)).as_py() or 0) for kind in KINDS}
    words = {
        "refused": f"{counts['refused']:,} refused",
        "unlabeled": f"{counts['unlabeled']:,} without a label (--unlabeled keep packs them)",
        "duplicate": plural(counts["duplicate"], "duplicate"),
        "evaluation": f"{counts['evaluation']:,} of evaluation sets",
        "split": f"{counts['split']:,} in the other split",
    }
    said = ", ".join(words[kind] for kind in KINDS if counts[kind])
    refused = table.filter(pc.equal(table["kind"], "refused"))
    return [f"left out: {said}", *_examples(refused.slice(0, _EXAMPLES).to_pylist(), refused.num_rows)]


def _examples(rows: Sequence[dict[str, str]], number: int) -> list[str]:
    lines = [printable_name(f"  {row['source']}: {row['reason']}") for row in rows]
    return [*lines, f"  and {number - len(rows):,} more"] if number > len(rows) else lines
