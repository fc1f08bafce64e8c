"""Every kind of source, made from real photographs, packed from a folder and from S3, and read back by plain
readers."""

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest
import webdataset as wds

from jobs.data import index
from jobs.data.pack import PackJob, run
from jobs.recipes.pack import RECIPES
from shards.dataset import open_dataset
from shards.sources.kinds import Source
from shards.store import open_store
from shards.verifying.verify import verify_dataset

NUM_IMAGES = 60


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """One file of the ImageNet sample; its class is its synset."""

    name: str
    synset: str
    data: bytes


@pytest.fixture(scope="module")
def photographs(test_data: Path) -> list[Photograph]:
    """60 photographs, assigned to 12 classes: otherwise too few would share a class."""
    files = sorted((test_data / "imagenet-sample").iterdir())[:NUM_IMAGES]
    synsets = [file.name.split("_")[0] for file in files[:12]]
    return [
        Photograph(name=file.name, synset=synsets[number % 12], data=file.read_bytes())
        for number, file in enumerate(files)
    ]


def by_class(photographs: list[Photograph]) -> dict[str, list[Photograph]]:
    return {
        synset: [photograph for photograph in photographs if photograph.synset == synset]
        for synset in sorted({photograph.synset for photograph in photographs})
    }


def tar_of(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def class_tars_of(photographs: list[Photograph]) -> dict[str, bytes]:
    return {
        f"{synset}.tar": tar_of({photograph.name: photograph.data for photograph in some})
        for synset, some in by_class(photographs).items()
    }


def as_folder(photographs: list[Photograph]) -> dict[str, bytes]:
    return {f"{photograph.synset}/{photograph.name}": photograph.data for photograph in photographs}


def as_flat(photographs: list[Photograph]) -> dict[str, bytes]:
    return {f"{photograph.synset}_{photograph.name}": photograph.data for photograph in photographs}


def as_flat_with_csv(photographs: list[Photograph]) -> dict[str, bytes]:
    rows = [("file", "label"), *((photograph.name, photograph.synset) for photograph in photographs)]
    return {photograph.name: photograph.data for photograph in photographs} | {"labels.csv": csv_of(rows)}


def as_tar_of_tars(photographs: list[Photograph]) -> dict[str, bytes]:
    return {"all.tar": tar_of(class_tars_of(photographs))}


def as_parquet(photographs: list[Photograph]) -> dict[str, bytes]:
    files = {}
    for number in range(3):
        rows = [
            {"image": {"bytes": photograph.data, "path": photograph.name}, "label": photograph.synset}
            for photograph in photographs[number::3]
        ]
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)
        files[f"train-{number:05d}.parquet"] = file.getvalue()
    return files


def as_csv_manifest(photographs: list[Photograph]) -> dict[str, bytes]:
    rows = [("path", "label"), *((f"images/{photograph.name}", photograph.synset) for photograph in photographs)]
    images = {f"images/{photograph.name}": photograph.data for photograph in photographs}
    return images | {"list.csv": csv_of(rows)}


def as_parquet_manifest(photographs: list[Photograph]) -> dict[str, bytes]:
    """As for JFT: several labels per image, with weights."""
    rows = [
        {"path": f"images/{photograph.name}", "label": [photograph.synset, "any"], "weights": [1.0, 0.25]}
        for photograph in photographs
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    images = {f"images/{photograph.name}": photograph.data for photograph in photographs}
    return images | {"list.parquet": file.getvalue()}


def csv_of(rows: list[tuple[str, str]]) -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


Files = Callable[[list[Photograph]], dict[str, bytes]]
# Name -> recipe, the files it packs, and its source's fields, with {url} for the files' folder.
KINDS: dict[str, tuple[str, Files, dict[str, object]]] = {
    "class folders": ("folder", as_folder, {"root": "{url}"}),
    "flat": ("flat", as_flat, {"root": "{url}"}),
    "flat with a CSV": ("flat", as_flat_with_csv, {"root": "{url}", "labels_csv": "{url}/labels.csv"}),
    "class tars": ("class_tars", class_tars_of, {"root": "{url}"}),
    "tar of tars": ("tar_of_tars", as_tar_of_tars, {"path": "{url}/all.tar"}),
    "Parquet": ("parquet", as_parquet, {"files": ("{url}/train-*.parquet",)}),
    "CSV manifest": ("manifest", as_csv_manifest, {"files": ("{url}/list.csv",)}),
    "Parquet manifest": (
        "manifest",
        as_parquet_manifest,
        {"files": ("{url}/list.parquet",), "weights_column": "weights"},
    ),
}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.long)])
def source_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a source."""
    if request.param == "folder":
        return str(tmp_path / "source")
    return f"s3://{request.getfixturevalue('s3_bucket')}/source"


def job_of(kind: str, url: str) -> PackJob:
    """The recipe of a kind with its source at `url`."""
    recipe, _, fields = KINDS[kind]
    job: PackJob = RECIPES[recipe]()
    filled = {name: _filled(value, url) for name, value in fields.items()}
    source: Source = replace(job.source, **filled)  # type: ignore[arg-type]
    return replace(job, source=source, samples_per_shard=13, samples_per_block=4)


def _filled(value: object, url: str) -> object:
    if isinstance(value, tuple):
        return tuple(_filled(item, url) for item in value)
    return value.replace("{url}", url) if isinstance(value, str) else value


def webdataset_samples(folder: Path) -> Iterator[dict[str, bytes]]:
    """Every sample, by plain webdataset."""
    for tar in sorted(folder.rglob("*.tar")):
        yield from wds.WebDataset(str(tar), shardshuffle=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source(kind: str, source_url: str, photographs: list[Photograph], tmp_path: Path) -> None:
    store = open_store(source_url)
    for name, data in KINDS[kind][1](photographs).items():
        store.write(name, data)
    out = tmp_path / "out"
    assert run(replace(job_of(kind, source_url), out=str(out))) == 0
    assert verify_dataset(str(out), deep=True) == []
    dataset, has_weights = open_dataset(str(out)), kind == "Parquet manifest"
    assert (dataset.num_samples, dataset.manifest.num_quarantined) == (NUM_IMAGES, 0)

    synsets = {photograph.data: photograph.synset for photograph in photographs}
    found = []
    for sample in webdataset_samples(out / "shards"):
        facts = json.loads(sample["json"])
        names = [dataset.label_names[label] for label in facts["labels"]]
        assert names == [synsets[sample["jpg"]]] + ["any"] * has_weights
        assert facts.get("weights") == ([1.0, 0.25] if has_weights else None)
        assert ("cls" in sample) == (not has_weights)
        found.append(sample["jpg"])
    assert sorted(found) == sorted(synsets)

    table = pds.dataset(str(out / "index")).to_table()
    assert table.num_rows == NUM_IMAGES
    sizes = {(row["height"], row["width"], row["size"]) for row in table.to_pylist()}
    assert len(sizes) > NUM_IMAGES // 2, "photographs differ in size"


def test_tars_made_by_others(source_url: str, photographs: list[Photograph], tmp_path: Path) -> None:
    """Tars of different lengths, which stay unchanged."""
    store, tars = open_store(source_url), {}
    labels = {synset: number for number, synset in enumerate(by_class(photographs))}
    for number, (begin, end) in enumerate([(0, 31), (31, 33), (33, 60)]):
        members = {}
        for place, photograph in enumerate(photographs[begin:end]):
            members[f"{place:04d}.jpg"] = photograph.data
            members[f"{place:04d}.cls"] = str(labels[photograph.synset]).encode()
        tars[f"train-{number:03d}.tar"] = tar_of(members)
    for name, data in tars.items():
        store.write(name, data)
    assert index.run(index.IndexJob(url=source_url, index_url=str(tmp_path / "out"))) == 0
    dataset = open_dataset(str(tmp_path / "out"))
    assert [record.num_samples for record in dataset.manifest.shards] == [31, 2, 27]
    assert verify_dataset(str(tmp_path / "out"), deep=True) == []
    assert {name: store.read(name) for name in store.list()} == tars
    assert pds.dataset(str(tmp_path / "out" / "index")).count_rows() == NUM_IMAGES
