"""What packing says when it refuses, each message once."""

import tarfile
from dataclasses import replace
from pathlib import Path

from shards.class_labels import are_names
from shards.packing.config import Dedup
from shards.packing.evaluation_sets import find_sets
from shards.packing.listing import listed
from shards.packing.plan import Plan
from shards.packing.survey import SurveyTask, survey
from shards.packing.write_shard import MOST_MEMBER_BYTES, header
from shards.sources.kinds import ClassTarsSource, FlatSource, FolderSource, ManifestSource, Source, TarOfTarsSource
from shards.store import open_store
from tests.rigs.messages import Row, row, table
from tests.rigs.packing import pack_spec


def dedup(_: Path, distance: int) -> None:
    Dedup(max_distance=distance)


def plan(_: Path, data: bytes) -> None:
    Plan.from_bytes(data)


def listing(folder: Path, source: Source) -> None:
    (folder / "list.csv").write_text("path,label\n")
    (folder / "empty").mkdir()
    tarfile.open(folder / "outer.tar", "w").close()
    there = {
        name: tuple(item.format(folder) for item in value) if name == "files" else value.format(folder)
        for name, value in vars(source).items()
        if name in ("root", "path", "files")
    }
    empty: Source = replace(source, **there)  # type: ignore[arg-type]
    listed(open_store(str(folder / "out")), empty, scan_hash="x")


def survey_without_a_scan(folder: Path) -> None:
    task = SurveyTask(
        url=str(folder),
        spec=pack_spec(FolderSource(root="x")),
        first_number=3,
        slices_sha256=("0",),
        meaning=are_names(None),
        evaluation_sets=(),
    )
    survey(task)


def tar_header(_: Path, name: str, num_bytes: int) -> None:
    header(name, num_bytes)


@table(
    # config
    *(
        row(f"distance, {distance}", dedup, distance).says("dedup.max_distance is …; allowed: 0 to 127")
        for distance in (-1, 128, 256)
    ),
    # damaged_files
    row("not a plan, b'[[[[[[[[[[[[[[[[[[[[[[", plan, b"[" * 200_000).says(
        "ValueError: not a plan: lists and objects are nested more than 64 deep"
    ),
    row("not a plan, b'3'", plan, b"3").says("ValueError: not a plan: not a plan: it has no format_version"),
    row("not a plan, b''", plan, b"").says("ValueError: not a plan: Expecting value: line 1 column 1 (char 0)"),
    row("not a plan, b'\\xff\\xfe'", plan, b"\xff\xfe").says(
        "ValueError: not a plan: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
    ),
    row('not a plan, b\'{"adopted": 1, "adopte', plan, b'{"adopted": 1, "adopted": 2}').says(
        "ValueError: not a plan: 'adopted' is named twice"
    ),
    # evaluation_sets
    row("no evaluation set", lambda folder: find_sets((str(folder / "none"),))).says(
        "NoDatasetError: there is nothing at 'DIR/none'; check the path, or pack a dataset there: patchline pack "
        "RECIPE --out DIR/none"
    ),
    # listing
    row("empty: FolderSource(root=/empty)", listing, FolderSource(root="{}/empty")).says(
        "no image found below DIR/empty; give a source that has some"
    ),
    row("empty: FlatSource(root=/empty)", listing, FlatSource(root="{}/empty")).says(
        "no image found below DIR/empty; give a source that has some"
    ),
    row("empty: FolderSource(root=)", listing, FolderSource(root="{}")).says(
        "no image found below DIR; it has tars: use patchline pack class_tars for one tar a class, patchline "
        "index for WebDataset's"
    ),
    row("empty: ClassTarsSource(root=/empty)", listing, ClassTarsSource(root="{}/empty")).says(
        "no *.tar below DIR/empty; give a source that has some"
    ),
    row("empty: TarOfTarsSource(path=/outer.tar)", listing, TarOfTarsSource(path="{}/outer.tar")).says(
        "no tar in DIR/outer.tar; give a source that has some"
    ),
    row("empty: ManifestSource(files=(/list.csv,))", listing, ManifestSource(files=("{}/list.csv",))).says(
        "no image found in DIR/list.csv; give a source that has some"
    ),
    # survey
    row("a missing scan", survey_without_a_scan).says(
        "DIR/plan/scan-000003.parquet is missing: the scan is not complete; run --phase scan with every part first"
    ),
    # write_shard
    row("a tar header: x * 101 1", tar_header, "x" * 101, 1).says(
        "ValueError: tar member "
        "'xxxxxxxxxx…' does not fit into a ustar header: name of 101 bytes (at most 100), 1 bytes (to 8589934591)"
    ),
    row("a tar header: ä * 51 1", tar_header, "\u00e4" * 51, 1).says(
        "ValueError: tar member 'äääääääääääääääääääääääääääääääääääääääääääääääääää' does not fit into a ustar "
        "header: name of 102 bytes (at most 100), 1 bytes (to 8589934591)"
    ),
    row(
        "a tar header: a MOST_MEMBER_BYTES + 1",
        tar_header,
        "a",
        MOST_MEMBER_BYTES + 1,
    ).says(
        "ValueError: tar member 'a' does not fit into a ustar header: name of 1 bytes (at most 100), 8589934592 "
        "bytes (to 8589934591)"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
