"""A dataset with one file changed and its hash made to fit again, as an attacker would; and who reads it."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from shards.card.facts import gather_facts
from shards.config import ReadConfig
from shards.dataset import open_dataset
from shards.errors import InvalidDataError
from shards.manifest import MANIFEST_PATH, sha256_hex
from shards.order import SampleOrder
from shards.reading.read import StreamReader
from shards.store import Store
from shards.tables import table_bytes
from shards.verifying.verify import verify_dataset
from tests.rigs.tables import read_table

Change = Callable[[pa.Table], pa.Table]


def rehash(store: Store, path: str, data: bytes) -> None:
    """Writes a file, and its sha256 into the manifest."""
    store.write(path, data)
    manifest = json.loads(store.read(MANIFEST_PATH))
    manifest["files"][path] = sha256_hex(data)
    write_manifest(store, manifest)


def write_manifest(store: Store, manifest: Any) -> None:
    store.write(MANIFEST_PATH, json.dumps(manifest, sort_keys=True, indent=1).encode() + b"\n")


def change_table(store: Store, path: str, change: Change) -> None:
    """Changes a table; the footer's metadata stays."""
    table = read_table(store.read(path))
    changed = change(table)
    rehash(store, path, table_bytes(changed.replace_schema_metadata(table.schema.metadata)))


def cell(name: str, row: int, value: object) -> Change:
    """Sets one value of a column."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[row] = value
        return with_column(name, values, table.schema.field(name).type)(table)

    return change


def with_column(name: str, values: object, kind: pa.DataType) -> Change:
    """Replaces a column; `values` may be a function of the old ones."""

    def change(table: pa.Table) -> pa.Table:
        old = table.column(name).to_pylist()
        new = values(old) if callable(values) else values
        return table.set_column(table.column_names.index(name), name, pa.array(new, kind))

    return change


def load(url: str) -> None:
    """Reads what a loader reads: every sample once, as training does."""
    dataset = open_dataset(url)
    _ = dataset.label_names
    order = SampleOrder(dataset.block_sizes, seed=0, lanes=1, window_blocks=2)
    with closing(StreamReader(ReadConfig())) as stream:
        reader = stream.samples(dataset, order)
        batches = [reader.read(np.array([position])) for position in range(dataset.num_samples)]
    samples = [sample for batch in batches for sample in batch.samples]
    assert all(0 <= label < dataset.num_classes for sample in samples for label in sample.labels)


def make_card(url: str) -> None:
    gather_facts(open_dataset(url), num_tiles=2)


def refusal(read: Callable[[str], None], url: str) -> str:
    """The message of a reader that refuses the dataset; empty if it does not. Any other error is raised."""
    try:
        read(url)
    except InvalidDataError as error:
        return str(error)
    return ""


def refusals(url: str) -> dict[str, str]:
    """What each of the three readers has against the dataset."""
    faults = verify_dataset(url)
    return {
        "loader": refusal(load, url),
        "card": refusal(make_card, url),
        "verify": "\n".join(f"{fault.where}: {fault.what}" for fault in faults),
    }
