"""What adoption says when a folder of tars cannot be adopted, each message once."""

from dataclasses import replace
from pathlib import Path

from shards.adoption.foreign_samples import SampleRules
from shards.store import open_store
from tests.rigs.messages import Row, row, table
from tests.shards.adoption.test_adopt import SPEC, adoption_of, run, with_cls, write_tars


def tar_without_a_label(folder: Path) -> None:
    store = open_store(str(folder))

    def members(tar: int, number: int) -> dict[str, bytes]:
        return with_cls(tar, number) | {"cls": b"cat" if tar != 1 or number else b"None"}

    write_tars(store, members)
    run(adoption_of(str(folder)))


def adopted_by(folder: Path, rules: SampleRules) -> None:
    write_tars(open_store(str(folder)), with_cls)
    run(adoption_of(str(folder), spec=replace(SPEC, rules=rules)), max_quarantined=1.0)


def record_of_an_index(folder: Path, record: bytes) -> None:
    write_tars(open_store(str(folder)), with_cls)
    run(adoption_of(str(folder)))
    open_store(str(folder)).write("plan/plan.json", record)
    run(adoption_of(str(folder)))


def without_images(folder: Path) -> None:
    write_tars(open_store(str(folder)), lambda _tar, _number: {"txt": b"x"})
    run(adoption_of(str(folder)), max_quarantined=1.0)


def one_tar_of_a_class(folder: Path, names: str) -> None:
    def members(tar: int, number: int) -> dict[str, bytes]:
        return with_cls(tar, number) | ({"cls": b"cat"} if number == 0 else {})

    write_tars(open_store(str(folder / "tars")), members)
    (folder / "names").write_text(names)
    spec = replace(SPEC, labels_file=str(folder / "names") if names else "")
    run(adoption_of(str(folder / "tars"), spec=spec))


def sample_rules(_: Path, fields: dict[str, object]) -> None:
    SampleRules(**fields)  # type: ignore[arg-type]


@table(
    # adopt
    row("one sample without a label", tar_without_a_label).says(
        '1 of 15 samples cannot be adopted, more than the allowed share of 0, most often: "no label", for example '
        "part-1/train-1.tar/dir.1/sample ü 000.JPEG; give --label-key, the label's suffix, or --label-field, a "
        "field of .json, or --unlabeled keep to index samples without a label, or raise --max-quarantined"
    ),
    row("wrong rules: SampleRules(label_key=label)", adopted_by, SampleRules(label_key="label")).says(
        'no sample can be adopted, most often: "no label: it has no member .label", for example '
        "part-0/train-2.tar/dir.2/sample ü 000.JPEG; give --label-key, the label's suffix, or --label-field, a "
        "field of .json, or --unlabeled keep to index samples without a label"
    ),
    row("wrong rules: SampleRules(label_field=label)", adopted_by, SampleRules(label_field="label")).says(
        'no sample can be adopted, most often: "no label: it has no member .json", for example '
        "part-0/train-2.tar/dir.2/sample ü 000.JPEG; give --label-key, the label's suffix, or --label-field, a "
        "field of .json, or --unlabeled keep to index samples without a label"
    ),
    row("wrong rules: SampleRules(image_keys=(tif,))", adopted_by, SampleRules(image_keys=("tif",))).says(
        'no sample can be adopted, most often: "no image: its members are cls, jpeg, txt", for example '
        "part-0/train-2.tar/dir.2/sample ü 000.txt; give --image-keys, the suffixes of the images"
    ),
    row("a damaged record of an index, b'{}'", record_of_an_index, b"{}").says(
        "the manifest.json or the plan/plan.json at DIR is damaged, or was not written by patchline ('adopted'); "
        "give --index-url to leave it alone"
    ),
    row("a damaged record of an index, b'[]'", record_of_an_index, b"[]").says(
        "the manifest.json or the plan/plan.json at DIR is damaged, or was not written by patchline (list indices "
        "must be integers or slices, not str); give --index-url to leave it alone"
    ),
    row("a damaged record of an index, b'{\"adopted\": 3}'", record_of_an_index, b'{"adopted": 3}').says(
        "the manifest.json or the plan/plan.json at DIR is damaged, or was not written by patchline ('int' object "
        "is not iterable); give --index-url to leave it alone"
    ),
    row(
        'a damaged record of an index, b\'{"adopted": [{"path": ',
        record_of_an_index,
        b'{"adopted": [{"path": 1}]}',
    ).says(
        "the manifest.json or the plan/plan.json at DIR is damaged, or was not written by patchline "
        "('num_bytes'); give --index-url to leave it alone"
    ),
    row("a damaged record of an index, b'[[[[[[[[[[[[[[[[[[[[[[", record_of_an_index, b"[" * 200_000).says(
        "the manifest.json or the plan/plan.json at DIR is damaged, or was not written by patchline (maximum "
        "recursion depth exceeded while decoding a JSON array from a unicode string); give --index-url to leave "
        "it alone"
    ),
    row("nothing to adopt", without_images).says(
        'no sample can be adopted, most often: "no image: its members are txt", for example '
        "part-0/train-2.tar/dir.2/sample ü 000.txt; give --image-keys, the suffixes of the images"
    ),
    row("names of the classes: a\\nb\\nc\\nd\\ne\\n", one_tar_of_a_class, "a\nb\nc\nd\ne\n").says(
        "3 of 15 samples cannot be adopted, more than the allowed share of 0, most often: \"unknown label 'cat'\", "
        "for example part-0/train-0.tar/dir.0/sample ü 000.JPEG; give --label-key or --label-field, or another "
        "--labels-file, or raise --max-quarantined"
    ),
    row("names of the classes: ", one_tar_of_a_class, "").says(
        "3 of 15 samples cannot be adopted, more than the allowed share of 0, most often: \"label 'cat' is not an "
        'integer, others are", for example part-0/train-0.tar/dir.0/sample ü 000.JPEG; give the names of all '
        "classes in --labels-file, or raise --max-quarantined"
    ),
    # foreign_samples
    row("rules that do not serve, {'image_keys': ()}", sample_rules, {"image_keys": ()}).says(
        "--image-keys is ''; give suffixes such as jpg png"
    ),
    row("rules that do not serve, {'image_keys': ('',)}", sample_rules, {"image_keys": ("",)}).says(
        "--image-keys is ''; give suffixes such as jpg png"
    ),
    row("rules that do not serve, {'label_key': ''}", sample_rules, {"label_key": ""}).says(
        "--label-key is empty; give the label's suffix, e.g. cls, or --label-field"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
