"""What the room of shards says when it refuses, each message once; some folders have tables of their own."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from shards.card.facts import gather_facts
from shards.class_names import read_label_names
from shards.config import HeldOutConfig, ReadConfig, SubsetConfig
from shards.config_values import refuse_wrong_values
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.index import index_bytes, read_commit, read_sample_rows
from shards.manifest import Manifest, index_path
from shards.order import Mixture, SampleOrder, quotas
from shards.parquet_pieces import footer_bytes, read_groups, read_struct, refuse_pages
from shards.part import labels_of, opened_parts, refuse_too_few
from shards.pool import Pool, each_at_once
from shards.sample_rows import SampleRows
from shards.store import Buckets, open_store
from shards.tables import read_checked, table_bytes
from shards.verifying.s3_probe import probe_store
from shards.verifying.verify import verify_dataset
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.datasets import packed_with_weights
from tests.rigs.images import image_bytes
from tests.rigs.messages import Row, row, table
from tests.shards.test_class_labels import NAMES, VECTORS, meant
from tests.shards.test_config_values import Example, Other
from tests.shards.test_index import COMMIT, ROWS
from tests.shards.test_manifest import MANIFEST
from tests.shards.test_parquet_pieces import TABLE, file_of, groups_of, made, pieces
from tests.shards.test_part import NOTHING
from tests.shards.test_pool import SECONDS
from tests.shards.test_rows_file import rows_with
from tests.shards.test_tables import RULES, SCHEMA
from tests.shards.test_tables import table as table_tables
from tests.shards.test_what_is_there import files


@dataclass(frozen=True)
class Refusing:
    size: int

    def __post_init__(self) -> None:
        raise UserError(f"size is {self.size}")


def read_as_vectors(_: Path, images: Sequence[tuple[str, ...]]) -> None:
    meant(*images)


def pairs_of_bits_and(_: Path, odd: tuple[str, ...]) -> None:
    pairs = [("1", "0"), ("0", "1")] * 20
    meant(*pairs, odd)


def names_in(folder: Path, content: bytes) -> None:
    (folder / "labels.txt").write_bytes(content)
    read_label_names(str(folder / "labels.txt"))


def names_from_a(folder: Path, kind: str) -> None:
    path = folder / "labels.txt"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    read_label_names(str(path))


def names_in_json(folder: Path, text: str) -> None:
    (folder / "labels.txt").write_text(text)
    read_label_names(str(folder / "labels.txt"))


def subset(_: Path, values: dict[str, float]) -> None:
    SubsetConfig(**values)  # type: ignore[arg-type]


def held_out(_: Path, values: dict[str, float]) -> None:
    HeldOutConfig(**values)  # type: ignore[arg-type]


def dataset_config(_: Path, fields: dict[str, Any]) -> None:
    refuse_wrong_values(Example(**fields), where="x.")


def reading_config(_: Path, values: dict[str, float]) -> None:
    ReadConfig(**values)  # type: ignore[arg-type]


def index_file(_: Path, data: bytes) -> None:
    read_commit(data)


def weighted_by(_: Path, weights: tuple[float, ...]) -> None:
    wrong = [ROWS[0], replace(ROWS[1], weights=weights), ROWS[2]]
    read_sample_rows(index_bytes(7, wrong, COMMIT))


def manifest(_: Path, data: bytes) -> None:
    Manifest.from_bytes(data)


def order_of(_: Path, sizes: list[int], lanes: int, window: int) -> None:
    SampleOrder(np.array(sizes, dtype=np.int64), seed=0, lanes=lanes, window_blocks=window)


def mixed_by(_: Path, weights: Sequence[float | str]) -> None:
    quotas(weights)


def quotas_of(_: Path, shares: tuple[int, ...], lanes: int) -> None:
    Mixture(shares, seed=0, lanes=lanes)


def encrypted_file_ending_with(_: Path, end: bytes) -> None:
    pieces(file_of(TABLE)[:-4] + end)


def file_ending_with(_: Path, end: bytes) -> None:
    footer_bytes(end)


def footer_of(_: Path, footer: bytes) -> None:
    read_groups(footer)


def page_outside_the_file(_: Path) -> None:
    data = made()
    refuse_pages(data[:100], groups_of(data), ["a"])


def delta_encoding(_: Path) -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"a": ["x" * 1000] * 1000})
    pq.write_table(table, sink, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"})
    data = sink.getvalue().to_pybytes()
    refuse_pages(data, groups_of(data), ["a"])


def thrift_struct(_: Path, data: bytes) -> None:
    read_struct(data, 0, {})


def number_per_class_of_several_labels(folder: Path) -> None:
    url = str(packed_with_weights(folder, ["a,", "a|b,1|1", "b,"]))
    opened_parts(open_dataset(url), SubsetConfig(per_class=1), NOTHING)


def task_that_times_out(_: Path) -> None:
    def slow() -> None:
        raise TimeoutError("the task's own")

    pool = Pool(1, name="test")
    pool.submit(slow).result(SECONDS)


def errors_of_many_requests(_: Path) -> None:
    def ask(item: int) -> None:
        if item % 2:
            raise ValueError(f"item {item}")

    each_at_once(ask, range(6))


def bytes_of_another_number(_: Path, wrong: bytes) -> None:
    data = rows_with([[(1, 0.5)], [(2, 0.5)]], has_weights=True).to_bytes()
    SampleRows.from_bytes(data + wrong if wrong else data[:-1], 2)


def several_labels(folder: Path) -> None:
    url = str(packed_with_weights(folder, ["a,", "a|b,1|1", "b,"]))
    labels_of(open_dataset(url), what="a measurement")


def labels_of_each_class(_: Path, labels: list[int], least: int) -> None:
    refuse_too_few(np.array(labels), ("a", "b", "c"), least=least, flag=f"--shots {least}", url="u")


def store_at(_: Path, url: str) -> None:
    open_store(url)


def store_below(_: Path, prefix: str) -> None:
    open_store(f"s3://bucket/{prefix}")


def object_at(_: Path, url: str) -> None:
    Buckets().locate(url)


def table_of_broken_text(_: Path) -> None:
    data = table_bytes(table_tables().set_column(1, "name", [pa.array([b"a", b"\xff"])]).cast(SCHEMA, safe=False))
    read_checked(data, RULES, most_rows=2)


def folder_at_home(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HOME", str(folder))
        files("photos/cat/0.jpg")(folder)
        open_dataset("~/photos")


def damaged_index(folder: Path) -> None:
    write_dataset(open_store(str(folder)), [[Sample(image=image_bytes(1))]], ["a"])
    (folder / index_path(0)).write_bytes(b"x")
    gather_facts(open_dataset(str(folder)), num_tiles=1)


@table(
    # class_labels
    *(
        row(f"vectors, {images!r:.24}", read_as_vectors, images).says(
            "the labels of … of … images are lists of … values, each 0 or 1; if they are vectors with a position for "
            "each class, give --labels.lists positions; if they are the ids 0 and 1 of classes: --labels.lists ids"
        )
        for images in (
            VECTORS,
            [*VECTORS, ("0", "2", "0"), ()],
            [("0 1 0",), ("1 0 1",), ("0 0 0",)],
            [("[0, 1, 0]",), ("[1, 0, 1]",), ("[0, 0, 0]",)],
            [("[0. 1. 0.]",), ("[1. 0. 1.]",), ("[0. 0. 0.]",)],
            [("0|1|0",), ("1|0|1",), ("0|0|0",)],
            [("[true, false]",), ("[false, true]",)],
            [("array([False, True])",), ("(True, False)",), ("tensor([0., 1.], device='cuda')",)],
            [("False", "True"), ("True", "False")],
            [("0.0", "1.0"), ("1.0", "0.0")],
            [("-1", "1", "0"), ("0", "1", "")],
        )
    ),
    row("from -1, three names", lambda _: meant(("-1",), ("0",), ("1",), given="numbered")).says(
        "-1 is a label and the other numbers are 0 to 1, but the 3 names of classes are for 0 to 2, so that 'cat' "
        "would have no image; if -1 means no label, give --labels.numbers from-0, with which 0 is 'ant'; if the labels "
        "count from -1, add 1 to each of them"
    ),
    row("from -1, two names", lambda _: meant(("-1",), ("0",), listed=("a", "b"))).says(
        "-1 is a label and the only other number is 0, but the 2 names of classes are for 0 to 1, so that 'b' would "
        "have no image; if -1 means no label, give --labels.numbers from-0, with which 0 is 'a'; if the labels count "
        "from -1, add 1 to each of them"
    ),
    row("lists in text of known names", lambda _: meant(("['ant', 'bee']",), ("ant",), listed=NAMES)).says(
        "1 labels are lists written as text, such as \"['ant', 'bee']\"; if an image has each of the classes in its "
        "list, give --labels.text lists; if the whole text is the name of one class: --labels.text names"
    ),
    *(
        row(
            f"pairs of bits and one odd image, {odd}",
            pairs_of_bits_and,
            odd,
        ).says(
            "the labels of 40 of 41 images are lists of 2 values, each 0 or 1; if they are vectors with a position "
            "for each class, give --labels.lists positions; if they are the ids 0 and 1 of classes: --labels.lists ids"
        )
        for odd in (("0.5", "0.5"), ("2",), ("1", "1", "0"))
    ),
    # class_names
    row("names of classes: b", names_in, b"").says(
        "--labels-file 'DIR/labels.txt' names no class; give one class name per line"
    ),
    row("names of classes: b\\xef\\xbb\\xbf", names_in, b"\xef\xbb\xbf").says(
        "--labels-file 'DIR/labels.txt' names no class; give one class name per line"
    ),
    row("names of classes: ba\\nb\\na\\n", names_in, b"a\nb\na\n").says(
        "--labels-file 'DIR/labels.txt': the classes 0 and 2 are both named 'a'; give one class name per line, "
        "each once"
    ),
    row("names of classes: café\\ncafé\\n.encode()", names_in, "caf\u00e9\ncafe\u0301\n".encode()).says(
        "--labels-file 'DIR/labels.txt': the classes 0 and 1 are both named 'café'; give one class name per line, "
        "each once"
    ),
    row("names of classes: ba\\nb\\x0cc\\n", names_in, b"a\nb\x0cc\n").says(
        "--labels-file 'DIR/labels.txt': its label 'b\\x0cc' has a line break; allowed: text on one line; give one "
        "class name per line, each once"
    ),
    row("names of classes: b\\xff\\n", names_in, b"\xff\n").says(
        "--labels-file 'DIR/labels.txt' cannot be read: DIR/labels.txt is not UTF-8: byte 0 (line 1) is 0xff; "
        "save it as UTF-8; give a text file with one class name per line"
    ),
    row("names of classes: ba * 1025", names_in, b"a" * 1025).says(
        "--labels-file 'DIR/labels.txt': its label is too long: 1025 characters, allowed: 1024; give one class "
        "name per line, each once"
    ),
    *(
        row(f"what has no end, {kind}", names_from_a, kind).says(
            "--labels-file 'DIR/labels.txt' cannot be read: DIR/labels.txt is not a regular file; give a file, not a "
            "pipe or a device; give a text file with one class name per line"
        )
        for kind in ("pipe", "device")
    ),
    row("a file that is not there", lambda folder: read_label_names(str(folder / "none"))).says(
        "--labels-file 'DIR/none' cannot be read: [Errno 2] No such file or directory: 'DIR/none'; give a text "
        "file with one class name per line"
    ),
    *(
        row(f"a file of JSON, {text!r:.24}", names_in_json, text).says(
            "--labels-file 'DIR/labels.txt' is JSON; give a text file with one class name per line"
        )
        for text in ('["cat", "dog"]', '[\n  "cat",\n  "dog"\n]\n', '{"0": "cat"}', "[\ncat\n]")
    ),
    # config
    row("subset: share: 0.0", subset, {"share": 0.0}).says("subset.share is 0.0; allowed: above 0 to 1"),
    row("subset: share: 1.5", subset, {"share": 1.5}).says("subset.share is 1.5; allowed: above 0 to 1"),
    row("subset: share: 0.5, count: 3", subset, {"share": 0.5, "count": 3}).says(
        "subset.share and subset.count do not go together; give one of them"
    ),
    row("subset: count: 3, per_class: 3", subset, {"count": 3, "per_class": 3}).says(
        "subset.count and subset.per_class do not go together; give one of them"
    ),
    row("subset: first: 4, end: 4", subset, {"first": 4, "end": 4}).says(
        "subset.end is 4; allowed: more than subset.first, 4, or 0 (the end)"
    ),
    row("subset: count: -1", subset, {"count": -1}).says("subset.count is -1; allowed: 0 (all) or more"),
    row("held-out part: share: 1.0", held_out, {"share": 1.0}).says(
        "held_out.share is 1.0; allowed: 0 (none) to below 1"
    ),
    row("held-out part: share: 0.1, count: 3", held_out, {"share": 0.1, "count": 3}).says(
        "held_out.share and held_out.count do not go together; give one of them"
    ),
    # config_values
    row("field count: 1.0", dataset_config, {"count": 1.0}).says("x.count is 1.0; allowed: a whole number"),
    row("field count: True", dataset_config, {"count": True}).says("x.count is True; allowed: a whole number"),
    row("field count: None", dataset_config, {"count": None}).says("x.count is None; allowed: a whole number"),
    row("field most: 3", dataset_config, {"most": "3"}).says("x.most is '3'; allowed: a whole number, or none"),
    row("field share: math.nan", dataset_config, {"share": math.nan}).says("x.share is nan; allowed: a finite number"),
    row("field share: math.inf", dataset_config, {"share": math.inf}).says("x.share is inf; allowed: a finite number"),
    row("field share: False", dataset_config, {"share": False}).says("x.share is False; allowed: a finite number"),
    row("field share: 10 ** 400", dataset_config, {"share": 10**400}).says(
        "x.share is 1000000000…; allowed: a finite number"
    ),
    row("field count: 1 << 63", dataset_config, {"count": 1 << 63}).says(
        "x.count is 9223372036854775808; allowed: whole numbers of 64 bits, to 9,223,372,036,854,775,807"
    ),
    row("field count: 10 ** 5000", dataset_config, {"count": 10**5000}).says(
        "x.count is a number of thousands of digits; allowed: whole numbers of 64 bits, to 9,223,372,036,854,775,807"
    ),
    row("field word: c", dataset_config, {"word": "c"}).says("x.word is 'c'; allowed: a, b"),
    row("field step: True", dataset_config, {"step": True}).says("x.step is True; allowed: 1, 2"),
    row("field step: 1.0", dataset_config, {"step": 1.0}).says("x.step is 1.0; allowed: 1, 2"),
    row("field step: None", dataset_config, {"step": None}).says("x.step is None; allowed: 1, 2"),
    row("field word: [a]", dataset_config, {"word": ["a"]}).says("x.word is ['a']; allowed: a, b"),
    row("field flag: 1", dataset_config, {"flag": 1}).says("x.flag is 1; allowed: true and false"),
    row("field name: 3", dataset_config, {"name": 3}).says("x.name is 3; allowed: a text"),
    row("field name: bx", dataset_config, {"name": b"x"}).says("x.name is b'x'; allowed: a text"),
    row("field name: Path(x)", dataset_config, {"name": Path("x")}).says("x.name is PosixPath('x'); allowed: a text"),
    row("field names: abc", dataset_config, {"names": "abc"}).says("x.names is 'abc'; allowed: a tuple"),
    row("field names: (a, 1)", dataset_config, {"names": ("a", 1)}).says("x.names.1 is 1; allowed: a text"),
    row("field most: 0", dataset_config, {"most": 0}).says("x.most is 0; allowed: 1 or more, or none"),
    row("field units: (1, 2.0)", dataset_config, {"units": (1, 2.0)}).says("x.units.1 is 2.0; allowed: a whole number"),
    row("field units: (0,)", dataset_config, {"units": (0,)}).says("x.units.0 is 0; allowed: 1 to 9"),
    row("field units: [3]", dataset_config, {"units": [3]}).says("x.units is [3]; allowed: a tuple, or none"),
    row("field pairs: ((a, 1.0), (b,))", dataset_config, {"pairs": (("a", 1.0), ("b",))}).says(
        "x.pairs.1 has 1 entries; allowed: 2"
    ),
    row("field pairs: ((a, 1.0), (b, True))", dataset_config, {"pairs": (("a", 1.0), ("b", True))}).says(
        "x.pairs.1.1 is True; allowed: a finite number"
    ),
    row("field inner: Other()", dataset_config, {"inner": Other()}).says("x.inner is Other(...); allowed: Inner"),
    row("field inner: None", dataset_config, {"inner": None}).says("x.inner is None; allowed: Inner"),
    row("field either: x", dataset_config, {"either": "x"}).says("x.either is 'x'; allowed: Inner, Other"),
    row("field name: [x * 1000]", dataset_config, {"name": ["x" * 1000]}).says(
        "x.name is ['xxxxxxxxxx…; allowed: a text"
    ),
    row("reading, {'connections': 0}", reading_config, {"connections": 0}).says(
        "data.reading.connections is 0; allowed: 1 or more"
    ),
    row("reading, {'hedge_share': -0.1}", reading_config, {"hedge_share": -0.1}).says(
        "data.reading.hedge_share is -0.1; allowed: 0 (none) to 1"
    ),
    row("reading, {'hedge_share': 1.1}", reading_config, {"hedge_share": 1.1}).says(
        "data.reading.hedge_share is 1.1; allowed: 0 (none) to 1"
    ),
    # errors
    row(
        "a refusal passes through pydantic unchanged", lambda _: TypeAdapter(Refusing).validate_python({"size": 3})
    ).says("size is 3"),
    # index
    row("not an index, b''", index_file, b"").says(
        "ValueError: not an index file of a shard: not a sound Parquet file: 'Parquet file size is 0 bytes'"
    ),
    row("not an index, b'no parquet'", index_file, b"no parquet").says(
        "ValueError: not an index file of a shard: not a sound Parquet file: 'Parquet magic bytes not found in "
        "footer. Either the file is corrupted or this is not a parquet file.'"
    ),
    row(
        "not an index, b'PAR1\\x15\\x04\\x15\\x10\\x",
        index_file,
        table_bytes(pa.table({"a": [1]})),
    ).says("ValueError: not an index file of a shard: tar_sha256 is missing"),
    row("weights: (0.5,)", weighted_by, (0.5,)).says("ValueError: row 1 has 1 weights; allowed: 2, or none"),
    row("weights: (0.5, -0.5)", weighted_by, (0.5, -0.5)).says(
        "ValueError: column weights has -0.5; allowed: 0 or more"
    ),
    row("weights: (0.5, float(inf))", weighted_by, (0.5, float("inf"))).says(
        "ValueError: column weights has inf; allowed: 0 or more"
    ),
    row("weights: (float(nan), 1.0)", weighted_by, (float("nan"), 1.0)).says(
        "ValueError: column weights has nan; allowed: 0 or more"
    ),
    # manifest
    row("manifest b", manifest, b"").says("JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    row("manifest b[]", manifest, b"[]").says("ValueError: not a manifest: it is []; allowed: an object"),
    row("manifest b", manifest, b"{}").says("ValueError: format version None, this version reads 2 and 3"),
    row('manifest b"format_version": 99', manifest, b'{"format_version": 99}').says(
        "ValueError: format version 99, this version reads 2 and 3"
    ),
    row('manifest b"format_version": 2', manifest, b'{"format_version": 2}').says(
        "ValueError: not a manifest: plan_hash is missing"
    ),
    row(
        'manifest MANIFEST.to_bytes().replace(b"adopted": false, b"description": 7)',
        manifest,
        MANIFEST.to_bytes().replace(b'"adopted": false', b'"description": 7'),
    ).says("ValueError: description is 7; allowed: a text"),
    row(
        'manifest MANIFEST.to_bytes().replace(b"adopted", b"limits": 7, "adopted")',
        manifest,
        MANIFEST.to_bytes().replace(b'"adopted"', b'"limits": 7, "adopted"'),
    ).says("ValueError: limits is 7; allowed: an object"),
    row(
        'manifest MANIFEST.to_bytes().replace(b"adopted", b"limits": "max_scans": 10001, "adopted")',
        manifest,
        MANIFEST.to_bytes().replace(b'"adopted"', b'"limits": {"max_scans": 10001}, "adopted"'),
    ).says("ValueError: limits.max_scans is 10001; allowed: 1 to 10,000"),
    row(
        'manifest MANIFEST.to_bytes().replace(b"num_samples": 3, b"num_samples": 4)',
        manifest,
        MANIFEST.to_bytes().replace(b'"num_samples": 3', b'"num_samples": 4'),
    ).says("ValueError: num_samples is 4, but its shards hold another number"),
    row("counts must fit", lambda _: replace(MANIFEST, num_samples=5)).says(
        "ValueError: num_samples is 5, but its shards hold another number"
    ),
    # order
    row("order of [] 1 1", order_of, [], 1, 1).says(
        "ValueError: block_sizes must be a non-empty list of sizes of 1 or more; repack the dataset"
    ),
    row("order of [3, 0] 1 1", order_of, [3, 0], 1, 1).says(
        "ValueError: block_sizes must be a non-empty list of sizes of 1 or more; repack the dataset"
    ),
    row("order of [3] 4 1", order_of, [3], 4, 1).says(
        "ValueError: lanes is 4; allowed: 1 to 3 (the number of samples)"
    ),
    row("order of [3] 0 1", order_of, [3], 0, 1).says(
        "ValueError: lanes is 0; allowed: 1 to 3 (the number of samples)"
    ),
    row("order of [3] 1 0", order_of, [3], 1, 0).says("ValueError: window_blocks is 0; allowed: 1 or more"),
    row(
        "sizes that no number holds are refused as such",
        lambda _: SampleOrder(np.full(5, 1 << 62), seed=0, lanes=4, window_blocks=1),
    ).says("ValueError: block_sizes add up to more than 4,611,686,018,427,387,904 samples; repack the dataset"),
    row("no weights to mix", mixed_by, []).says("there are no weights to mix by; give one for each dataset, e.g. 3 1"),
    row("zero", mixed_by, [1, 0]).says("the weight 0 cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"),
    row("negative", mixed_by, [1, -0.5]).says(
        "the weight -0.5 cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"
    ),
    row("not a number", mixed_by, [float("nan")]).says(
        "the weight nan cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"
    ),
    row("infinite", mixed_by, [1, float("inf")]).says(
        "the weight inf cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"
    ),
    row("text", mixed_by, ["much"]).says(
        "the weight 'much' cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"
    ),
    row("no fraction", mixed_by, ["1/0"]).says(
        "the weight '1/0' cannot be mixed by; allowed: numbers above 0, e.g. 0.7 or 3"
    ),
    row("a period that is too long", mixed_by, [0.123456, 0.333333]).says(
        "the weights 0.123456, 0.333333 repeat only after 152,263 samples; allowed: 65,536; round them, e.g. to "
        "0.270, 0.730"
    ),
    row("shares and lanes: () 1", quotas_of, (), 1).says(
        "ValueError: quotas are (); allowed: one or more numbers of 1 or more"
    ),
    row("shares and lanes: (1, 0) 1", quotas_of, (1, 0), 1).says(
        "ValueError: quotas are (1, 0); allowed: one or more numbers of 1 or more"
    ),
    row("shares and lanes: (1,) 0", quotas_of, (1,), 0).says("ValueError: lanes is 0; allowed: 1 or more"),
    # parquet_pieces
    row("an encrypted file that ends with, b'PARE'", encrypted_file_ending_with, b"PARE").says(
        "ValueError: it is encrypted; give a copy that is not"
    ),
    row("an encrypted file that ends with, b'PAR2'", encrypted_file_ending_with, b"PAR2").says(
        "ValueError: not a sound Parquet file: its end is not that of one"
    ),
    *(
        row(f"not the end of a Parquet file, {end!r:.24}", file_ending_with, end).says(
            "ValueError: not a sound Parquet file: its end is not that of one"
        )
        for end in (b"", b"PAR1", b"\x00" * 8)
    ),
    *(
        row(f"footers that, {footer!r:.24}", footer_of, footer).says(
            "ValueError: not a sound Parquet file: its footer is damaged (…"
        )
        for footer in (b"", b"\x00", b"\x19\xfc\xff\xff\xff\x7f", b"\x1c" * 100, b"\xff" * 50, b"\x15" + b"\xff" * 20)
    ),
    row("a page outside the file", page_outside_the_file).says(
        "ValueError: column 'a': its pages are said to be at bytes 4 to 2786 of 100"
    ),
    row("an encoding that repeats parts of values", delta_encoding).says(
        "ValueError: column 'a': a page of 1000 values has encoding 7; allowed: (0, 2, 3, 8)"
    ),
    row("not a struct, b'\\x1c\\x1c\\x1c\\x1c\\x1c\\x", thrift_struct, b"\x1c" * 100).says(
        "ValueError: it is nested too deep"
    ),
    row("not a struct, b'\\x19\\x19\\x19\\x19\\x19\\x", thrift_struct, b"\x19" * 100).says(
        "ValueError: it is nested too deep"
    ),
    row("not a struct, b'\\x1f'", thrift_struct, b"\x1f").says("ValueError: it has a value of kind 15"),
    row("not a struct, b'\\x15\\xff\\xff\\xff\\xff\\x", thrift_struct, b"\x15" + b"\xff" * 20).says(
        "ValueError: a number has no end"
    ),
    # part
    row("a number per class for several labels", number_per_class_of_several_labels).says(
        "DIR/packed has a sample with 2 labels; a subset by samples per class needs images with exactly one "
        "label: give another dataset"
    ),
    # pool
    row("a task that times out itself", task_that_times_out).says("TimeoutError: the task's own"),
    row("the first error of many requests", errors_of_many_requests).says("ValueError: item 1"),
    # rows_file
    *(
        row(f"more or fewer bytes, {wrong!r:.24}", bytes_of_another_number, wrong).says(
            "ValueError: 7… bytes are not those of 2 samples"
        )
        for wrong in (b"", b"\0")
    ),
    # sample_rows
    row("several labels", several_labels).says(
        "DIR/packed has a sample with 2 labels; a measurement needs images with exactly one label: give another dataset"
    ),
    row("one", labels_of_each_class, [0, 0, 0, 1, 1, 2], 2).says(
        "u has 1 images of class 'c', fewer than --shots 2; allowed: at most 1 here"
    ),
    row("several", labels_of_each_class, [0, 0, 0, 1, 1, 2], 3).says(
        "u has 1 images of class 'c', fewer than --shots 3 (2 of 3 classes have too few); allowed: at most 1 here"
    ),
    row("none", labels_of_each_class, [0, 1], 1).says(
        "u has 0 images of class 'c', fewer than --shots 1; allowed: at most 0 here: none; give a dataset with "
        "images of every class"
    ),
    # store
    row("not a store, ", store_at, "").says("a dataset URL is empty; give a folder or s3://bucket/prefix"),
    row("not a store, http://host/x", store_at, "http://host/x").says(
        "cannot open 'http://host/x'; give a folder or s3://bucket/prefix"
    ),
    row("not a store, s3://", store_at, "s3://").says("cannot open 's3://'; give a folder or s3://bucket/prefix"),
    row("not a store, s3:///x", store_at, "s3:///x").says("cannot open 's3:///x'; give a folder or s3://bucket/prefix"),
    row("a prefix with two spellings, a//b", store_below, "a//b").says(
        "cannot open 's3://bucket/a//b': object path 'a//b' is not a plain relative path: it has an empty part, "
        "the one between the two slashes after 'a'; copy it to a name without //"
    ),
    row("a prefix with two spellings, ../x", store_below, "../x").says(
        "cannot open 's3://bucket/../x': object path '../x' is not a plain relative path: use NAME or "
        "FOLDER/NAME, no .."
    ),
    row("a prefix with two spellings, a/./b", store_below, "a/./b").says(
        "cannot open 's3://bucket/a/./b': object path 'a/./b' is not a plain relative path: use NAME or "
        "FOLDER/NAME, no .."
    ),
    row(
        "credentials in a URL, 'http://me:hidden@host/x",
        store_at,
        "http://me:hidden@host/x",
    ).says("cannot open 'http://***@host/x'; give a folder or s3://bucket/prefix"),
    row(
        "credentials in a URL, 's3://me:hidden@bucket/x",
        store_at,
        "s3://me:hidden@bucket/x",
    ).says(
        "cannot open 's3://***@bucket/x': credentials do not belong in a URL; set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, and give s3://bucket/prefix"
    ),
    *(
        row(f"not the name of an object, {url}", object_at, url).says(
            "ImageRefusedError: '…s3://…' is not s3://bucket/key"
        )
        for url in ("s3://", "s3://bucket", "s3://bucket/", "s3://a:b@bucket/key", "s3:///key", "/s3://b/k")
    ),
    # tables
    row("text that is not UTF-8", table_of_broken_text).says(
        "ValueError: not a sound Parquet file: 'In chunk 0: Invalid: Invalid UTF8 sequence at string index 1'"
    ),
    # what_is_there
    row("a folder at home that is empty", folder_at_home).says(
        "NoDatasetError: '~/photos' holds folders of images, not a packed dataset; pack it first:\n  patchline "
        "pack folder --source.root '~/photos' --out data/photos"
    ),
    # facts
    row("a damaged index", damaged_index).says(
        "InvalidDataError: DIR/index/shard-000000.parquet is damaged: its sha256 is not the manifest's; see what "
        "else is wrong with: patchline verify DIR"
    ),
    # s3_probe
    row("a url of something else", lambda _: probe_store("data")).says("--url is 'data'; allowed: s3://bucket/prefix"),
    # verify
    row("no dataset", lambda folder: verify_dataset(str(folder))).says(
        "NoDatasetError: DIR has no manifest.json, so it is not a complete dataset; pack it with: patchline pack "
        "RECIPE --out DIR"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
