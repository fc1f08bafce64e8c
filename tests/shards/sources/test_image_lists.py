"""Collections listed in tables: labels, weights and invalid rows; reads from paths, buckets and web servers."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data import pack
from jobs.data.pack import source_of_split
from shards.dataset import open_dataset
from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import Entry, ImageBytes
from shards.sources.folders import FlatSource
from shards.sources.image_lists import Locations, ManifestSource
from shards.sources.tree import refused_entry
from shards.store import open_store
from tests.rigs.images import image_bytes
from tests.rigs.web import web_server


def read(source: ManifestSource) -> list[tuple[Entry, ImageBytes]]:
    """All images, and all of them again by locator."""
    images = list(source.images(list(source.entries()), max_bytes=1 << 20))
    again = list(source.reader().read_many([entry.locator for entry, _ in images]))
    assert [str(image) for image in again] == [str(image) for _, image in images]
    return images


def test_a_csv_with_all_that_is_odd(tmp_path: Path) -> None:
    for name in (b"a.jpg", b"sub/x y.jpg", "猫 5.jpg".encode(), b"caf\xe9.jpg"):
        path = tmp_path / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name)
    (tmp_path / "list.csv").write_bytes(
        b"path,label,score\n"
        b"a.jpg,cat,\n"
        b"a.jpg,cat|dog|cat,\n"  # the same image again
        b"sub/x y.jpg,cat|dog,0.5|0.25\n" + '"猫 5.jpg",猫,1\n'.encode() + b"caf\xe9.jpg,,\n"
        b",cat,1\n"
        b"a.jpg,cat,1|2\n"
        b"a.jpg,cat,much\n"
        b"a.jpg,cat\n"
        b"gone.jpg,cat,1\n"
        b"../list.csv,cat,1"
    )
    images = read(ManifestSource(files=(str(tmp_path / "list.csv"),), weights_column="score"))
    assert [(entry.name, entry.labels, entry.weights) for entry, _ in images] == [
        ("a.jpg", ("cat",), ()),
        ("a.jpg", ("cat", "dog", "cat"), ()),
        ("sub/x y.jpg", ("cat", "dog"), (0.5, 0.25)),
        ("猫 5.jpg", ("猫",), (1.0,)),
        ("caf\\xe9.jpg", (), ()),
        ("list.csv row 7", (), ()),
        ("a.jpg", (), ()),
        ("a.jpg", (), ()),
        ("list.csv row 10", (), ()),
        ("gone.jpg", ("cat",), (1.0,)),
        ("../list.csv", ("cat",), (1.0,)),
    ]
    assert [image for _, image in images[:5]] == [
        *(b"a.jpg", b"a.jpg", b"sub/x y.jpg", "猫 5.jpg".encode(), b"caf\xe9.jpg")
    ]
    assert [str(image) for _, image in images[5:10]] == [
        "the row names no image",
        "list.csv row 8: 2 weights for 1 labels; allowed: one each, or none",
        "list.csv row 9: the weight 'much': allowed: numbers of 0 or more",
        "the row has 2 columns, the header has 3",
        "No such file or directory",
    ]
    assert "no '..'" in str(images[10][1])


def test_paths_as_windows_writes_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.jpg").write_bytes(b"a")
    (tmp_path / "list.csv").write_text("path,label\nsub\\a.jpg,cat\n .\\sub\\a.jpg , cat\n")
    assert [image for _, image in read(ManifestSource(files=(str(tmp_path / "list.csv"),)))] == [b"a", b"a"]


def test_paths_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/a.jpg").write_bytes(b"a")
    (tmp_path / "list.csv").write_text("path,label\n~/a.jpg,cat\n~a.jpg,cat\n")
    (tmp_path / "~a.jpg").write_bytes(b"beside the list")
    images = read(ManifestSource(files=(str(tmp_path / "list.csv"),)))
    assert [image for _, image in images] == [b"a", b"beside the list"]


SPLITS = ("train", "Train", "val", "test", "")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_table_of_several_splits(tmp_path: Path, suffix: str) -> None:
    names, path = [f"{number}.jpg" for number in range(len(SPLITS))], tmp_path / f"list{suffix}"
    for name in names:
        (tmp_path / name).write_bytes(image_bytes(1))
    if suffix == ".csv":
        path.write_text("path,split,label\n" + "".join(f"{a},{b},cat\n" for a, b in zip(names, SPLITS, strict=True)))
    else:
        pq.write_table(pa.table({"path": names, "split": SPLITS, "label": ["cat"] * len(names)}), path)
    source = ManifestSource(files=(str(path),))
    with pytest.raises(
        UserError, match=r"rows of the splits train \(list.* row \d\), validation .*--source.split-column"
    ):
        list(source.entries())
    with pytest.raises(UserError, match=r"rows of the splits train .* row \d\), validation"):
        list(FlatSource(root=str(tmp_path), labels_csv=str(path), file_column="path").entries())
    for split, found in (("train", "01"), ("validation", "2"), ("val", "2"), ("test", "3")):
        chosen = source_of_split(replace(source, split_column="split"), split)
        assert isinstance(chosen, ManifestSource)
        assert [entry.name for entry, _ in read(chosen)] == [f"{number}.jpg" for number in found]
    with pytest.raises(UserError, match=r"no row of the split 'dev2', but 'train', .*, 'test', ''; set --split"):
        list(source_of_split(replace(source, split_column="split"), "dev2").entries())
    with pytest.raises(UserError, match=r"has no column 'part'; .*set --source\.split-column"):
        list(replace(source, split_column="part").entries())


@pytest.mark.parametrize("values", [(0, 1, 2), ("Training", "PublicTest"), ("id_train", "ood_test"), (True, False)])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_splits_that_are_numbered_or_named_otherwise_are_no_single_dataset(
    tmp_path: Path, values: tuple[object, ...], suffix: str
) -> None:
    names, path = [f"{number}.jpg" for number in range(len(values))], tmp_path / f"list{suffix}"
    if suffix == ".csv":
        path.write_text("path,split,label\n" + "".join(f"{a},{b},cat\n" for a, b in zip(names, values, strict=True)))
    else:
        pq.write_table(pa.table({"path": names, "split": values, "label": ["cat"] * len(names)}), path)
    with pytest.raises(UserError, match="column 'split' has rows of the splits"):
        list(ManifestSource(files=(str(path),)).entries())


def test_older_copies_of_a_table_in_hidden_folders_are_not_read(tmp_path: Path) -> None:
    for folder in ("", ".ipynb_checkpoints", ".Trash-1000/files", "#recycle"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "labels.csv").write_text(f"path,label\na.jpg,{folder or 'cat'}\n")
    (entry,) = ManifestSource(files=(str(tmp_path),)).entries()
    assert entry.labels == ("cat",)


def test_one_split_or_none_in_a_table_is_packed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,split,label\na.jpg,test,cat\nb.jpg,TEST,cat\nc.jpg,,cat\nd.jpg,3,cat\n")
    assert len(list(ManifestSource(files=(str(tmp_path / "a.csv"),)).entries())) == 4


def test_a_path_with_a_line_break_is_refused_by_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a\nb.jpg", "c\rd.jpg"], "label": ["x", "x"]}), tmp_path / "list.parquet")
    images = read(ManifestSource(files=(str(tmp_path / "list.parquet"),)))
    assert [(entry.name, str(image)) for entry, image in images] == [
        ("list.parquet row 0", "its path has a line break"),
        ("list.parquet row 1", "its path has a line break"),
    ]


def test_parquet_lists_of_labels_and_locations_of_every_kind(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "near.jpg").write_bytes(b"near")
    open_store(f"s3://{s3_bucket}").write("stored.jpg", b"stored")
    with web_server() as web:
        paths = ["near.jpg", f"s3://{s3_bucket}/stored.jpg", web.serve("/x.jpg", b"fetched"), None]
        labels = [["a", "b"], [], ["c"], ["d"]]
        weights = [[0.5, 1.0], [], None, [1.0]]
        table = pa.table({"url": paths, "classes": labels, "weights": weights})
        pq.write_table(table, tmp_path / "list.parquet", row_group_size=2)
        images = read(
            ManifestSource(files=(str(tmp_path),), path_column="url", label_column="classes", weights_column="weights")
        )
    assert [(entry.name, entry.labels, entry.weights) for entry, _ in images] == [
        ("near.jpg", ("a", "b"), (0.5, 1.0)),
        (f"s3://{s3_bucket}/stored.jpg", (), ()),
        (f"{web.url}/x.jpg", ("c",), ()),
        ("list.parquet row 3", (), ()),
    ]
    assert [image for _, image in images[:3]] == [b"near", b"stored", b"fetched"]


def test_a_list_in_a_bucket_names_what_lies_beside_it(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/data")
    store.write("images/a.jpg", b"1")
    store.write("list.csv", b"path,label\nimages/a.jpg,x\n")
    ((entry, image),) = read(ManifestSource(files=(f"s3://{s3_bucket}/data/list.csv",)))
    assert (entry.locator, entry.labels, image) == ("images/a.jpg", ("x",), b"1")


def test_addresses_with_secrets_are_refused_and_nothing_keeps_them(tmp_path: Path) -> None:
    addresses = (
        *("https://me:sesame@example.invalid/a@b.jpg", "ftp://me:sesame@example.invalid/f"),
        *("https://example.invalid/c.jpg?w=1&X-Amz-Signature=sesame", "s3://me:sesame@bucket/key"),
        "https://example.invalid/d.jpg?w=1",
    )
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *(f"{address},x" for address in addresses)]))
    *entries, public = ManifestSource(files=(str(tmp_path / "list.csv"),)).entries()
    assert "sesame" not in str(entries)
    assert [entry.name for entry in entries] == [
        *("https://***@example.invalid/a@b.jpg", "ftp://***@example.invalid/f"),
        *("https://example.invalid/c.jpg", "s3://***@bucket/key"),
    ]
    source = ManifestSource(files=(str(tmp_path / "list.csv"),))
    for _, image in source.images(entries, max_bytes=100):
        assert isinstance(image, ImageRefusedError)
        assert "use s3://bucket/key with credentials from the environment, or a public URL" in str(image)
    assert (public.locator, public.name) == (addresses[-1], "https://example.invalid/d.jpg")


def test_no_file_of_a_dataset_has_the_secret(tmp_path: Path) -> None:
    with web_server() as web:
        good = web.serve("/a.jpg?w=1", image_bytes(0))
        lines = [
            good,
            f"{web.serve('/b.jpg?sig=sesame', image_bytes(1))}",
            web.url.replace("//", "//bob:sesame@") + "/c",
        ]
        (tmp_path / "list.csv").write_text("\n".join(["path,label", *(f"{line},x" for line in lines)]))
        source = ManifestSource(files=(str(tmp_path / "list.csv"),))
        pack.run(pack.PackJob(source=source, out=str(tmp_path / "out"), max_quarantined=1.0))
        assert dict(web.asked) == {"/a.jpg?w=1": 2}
    store = open_store(str(tmp_path / "out"))
    for path in store.list():
        assert b"sesame" not in store.read(path), path
        if path.endswith(".parquet"):
            assert "sesame" not in str(pq.read_table(tmp_path / "out" / path).to_pylist()), path


def test_a_secret_in_the_root_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\na.jpg,x\n")
    for root in ("https://me:sesame@example.invalid/", "https://example.invalid/?sig=sesame"):
        with pytest.raises(UserError, match=r"--source\.root") as caught:
            list(ManifestSource(files=(str(tmp_path / "list.csv"),), root=root).entries())
        assert "sesame" not in str(caught.value)


def test_lists_in_several_folders_need_a_root(tmp_path: Path) -> None:
    for name in ("a/list.csv", "b/list.csv"):
        open_store(str(tmp_path)).write(name, b"path,label\nx.jpg,cat\n")
    (tmp_path / "x.jpg").write_bytes(b"1")
    with pytest.raises(UserError):
        list(ManifestSource(files=(f"{tmp_path}/*/list.csv",)).entries())
    images = read(ManifestSource(files=(f"{tmp_path}/*/list.csv",), root=str(tmp_path)))
    assert [image for _, image in images] == [b"1", b"1"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ManifestSource(), "--source.files is missing"),
        (ManifestSource(files=("{}/none.csv",)), "matches no file"),
        (
            ManifestSource(files=("{}/list.csv",)),
            "no column 'path'; it has 'file', 'label'; set --source.path-column",
        ),
        (ManifestSource(files=("{}/list.csv",), path_column="file", weights_column="w"), "set --source.weights-column"),
    ],
)
def test_a_list_of_no_use_is_the_users_mistake(source: ManifestSource, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("file,label\nx,y\n")
    files = tuple(path.format(tmp_path) for path in source.files)
    source = ManifestSource(files=files, path_column=source.path_column, weights_column=source.weights_column)
    with pytest.raises(UserError) as caught:
        list(source.entries())
    assert message in str(caught.value)


def test_real_photographs_from_a_list(test_data: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in (test_data / "imagenet-sample").iterdir())[:20]
    lines = [f"{name},{name.partition('_')[0]}|all" for name in names]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    source = ManifestSource(files=(str(tmp_path / "list.csv"),), root=str(test_data / "imagenet-sample"))
    images = read(source)
    assert [entry.labels for entry, _ in images] == [(name.partition("_")[0], "all") for name in names]
    assert all(isinstance(image, bytes) and image.startswith(b"\xff\xd8\xff") for _, image in images)


def test_with_copies_kept_nothing_is_fetched_twice(tmp_path: Path) -> None:
    with web_server() as web:
        for number in range(6):
            web.serve(f"/{number}.jpg", image_bytes(number))
        lines = [f"{web.url}/{number}.jpg,c{number % 2}" for number in range(6)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
        source = ManifestSource(files=(str(tmp_path / "list.csv"),), keep_copies=True)
        assert pack.run(pack.PackJob(source=source, out=str(tmp_path / "out"))) == 0
        assert web.asked.total() == 6
    assert open_dataset(str(tmp_path / "out")).num_samples == 6


def test_every_kind_of_location_in_one_list(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a b.jpg").write_bytes(b"relative")
    (tmp_path / "other.jpg").write_bytes(b"absolute")
    open_store(f"s3://{s3_bucket}/deep").write("猫 x.jpg", b"stored")
    with web_server() as web:
        cases = {
            "a b.jpg": b"relative",
            f"{tmp_path}/other.jpg": b"absolute",
            f"s3://{s3_bucket}/deep/猫 x.jpg": b"stored",
            web.serve("/a.jpg", b"fetched"): b"fetched",
            f"s3://{s3_bucket}/none.jpg": OSError("no object 'none.jpg'"),
            f"s3://{s3_bucket}/a//b.jpg": ImageRefusedError("not a plain relative path"),
            "s3://nonsense": ImageRefusedError("is not s3://bucket/key"),
            f"{web.url}/none.jpg": OSError("the server answers 404"),
            "../other.jpg": ImageRefusedError("no '..'"),
            "gone.jpg": OSError("No such file or directory"),
            f"{tmp_path}/gone\0.jpg": ImageRefusedError("NUL"),
            "file:///etc/passwd": ImageRefusedError("neither a path nor a URL"),
            refused_entry("x", "ftp://a is bad").locator: ImageRefusedError("ftp://a is bad"),
        }
        images = Locations(root=str(tmp_path / "root")).read_many(list(cases))
        for image, expected in zip(images, cases.values(), strict=True):
            assert type(image) is type(expected)
            assert image == expected or str(expected) in str(image)


@pytest.mark.parametrize("ending", ["", "/"])
def test_relative_ones_below_a_prefix_or_an_address(ending: str, s3_bucket: str) -> None:
    open_store(f"s3://{s3_bucket}").write("root/sub/a.jpg", b"stored")
    open_store(f"s3://{s3_bucket}").write("secret.jpg", b"outside")
    images = list(Locations(root=f"s3://{s3_bucket}/root{ending}").read_many(["sub/a.jpg", "../secret.jpg"]))
    assert images[0] == b"stored"
    assert isinstance(images[1], ImageRefusedError)
    with web_server() as web:
        web.serve("/root/a%20b.jpg", b"fetched")
        assert list(Locations(root=f"{web.url}/root{ending}").read_many(["a b.jpg"])) == [b"fetched"]


def test_too_large_is_refused_everywhere(tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "a.jpg").write_bytes(b"12345")
    open_store(f"s3://{s3_bucket}").write("a.jpg", b"12345")
    with web_server() as web:
        locations = ["a.jpg", f"s3://{s3_bucket}/a.jpg", web.serve("/a.jpg", b"12345")]
        entries = [Entry(locator=location, name="") for location in locations]
        for _, image in Locations(root=str(tmp_path)).images(entries, max_bytes=4):
            assert isinstance(image, ImageRefusedError)
            assert str(image).startswith("too large")
        assert [image for _, image in Locations(root=str(tmp_path)).images(entries, max_bytes=5)] == [b"12345"] * 3


def test_a_bucket_that_is_not_there_ends_the_job(s3_endpoint: str) -> None:
    with pytest.raises(UserError, match="create the bucket"):
        list(Locations(root=".").read_many(["s3://no-such-bucket/a.jpg"]))
