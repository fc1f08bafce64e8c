"""The command line's promises: a user's mistake ends with code 2 and one message that names the value, no traceback.

Commands run as processes of their own (see tests/rigs/processes.py); one test starts the real `python -m jobs.cli`.
"""

import errno
import gc
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from jobs import exit_codes
from jobs.cli import _imported, main
from jobs.record import read_record
from jobs.stages import STAGES
from pipeline.models import ModelConfig, build_model
from pipeline.models.weights.folder import open_weights, save_weights
from pipeline.training.settings.job import TrainingJob
from shards.storage.s3_client import BadAnswerError
from tests.rigs.datasets import packed_folders
from tests.rigs.images import class_folders
from tests.rigs.processes import Ended, patchline
from tests.rigs.s3 import free_port

CHECKOUT = Path(__file__).resolve().parent.parent.parent
TINY = ("--model.width", "8", "--model.depth", "1", "--model.mlp-width", "8", "--model.num-heads", "2")
CPU = ("--device", "cpu")
ALONE: dict[str, str] = {}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """15 samples of 3 classes."""
    return packed_folders(tmp_path_factory.mktemp("cli"))


def assert_refused(ended: Ended, message: str) -> None:
    """Exit code 2, and `message` in the one error that was said."""
    assert "Traceback" not in ended.errors, ended.errors
    assert ended.code == 2, ended.errors
    assert message in " ".join(ended.errors.split()), ended.errors
    errors = [line for line in ended.errors.splitlines() if line.startswith(("error: ", "rank "))]
    assert len(errors) <= 1, "one message"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param((), "usage: patchline STAGE", id="nothing"),
        pytest.param(("pretain",), "unknown stage 'pretain'; did you mean pretrain? allowed: pack, index,", id="stage"),
        pytest.param(("pretrain",), "usage: patchline pretrain RECIPE|FILE.yaml", id="no recipe"),
        pytest.param(
            ("pretrain", "digit"),
            "unknown recipe 'digit' of patchline pretrain; did you mean digits_smoke? allowed: what",
            id="recipe",
        ),
        pytest.param(
            ("pretrain", "--steps", "3"), "usage: patchline pretrain RECIPE|FILE.yaml", id="fields, no recipe"
        ),
        pytest.param(("pretrain", "digits_smoke", "--stepz", "3"), "--stepz", id="unknown field"),
        pytest.param(("pretrain", "digits_smoke", "--steps", "ten"), "ten", id="not a number"),
        pytest.param(("pretrain", "digits_smoke", "--steps"), "--steps", id="no value"),
        pytest.param(("pretrain", "digits_smoke", "--engine.zero-stage", "4"), "4", id="not one of the choices"),
        pytest.param(
            ("pretrain", "digits_smoke", "--steps", "0"),
            "--steps is 0; allowed: 1 to 1,000,000,000",
            id="out of range",
        ),
        pytest.param(("pretrain", "nothing.yaml"), "nothing.yaml cannot be read: No such file", id="no such record"),
        pytest.param(("evaluate",), "WEIGHTS is missing", id="evaluate without weights"),
        pytest.param(("finetune", "digits_48"), "--initial.weights is missing", id="finetune without weights"),
        pytest.param(("pack", "folder"), "--out is missing", id="pack without out"),
        pytest.param(("pack", "folder", "--workers", "0"), "--workers is 0", id="pack without workers"),
        pytest.param(("import",), "usage: patchline import PATH|FILE.yaml", id="import nothing"),
        pytest.param(("import", "gone.npz", "--out", "w"), "no weights at 'gone.npz'", id="import what is not there"),
        pytest.param(("export", "gone", "--out", "w"), "no weights at 'gone'", id="export what is not there"),
        pytest.param(("export", "gone", "--format", "onnx"), "onnx", id="export in a format that is none"),
        pytest.param(("weights",), "usage: patchline weights RUN", id="weights of nothing"),
        pytest.param(("weights", "gone"), "--out is missing", id="weights to nowhere"),
        pytest.param(("weights", "gone", "--out", "w"), "no run at 'gone'", id="weights of what is not there"),
        pytest.param(
            ("weights", "gone", "--out", "w", "--best", "--step", "4"), "--best with --step 4", id="weights of two"
        ),
        pytest.param(("verify", "/nowhere"), "there is nothing at '/nowhere'", id="verify without a dataset"),
        pytest.param(
            ("pretrain", "digits_smoke", "--model.image-size", "33"),
            "model.image_size is 33, not a multiple of the patch (8 px); take 32 or 40",
            id="image size and patch",
        ),
    ],
)
def test_mistakes_in_the_words(words: tuple[str, ...], message: str) -> None:
    assert_refused(patchline(*words), message)


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "environ", "message"),
    [
        pytest.param(("--run-dir", ""), ALONE, "--run-dir is missing", id="no run directory"),
        pytest.param(("--data.url", ""), ALONE, "--data.url is missing", id="no dataset"),
        pytest.param(("--data.url", "/nowhere"), ALONE, "there is nothing at '/nowhere'", id="no manifest"),
        pytest.param(("--data.url", "gs://x/y"), ALONE, "cannot open 'gs://x/y'", id="another store"),
        pytest.param(("--evaluation.url", "/gone"), ALONE, "there is nothing at '/gone'", id="no held-out split"),
        pytest.param(
            ("--global-batch", "100", "--data.lanes", "8"),
            ALONE,
            "--global-batch is 100, not a multiple of --data.lanes = 8; take 96",
            id="lanes",
        ),
        pytest.param(
            ("--global-batch", "128"),
            {"RANK": "0", "WORLD_SIZE": "3", **MASTER},
            "--global-batch is 128, not divisible by 3 ranks; start 1 or 2 or 4 ranks",
            id="ranks",
        ),
        pytest.param((), {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set for 2 ranks", id="nowhere to meet"),
        pytest.param(
            (), {"RANK": "first", "WORLD_SIZE": "2"}, "the environment variable RANK is 'first'", id="no rank"
        ),
        pytest.param(
            ("--micro-batch", "24"),
            ALONE,
            "--micro-batch is 24, which does not divide a rank's share of 128",
            id="micro",
        ),
        pytest.param(("--data.memory-limit-bytes", "10"), ALONE, "--data.memory-limit-bytes = 0.0 GB", id="memory"),
        pytest.param(("--data.lanes", "16"), ALONE, "lanes is 16; allowed: 1 to 15", id="more lanes than samples"),
        pytest.param(
            ("--model.num-classes", "2"),
            ALONE,
            "has 3 classes, the model has 2; set --model.num-classes 3",
            id="classes",
        ),
        pytest.param(("--initial.weights", "/w"), ALONE, "no weights at '/w'", id="no weights there"),
    ],
)
def test_mistakes_before_training(
    packed: Path, tmp_path: Path, change: tuple[str, ...], environ: Mapping[str, str], message: str
) -> None:
    words = ("--data.url", str(packed), "--run-dir", str(tmp_path / "run"), *CPU, *change)
    assert_refused(patchline("pretrain", "digits_smoke", *words, environ=environ), message)


def test_the_other_ranks_say_who_they_are(packed: Path, tmp_path: Path) -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "3", **MASTER}
    words = ("--data.url", str(packed), "--run-dir", str(tmp_path), *CPU)
    ended = patchline("pretrain", "digits_smoke", *words, environ=environ)
    assert_refused(ended, "rank 2: error: --global-batch is 128")


def test_weights_that_do_not_fit_are_named_with_their_shapes(packed: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"patch": 8, "depth": 1, "width": 12, "mlp_width": 8, "num_heads": 2}
    config = ModelConfig(name="vit", image_size=32, num_classes=3, **sizes)
    state = build_model(config).state_dict()
    save_weights(tmp_path / "w", config=config, labels=("a", "b", "c"), tensor=lambda name: state[name])
    words = ("--initial.weights", str(tmp_path / "w"), "--data.url", str(packed), "--run-dir", str(tmp_path / "run"))
    ended = patchline("finetune", "digits_48", *words, *TINY, *CPU)
    assert_refused(ended, "embed.patch.weight is [12, 192], the model needs [8, 192]")
    assert "--model.width" in ended.errors


@pytest.mark.usefixtures("s3_endpoint")
def test_a_bucket_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = ("--data.url", "s3://no-such-bucket/data", "--run-dir", str(tmp_path), *CPU)
    assert_refused(patchline("pretrain", "digits_smoke", *words), "'no-such-bucket'")


def test_a_store_that_does_not_answer_is_named(s3_endpoint: str, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    words = ("--data.url", "s3://bucket/data", "--run-dir", str(tmp_path), *CPU)
    ended = patchline("pretrain", "digits_smoke", *words, environ={"AWS_ENDPOINT_URL": endpoint})
    assert_refused(ended, f"S3 is unreachable for s3://bucket/data at {endpoint}")


def test_a_store_that_a_batch_job_has_just_reached_is_away_and_not_wrong(s3_endpoint: str) -> None:
    """slurm/stage.sbatch tries again after 74, and never after 2."""
    environ = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "PATCHLINE_S3_ANSWERED": "yes"}
    ended = patchline("verify", "s3://bucket/data", environ=environ)
    assert (ended.code, "S3 is unreachable" in ended.errors) == (exit_codes.CRASH, True), ended.errors
    assert "run the same command to continue" in ended.errors


def test_a_changed_model_can_not_go_on_with_a_record(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("stage: pretrain\njob:\n  stepz: 3\n")
    assert_refused(patchline("pretrain", str(tmp_path / "job.yaml")), "unknown stepz (line 3; did you mean steps?)")
    assert_refused(patchline("finetune", str(tmp_path / "job.yaml")), "run: patchline pretrain")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_help(stage: str) -> None:
    ended = patchline(stage, "--help")
    assert (ended.code, "Traceback" in ended.errors) == (0, False)
    assert f"usage: patchline {stage}" in ended.output


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        ("import", ("--path", "--out", "--image-size", "--patch", "--new-head", "--gelu", "--labels-file")),
        ("export", ("--path", "--out", "--format", "--image-size", "--patch")),
        ("weights", ("--run", "--out", "--step", "--best", "--raw", "--labels-file", "--overwrite")),
        ("verify", ("--deep",)),
        ("index", ("--index-url",)),
        ("card", ("--num-mosaic",)),
    ],
)
def test_help_of_stages_without_recipes_lists_their_flags(stage: str, flags: tuple[str, ...]) -> None:
    ended = patchline(stage, "--help")
    assert ended.code == 0
    assert [flag for flag in flags if flag not in ended.output] == []


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("help",),
        ("help", "pack", "folder"),
        ("pretrain", "--help"),
        ("pretrain", "digits_smoke", "--steps", "ten", "--help-all"),
        ("verify", "somewhere", "--help"),
    ],
)
def test_help_that_is_asked_for_goes_to_standard_output(words: tuple[str, ...]) -> None:
    ended = patchline(*words)
    assert (ended.code, ended.errors) == (0, "")
    assert ended.output.startswith("usage: patchline ")


def test_the_version_is_said() -> None:
    ended = patchline("--version")
    assert (ended.code, ended.output) == (0, f"patchline {version('patchline')}\n")


def test_a_reader_of_help_may_have_seen_enough() -> None:
    command = f"set -o pipefail; {sys.executable} -m jobs.cli pretrain digits_smoke --help-all | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", ["show digits_smoke", "diff digits_smoke cifar10_small", "completion bash"])
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(words: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m jobs.cli {words} | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert (ended.returncode in (0, 141), ended.stderr) == (True, ""), "141: as any program that SIGPIPE ends"


def test_a_terminal_that_lacks_a_letter_shows_its_number(tmp_path: Path) -> None:
    (tmp_path / "caf\xe9.yaml").write_text("recipe: digits_smoke\nseed: 7\n")
    command = [sys.executable, "-m", "jobs.cli", "diff", "digits_smoke", str(tmp_path / "caf\xe9.yaml")]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT, env=environ)
    assert (ended.returncode, "caf\\xe9.yaml" in ended.stdout) == (1, True), ended.stderr


@pytest.mark.parametrize("words", [("--path", "gone.npz"), ("--out", "o", "--path", "gone.npz"), ("--path=gone.npz",)])
def test_a_path_may_come_as_a_flag(words: tuple[str, ...]) -> None:
    assert_refused(patchline("import", "--out", "o", *words), "no weights at 'gone.npz'")


def test_help_is_found_behind_other_flags() -> None:
    ended = patchline("import", "--out", "o", "--help")
    assert (ended.code, "--num-heads" in ended.output, "missing" in ended.errors) == (0, True, False)


def test_a_path_that_is_missing_is_asked_for() -> None:
    ended = patchline("import", "--out", "o")
    assert (ended.code, "usage: patchline import PATH" in ended.errors) == (2, True)
    assert "PATH is missing" in ended.errors


@pytest.mark.parametrize(
    "words",
    [
        ("pretrain", "digits_smoke"),
        ("finetune", "digits_48"),
        ("pack", "digits"),
        ("plan", "vit_h14_jft"),
    ],
)
def test_every_recipe_lists_its_fields(words: tuple[str, str]) -> None:
    ended = patchline(*words, "--help")
    assert ended.code == 0
    assert f"usage: patchline {words[0]} {words[1]}" in ended.output


def test_help_names_every_stage() -> None:
    ended = patchline("--help")
    assert ended.code == 0
    assert all(f"  {stage} " in ended.output + ended.errors for stage in STAGES)


def test_the_record_holds_what_was_given(packed: Path, tmp_path: Path) -> None:
    words = ("--data.url", str(packed), "--run-dir", str(tmp_path / "run"), *TINY, *CPU)
    assert_refused(patchline("pretrain", "digits_smoke", *words, "--initial.weights", "/w"), "no weights at '/w'")
    assert not (tmp_path / "run").exists()  # a mistake leaves nothing behind
    assert patchline("pretrain", "digits_smoke", *words, "--steps", "1", "--schedule.warmup-steps", "0").code == 0
    job = read_record(tmp_path / "run" / "job.yaml", stage="pretrain", kind=TrainingJob)
    assert (job.model.width, job.model.num_classes, job.steps, job.device) == (8, 3, 1, "cpu")


def test_a_refusal_prints_the_command_that_works(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "my images")
    (root / "c0" / "hurt.jpg").write_bytes(b"")
    given = ("--max_quarantined=0", "--source.root", str(root), "--out", str(tmp_path / "out"))
    ended = patchline("pack", "folder", *given)
    command = shlex.split(ended.errors.splitlines()[-1])
    assert command[:2] == ["patchline", "pack"], ended.errors
    ended = patchline(*command[1:])
    assert ended.code == 0, ended.errors
    assert ended.errors.count("1 refused") == 1


def test_packing_and_verifying_from_the_command_line(packed: Path, tmp_path: Path) -> None:
    source = str(packed.parent / "images")
    words = ("--source.root", source, "--out", str(tmp_path / "out"), "--samples-per-shard", "4", "--workers", "1")
    assert patchline("pack", "folder", *words, "--samples-per-block", "3").code == 0
    assert patchline("verify", str(tmp_path / "out"), "--deep").code == 0
    (tmp_path / "out" / "shards" / "shard-000000.tar").write_bytes(b"")
    ended = patchline("verify", str(tmp_path / "out"))
    assert ended.code == 1
    assert "shard-000000.tar" in ended.errors


def test_weights_go_out_and_come_in_by_the_same_words_and_their_records(tmp_path: Path) -> None:
    config = ModelConfig(name="vit_ti16", image_size=32, depth=1, num_classes=3)
    state = build_model(config).state_dict()
    save_weights(tmp_path / "w", config=config, labels=("a", "b", "c"), tensor=lambda name: state[name])
    npz, run_dir = str(tmp_path / "w.npz"), str(tmp_path / "run")
    words = ("--out", npz, "--format", "big_vision", "--run-dir", run_dir)
    assert patchline("export", str(tmp_path / "w"), *words).code == 0
    first = (tmp_path / "w.npz").read_bytes()
    assert patchline("export", str(tmp_path / "run" / "job.yaml")).code == 0
    assert (tmp_path / "w.npz").read_bytes() == first
    assert patchline("import", npz, "--out", str(tmp_path / "back"), "--image-size", "48").code == 0
    assert open_weights(str(tmp_path / "back")).config.image_size == 48
    ended = patchline("import", npz, "--out", str(tmp_path / "other"), "--model", "vit_s16")
    assert_refused(ended, "embedding/kernel is [16, 16, 3, 192], the model needs [16, 16, 3, 384]")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(["pretrain", "nope"], 2, "unknown recipe 'nope'", id="a mistake"),
        pytest.param(["verify", "--help"], 0, "usage: patchline verify URL", id="help"),
    ],
)
def test_the_real_program(words: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "jobs.cli", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "No space left on device at /data/x; make room"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/data/x"),
            "Permission denied at /data/x; give this user access",
        ),
        (
            NotADirectoryError(errno.ENOTDIR, "Not a directory"),
            "a system call failed; run the same command to continue",
        ),
        (BrokenProcessPool("a child process terminated abruptly"), "a worker process was killed"),
        (BadAnswerError("GetObject of s3://b/x failed: 503"), "failed: 503; run the same command to continue"),
        (RuntimeError("odd"), "ended by an unexpected error; run the same command to continue"),
    ],
)
def test_a_crash_is_never_taken_for_faults_that_were_found(
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("jobs.data.verify.verify_dataset", fail)
    assert main(["verify", "anywhere"]) == exit_codes.CRASH
    assert message in capsys.readouterr().err + caplog.text


def test_a_library_that_aborts_at_the_end_makes_no_failure_of_work_that_is_done(packed: Path) -> None:
    """Seen with Arrow and torch: "terminate called without an active exception" after the last line of a good run."""
    program = (
        "import atexit, os, sys\n"
        "atexit.register(os.abort)\n"
        "from jobs.cli import entry\n"
        f"sys.argv = ['patchline', 'verify', {str(packed)!r}]\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    assert "no fault found" in done.stderr


def test_imports_leave_the_garbage_collector_on() -> None:
    assert gc.isenabled()
    _imported("jobs.exit_codes")
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError):
        _imported("jobs.no_such_module")
    assert gc.isenabled()
