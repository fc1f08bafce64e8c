"""Tars made by others as a dataset: verified, read back by webdataset, pyarrow and our own reader; tars untouched."""

import io
import json
import logging
import tarfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest
import webdataset

from shards.adoption.adopt import Adoption, adopt, label_names
from shards.adoption.foreign_samples import SampleRules
from shards.adoption.foreign_tar import AdoptSpec
from shards.adoption.tar_lists import find_tars
from shards.class_labels import Meaning
from shards.config import ReadConfig
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.manifest import QUARANTINE_PATH, Manifest
from shards.order import SampleOrder
from shards.reading.read import StreamReader
from shards.reading.samples import verified
from shards.store import Store, open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import index_rows
from tests.rigs.images import image_bytes
from tests.rigs.tables import read_table

SIZES = (5, 1, 9)  # samples per tar: uneven, as in others' tars
NUM_CLASSES = 4
SPEC = AdoptSpec(rules=SampleRules(), samples_per_block=2)


def sample_image(tar: int, number: int) -> bytes:
    return image_bytes(100 * tar + number, height=16 + 4 * number)


def write_tars(
    store: Store, members: Callable[[int, int], dict[str, bytes]], *, sizes: tuple[int, ...] = SIZES
) -> None:
    """Tars of PAX format, as Python makes them by default, in two folders."""
    for tar, size in enumerate(sizes):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for number in range(size):
                for suffix, data in members(tar, number).items():
                    info = tarfile.TarInfo(f"dir.{tar}/sample ü {number:03d}.{suffix}")
                    info.size, info.mtime = len(data), 1.5
                    archive.addfile(info, io.BytesIO(data))
        store.write(f"part-{tar % 2}/train-{tar}.tar", file.getvalue())


def with_cls(tar: int, number: int) -> dict[str, bytes]:
    return {
        "txt": b"a caption " * 200,
        "JPEG": sample_image(tar, number),
        "cls": str((tar + number) % NUM_CLASSES).encode(),
    }


def with_json(tar: int, number: int) -> dict[str, bytes]:
    labels = [f"class {(tar + number) % NUM_CLASSES}", "any"]
    return {"json": json.dumps({"labels": labels}).encode(), "jpg": sample_image(tar, number)}


def adoption_of(url: str, *, spec: AdoptSpec = SPEC, index_url: str = "") -> Adoption:
    return Adoption(tars_url=url, index_url=index_url or url, tars=tuple(find_tars(url)), spec=spec)


def run(adoption: Adoption, *, workers: int = 1, max_quarantined: float = 0.0) -> Manifest:
    return adopt(adoption, workers=workers, max_quarantined=max_quarantined)


def images_of(dataset: Dataset) -> set[bytes]:
    """All images, as a rank reads them in one epoch and the start of the next."""
    order = SampleOrder(dataset.block_sizes, seed=1, lanes=1, window_blocks=2)
    with closing(StreamReader(ReadConfig(connections=2))) as stream:
        reader = stream.samples(dataset, order)
        steps = [order.positions(step, 5, 0, 1) for step in range(-(-dataset.num_samples // 5))]
        samples = [verified(dataset, sample) for step in steps for sample in reader.read(step).samples]
    assert not any(sample.fault for sample in samples)
    return {bytes(sample.data) for sample in samples if sample.data is not None}


EXPECTED = {sample_image(tar, number) for tar, size in enumerate(SIZES) for number in range(size)}


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "tars")
    return f"s3://{request.getfixturevalue('s3_bucket')}/tars"


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_adopted_tars_are_a_verified_dataset(url: str, tmp_path: Path, is_elsewhere: bool) -> None:
    store = open_store(url)
    write_tars(store, with_cls)
    before = {path: store.read(path) for path in store.list()}
    index_url = str(tmp_path / "index of it") if is_elsewhere else url
    manifest = run(adoption_of(url, index_url=index_url))
    assert {path: store.read(path) for path in store.list() if path.endswith(".tar")} == before
    assert is_elsewhere == (set(store.list()) == set(before))
    assert (manifest.num_samples, manifest.num_classes, manifest.adopted) == (15, NUM_CLASSES, True)
    paths = ["part-0/train-0.tar", "part-0/train-2.tar", "part-1/train-1.tar"]
    assert [shard.path for shard in manifest.shards] == paths
    assert [shard.first_sample_id for shard in manifest.shards] == [0, 5, 14]
    assert verify_dataset(index_url, deep=True) == []
    dataset = open_dataset(index_url)
    assert dataset.label_names == ("0", "1", "2", "3")
    assert images_of(dataset) == EXPECTED
    assert not list(open_store(index_url).list("work"))


def test_webdataset_and_pyarrow_read_it(tmp_path: Path) -> None:
    url = str(tmp_path)
    write_tars(open_store(url), with_cls)
    manifest = run(adoption_of(url))
    index = pyarrow.dataset.dataset(f"{url}/index", format="parquet").to_table()
    assert index.num_rows == 15
    by_key = {(row["shard"], row["key"]): row for row in index.to_pylist()}
    for shard, record in enumerate(manifest.shards):
        samples = list(webdataset.WebDataset(f"{url}/{record.path}", shardshuffle=False))
        assert len(samples) == record.num_samples
        tar = (tmp_path / record.path).read_bytes()
        for sample in samples:
            row = by_key[shard, sample["__key__"]]
            assert tar[row["offset"] : row["offset"] + row["size"]] == sample["jpeg"]
            assert row["labels"] == [int(sample["cls"])]


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """The index has them as backslash escapes, and the checks know that."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for suffix, data in with_cls(0, 0).items():
            info = tarfile.TarInfo(f"\udcfe\udcff.{suffix}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (tmp_path / "some.tar").write_bytes(file.getvalue())
    run(adoption_of(str(tmp_path)))
    assert [row.key for row in index_rows(open_dataset(str(tmp_path)), 0)] == ["\\xfe\\xff"]
    assert verify_dataset(str(tmp_path), deep=True) == []


def test_several_labels_by_name_from_json(tmp_path: Path) -> None:
    url = str(tmp_path)
    write_tars(open_store(url), with_json)
    run(adoption_of(url, spec=replace(SPEC, rules=SampleRules(label_field="labels"))))
    assert verify_dataset(url, deep=True) == []
    dataset = open_dataset(url)
    assert dataset.label_names == ("any", "class 0", "class 1", "class 2", "class 3")
    assert [row.labels for row in index_rows(dataset, 0)] == [(1 + number % NUM_CLASSES, 0) for number in range(5)]


def test_names_from_a_file(tmp_path: Path) -> None:
    url = str(tmp_path / "tars")
    write_tars(open_store(url), with_cls)
    (tmp_path / "labels.txt").write_text("tench\nshark\nray\nhen\n")
    spec = replace(SPEC, labels_file=str(tmp_path / "labels.txt"))
    run(adoption_of(url, spec=spec))
    dataset = open_dataset(url)
    assert dataset.label_names == ("tench", "shark", "ray", "hen")
    assert [row.labels for row in index_rows(dataset, 0)] == [(0,), (1,), (2,), (3,), (0,)]


def test_any_number_of_workers_and_a_rerun_write_the_same(tmp_path: Path) -> None:
    tars = str(tmp_path / "tars")
    write_tars(open_store(tars), with_cls)
    written = []
    for workers in (1, 2):
        index_url = str(tmp_path / f"index-{workers}")
        first = run(adoption_of(tars, index_url=index_url), workers=workers)
        store = open_store(index_url)
        written.append({path: store.read(path) for path in store.list()})
        store.write("work/adopted-000000.parquet", b"left by a killed command")
        assert run(adoption_of(tars, index_url=index_url)) == first
        assert {path: store.read(path) for path in store.list()} == written[0]
    assert written[0] == written[1]


def test_an_interrupted_command_goes_on(tmp_path: Path) -> None:
    """Indexes with an older format and descriptions of replaced tars are made again."""
    url = str(tmp_path)
    store = open_store(url)
    write_tars(store, with_cls)
    run(adoption_of(url))
    expected = {path: store.read(path) for path in store.list()}
    store.delete("manifest.json")
    store.delete("index/shard-000001.parquet")
    store.write("index/shard-000000.parquet", b"damaged")
    store.write("index/shard-000003.parquet", expected["index/shard-000001.parquet"])
    run(adoption_of(url))
    assert {path: store.read(path) for path in store.list()} == expected


def test_refused_samples_are_listed_and_counted(tmp_path: Path) -> None:
    def members(tar: int, number: int) -> dict[str, bytes]:
        good = with_cls(tar, number)
        if (tar, number) == (0, 1):
            return good | {"JPEG": b"no image"}
        if tar == 1:
            del good["cls"]
        return good

    url = str(tmp_path)
    store = open_store(url)
    write_tars(store, members)
    with pytest.raises(UserError, match=r"2 of 15 samples cannot be adopted, more than the allowed share of 0\.1"):
        run(adoption_of(url), max_quarantined=0.1)
    manifest = run(adoption_of(url), max_quarantined=0.2)
    assert (manifest.num_samples, manifest.num_quarantined, len(manifest.shards)) == (13, 2, 2)
    assert verify_dataset(url, deep=True) == []
    rows = read_table(store.read(QUARANTINE_PATH)).to_pylist()
    assert [(row["position"], row["source"], row["phase"], row["kind"]) for row in rows] == [
        (1, "part-0/train-0.tar/dir.0/sample ü 001.JPEG", "scan", "refused"),
        (14, "part-1/train-1.tar/dir.1/sample ü 000.JPEG", "scan", "refused"),
    ]
    assert rows[1]["reason"] == "no label: it has no member .cls"
    assert len(images_of(open_dataset(url))) == 13


def test_a_tar_that_was_corrected_is_read_again(tmp_path: Path) -> None:
    """Its size is the same, since tars are padded: the labels that it had before were kept."""
    store = open_store(str(tmp_path))

    def members(tar: int, number: int) -> dict[str, bytes]:
        return with_cls(tar, number) | {"cls": b"cat" if tar != 1 or number else b"None"}

    write_tars(store, members)
    with pytest.raises(UserError):
        run(adoption_of(str(tmp_path)))
    before = dict(store.list_sizes())
    write_tars(store, lambda tar, number: with_cls(tar, number) | {"cls": b"dog"})
    assert all(before[path] == size for path, size in store.list_sizes() if path.endswith(".tar"))
    run(adoption_of(str(tmp_path)))
    assert open_dataset(str(tmp_path)).label_names == ("dog",)
    assert verify_dataset(str(tmp_path), deep=True) == []


def test_odd_labels_among_integers_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They must not turn the integers into names, which would give every class another id."""
    odd = {(0, 3): b"x1", (1, 0): b"cat"}

    def members(tar: int, number: int) -> dict[str, bytes]:
        return with_cls(tar, number) | ({"cls": odd[tar, number]} if (tar, number) in odd else {})

    tars = str(tmp_path / "tars")
    write_tars(open_store(tars), members)
    written = []
    for workers in (1, 2):
        url = str(tmp_path / f"index-{workers}")
        with pytest.raises(
            UserError, match=r"2 of 15 samples .* most often: \"label 'x1' is not an integer, others are\""
        ):
            run(adoption_of(tars, index_url=url), max_quarantined=0.1)
        assert (
            "2 samples are refused: they have a label that is not an integer, but 13 of 15 labels are integers"
            in caplog.text
        )
        manifest = run(adoption_of(tars, index_url=url), workers=workers, max_quarantined=0.2)
        assert (manifest.num_samples, manifest.num_quarantined, len(manifest.shards)) == (13, 2, 2)
        assert verify_dataset(url, deep=True) == []
        dataset = open_dataset(url)
        assert dataset.label_names == ("0", "1", "2", "3")
        assert [row.labels for row in index_rows(dataset, 0)] == [(0,), (1,), (2,), (0,)]
        store = open_store(url)
        rows = read_table(store.read(QUARANTINE_PATH)).to_pylist()
        assert [(row["position"], row["reason"]) for row in rows] == [
            (3, "label 'x1' is not an integer, others are"),
            (14, "label 'cat' is not an integer, others are"),
        ]
        written.append({path: store.read(path) for path in store.list()})
    assert written[0] == written[1]


def test_a_class_that_only_refused_samples_have_is_none(tmp_path: Path) -> None:
    def members(tar: int, number: int) -> dict[str, bytes]:
        labels = [9, "cat"] if (tar, number) == (0, 0) else [number % 2]
        return {"jpg": sample_image(tar, number), "json": json.dumps({"labels": labels}).encode()}

    write_tars(open_store(str(tmp_path)), members)
    spec = replace(SPEC, rules=SampleRules(label_field="labels"))
    manifest = run(adoption_of(str(tmp_path), spec=spec), max_quarantined=0.1)
    assert (manifest.num_samples, manifest.num_classes) == (14, 2)


@pytest.mark.parametrize(("num_names", "label_names"), [(7, ("0", "1", "2", "3")), (8, ("0", "1", "2", "3", "cat"))])
def test_more_than_half_of_the_labels_decide(tmp_path: Path, num_names: int, label_names: tuple[str, ...]) -> None:
    names = [(tar, number) for tar, size in enumerate(SIZES) for number in range(size)][:num_names]

    def members(tar: int, number: int) -> dict[str, bytes]:
        return with_cls(tar, number) | ({"cls": b"cat"} if (tar, number) in names else {})

    write_tars(open_store(str(tmp_path)), members)
    run(adoption_of(str(tmp_path)), max_quarantined=0.5)
    assert open_dataset(str(tmp_path)).label_names == label_names
    assert verify_dataset(str(tmp_path), deep=True) == []


def test_tars_that_patchline_packed_can_be_adopted_elsewhere(digits_url: str, tmp_path: Path) -> None:
    index_url = str(tmp_path / "again")
    manifest = run(adoption_of(digits_url, index_url=index_url))
    packed = open_dataset(digits_url)
    assert manifest.num_samples == packed.num_samples
    assert verify_dataset(index_url) == []
    both = (index_rows(packed, 2), index_rows(open_dataset(index_url), 2))
    ours, again = ([(row.key, row.labels, row.offset) for row in rows] for rows in both)
    assert again == ours
    with pytest.raises(UserError, match="is a dataset packed by patchline; give --index-url"):
        run(adoption_of(digits_url))


def test_tars_that_are_not_read_again_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their labels may have changed: a tar of the same size is taken for the same."""
    write_tars(open_store(str(tmp_path)), with_cls)
    caplog.set_level(logging.INFO)
    run(adoption_of(str(tmp_path)))
    assert "already indexed" not in caplog.text
    run(adoption_of(str(tmp_path)))
    assert f"{tmp_path} is already indexed: 15 samples; its tars were not read again" in caplog.text


def test_another_index_is_not_overwritten(tmp_path: Path) -> None:
    url = str(tmp_path)
    store = open_store(url)
    write_tars(store, with_cls)
    run(adoption_of(url))
    with pytest.raises(UserError, match=r"was indexed with other settings; delete its manifest\.json first"):
        run(adoption_of(url, spec=replace(SPEC, samples_per_block=3)))
    write_tars(store, with_cls, sizes=(5, 1, 9, 2))
    with pytest.raises(UserError, match="was indexed when there were other tars"):
        run(adoption_of(url))
    store.write("manifest.json", b'{"of": "another tool"}')
    with pytest.raises(UserError, match=r"was not written by patchline .*; give --index-url"):
        run(adoption_of(url))


def test_nothing_of_others_is_removed(tmp_path: Path) -> None:
    """Not even a folder with the name of our own work folder."""
    store = open_store(str(tmp_path))
    write_tars(store, with_cls)
    others = ("work/notes.txt", "work/adopted.parquet", "index/notes.txt", "train.csv")
    for path in others:
        store.write(path, b"of others")
    run(adoption_of(str(tmp_path)))
    assert [store.read(path) for path in others] == [b"of others"] * len(others)
    assert list(store.list("work")) == ["work/adopted.parquet", "work/notes.txt"]


@pytest.mark.parametrize(
    ("found", "meaning", "names"),
    [
        ({"2", "0"}, Meaning(names=None), ("0", "1", "2")),
        ({"2", "1"}, Meaning(names=None, first=1), ("1", "2")),
        ({"b", "1", "a"}, Meaning(names=None), ("1", "a", "b")),
        ({"x"}, Meaning(names=("x", "y")), ("x", "y")),
        (set(), Meaning(names=None), ()),
    ],
)
def test_label_names(found: set[str], meaning: Meaning, names: tuple[str, ...]) -> None:
    assert label_names(found, meaning) == names


def test_a_number_that_can_be_no_class() -> None:
    with pytest.raises(UserError, match="the label 1440764000 is not a class number"):
        label_names({"1440764000"}, Meaning(names=None))
    with pytest.raises(UserError, match=r"the label 9{200}\.\.\. is not a class number"):
        label_names({"9" * 1024}, Meaning(names=None))


def test_samples_without_a_label_are_kept_if_asked_for(tmp_path: Path) -> None:
    """Captions alone, and a label on one sample in four: an empty text, NaN and no member are no label."""
    labels = {0: {"cls": b"3"}, 1: {"cls": b""}, 2: {"cls": b"NaN"}, 3: {}}
    store = open_store(str(tmp_path))
    write_tars(store, lambda tar, number: {"jpg": sample_image(tar, number), "txt": b"a caption", **labels[number % 4]})
    spec = AdoptSpec(rules=SampleRules(unlabeled="keep"), samples_per_block=2)
    adoption = adoption_of(store.url, spec=spec)
    with pytest.raises(UserError, match=r"--label-field, a field of \.json, or --unlabeled keep to index"):
        adopt(replace(adoption, spec=SPEC), workers=1, max_quarantined=0)
    manifest = adopt(adoption, workers=1, max_quarantined=0)
    assert (manifest.num_samples, manifest.num_quarantined, manifest.unlabeled) == (sum(SIZES), 0, True)
    assert verify_dataset(store.url, deep=True) == []
    for shard in range(len(SIZES)):
        rows = index_rows(open_dataset(store.url), shard)
        assert [row.labels for row in rows] == [(3,) if number % 4 == 0 else () for number in range(len(rows))]
