"""What commands say when they refuse, each message once: flags, files of jobs, recipes, chains and sweeps."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.arguments import take_own_flags, take_run_flags, values_of
from jobs.chains import submit
from jobs.chains.done import refuse_stopped
from jobs.chains.steps import ChainConfig, StepConfig, read_chain, units_of
from jobs.completion import CompletionJob
from jobs.data.index import run as index
from jobs.data.verify import VerifyJob
from jobs.data.verify import run as verify_verify
from jobs.flags import flags_of
from jobs.mistakes import refuse_missing
from jobs.monitor import ask, doctor
from jobs.output import refuse_no_page, write_to
from jobs.planning.scaling import at_sizes
from jobs.ranks import must_start
from jobs.recipes import pretrain
from jobs.recipes.pretrain import RECIPES
from jobs.record import MOST_BYTES, read_leaves, read_tree, write_record
from jobs.resolve import default_job, own_job
from jobs.settings.data import IndexJob
from jobs.settings.models import EvaluateJob
from jobs.settings.runs import DoctorJob
from jobs.stages import STAGES, job_class
from jobs.train.demo import DemoJob
from jobs.train.demo import run as run_demo
from jobs.train.pretrain import run as run_pretrain
from jobs.train.verify_resume import verify as verify_verify_resume
from pipeline.training.settings.job import InitialConfig, TrainingJob
from tests.jobs.chains.test_chain_sweep import GRID
from tests.jobs.chains.test_steps import PACK, SWEEP, TRAIN, chain
from tests.jobs.test_arguments import Example
from tests.jobs.test_mistakes import PACKING, TRAINING
from tests.jobs.test_own_recipes import read as read_own_recipes
from tests.jobs.test_placing import file_writer, writer
from tests.jobs.test_record import read as read_record
from tests.jobs.test_record import read_tree_of, written
from tests.jobs.test_resolve import file
from tests.jobs.train.test_sweep_plan import RATES, plan
from tests.jobs.train.test_verify_resume import Starts, trial
from tests.rigs.fake_runs import override
from tests.rigs.messages import Row, row, table

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def run_flags(_: Path, words: list[str]) -> None:
    take_run_flags("pretrain", words)


def own_flag(_: Path, text: str) -> None:
    take_own_flags(Example, ["--most-rows", text])


def completion_of_tcsh(_: Path) -> None:
    CompletionJob(shell="tcsh")  # type: ignore[arg-type]  # noqa: S604 - a word, not a call


def flag_of_epochs(_: Path, word: str) -> None:
    values_of([word, "10"], TRAINING, command=("x", ""))


def flag_of_sbatch(_: Path, word: str) -> None:
    values_of([word, "1"], TRAINING, command=("x", ""))


def job_of_stage(_: Path, stage: str) -> None:
    refuse_missing(list(flags_of(job_class(stage)())), STAGES[stage].required)


def page_at(folder: Path, name: str) -> None:
    (folder / "notes.txt").write_text("mine")
    try:
        refuse_no_page(folder / name, name="report.html")
    finally:
        assert (folder / "notes.txt").read_text() == "mine"


def own_recipe_in(folder: Path, text: str) -> None:
    (folder / "mine.py").write_text(text)
    read_own_recipes(folder, "f")


def missing_recipe_file(folder: Path) -> None:
    own_job(f"{folder}/gone.py:f", kinds=(TrainingJob,), has_smoke=False)


def other_file(folder: Path) -> None:
    out = folder / "w.npz"
    for _ in range(2):
        write_to(out, file_writer("a"), overwrite=False)
    write_to(out, file_writer("b"), overwrite=False)


def current_folder(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (folder / "thesis").write_text("years")
        monkeypatch.chdir(folder)
        write_to(Path(), writer(config="a"), overwrite=False)


def processes_beside(_: Path, environ: dict[str, str]) -> None:
    must_start(2, environ)


def run_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    run_dir = tmp_path / folder
    write_record(run_dir, stage="pretrain", job=pretrain.digits_smoke())


def folder_in_place_of_a_record(folder: Path) -> None:
    (folder / "job.yaml").mkdir()
    write_record(folder, stage="pretrain", job=pretrain.digits_smoke())


def field_called_by_a_number(folder: Path) -> None:
    read_record(written(folder, "stage: pretrain\njob: {7: 8, steps: 20, model: {3: 4}}\n"))


def job_file(folder: Path, content: bytes) -> None:
    read_record(written(folder, content))


def job_file_at(folder: Path, name: str) -> None:
    (folder / "folder").mkdir()
    read_record(folder / name)


def tree_of(folder: Path, text: str | bytes) -> None:
    read_tree_of(folder, text)


def tree_from_a(folder: Path, kind: str) -> None:
    path = folder / "a.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    read_tree(path)


def record(folder: Path, text: str) -> None:
    (folder / "job.yaml").write_text(text)
    read_leaves(folder / "job.yaml")


def recipe(_: Path, stage: str, word: str) -> None:
    default_job(stage, word)


def recipe_of_another_stage(folder: Path, text: str) -> None:
    default_job("pretrain", file(folder / "my.yaml", text))


def demo_in_another_folder(folder: Path) -> None:
    (folder / "thesis.txt").write_text("years of work")
    run_demo(DemoJob(run_dir=str(folder)), environ={})


def finetuning(_: Path, job: TrainingJob) -> None:
    run_pretrain(replace(job, initial=InitialConfig(weights="somewhere"), device="cpu"), stage="finetune")


def sweep_of(_: Path, words: tuple[str, ...]) -> None:
    plan(*words)


def trial_in_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    verify_verify_resume(trial("x", folder / "file"), start=Starts())


def cancelled(_: Path, words: list[str]) -> None:
    ask.cancel(words, environ={})


def doctor_without_a_gpu(folder: Path) -> None:
    doctor.run(DoctorJob(gpu=True, out=str(folder / "gpu.json")), environ={})


def doctor_over(folder: Path, text: str) -> None:
    out = folder / "notes.json"
    out.write_text(text)
    doctor.run(DoctorJob(gpu=True, device="cpu", out=str(out)), environ={})


def doctor_over_its_page(folder: Path) -> None:
    doctor.run(DoctorJob(gpu=True, device="cpu", out=str(folder / "gpu.html")), environ={})


def spares_of_a_sweep(_: Path) -> None:
    submit.run(["sweep", "pretrain", "digits_smoke", "--spares=1", *GRID], override=override, environ={})


def stopped_run(folder: Path) -> None:
    (folder / "STOP").touch()
    refuse_stopped(EvaluateJob(run_dir=str(folder)))
    refuse_stopped(replace(RECIPES["digits_smoke"](), run_dir=str(folder)))


def chain_of(_: Path, steps: tuple[StepConfig, ...]) -> None:
    units_of(chain(*steps))


def step_in_the_chains_folder(folder: Path, run_dir: str) -> None:
    (folder / "link").symlink_to(folder / "chain")
    step = StepConfig(name="a", stage="pretrain", recipe="r", flags=(f"--run-dir={folder}/{run_dir}",))
    units_of(ChainConfig(folder=str(folder), steps=(step,)))


def plan_at_sizes(_: Path) -> None:
    at_sizes(replace(default_job("plan", "vit_b16_i21k"), image_sizes=(224, 230)))


def index_job(_: Path, fields: dict[str, object]) -> None:
    index(IndexJob(**fields))  # type: ignore[arg-type]


SQUEUE_SAYS = (
    "squeue does not answer: squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host squeue: "
    "error: fetch_config: DNS SRV lookup failed squeue: error: _establish_config_source: failed to fetch "
    "config squeue: fatal: Could not establish a configuration source; try again when Slurm does"
    if shutil.which("squeue")
    else "cannot run squeue: No such file or directory; it comes with Slurm, as sbatch does"
)


@table(
    # arguments
    row("run flags: [--processes]", run_flags, ["--processes"]).says(
        "--processes is ''; allowed: whole numbers from 1 on, for example --processes 2"
    ),
    row("run flags: [--processes, two]", run_flags, ["--processes", "two"]).says(
        "--processes is 'two'; allowed: whole numbers from 1 on, for example --processes 2"
    ),
    row("run flags: [--processes=0]", run_flags, ["--processes=0"]).says(
        "--processes is '0'; allowed: whole numbers from 1 on, for example --processes 2"
    ),
    row("run flags: [--processes, 9 * 5000]", run_flags, ["--processes", "9" * 5000]).says(
        "--processes is '9999999999…; allowed: whole numbers from 1 on, for example --processes 2"
    ),
    row("run flags: [--profile]", run_flags, ["--profile"]).says(
        "--profile is ''; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--profile, 0:3]", run_flags, ["--profile", "0:3"]).says(
        "--profile is '0:3'; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--profile, 5:3]", run_flags, ["--profile", "5:3"]).says(
        "--profile is '5:3'; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--profile, 1:101]", run_flags, ["--profile", "1:101"]).says(
        "--profile is '1:101'; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--profile, 1:2:3]", run_flags, ["--profile", "1:2:3"]).says(
        "--profile is '1:2:3'; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--profile, a:b]", run_flags, ["--profile", "a:b"]).says(
        "--profile is 'a:b'; allowed: the first and the last step to trace, at most 100 of them, for example "
        "--profile 10:12"
    ),
    row("run flags: [--extend=yes]", run_flags, ["--extend=yes"]).says(
        "--extend takes no value, and has 'yes'; leave out '=yes'"
    ),
    row("a number outside its range, ", own_flag, "").says("--most-rows is ''; allowed: 1 to 9,999"),
    row("a number outside its range, 0", own_flag, "0").says("--most-rows is '0'; allowed: 1 to 9,999"),
    row("a number outside its range, 10000", own_flag, "10000").says("--most-rows is '10000'; allowed: 1 to 9,999"),
    row("a number outside its range, -1", own_flag, "-1").says("--most-rows is '-1'; allowed: 1 to 9,999"),
    row("a number outside its range, x", own_flag, "x").says("--most-rows is 'x'; allowed: 1 to 9,999"),
    row(
        "a number outside its range, too long",
        own_flag,
        "9" * 5000,
    ).says("--most-rows is '9999999999…; allowed: 1 to 9,999"),
    # completion
    row("another shell", completion_of_tcsh).says("shell is 'tcsh'; allowed: bash, zsh, fish"),
    # mistakes
    *(
        row(f"epochs for steps, {word}", flag_of_epochs, word).says(
            "unknown flag -…-epochs of patchline x; did you mean --steps? steps are epochs x images of the dataset / "
            "--global-batch; patchline x --help-all lists all flags"
        )
        for word in ("--epochs", "--num-epochs")
    ),
    row("an option of sbatch: --gres", flag_of_sbatch, "--gres").says(
        "unknown flag --gres of patchline x; it is an option of sbatch: write `gpus_per_node:` into the file of "
        "`patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --partition", flag_of_sbatch, "--partition").says(
        "unknown flag --partition of patchline x; it is an option of sbatch: write `partition:` into the file of "
        "`patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: -p", flag_of_sbatch, "-p").says(
        "unknown flag -p of patchline x; it is an option of sbatch: write `partition:` into the file of "
        "`patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --cpus_per_task", flag_of_sbatch, "--cpus_per_task").says(
        "unknown flag --cpus_per_task of patchline x; it is an option of sbatch: write `cpus_per_rank:` into the "
        "file of `patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --mem", flag_of_sbatch, "--mem").says(
        "unknown flag --mem of patchline x; it is an option of sbatch: write `options: [--mem=...]` into the file "
        "of `patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --exclusive", flag_of_sbatch, "--exclusive").says(
        "unknown flag --exclusive of patchline x; it is an option of sbatch: write `exclusive:` into the file of "
        "`patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of srun: --container-image", flag_of_sbatch, "--container-image").says(
        "unknown flag --container-image of patchline x; it is an option of sbatch: write `container:` into the file "
        "of `patchline submit --cluster FILE`; patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --job-name", flag_of_sbatch, "--job-name").says(
        "unknown flag --job-name of patchline x; it is an option of sbatch that `patchline submit` sets itself; "
        "patchline x --help-all lists all flags"
    ),
    row("an option of sbatch: --array", flag_of_sbatch, "--array").says(
        "unknown flag --array of patchline x; it is an option of sbatch that `patchline submit` sets itself; "
        "patchline x --help-all lists all flags"
    ),
    row("nothing is suggested for nonsense", lambda _: values_of(["--xyzzy"], TRAINING, command=("x", ""))).says(
        "unknown flag --xyzzy of patchline x; patchline x --help-all lists all flags"
    ),
    row("what is missing is named all at once", lambda _: refuse_missing(PACKING, STAGES["pack"].required)).says(
        "--source.root is missing: Folder or s3://bucket/prefix that holds one folder of images per class; --out "
        "is missing: Folder or s3://bucket/prefix that the dataset is written to"
    ),
    row("an empty job of: index", job_of_stage, "index").says(
        "--url is missing: The tars: a folder or s3://bucket/prefix (all *.tar below), or a pattern such as "
        "'DIR/train-{0000..1023}.tar'"
    ),
    row("an empty job of: verify", job_of_stage, "verify").says(
        "--url is missing: Dataset to check: a folder or s3://bucket/prefix"
    ),
    row("an empty job of: card", job_of_stage, "card").says(
        "--url is missing: Dataset to show: a folder or s3://bucket/prefix"
    ),
    row("an empty job of: evaluate", job_of_stage, "evaluate").says(
        "--weights is missing: Weights to evaluate: a run (RUN), a weights folder, a timm or Hugging Face folder, "
        "or a .npz, .safetensors or .pth file; --data.url is missing: Dataset to evaluate on: a folder or "
        "s3://bucket/prefix"
    ),
    row("an empty job of: fewshot", job_of_stage, "fewshot").says(
        "--weights is missing: Weights folder to measure (RUN/weights), or the run directory; --data.url is "
        "missing: Dataset to take the shots from: a folder or s3://bucket/prefix"
    ),
    row("an empty job of: predict", job_of_stage, "predict").says(
        "--weights is missing: A run (RUN), a weights folder, a timm or Hugging Face folder, or a .npz, "
        ".safetensors or .pth file"
    ),
    row("an empty job of: inspect", job_of_stage, "inspect").says(
        "--weights is missing: Weights folder (RUN/weights), or the run directory"
    ),
    row("an empty job of: pretrain", job_of_stage, "pretrain").says(
        "--data.url is missing: Dataset to train on: a folder or s3://bucket/prefix; --run-dir is missing: Folder "
        "for everything the run writes; the same command continues the run that is there"
    ),
    row("an empty job of: finetune", job_of_stage, "finetune").says(
        "--initial.weights is missing: Weights to start from: a run (RUN), a weights folder, a timm or Hugging "
        "Face folder, or a .npz, .safetensors or .pth file; --data.url is missing: Dataset to train on: a folder "
        "or s3://bucket/prefix; --run-dir is missing: Folder for everything the run writes; the same command "
        "continues the run that is there"
    ),
    row("an empty job of: verify-resume", job_of_stage, "verify-resume").says(
        "--data.url is missing: Dataset to train on: a folder or s3://bucket/prefix"
    ),
    row("an empty job of: weights", job_of_stage, "weights").says(
        "--run is missing: Run directory; the run may still be training; --out is missing: Weights folder to write"
    ),
    row("an empty job of: import", job_of_stage, "import").says(
        "--path is missing: Weights to import: a published .npz file (vision_transformer's, big_vision's or "
        "big_transfer's), a timm or Hugging Face folder, a run (RUN) or its weights folder, or a bare .safetensors, "
        ".bin, .pth, .pth.tar, .pt or .ckpt file; --out is missing: Weights folder to write"
    ),
    row("an empty job of: export", job_of_stage, "export").says(
        "--path is missing: Weights folder to export (RUN/weights); --out is missing: File (.npz formats) or "
        "folder to write"
    ),
    # output
    row("a page at: ", page_at, "").says(
        "--out is the folder 'DIR'; give the name of a file, such as 'DIR/report.html'"
    ),
    row("a page at: nowhere/a.html", page_at, "nowhere/a.html").says(
        "--out is 'DIR/nowhere/a.html', and there is no folder 'DIR/nowhere'; make it first"
    ),
    row("a page at: notes.txt", page_at, "notes.txt").says(
        "--out is 'DIR/notes.txt', which is there and is no .html file; give another name"
    ),
    # own_recipes
    row("no Python", own_recipe_in, "def f(:\n").says(
        'mine.py failed:\n  File "mine.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax'
    ),
    row("missing import", own_recipe_in, "import nothing_of_this_name\n").says(
        'mine.py failed:\n  File "mine.py", line 1, in <module>\n    import nothing_of_this_name\n'
        "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    ),
    row("nothing in it", own_recipe_in, "x = 3\n").says("mine.py has no function 'f' without arguments. It has: none"),
    row("a missing file of recipes", missing_recipe_file).says(
        "DIR/gone.py is not a file; your own recipe is FILE.py:FUNCTION, with the path of a Python file"
    ),
    # placing
    row("another file", other_file).says(
        "--out is 'DIR/w.npz', which has other content: w.npz (a file); give another --out, or --overwrite, which "
        "replaces files of the same names and leaves the others as they are"
    ),
    row("the current folder with other files", current_folder).says(
        "--out is '.', which has other content: thesis; give another --out, or --overwrite, which replaces files "
        "of the same names and leaves the others as they are"
    ),
    # processes
    row(
        "processes beside: RANK: 0, WORLD_SIZE: 4",
        processes_beside,
        {"RANK": "0", "WORLD_SIZE": "4"},
    ).says(
        "--processes is 2, but torchrun has started 4 ranks, of which this is one; leave out --processes, or "
        "start patchline without torchrun"
    ),
    row(
        "processes beside: RANK: 0, WORLD_SIZE: 1",
        processes_beside,
        {"RANK": "0", "WORLD_SIZE": "1"},
    ).says(
        "--processes is 2, but torchrun has started 1 ranks, of which this is one; leave out --processes, or "
        "start patchline without torchrun"
    ),
    row(
        "processes beside: SLURM_PROCID: 0, SLURM_STEP_NUM_TASKS: 4",
        processes_beside,
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    ).says(
        "--processes is 2, but srun has started 4 ranks, of which this is one; leave out --processes, or start "
        "patchline without srun"
    ),
    # record
    row("another file", run_folder, "file").says(
        "cannot write job.yaml in DIR/file: File exists; give --run-dir a folder that this user may write to"
    ),
    row("below a file", run_folder, "file/run").says(
        "cannot write job.yaml in DIR/file/run: Not a directory; give --run-dir a folder that this user may write to"
    ),
    row("a file system that takes no folders", run_folder, "/proc/nope").says(
        "cannot write job.yaml in /proc/nope: No such file or directory; give --run-dir a folder that this user "
        "may write to"
    ),
    row("a name that is too long", run_folder, "run" * 100).says(
        "cannot write job.yaml in DIR/runrunrun…: File name too long; give --run-dir a folder that this user may "
        "write to"
    ),
    row("a record that cannot be written", folder_in_place_of_a_record).says(
        "cannot write job.yaml in DIR: Is a directory; give --run-dir a folder that this user may write to"
    ),
    row("a field whose name is a number", field_called_by_a_number).says(
        "DIR/my.yaml is not a record of this version, which has every field and no other: unknown 7 (line 2), "
        "model.3 (line 2); missing run_dir, data, model.name, model.image_size, model.num_classes, model.patch, "
        "model.depth, model.width and … more; replay it with the version that wrote it, or write a file with "
        "`recipe: NAME` and what differs from it"
    ),
    row("not YAML", job_file, b"stage: [pretrain").says(
        "DIR/my.yaml is not YAML that a job can be read from: line 1: expected ',' or ']', but got '<stream end>'"
    ),
    row("an image", job_file, b"\xff\xd8\xff\xe0\x00").says(
        "DIR/my.yaml is not YAML: unacceptable character #x00ff: invalid start byte"
    ),
    row("empty", job_file, b"").says(
        "DIR/my.yaml has no fields; add a line such as `recipe: digits_smoke`, and your changes"
    ),
    row("a list", job_file, b"- 1\n- 2\n").says(
        "DIR/my.yaml has no fields; add a line such as `recipe: digits_smoke`, and your changes"
    ),
    row("no job in it", job_file, b"stage: pretrain\njob:\n").says(
        "DIR/my.yaml, line 2: `job:` has no fields; it must have every one"
    ),
    row("a job of no stage", job_file, b"job: {}\n").says(
        "DIR/my.yaml has the entries job; allowed beside `job:` is `stage:`, and nothing else"
    ),
    row("both forms", job_file, b"stage: pretrain\njob: {}\nrecipe: x\n").says(
        "DIR/my.yaml has the entries stage, job, recipe; allowed beside `job:` is `stage:`, and nothing else"
    ),
    row("two recipes", job_file, b"recipe: [a, b]\n").says("DIR/my.yaml, line 1: recipe must be a single word"),
    row("no recipe", job_file, b"recipe:\n").says("DIR/my.yaml, line 1: recipe must be a single word"),
    row("no stage", job_file, b"stage: pretran\njob: {}\n").says(
        "DIR/my.yaml: stage is 'pretran'; allowed: pack, index, verify, card, pretrain, finetune, evaluate, "
        "fewshot, predict, inspect, plan, verify-resume, ls, report, weights, import, export, doctor, preflight, "
        "demo, example, completion"
    ),
    row("another stage", job_file, b"stage: finetune\njob: {}\n").says(
        "DIR/my.yaml is of the stage 'finetune'; run: patchline finetune DIR/my.yaml"
    ),
    row("code is not run", job_file, b"stage: !!python/object/apply:os.getcwd []\njob: {}\n").says(
        "DIR/my.yaml is not YAML that a job can be read from: line 1: the tag "
        "tag:yaml.org,2002:python/object/apply:os.getcwd; leave it out"
    ),
    *(
        row(f"not a file, {name}", job_file_at, name).says(
            "DIR/… cannot be read: … directory; give a recipe's name or a YAML file"
        )
        for name in ("nothing.yaml", "folder")
    ),
    row("billion laughs", tree_of, LAUGHS).says(
        "DIR/a.yaml is not YAML that a job can be read from: line 2: the alias *a; write out what it stands for"
    ),
    row("a list in itself", tree_of, "a: &a [*a]\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: the alias *a; write out what it stands for"
    ),
    row("code", tree_of, "a: !!python/object/apply:os.getcwd []\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: the tag "
        "tag:yaml.org,2002:python/object/apply:os.getcwd; leave it out"
    ),
    row("a harmless tag", tree_of, "a: !!str 3\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: the tag tag:yaml.org,2002:str; leave it out"
    ),
    row("twice", tree_of, "a: 1\nb: 2\na: 3\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 3: a is given on line 1 already; remove one"
    ),
    row("twice in a group", tree_of, "a: {b: 1, b: 2}\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: b is given on line 1 already; remove one"
    ),
    row("a list for a name", tree_of, "[1, 2]: 3\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: a field's name is a word, here it is a list "
        "or a group"
    ),
    row("too deep", tree_of, "[" * 100_000).says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: nested deeper than 16 levels"
    ),
    row("too deep in blocks", tree_of, "- " * 20 + "x").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 1: nested deeper than 16 levels"
    ),
    row("broken", tree_of, "a: [1\nb: 2\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 2: expected ',' or ']', but got ':'"
    ),
    row("two documents", tree_of, "a: 1\n---\nb: 2\n").says(
        "DIR/a.yaml is not YAML that a job can be read from: line 2: but found another document"
    ),
    row("an image", tree_of, b"\xff\xd8\xff\xe0\x00").says(
        "DIR/a.yaml is not YAML: unacceptable character #x00ff: invalid start byte"
    ),
    row("too large", tree_of, "#" * (MOST_BYTES + 1)).says(
        "InvalidDataError: DIR/a.yaml is larger than 262,144 bytes, the most that are read of such a file; a job "
        "is a YAML file of about 4 KiB"
    ),
    *(
        row(f"not a regular file, {kind}", tree_from_a, kind).says(
            "InvalidDataError: DIR/a.yaml is not a regular file; give a file, not a pipe or a device; a job is a YAML "
            "file of about 4 KiB"
        )
        for kind in ("pipe", "device")
    ),
    row("empty", record, "").says("InvalidDataError: it has no stage and job, as a run's record has"),
    row("half of it", record, "stage: pretrain\n").says(
        "InvalidDataError: it has no stage and job, as a run's record has"
    ),
    row("cut off", record, "stage: pretrain\njob: {a: [1\n").says(
        "InvalidDataError: it is not YAML: line 3: did not find expected ',' or ']'"
    ),
    row("an alias", record, "a: &x 1\nb: *x\n").says(
        "InvalidDataError: it is not YAML: line 2: the alias *x; write out what it stands for"
    ),
    row("deep", record, "[" * 5000).says("InvalidDataError: it is not YAML: line 1: nested deeper than 16 levels"),
    row("groups as names", record, "{" * 5000).says(
        "InvalidDataError: it is not YAML: line 1: nested deeper than 16 levels"
    ),
    row("binary", record, "\x00\x01").says(
        "InvalidDataError: it is not YAML: unacceptable character #x0000: control characters are not allowed"
    ),
    row("large", record, "a" * (1 << 19)).says(
        "InvalidDataError: DIR/job.yaml is larger than 262,144 bytes, the most that are read of such a file"
    ),
    # resolve
    row("none", recipe, "pretrain", "digit").says(
        "unknown recipe 'digit' of patchline pretrain; did you mean digits_smoke? allowed: what 'patchline "
        "pretrain' lists, a YAML file (my.yaml, RUN/job.yaml), or a function in a Python file "
        "(my_recipes.py:my_vit)"
    ),
    row("already at its smoke size", recipe, "pretrain", "digits_smoke_smoke").says(
        "unknown recipe 'digits_smoke_smoke' of patchline pretrain; did you mean digits_smoke? allowed: what "
        "'patchline pretrain' lists, a YAML file (my.yaml, RUN/job.yaml), or a function in a Python file "
        "(my_recipes.py:my_vit)"
    ),
    row("other", recipe, "pretrain", "digits_48").says(
        "'digits_48' is a recipe of patchline finetune, not of pretrain"
    ),
    row("two others", recipe, "pretrain", "cifar10").says(
        "'cifar10' is a recipe of patchline pack and of patchline finetune, not of pretrain"
    ),
    row("packing has no smoke size", recipe, "pack", "folder_smoke").says(
        "unknown recipe 'folder_smoke' of patchline pack; did you mean folder? allowed: folder, flat, class_tars, "
        "tar_of_tars, parquet, manifest, digits, cifar10, vtab, a YAML file (my.yaml, RUN/job.yaml), or a "
        "function in a Python file (my_recipes.py:my_vit)"
    ),
    row("no training", recipe, "plan", "folder").says(
        "folder is a recipe of the stage 'pack'; a plan is of pretrain or finetune"
    ),
    row("no plan", recipe, "plan", "nothing").says(
        "unknown recipe 'nothing' of patchline plan; allowed: what 'patchline plan' lists, a YAML file (my.yaml, "
        "RUN/job.yaml), or a function in a Python file (my_recipes.py:my_vit)"
    ),
    row("other stage", recipe_of_another_stage, "recipe: digits_48").says(
        "DIR/my.yaml, recipe: 'digits_48' is a recipe of patchline finetune, not of pretrain"
    ),
    row("no recipe", recipe_of_another_stage, "recipe: digit").says(
        "DIR/my.yaml, recipe: unknown recipe 'digit' of patchline pretrain; did you mean digits_smoke? allowed: "
        "what 'patchline pretrain' lists, a YAML file (my.yaml, RUN/job.yaml), or a function in a Python file "
        "(my_recipes.py:my_vit)"
    ),
    row("Python", recipe_of_another_stage, "recipe: gone.py:mine").says(
        "DIR/my.yaml, recipe: 'gone.py:mine' is Python, which a YAML file cannot start; name it on the command "
        "line instead: patchline STAGE gone.py:mine"
    ),
    row("says its stage", recipe_of_another_stage, "stage: finetune\nrecipe: digits_48").says(
        "DIR/my.yaml is of the stage 'finetune'; run: patchline finetune DIR/my.yaml"
    ),
    # demo
    row("a demo in somebody's folder", demo_in_another_folder).says(
        "DIR is not empty and was not made by an earlier demo; give another --run-dir"
    ),
    # finetune
    row("no run directory", finetuning, TrainingJob()).says(
        "--run-dir is missing: give the run directory as --run-dir"
    ),
    row("no dataset", finetuning, TrainingJob(run_dir="x")).says(
        "--data.url is missing: give the dataset as --data.url, or several as --data.mix URL WEIGHT URL WEIGHT ..."
    ),
    # sweep_plan
    row("what is not allowed: ()", sweep_of, ()).says(
        "--run-dir is missing: the folder of the sweep, in which each run has its own"
    ),
    row("what is not allowed: (--run-dir, a, b)", sweep_of, ("--run-dir", "a", "b")).says(
        "--run-dir takes one value, and 2 were given; the sweep has one folder"
    ),
    row("what is not allowed: (--run-dir,)", sweep_of, ("--run-dir",)).says(
        "--run-dir takes one value, and 0 were given; the sweep has one folder"
    ),
    row("what is not allowed: (x, --run-dir, s)", sweep_of, ("x", "--run-dir", "s")).says(
        "unexpected word 'x'; a value follows its flag, as in --flag VALUE"
    ),
    row("what is not allowed: (--run-dir, s, --seeds, 0)", sweep_of, ("--run-dir", "s", "--seeds", "0")).says(
        "--seeds is '0'; allowed: 1 to 1000"
    ),
    row("what is not allowed: (--run-dir, s, --seed, 1, 2)", sweep_of, ("--run-dir", "s", "--seed", "1", "2")).says(
        "--seed cannot be swept: the best is repeated with --seeds N"
    ),
    row(
        "what is not allowed: (--run-dir, s, --steps, 1, 2)",
        sweep_of,
        ("--run-dir", "s", "--steps", "1", "2"),
    ).says(
        "the tries need one thing to be compared on: --data.held-out.share .02, a part of the training set, or "
        "--select-on URL, a dataset of its own. Do not choose on the test set"
    ),
    row(
        "what is not allowed: (--run-dir, s, --select-on, x)",
        sweep_of,
        ("--run-dir", "s", "--select-on", "x"),
    ).says("--select-on says nothing without a grid; give a flag several values, as in --flag A B C"),
    row(
        "what is not allowed: (*RATES, --data.held-out.share, .1)",
        sweep_of,
        (*RATES, "--data.held-out.share", ".1"),
    ).says(
        "the tries need one thing to be compared on: --data.held-out.share .02, a part of the training set, or "
        "--select-on URL, a dataset of its own. Do not choose on the test set"
    ),
    row(
        "what is not allowed: (--run-dir, s, --data.held-out.share=.1)",
        sweep_of,
        ("--run-dir", "s", "--data.held-out.share=.1"),
    ).says("--data.held-out says nothing without a grid; give a flag several values, as in --flag A B C"),
    row("what is not allowed: (*RATES, --data.url, a/b, a_b)", sweep_of, (*RATES, "--data.url", "a/b", "a_b")).says(
        "--data.url has 'a/b' and 'a_b', which would share a folder; leave one out"
    ),
    row("what is not allowed: (*RATES, --steps, 5, 5)", sweep_of, (*RATES, "--steps", "5", "5")).says(
        "--steps has '5' and '5', which are the same number; leave one out"
    ),
    row(
        "what is not allowed: (*RATES, --optimizer.weight-decay, 0.50, .5)",
        sweep_of,
        (*RATES, "--optimizer.weight-decay", "0.50", ".5"),
    ).says("--optimizer.weight-decay has '0.50' and '.5', which are the same number; leave one out"),
    row("what is not allowed: (*RATES, --steps, 5, 5.0)", sweep_of, (*RATES, "--steps", "5", "5.0")).says(
        "--steps has '5' and '5.0', which are the same number; leave one out"
    ),
    row(
        "what is not allowed: (--run-dir, s, --schedule.learning-rates, .003, 1, --data.held-out.share, .1)",
        sweep_of,
        ("--run-dir", "s", "--schedule.learning-rates", ".003", "1", "--data.held-out.share", ".1"),
    ).says(
        "unknown flag --schedule.learning-rates of patchline finetune digits_48; did you mean "
        "--schedule.learning-rate or --schedule.final-learning-rate or --schedule.stair-steps? patchline finetune "
        "digits_48 --help-all lists all flags"
    ),
    row("what is not allowed: (*RATES, --seed-s=3)", sweep_of, (*RATES, "--seed-s=3")).says(
        "unknown flag --seed-s of patchline finetune digits_48; did you mean --seeds or --seed or --steps? "
        "patchline finetune digits_48 --help-all lists all flags"
    ),
    row("what is not allowed: (*RATES, --phase, all)", sweep_of, (*RATES, "--phase", "all")).says(
        "--phase is 'all'; allowed: tries, seeds"
    ),
    row("what is not allowed: (*RATES, --part, 0/2)", sweep_of, (*RATES, "--part", "0/2")).says(
        "--part says nothing without --phase: the repetitions need the scores of all tries"
    ),
    row("what is not allowed: (*RATES, --part, 2/2)", sweep_of, (*RATES, "--part", "2/2")).says(
        "--part is '2/2'; allowed: I/N with I from 0 to N-1, for example 0/8"
    ),
    row(
        "what is not allowed: (*RATES, --steps, *map(str, range(1, 502)))",
        sweep_of,
        (*RATES, "--steps", *map(str, range(1, 502))),
    ).says("the grid has 1,002 points; allowed: at most 1,000"),
    # verify_resume
    row("a trial in a file", trial_in_a_file).says(
        "cannot make a folder in 'DIR/file': File exists; give --run-dir a folder that this user may write to"
    ),
    # ask
    *(
        row(f"cancelling, {words}", cancelled, words).says("usage: patchline cancel RUN|CHAIN, one folder")
        for words in ([], ["a", "b"])
    ),
    row("a folder that is neither", lambda folder: ask.cancel([str(folder)], environ={})).says(
        "'DIR' is neither a run nor a chain that was submitted; give its folder. "
        f"If a job is to write it: {SQUEUE_SAYS}"
    ),
    # gpu_trial
    row("doctor --gpu without a GPU", doctor_without_a_gpu).says(
        "there is no GPU to measure; --device cpu tries every part at a small size"
    ),
    row("another file in the place of the results, ''", doctor_over, "").says(
        "DIR/notes.json is no file of `doctor --gpu` (Expecting value: line 1 column 1 (char 0)); give another --out"
    ),
    row("another file in the place of the results, '[]'", doctor_over, "[]").says(
        "DIR/notes.json is no file of `doctor --gpu` (list indices must be integers or slices, not str); give "
        "another --out"
    ),
    row(
        'another file in the place of the results, \'{"parts": 7, "about": {',
        doctor_over,
        '{"parts": 7, "about": {}}',
    ).says("DIR/notes.json is no file of `doctor --gpu` ('int' object has no attribute 'values'); give another --out"),
    row(
        'another file in the place of the results, \'{"parts": {"a": 1}, "ab',
        doctor_over,
        '{"parts": {"a": 1}, "about": {}}',
    ).says("DIR/notes.json is no file of `doctor --gpu` (a part is no object); give another --out"),
    row("another file in the place of the results, '{'", doctor_over, "{").says(
        "DIR/notes.json is no file of `doctor --gpu` (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)); give another --out"
    ),
    row("a page in the place of the results", doctor_over_its_page).says(
        "--out is 'DIR/gpu.html', but .html is the page beside the results; give a name that ends in .json"
    ),
    # chain_sweep
    row("spares of a sweep", spares_of_a_sweep).says(
        "a sweep takes no --spares; write `spares:` into the cluster's settings"
    ),
    # done
    row("a run that was stopped", stopped_run).says(
        "DIR/STOP keeps the run stopped, so its job would end at once; to continue it, first: rm DIR/STOP"
    ),
    # steps
    row("a file that is missing", lambda folder: read_chain(folder / "none.yaml")).says(
        "DIR/none.yaml cannot be read: No such file or directory; give a chain, such as your copy of the output "
        "of `patchline example chain.yaml`"
    ),
    row(
        "a report of a step without a run",
        chain_of,
        (PACK, StepConfig(name="r", stage="report", run="pack")),
    ).says("step r, run: pack is a step of pack, which makes no run"),
    row(
        "data of a step that makes none",
        chain_of,
        (PACK, TRAIN, StepConfig(name="v", stage="verify", data="train")),
    ).says("step v, data: train is a step of pretrain, which makes no dataset"),
    row(
        "a step without a recipe",
        chain_of,
        (StepConfig(name="p", stage="pack"),),
    ).says("step p needs `recipe:`"),
    row(
        "a recipe beside data",
        chain_of,
        (PACK, StepConfig(name="v", stage="verify", data="pack", recipe="x")),
    ).says("step v needs either `data:` or `recipe:`"),
    row(
        "variants of two steps",
        chain_of,
        (
            PACK,
            TRAIN,
            SWEEP,
            StepConfig(name="e", stage="evaluate", recipe="r", weights="sweep", variants=(("--a",), ("--b",))),
        ),
    ).says("step e and step sweep both have variants; write a step for each run"),
    row(
        "two runs in one folder",
        chain_of,
        tuple(StepConfig(name=n, stage="pretrain", recipe="r", flags=("--run-dir=/one",)) for n in ("a", "b")),
    ).says("a and b both write to /one; give each its own folder"),
    row(
        "two runs in one folder, spelled in two ways",
        chain_of,
        tuple(
            StepConfig(name=n, stage="pretrain", recipe="r", flags=(f"--run-dir={path}",))
            for n, path in (("a", "/one/"), ("b", "/x/../one"))
        ),
    ).says("a and b both write to /x/../one; give each its own folder"),
    row(
        "two datasets in one prefix",
        chain_of,
        tuple(
            StepConfig(name=n, stage="pack", recipe="digits", tasks=tasks, flags=(f"--out={url}",))
            for n, tasks, url in (("a", 2, "s3://b/x"), ("b", 1, "s3://b/x/"))
        ),
    ).says("a and b both write to s3://b/x/; give each its own folder"),
    row(
        "two variants in one folder",
        chain_of,
        (StepConfig(name="a", stage="pretrain", recipe="r", flags=("--run-dir=/z",), variants=(("--x",), ("--y",))),),
    ).says("two variants of a write to /z; give each its own folder"),
    *(
        row(
            f"a step in the chain's folder, {run_dir}",
            step_in_the_chains_folder,
            run_dir,
        ).says("step a writes to DIR/…, where the chain keeps its state; give another --run-dir")
        for run_dir in ("chain", "chain/", "x/../chain/jobs", "link")
    ),
    # scaling
    row("an image size of a plan", plan_at_sizes).says(
        "--image-sizes has 230, not a multiple of the patch (16 px); take 224 or 240"
    ),
    # data
    row("index: ", index_job, {}).says("the URL of the tars is missing; give a folder or s3://bucket/prefix"),
    row("index: workers: 0", index_job, {"workers": 0}).says("workers is 0; allowed: 1 or more"),
    row("index: max_quarantined: 2.0", index_job, {"max_quarantined": 2.0}).says(
        "max_quarantined is 2.0; allowed: 0 to 1"
    ),
    row("index: url: x, samples_per_block: 0", index_job, {"url": "x", "samples_per_block": 0}).says(
        "samples_per_block is 0; allowed: 1 or more"
    ),
    row("index: url: /nowhere", index_job, {"url": "/nowhere"}).says(
        "no *.tar is below /nowhere; give the folder or s3://bucket/prefix that holds the tars"
    ),
    row("no dataset", lambda _: verify_verify(VerifyJob(url="/nowhere"))).says(
        "NoDatasetError: there is nothing at '/nowhere'; check the path, or pack a dataset there: patchline pack "
        "RECIPE --out /nowhere"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
