"""What checkpoints say when they are damaged, missing or of another version, each message once."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.attempts import attempt_from_json, attempt_to_json, next_token
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import commit
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.manifest import (
    CheckpointId,
    CheckpointManifest,
    LogicalTensor,
    manifest_from_json,
    manifest_to_json,
    own_manifest_from_json,
)
from pipeline.checkpoints.rank_file_in import RankFiles, tensors_in_order
from pipeline.checkpoints.rank_file_out import read_report
from pipeline.checkpoints.saves import lay_out
from pipeline.checkpoints.stored import CheckpointChoice, chosen, read_best, write_best
from pipeline.checkpoints.writer_messages import from_line, to_line
from shards.files.typed_json import sealed, unsealed
from shards.store import LocalStore, open_store
from tests.pipeline.checkpoints.test_commit import order_in, put_attempts
from tests.pipeline.checkpoints.test_fence import a
from tests.pipeline.checkpoints.test_manifest import MANIFEST, SKIPPING, changed, replaced
from tests.pipeline.checkpoints.test_rank_file_in import NAMES, file_of, header, manifest_of, tensor
from tests.pipeline.checkpoints.test_rank_file_in import saved as saved_rank_file_in
from tests.pipeline.checkpoints.test_rank_file_out import FOLDER, written
from tests.pipeline.checkpoints.test_stored import ALL, BEST
from tests.pipeline.checkpoints.test_whole_tensors import NUM_TENSORS
from tests.pipeline.checkpoints.test_whole_tensors import saved as saved_whole_tensors
from tests.pipeline.checkpoints.test_writer_messages import COMMIT, WRITE
from tests.rigs.messages import Row, row, table

PLACE = ("tensors", "head.weight", "slots", "master", "0")
FILE = json.loads(unsealed(manifest_to_json(MANIFEST)))["files"]["rank-00000.safetensors"]


def zeroed(data: bytes) -> bytes:
    return data[:-200] + bytes(200)


def put_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def one_tensor(manifest: CheckpointManifest) -> LogicalTensor:
    return LogicalTensor(shape=(30,), dtype="float32", slots={"master": manifest.tensors["a"].slots["master"][:1]})


def moved(manifest: CheckpointManifest, **values: Any) -> CheckpointManifest:
    """The manifest with another place of the first fragment of "a"."""
    first, *others = manifest.tensors["a"].slots["master"]
    slots = manifest.tensors["a"].slots | {"master": (replace(first, **values), *others)}
    return replace(manifest, tensors=manifest.tensors | {"a": replace(manifest.tensors["a"], slots=slots)})


def rank_file_after(folder: Path, damage: Callable[[Path], object]) -> None:
    manifest, store = saved_rank_file_in(folder), LocalStore(str(folder))
    damage(file_of(folder))
    RankFiles(store, manifest).verify(NAMES[0])


def manifest_after(folder: Path, change: Callable[[CheckpointManifest], CheckpointManifest]) -> None:
    manifest, store = saved_rank_file_in(folder), LocalStore(str(folder))
    RankFiles(store, change(manifest)).verify(NAMES[0])


def two_fragments_of_one_name(folder: Path) -> None:
    manifest = saved_rank_file_in(folder)
    first = manifest.tensors["a"].slots["master"][0]
    again = replace(manifest.tensors["b"], slots={"master": (first, replace(first, start=30))})
    RankFiles(LocalStore(str(folder)), replace(manifest, tensors={"b": again}))


def a_header_of_another_kind(folder: Path, data: bytes) -> None:
    RankFiles(LocalStore(str(folder)), manifest_of(folder, data)).verify(NAMES[0])


def overlapping_tensors(folder: Path) -> None:
    manifest = manifest_of(folder, header(master=tensor(0), exp_avg=tensor(60)))
    slots = manifest.tensors["a"].slots
    moved_too = replace(slots["exp_avg"][0], offset=slots["master"][0].offset + 60)
    both = {"a": replace(manifest.tensors["a"], slots=slots | {"exp_avg": (moved_too,)})}
    RankFiles(LocalStore(str(folder)), replace(manifest, tensors=both)).verify(NAMES[0])


def pipe_in_place_of_a_file(folder: Path) -> None:
    manifest, store = saved_rank_file_in(folder), LocalStore(str(folder))
    file_of(folder).unlink()
    os.mkfifo(file_of(folder))
    RankFiles(store, manifest).read(NAMES[0], 0, 8)


def stored_with(folder: Path, change: dict[str, Any]) -> None:
    (folder / "best.json").write_bytes(sealed(json.dumps(asdict(BEST) | change).encode()))
    read_best(folder)


def choosing(folder: Path, choice: CheckpointChoice, standing: list[CheckpointId]) -> None:
    chosen(choice, standing, run_dir=folder, url="there")


def best_that_is_gone(folder: Path) -> None:
    write_best(folder, type(BEST)(**asdict(BEST)))
    chosen(CheckpointChoice(is_best=True), ALL[:2], run_dir=folder, url="there")


def fragment_of(_: Path, view: torch.Tensor) -> None:
    lay_out([Fragment(name="a", start=0, length=2, slots={"master": view})])


def settings(_: Path, values: dict[str, int]) -> None:
    CheckpointConfig(**values)  # type: ignore[arg-type]  # a table of one field each


def commit_after(folder: Path, change: dict[str, int]) -> None:
    store = LocalStore(str(folder))
    put_attempts(store, 1)
    commit(store, replace(order_in(store), **change))  # type: ignore[arg-type]  # a table of one field each


def writer_message(_: Path, line: bytes) -> None:
    from_line(line)


def read_after(folder: Path, damage: Any) -> None:
    manifest = saved_whole_tensors(folder)
    file = folder / "step-00000007/attempt-0001-a/rank-00011.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    tensor = tensors_in_order(RankFiles(LocalStore(str(folder)), manifest), manifest, slot="exp_avg_sq")
    tensor(f"t{NUM_TENSORS - 1}")


def changed_bit(folder: Path) -> None:
    store = open_store(str(folder))
    written(store)
    path = folder / FOLDER / "rank-00007.json"
    path.write_bytes(path.read_bytes().replace(b'"save": 2', b'"save": 3'))
    read_report(store, FOLDER, rank=7, save=3)


def manifest_of_a_format(_: Path, number: int, seal: Callable[[bytes], bytes]) -> None:
    values = json.loads(unsealed(manifest_to_json(MANIFEST))) | {"format": number}
    manifest_from_json(seal(json.dumps(values).encode()))


def manifest_in_bytes(_: Path, data: bytes) -> None:
    manifest_from_json(data)


def own_manifest_in_bytes(_: Path, data: bytes) -> None:
    own_manifest_from_json(data)


def attempt_in_bytes(_: Path, data: bytes) -> None:
    attempt_from_json(data)


def sealed_text(_: Path, data: bytes) -> None:
    unsealed(data)


HALF = manifest_to_json(MANIFEST)[:-30]


@table(
    # rank_file_in
    row("zeros", rank_file_after, lambda file: file.write_bytes(zeroed(file.read_bytes()))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors does not have the bytes its manifest promises"
    ),
    row("cut", rank_file_after, lambda file: file.write_bytes(file.read_bytes()[:-1])).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors does not have the bytes its manifest promises"
    ),
    row("longer", rank_file_after, lambda file: file.write_bytes(file.read_bytes() + b"x")).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors does not have the bytes its manifest promises"
    ),
    row(
        "swapped",
        rank_file_after,
        lambda file: file.write_bytes(file_of(file.parent.parent.parent, NAMES[1]).read_bytes()),
    ).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors does not have the bytes its manifest promises"
    ),
    row("empty", rank_file_after, lambda file: file.write_bytes(b"")).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors does not have the bytes its manifest promises"
    ),
    row("missing", rank_file_after, lambda file: file.unlink()).says(
        "MissingObjectError: no object 'step-00000007/attempt-0001-a/rank-00000.safetensors' in DIR"
    ),
    row("a pipe", rank_file_after, put_a_pipe).says(
        "MissingObjectError: no object 'step-00000007/attempt-0001-a/rank-00000.safetensors' in DIR"
    ),
    row("a folder", rank_file_after, put_a_folder).says(
        "MissingObjectError: no object 'step-00000007/attempt-0001-a/rank-00000.safetensors' in DIR"
    ),
    row("offset", manifest_after, lambda m: moved(m, offset=204)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'master:a' is [30] of torch.float32 at "
        "bytes 160 to 280; in the manifest: [30] of torch.float32 at bytes 204 to 324"
    ),
    row("length", manifest_after, lambda m: moved(m, length=29)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'master:a' is [30] of torch.float32 at "
        "bytes 160 to 280; in the manifest: [29] of torch.float32 at bytes 160 to 276"
    ),
    row("file", manifest_after, lambda m: moved(m, file=NAMES[1])).says(
        "ValueError: rank-00001.safetensors holds two fragments of 'master:a'"
    ),
    row("a tensor less", manifest_after, lambda m: replace(m, tensors={"b": m.tensors["b"]})).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: only its header has 'exp_avg:a'"
    ),
    row("a tensor more", manifest_after, lambda m: replace(m, tensors=m.tensors | {"c": one_tensor(m)})).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: only the manifest has 'master:c'"
    ),
    row("two fragments of one name", two_fragments_of_one_name).says(
        "ValueError: rank-00000.safetensors holds two fragments of 'master:b'"
    ),
    row(
        "another type",
        a_header_of_another_kind,
        header(master=tensor(0), exp_avg=tensor(120, dtype="BF16", shape=[60])),
    ).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' is [60] of torch.bfloat16 "
        "at bytes 274 to 394; in the manifest: [30] of torch.float32 at bytes 274 to 394"
    ),
    row("a shape", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(120, shape=[30, 1]))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' is [30, 1] of torch.float32 "
        "at bytes 276 to 396; in the manifest: [30] of torch.float32 at bytes 276 to 396"
    ),
    row("overlapping", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(60))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: exp_avg:a begins at byte 212, the "
        "tensor before it ends at 272"
    ),
    row("one less", a_header_of_another_kind, header(master=tensor(0))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its tensors end at byte 199, the file at 319"
    ),
    row("another name", a_header_of_another_kind, header(master=tensor(0), b=tensor(120))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: only its header has 'b:a'"
    ),
    row("one more", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(120), b=tensor(240))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its tensors end at byte 581, the file at 461"
    ),
    row("a field more", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(120, more=1))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' is {'dtype': 'F32', "
        "'shape': [30], 'data_offsets': [120, 240], 'more': 1}; allowed: dtype, shape and data_offsets"
    ),
    row("a text", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(120, shape=["30"]))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' has the shape ['30'] at "
        "[120, 240]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("before the file", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(-1))).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' has the shape [30] at [-1, "
        "119]; allowed: whole numbers of 0 or more, and two offsets"
    ),
    row("a list for a tensor", a_header_of_another_kind, header(master=tensor(0), exp_avg=[])).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'exp_avg:a' is []; allowed: dtype, "
        "shape and data_offsets"
    ),
    row("a long header", a_header_of_another_kind, (1 << 62).to_bytes(8, "little") + bytes(300)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its header declares "
        "4,611,686,018,427,387,904 bytes; allowed in a file of 308: 1 to 300"
    ),
    row("no header", a_header_of_another_kind, bytes(400)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its header declares 0 bytes; allowed in "
        "a file of 400: 1 to 392"
    ),
    row("nested", a_header_of_another_kind, (300).to_bytes(8, "little") + b"[" * 150 + b"]" * 150 + bytes(240)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: lists and objects are nested more than "
        "64 deep"
    ),
    row("a list", a_header_of_another_kind, (2).to_bytes(8, "little") + b"[]" + bytes(240)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its header is []; allowed: an object"
    ),
    row("no UTF-8", a_header_of_another_kind, (2).to_bytes(8, "little") + b"\xff\xff" + bytes(240)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: 'utf-8' codec can't decode byte 0xff in "
        "position 0: invalid start byte"
    ),
    row("bytes of no tensor", a_header_of_another_kind, header(master=tensor(0), exp_avg=tensor(120)) + bytes(8)).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: its tensors end at byte 393, the file at 401"
    ),
    row(
        "tensors that overlap, as the manifest says",
        overlapping_tensors,
    ).says(
        "ValueError: step-00000007/attempt-0001-a/rank-00000.safetensors: exp_avg:a begins at byte 212, the "
        "tensor before it ends at 272"
    ),
    row("a pipe in place of a file", pipe_in_place_of_a_file).says(
        "InvalidDataError: DIR/step-00000007/attempt-0001-a/rank-00000.safetensors is not a regular file; give a "
        "file, not a pipe or a device"
    ),
    # stored
    row("wrong values: step: 9", stored_with, {"step": 9}).says(
        "InvalidDataError: DIR/best.json cannot be read (checkpoint is 'step-00000008/attempt-0001-aaaaaaaa'; "
        "allowed: one of step 9)"
    ),
    row("wrong values: step: 0", stored_with, {"step": 0}).says(
        "InvalidDataError: DIR/best.json cannot be read (step is 0; allowed: 1 or more)"
    ),
    row("wrong values: step: 8", stored_with, {"step": "8"}).says(
        "InvalidDataError: DIR/best.json cannot be read (step is '8'; allowed: a whole number)"
    ),
    row("wrong values: checkpoint: ../../etc", stored_with, {"checkpoint": "../../etc"}).says(
        "InvalidDataError: DIR/best.json cannot be read (checkpoint is '../../etc'; allowed: step-N/attempt-TOKEN)"
    ),
    row(
        "wrong values: checkpoint: step-00000008/attempt-0001-aaaaaaaa/..",
        stored_with,
        {"checkpoint": "step-00000008/attempt-0001-aaaaaaaa/.."},
    ).says(
        "InvalidDataError: DIR/best.json cannot be read (checkpoint is 'step-00000008/attempt-0001-aaaaaaaa/..'; "
        "allowed: step-N/attempt-TOKEN)"
    ),
    row("wrong values: accuracy: 1.5", stored_with, {"accuracy": 1.5}).says(
        "InvalidDataError: DIR/best.json cannot be read (accuracy is 1.5; allowed: 0 to 1)"
    ),
    row("wrong values: loss: low", stored_with, {"loss": "low"}).says(
        "InvalidDataError: DIR/best.json cannot be read (loss is 'low'; allowed: a finite number)"
    ),
    row("wrong values: more: 1", stored_with, {"more": 1}).says(
        "InvalidDataError: DIR/best.json cannot be read ('more' is not a field; allowed: step, checkpoint, "
        "accuracy, loss, images, dataset)"
    ),
    row("choosing: CheckpointChoice() []", choosing, CheckpointChoice(), []).says(
        "'DIR' has no committed checkpoint in there: the run has not saved yet, or they were moved; wait for the "
        "first one (touch DIR/SAVE asks for it), or give another run"
    ),
    row("choosing: CheckpointChoice(step=5) ALL", choosing, CheckpointChoice(step=5), ALL).says(
        "no checkpoint of step 5 is in there; there are those of steps 16, 12, 8, 4"
    ),
    row("choosing: CheckpointChoice(step=5) ALL[:1]", choosing, CheckpointChoice(step=5), ALL[:1]).says(
        "no checkpoint of step 5 is in there; there is only that of step 16"
    ),
    row(
        "choosing: CheckpointChoice(step=5) 12 * ALL[:1]",
        choosing,
        CheckpointChoice(step=5),
        12 * ALL[:1],
    ).says(
        "no checkpoint of step 5 is in there; there are those of steps 16, 16, 16, 16, 16, 16, 16, 16, 16, 16 and "
        "2 older ones"
    ),
    row("choosing: CheckpointChoice(is_best=True) ALL", choosing, CheckpointChoice(is_best=True), ALL).says(
        "DIR/best.json is missing: a run names its best checkpoint once it was evaluated (--evaluation.url) with "
        "--checkpoint.keep-best; leave out --best, or give --step; there are those of steps 16, 12, 8, 4"
    ),
    row("a best checkpoint that is gone", best_that_is_gone).says(
        "DIR/best.json names step-00000008/attempt-0001-aaaaaaaa, which is not there any more; there are those of "
        "steps 16, 12: give one of them as --step"
    ),
    # saves
    *(
        row(f"a view that is not what the fragment says, {view.dtype} {list(view.shape)}", fragment_of, view).says(
            "ValueError: master of a is torch.float…]; allowed: 2 float32 or bfloat16"
        )
        for view in (torch.zeros(3), torch.zeros(2, dtype=torch.float64))
    ),
    # checkpoint
    row("settings, {'every_steps': -1}", settings, {"every_steps": -1}).says(
        "checkpoint.every_steps is -1; allowed: 0 (not by steps) or more"
    ),
    row("settings, {'keep_newest': 0}", settings, {"keep_newest": 0}).says(
        "checkpoint.keep_newest is 0; allowed: 1 or more"
    ),
    row("settings, {'keep_every': -1}", settings, {"keep_every": -1}).says(
        "checkpoint.keep_every is -1; allowed: 0 (none) or more"
    ),
    # fence
    row(
        "no number is left after the highest one",
        lambda _: next_token([a("0002-x"), a(f"{'9' * 18}-0123abcd")], nonce="bb"),
    ).says(
        "InvalidDataError: attempts/999999999999999999-0123abcd.json in the checkpoints' folder has the highest "
        "number; move it away"
    ),
    # commit
    row("a rank has written nothing", commit_after, {"num_ranks": 3}).says(
        "StorageError: the report of rank 2 cannot be used: no object "
        "'step-00000004/attempt-0051-aaaaaaaa/rank-00002.json' in DIR"
    ),
    row("a rank is left out", commit_after, {"num_ranks": 1}).says(
        "StorageError: the ranks' reports in DIR/step-00000004/attempt-0051-aaaaaaaa do not make a checkpoint: "
        "master of 'a': its fragments hold 2 elements; allowed: 4"
    ),
    row("of an earlier save", commit_after, {"save": 2}).says(
        "StorageError: the report of rank 0 cannot be used: step-00000004/attempt-0051-aaaaaaaa/rank-00000.json "
        "is about 'rank-00000.safetensors' of save 1; allowed: rank-00000.safetensors of save 2"
    ),
    # writer_messages
    row("anything else: b", writer_message, b"").says("JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    row("anything else: b[]", writer_message, b"[]").says(
        "ValueError: a message of kind None; allowed: BufferFit, Write, Hurry, CommitOrder, SaveResult"
    ),
    row('anything else: b"kind": "Delete"', writer_message, b'{"kind": "Delete"}').says(
        "ValueError: a message of kind 'Delete'; allowed: BufferFit, Write, Hurry, CommitOrder, SaveResult"
    ),
    row('anything else: b"kind": "SaveResult", "save": 1', writer_message, b'{"kind": "SaveResult", "save": 1}').says(
        "ValueError: what is missing"
    ),
    row(
        'anything else: b"kind": "SaveResult", "save": -1, "what": "written"',
        writer_message,
        b'{"kind": "SaveResult", "save": -1, "what": "written"}',
    ).says("ValueError: save is -1; allowed: 0 or more"),
    row(
        'anything else: b"kind": "SaveResult", "save": true, "what": "written"',
        writer_message,
        b'{"kind": "SaveResult", "save": true, "what": "written"}',
    ).says("ValueError: save is True; allowed: a whole number"),
    row(
        'anything else: b"kind": "SaveResult", "save": 1, "what": "burned"',
        writer_message,
        b'{"kind": "SaveResult", "save": 1, "what": "burned"}',
    ).says("ValueError: what is 'burned'; allowed: written, failed, overtaken, committed, retired, progress, said"),
    row(
        'anything else: b"kind": "SaveResult", "save": 1, "what": "written", "more": 1',
        writer_message,
        b'{"kind": "SaveResult", "save": 1, "what": "written", "more": 1}',
    ).says("ValueError: 'more' is not a field; allowed: save, what, message"),
    row(
        'anything else: b"kind": "BufferFit", "num_bytes": 8, "pieces": [["a", "master", 8, 0]]',
        writer_message,
        b'{"kind": "BufferFit", "num_bytes": 8, "pieces": [["a", "master", 8, 0]]}',
    ).says("ValueError: pieces.0 has 4 entries; allowed: 5"),
    row(
        'anything else: to_line(WRITE).replace(b"rank": 3, b"rank": -1)',
        writer_message,
        to_line(WRITE).replace(b'"rank": 3', b'"rank": -1'),
    ).says("ValueError: rank is -1; allowed: 0 or more"),
    row(
        'anything else: to_line(COMMIT).replace(b"num_ranks": 2, b"num_ranks": 0)',
        writer_message,
        to_line(COMMIT).replace(b'"num_ranks": 2', b'"num_ranks": 0'),
    ).says("ValueError: num_ranks is 0; allowed: 1 or more"),
    # whole_tensors
    row(
        "a rank file whose last bytes changed after it was verified",
        read_after,
        lambda data: data[:-4] + b"\0\0\0\1",
    ).says(
        "StorageError: step-00000007/attempt-0001-a/rank-00011.safetensors does not have the bytes its manifest "
        "promises; it changed after it was verified"
    ),
    row("a rank file cut off after it was verified", read_after, lambda data: data[:-300]).says(
        "StorageError: DIR/step-00000007/attempt-0001-a/rank-00011.safetensors: bytes 15616..15951 asked, it ends "
        "at 15652; it changed after it was verified"
    ),
    # rank_file_out
    row("a changed bit", changed_bit).says(
        "ValueError: step-00000004/attempt-0001-a/rank-00007.json: its digest does not fit: it was changed after "
        "it was written"
    ),
    # manifest
    row("sealed, 0", manifest_of_a_format, 0, sealed).says(
        "OtherFormatError: its manifest has format 0, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("sealed, 1", manifest_of_a_format, 1, sealed).says(
        "OtherFormatError: its manifest has format 1, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("sealed, 2", manifest_of_a_format, 2, sealed).says(
        "OtherFormatError: its manifest has format 2, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("sealed, 3", manifest_of_a_format, 3, sealed).says(
        "OtherFormatError: its manifest has format 3, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("sealed, 5", manifest_of_a_format, 5, sealed).says(
        "OtherFormatError: its manifest has format 5, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("without a digest, 0", manifest_of_a_format, 0, bytes).says(
        "ValueError: its manifest has format 0, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("without a digest, 1", manifest_of_a_format, 1, bytes).says(
        "ValueError: its manifest has format 1, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("without a digest, 2", manifest_of_a_format, 2, bytes).says(
        "ValueError: its manifest has format 2, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("without a digest, 3", manifest_of_a_format, 3, bytes).says(
        "ValueError: its manifest has format 3, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("without a digest, 5", manifest_of_a_format, 5, bytes).says(
        "ValueError: its manifest has format 5, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("sealed, a field that nobody knows", manifest_in_bytes, replaced(later=1)).says(
        "OtherFormatError: its manifest is intact, but of another version of Patchline (not a manifest: later: "
        "Unexpected keyword argument); use the version of Patchline that wrote it"
    ),
    row("updates", own_manifest_in_bytes, replaced(num_updates=121)).says(
        "ValueError: num_updates is 121; allowed: 0 to its step, 120"
    ),
    row("fewer updates than none", own_manifest_in_bytes, replaced(num_updates=-1)).says(
        "ValueError: not a manifest: num_updates: Input should be greater than or equal to 0"
    ),
    row("a text", own_manifest_in_bytes, replaced(num_updates="119")).says(
        "ValueError: not a manifest: num_updates: Input should be a valid integer"
    ),
    row("a boolean", own_manifest_in_bytes, replaced(num_updates=True)).says(
        "ValueError: not a manifest: num_updates: Input should be a valid integer"
    ),
    row("more than any counter", own_manifest_in_bytes, replaced(num_updates=1 << 70)).says(
        "ValueError: not a manifest: num_updates: Input should be less than 4611686018427387904"
    ),
    row("samples", own_manifest_in_bytes, replaced(num_samples=1904)).says(
        "ValueError: num_samples is 1904; allowed: 1920, its step x the batch"
    ),
    row("moments", own_manifest_in_bytes, replaced(moments=["exp_avg"])).says(
        "ValueError: 'head.weight' has ['exp_avg', 'exp_avg_sq', 'master']; allowed: ['exp_avg', 'master']"
    ),
    row("the master as a moment", own_manifest_in_bytes, replaced(moments=["master"])).says(
        "ValueError: moments are master; allowed: each once, and no master"
    ),
    row("a moment twice", own_manifest_in_bytes, replaced(moments=["exp_avg"] * 2)).says(
        "ValueError: moments are exp_avg exp_avg; allowed: each once, and no master"
    ),
    row("no files", own_manifest_in_bytes, replaced(files={})).says(
        "ValueError: master of 'head.weight': rank-00000.safetensors is not among the checkpoint's files"
    ),
    row("a field that nobody knows", own_manifest_in_bytes, replaced(later=1)).says(
        "ValueError: not a manifest: later: Unexpected keyword argument"
    ),
    row("a path", own_manifest_in_bytes, changed(*PLACE, file="../rank-00000.safetensors")).says(
        "ValueError: not a manifest: tensors.head.weight.slots.master.0.file: String should match pattern "
        "'^rank-[0-9]{5,9}\\.safetensors$'"
    ),
    row("another rank's file", own_manifest_in_bytes, changed(*PLACE, file="rank-00001.safetensors")).says(
        "ValueError: master of 'head.weight': rank-00001.safetensors is not among the checkpoint's files"
    ),
    row("an offset outside", own_manifest_in_bytes, changed(*PLACE, offset=237)).says(
        "ValueError: master of 'head.weight': element 0 begins beyond the end of rank-00000.safetensors, at byte 237"
    ),
    row("an offset before the file", own_manifest_in_bytes, changed(*PLACE, offset=-4)).says(
        "ValueError: not a manifest: tensors.head.weight.slots.master.0.offset: Input should be greater than or "
        "equal to 0"
    ),
    row("a file too many", own_manifest_in_bytes, changed(*PLACE, num_files=2)).says(
        "ValueError: master of 'head.weight': rank-00000.safetensors or one of the 1 files after it is not among "
        "the checkpoint's files"
    ),
    row("files without end", own_manifest_in_bytes, changed(*PLACE, num_files=1 << 30)).says(
        "ValueError: master of 'head.weight': rank-00000.safetensors or one of the 1073741823 files after it is "
        "not among the checkpoint's files"
    ),
    row("even more files", own_manifest_in_bytes, changed(*PLACE, num_files=1 << 70)).says(
        "ValueError: not a manifest: tensors.head.weight.slots.master.0.num_files: Input should be less than 2147483648"
    ),
    row("in no file", own_manifest_in_bytes, changed(*PLACE, num_files=0)).says(
        "ValueError: not a manifest: tensors.head.weight.slots.master.0.num_files: Input should be greater than "
        "or equal to 1"
    ),
    row(
        "two files of one rank",
        own_manifest_in_bytes,
        replaced(files={f"rank-0000{n}.safetensors": FILE for n in ("00", "0")}),
    ).says("ValueError: a file is named rank-000000.safetensors; allowed: rank-00000.safetensors"),
    row("too short", own_manifest_in_bytes, changed(*PLACE, length=11)).says(
        "ValueError: master of 'head.weight': its fragments hold 11 elements; allowed: 12"
    ),
    row("too long", own_manifest_in_bytes, changed(*PLACE, length=13)).says(
        "ValueError: master of 'head.weight': its fragments hold 13 elements; allowed: 12"
    ),
    row("the first is missing", own_manifest_in_bytes, changed(*PLACE, start=1)).says(
        "ValueError: master of 'head.weight': element 0 is held nowhere"
    ),
    row("a shape", own_manifest_in_bytes, changed("tensors", "head.weight", shape=[3, 5])).says(
        "ValueError: master of 'head.weight': its fragments hold 12 elements; allowed: 15"
    ),
    row("a negative shape", own_manifest_in_bytes, changed("tensors", "head.weight", shape=[-3, -4])).says(
        "ValueError: not a manifest: tensors.head.weight.shape.0: Input should be greater than or equal to 0"
    ),
    row("a type", own_manifest_in_bytes, changed("tensors", "head.weight", dtype="bfloat16")).says(
        "ValueError: not a manifest: tensors.head.weight.dtype: Input should be 'float32'"
    ),
    row("no slots", own_manifest_in_bytes, changed("tensors", "head.weight", slots={})).says(
        "ValueError: 'head.weight' has []; allowed: ['exp_avg', 'exp_avg_sq', 'master']"
    ),
    row("no checksums", own_manifest_in_bytes, changed("files", "rank-00000.safetensors", sha256=[])).says(
        "ValueError: not a manifest: files.rank-00000.safetensors: Value error, 0 checksums for 280 bytes in "
        "parts of 1048576"
    ),
    row("no checksum", own_manifest_in_bytes, changed("files", "rank-00000.safetensors", sha256=["AB" * 32])).says(
        "ValueError: not a manifest: files.rank-00000.safetensors: Value error, a sha256 is not 64 hexadecimal "
        "digits in lower case"
    ),
    row("empty parts", own_manifest_in_bytes, changed("files", "rank-00000.safetensors", part_bytes=0)).says(
        "ValueError: not a manifest: files.rank-00000.safetensors: Value error, num_bytes is 280, part_bytes is "
        "0; allowed: 8 or more, and 1 to 16777216"
    ),
    row(
        "more than is read at once",
        own_manifest_in_bytes,
        changed("files", "rank-00000.safetensors", part_bytes=1 << 25),
    ).says(
        "ValueError: not a manifest: files.rank-00000.safetensors: Value error, num_bytes is 280, part_bytes is "
        "33554432; allowed: 8 or more, and 1 to 16777216"
    ),
    row("a step beyond all", own_manifest_in_bytes, changed("id", step=1 << 80)).says(
        "ValueError: not a manifest: id.step: Input should be less than 4611686018427387904"
    ),
    row("a path as an attempt", own_manifest_in_bytes, changed("id", attempt="../x")).says(
        "ValueError: not a manifest: id.attempt: String should match pattern '^[0-9]+-[0-9a-z]+$'"
    ),
    row("no steps", own_manifest_in_bytes, changed("job", "job", steps=0)).says(
        "ValueError: not a manifest: job: Value error, its steps is 0; allowed: a whole number, 1 or more"
    ),
    row("files that are a list", own_manifest_in_bytes, replaced(files=[])).says(
        "ValueError: not a manifest: files: Input should be an object"
    ),
    row("one more space", manifest_in_bytes, manifest_to_json(MANIFEST) + b" ").says(
        "ValueError: its digest does not fit: it was changed after it was written"
    ),
    row("no digest", manifest_in_bytes, unsealed(manifest_to_json(MANIFEST))).says(
        "ValueError: it does not end with its digest"
    ),
    row("nested too deeply", manifest_in_bytes, b"[" * 200_000).says(
        "ValueError: not a manifest: Invalid JSON: recursion limit exceeded at line 1 column 202"
    ),
    row("empty", manifest_in_bytes, b"").says(
        "ValueError: not a manifest: Invalid JSON: EOF while parsing a value at line 1 column 0"
    ),
    row("half-written", manifest_in_bytes, HALF).says(
        f"ValueError: not a manifest: Invalid JSON: EOF while parsing a string at line 1 column {len(HALF)}"
    ),
    row("another JSON", manifest_in_bytes, b"{}").says("ValueError: not a manifest: format: Field required"),
    row("not UTF-8", manifest_in_bytes, b"\xff\xfe").says(
        "ValueError: not a manifest: Invalid JSON: expected value at line 1 column 1"
    ),
    row("the future", manifest_in_bytes, manifest_to_json(MANIFEST).replace(b'"format":4', b'"format":5')).says(
        "ValueError: its manifest has format 5, this version reads 4; use the version of Patchline that wrote it"
    ),
    row("steps that do not agree", own_manifest_in_bytes, changed(next_step=119, data_step=119)).says(
        "ValueError: not a manifest: Value error, the checkpoint is of step 120, its position of 119"
    ),
    row("a loss that is not finite", own_manifest_in_bytes, replaced(losses=[1.0, float("nan")])).says(
        "ValueError: not a manifest: losses.1: Input should be a finite number"
    ),
    row("data steps that do not follow", own_manifest_in_bytes, changed(data_step=119)).says(
        "ValueError: not a manifest: position: Value error, data_step is 119; allowed: 120, as follows from what "
        "was skipped"
    ),
    row("an empty range", own_manifest_in_bytes, changed(skipped=[{"first": 4, "end": 4}])).says(
        "ValueError: not a manifest: position.skipped.0: Value error, skipped data steps 4 to 3; allowed: one or "
        "more, from 0 on"
    ),
    row("a seed as a text", own_manifest_in_bytes, changed(seed="0")).says(
        "ValueError: not a manifest: position.seed: Input should be a valid integer"
    ),
    row("a position with more", own_manifest_in_bytes, changed(later=1)).says(
        "ValueError: not a manifest: position.later: Unexpected keyword argument"
    ),
    row("a model of a later version", own_manifest_in_bytes, changed("job", "model", later=1)).says(
        "ValueError: not a manifest: job: Value error, its model has the unknown field 'later'"
    ),
    row("a model that is wrong", own_manifest_in_bytes, changed("job", "model", image_size="x")).says(
        "ValueError: not a manifest: job: Value error, its model cannot be used: model.image_size is 'x'; "
        "allowed: a whole number"
    ),
    row("steps that are a text", own_manifest_in_bytes, changed("job", "job", steps="x")).says(
        "ValueError: not a manifest: job: Value error, its steps is 'x'; allowed: a whole number, 1 or more"
    ),
    row("not an attempt: b", attempt_in_bytes, b"").says("ValueError: it does not end with its digest"),
    row("not an attempt: b", attempt_in_bytes, b"{").says("ValueError: it does not end with its digest"),
    row(
        "not an attempt: unsealed(attempt_to_json(SKIPPING))",
        attempt_in_bytes,
        unsealed(attempt_to_json(SKIPPING)),
    ).says("ValueError: it does not end with its digest"),
    row('not an attempt: sealed(b"token": 3)', attempt_in_bytes, sealed(b'{"token": 3}')).says(
        "ValidationError: 3 validation errors for Attempt\ntoken\n  Input should be a valid string "
        "[type=string_type, input_value=3, input_type=int]\n    For further information visit "
        "https://errors.pydantic.dev/2.14/v/string_type\nresumed_fro… input_value={'token': 3}, "
        "input_type=dict]\n    For further information visit https://errors.pydantic.dev/2.14/v/missing"
    ),
    row(
        'not an attempt: sealed(b"token": "0001-aa", "resumed_from": null)',
        attempt_in_bytes,
        sealed(b'{"token": "0001-aa", "resumed_from": null}'),
    ).says(
        "ValidationError: 1 validation error for Attempt\nskipped\n  Field required [type=missing, "
        "input_value={'token': '0001-aa', 'resumed_from': None}, input_type=dict]\n    For further information "
        "visit https://errors.pydantic.dev/2.14/v/missing"
    ),
    row("without a digest", sealed_text, b'{"a":1}').says("ValueError: it does not end with its digest"),
    row("empty", sealed_text, b"").says("ValueError: it does not end with its digest"),
    row("another value", sealed_text, sealed(b'{"a":1}').replace(b"1", b"2", 1)).says(
        "ValueError: its digest does not fit: it was changed after it was written"
    ),
    row("the end is missing", sealed_text, sealed(b'{"a":1}')[:-1]).says(
        "ValueError: its digest does not fit: it was changed after it was written"
    ),
    row("twice", sealed_text, sealed(b'{"a":1}') * 2).says(
        "ValueError: its digest does not fit: it was changed after it was written"
    ),
    row("upper case", sealed_text, sealed(b'{"a":1}').upper()).says("ValueError: it does not end with its digest"),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
