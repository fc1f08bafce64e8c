"""What is written for sbatch: every word arrives as it was given, whatever is in it, and an array in pieces has every
task once, every index below the limit, and no more at once than asked for."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.cluster.batch_script import (
    Piece,
    Request,
    batch_script,
    most_hours,
    names_of,
    pieces_of,
    script_summary,
)
from jobs.cluster.container import ContainerConfig
from jobs.cluster.settings import ClusterConfig

BODY = (Path(__file__).resolve().parents[3] / "slurm" / "stage.sbatch").read_text()
REQUEST = Request(
    words=("pretrain", "digits_smoke"),
    name="pretrain-digits_smoke",
    comment="patchline-0",
    nodes=2,
    time_limit="",
    folder=Path("/shared/my runs/50%/submit"),
    chdir=Path("/shared"),
)
CLUSTER = ClusterConfig(command=("patchline",))
SHOWS = '# Run one stage of Patchline\nprintf "%s\\0" "${patchline[@]}" "$@"\n'
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def lines_of(request: Request, cluster: ClusterConfig) -> list[str]:
    return [line for line in batch_script(request, cluster, body=BODY).splitlines() if line.startswith("#SBATCH")]


@settings(max_examples=60)
@given(st.lists(WORDS, min_size=1, max_size=6))
def test_bash_reads_the_words_that_were_given(words: list[str]) -> None:
    request = replace(REQUEST, words=tuple(words))
    script = batch_script(request, replace(CLUSTER, command=("run", "the $(id) one")), body=SHOWS)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().split("\0")[:-1] == ["run", "the $(id) one", *words]
    head = script[: script.index("# Run one stage")]
    assert sum(line.startswith("#SBATCH") for line in head.splitlines()) == len(lines_of(REQUEST, CLUSTER))


def test_it_ends_with_the_body_without_a_change() -> None:
    script = batch_script(REQUEST, CLUSTER, body=BODY)
    tail = BODY[BODY.index("# Run one stage") :]
    assert script.endswith(tail)
    assert tail.count("\n") > 200


def test_the_sites_settings_become_options_and_variables() -> None:
    site = ClusterConfig(
        partition="gpu",
        gpus_per_node=8,
        gpu_type="h100",
        cpus_per_rank=12,
        time_limit="24:00:00",
        margin_seconds=300,
        options=("--reservation=vit",),
        setup=("module load cuda",),
        command=("apptainer", "exec", "it's.sif", "patchline"),
        s3_profile="training",
    )
    assert lines_of(REQUEST, site) == [
        "#SBATCH --job-name=pretrain-digits_smoke",
        "#SBATCH --comment=patchline-0",
        '#SBATCH --chdir="/shared"',
        '#SBATCH --output="/shared/my runs/50%%/submit/%x-%j.out"',
        "#SBATCH --open-mode=append",
        "#SBATCH --partition=gpu",
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=h100:8",
        "#SBATCH --mem=0",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "#SBATCH --reservation=vit",
    ]
    script = batch_script(replace(REQUEST, time_limit="60"), site, body=BODY)
    assert "#SBATCH --time=60\n" in script
    assert (
        "export AWS_PROFILE=training\nmodule load cuda\npatchline=(apptainer exec 'it'\"'\"'s.sif' patchline)\n"
        in script
    )
    assert "export PATCHLINE_MARGIN=300\n" in script


def test_a_summary_has_what_a_reader_checks_first() -> None:
    site = replace(CLUSTER, gpus_per_node=8, time_limit="12:00:00", spares=1)
    first, command, size, *options = script_summary(REQUEST, site).splitlines()
    assert (first, command) == ("pretrain-digits_smoke", "  patchline pretrain digits_smoke")
    assert size == "  3 nodes with 24 GPUs in all, at most 12:00:00 and 288 GPU-hours for each job"
    assert options.pop(0) == (
        "  forecast of the whole run (replace GPU by one of a100, a100-40, h100, h200, b200, l40s, rtx4090): "
        "patchline plan digits_smoke --gpu GPU --nodes 2 --gpus-per-node 8 --max-time 12"
    )
    assert options == [f"  {line}" for line in lines_of(REQUEST, site)]
    common = frozenset(line.removeprefix("  ") for line in options)
    assert script_summary(REQUEST, site, besides=common).splitlines()[:3] == [first, command, size]
    sized = ("finetune", "cifar10", "--data.url=d", "--steps", "90", "--flip", "--model.name=vit_l16")
    costly = ("--optimizer.sam-rho", "0.2", "--tokens.patch-dropout", "0.5", "--teacher.weights", "w")
    planned = script_summary(replace(REQUEST, words=(*sized, *costly)), replace(site, gpu_type="H100")).splitlines()[3]
    assert planned.endswith(
        "plan cifar10 --gpu h100 --nodes 2 --gpus-per-node 8 --max-time 12 --training.steps 90 "
        "--training.model.name=vit_l16 --training.optimizer.sam-rho 0.2 --training.tokens.patch-dropout 0.5 "
        "--training.teacher.weights w"
    )
    other = script_summary(REQUEST, replace(site, gpu_type="a100-sxm4-80gb")).splitlines()[3]
    assert other == script_summary(REQUEST, site).splitlines()[3]  # Slurm's name is none of a plan's
    for words in (("finetune", "photos", "--initial.weights=w"), ("pretrain", "photos_scratch_s16")):
        assert "plan" not in script_summary(replace(REQUEST, words=words), site)  # its model and steps are not known
    array = script_summary(replace(REQUEST, array="0-2,5%2"), site).splitlines()[2]
    assert array == "  4 tasks, each 3 nodes with 24 GPUs in all, at most 12:00:00 each and 1,152 GPU-hours in all"
    alone = script_summary(replace(REQUEST, has_ranks=False, nodes=1, time_limit="30"), site).splitlines()
    assert alone[2] == "  1 node, at most 30 for each job"


def test_the_most_hours_are_never_fewer_than_a_job_may_take() -> None:
    table = {0.5: "0.5", 1 / 60: "0.1", 1.5: "1.5", 2.51: "2.6", 10 * 0.3: "3", 9.95: "10", 10.2: "11", 1151.5: "1,152"}
    assert {hours: most_hours(hours) for hours in table} == table


def test_a_job_with_ranks_takes_all_memory_unless_it_asks_for_other() -> None:
    for site in (replace(CLUSTER, all_memory=False), replace(CLUSTER, options=("--mem-per-gpu=64G",))):
        assert not [line for line in lines_of(REQUEST, site) if "--mem=0" in line]
    assert "#SBATCH --mem=0" not in lines_of(replace(REQUEST, has_ranks=False), CLUSTER)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["--gpus-per-node=h100:8", "--mem=0", "--exclusive"]),
        ({"gpus_by": "gres"}, ["--gres=gpu:h100:8", "--mem=0", "--exclusive"]),
        (  # Slurm takes only the last --gres
            {"gpus_by": "gres", "options": ("--gres=nvme:1", "--hold")},
            ["--gres=gpu:h100:8,nvme:1", "--mem=0", "--exclusive", "--hold"],
        ),
        ({"gpus_by": "nothing", "gpu_type": ""}, ["--mem=0", "--exclusive"]),
        ({"options": ("--gres=nvme:1",)}, ["--gpus-per-node=h100:8", "--mem=0", "--exclusive", "--gres=nvme:1"]),
        # --mem=0 on a shared node would wait for all of its memory
        ({"exclusive": False, "cpus_per_rank": 4}, ["--gpus-per-node=h100:8", "--cpus-per-task=4"]),
        (
            {"exclusive": False, "cpus_per_rank": 4, "options": ("--mem=500G",)},
            ["--gpus-per-node=h100:8", "--cpus-per-task=4", "--mem=500G"],
        ),
    ],
)
def test_gpus_and_nodes_are_asked_for_in_the_clusters_way(changes: dict[str, Any], lines: list[str]) -> None:
    site = replace(ClusterConfig(command=("patchline",), gpus_per_node=8, gpu_type="h100"), **changes)
    kinds = ("gpus", "gres", "mem", "cpus-per-task", "exclusive", "hold")
    found = [line.removeprefix("#SBATCH ") for line in lines_of(REQUEST, site)]
    assert [line for line in found if line.removeprefix("--").startswith(kinds)] == lines
    assert "#SBATCH --ntasks-per-node=8" in lines_of(REQUEST, site)


def test_a_job_without_gpus_keeps_the_other_gres() -> None:
    site = replace(CLUSTER, gpus_per_node=8, gpus_by="gres", options=("--gres=nvme:1",), cpu_constraint="cpu")
    found = lines_of(replace(REQUEST, has_ranks=False), site)
    assert "#SBATCH --gres=nvme:1" in found
    assert '#SBATCH --constraint="cpu"' in found


PYXIS = ContainerConfig(image="/shared/p.sqsh", mounts=("/shared", "/raid/jft:/data:ro", "/home/me/.aws:ro"))
MOUNTS = "/shared:/shared,/raid/jft:/data:ro,/home/me/.aws:/home/me/.aws:ro,/scratch:/scratch"
RANK = ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "patchline"]


def arrays_of(cluster: ClusterConfig, *, request: Request = REQUEST) -> tuple[list[str], list[str], list[str]]:
    """What bash makes of the script: srun's options, the command of a rank, and the command of the script itself."""
    shows = "".join(
        f'printf "%s\\0" ${{{name}[@]+"${{{name}[@]}}"}} over\n'
        for name in ("in_container", "rank_command", "patchline")
    )
    script = batch_script(request, cluster, body=f"# Run one stage of Patchline\n{shows}")
    done = subprocess.run(["bash", "-uc", script], capture_output=True, check=True, timeout=60, text=True)
    one, two, three = done.stdout.split("over\0")[:3]
    return one.split("\0")[:-1], two.split("\0")[:-1], three.split("\0")[:-1]


@pytest.mark.parametrize(
    ("changes", "options", "command"),
    [
        (
            {},
            [
                "--container-image=/shared/p.sqsh",
                f"--container-mounts={MOUNTS}",
                "--container-workdir=/shared",
                "--no-container-mount-home",
                "--no-container-entrypoint",
            ],
            RANK,
        ),
        (
            {
                "image": "nvcr.io#nvidia/pytorch:25.01-py3",
                "mounts": ("/",),  # which has the scratch folder, too
                "home": True,
                "command": ("/opt/it's/patchline",),
                "options": ("--container-writable",),
            },
            [
                "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
                "--container-mounts=/:/",
                "--container-workdir=/shared",
                "--container-mount-home",
                "--no-container-entrypoint",
                "--container-writable",
            ],
            [*RANK[:-1], "/opt/it's/patchline"],
        ),
        (
            {"system": "apptainer", "image": "/shared/p.sif"},
            [],
            ["apptainer", "exec", "--nv", "--no-home", "--bind", MOUNTS, "--pwd", "/shared", "/shared/p.sif", *RANK],
        ),
        (
            {"system": "singularity", "image": "docker://a.b/c:1", "home": True, "options": ("--rocm",)},
            [],
            [
                *("singularity", "exec", "--nv", "--bind", MOUNTS, "--pwd", "/shared", "--rocm"),
                *("docker://a.b/c:1", *RANK),
            ],
        ),
    ],
)
def test_ranks_run_in_the_container(changes: dict[str, Any], options: list[str], command: list[str]) -> None:
    site = replace(CLUSTER, container=replace(PYXIS, **changes), scratch="/scratch", gpus_per_node=8)
    assert arrays_of(site) == (options, command, ["patchline"])


def test_what_has_no_ranks_runs_outside_the_container() -> None:
    site = replace(CLUSTER, container=PYXIS)
    assert arrays_of(site, request=replace(REQUEST, has_ranks=False)) == ([], [], ["patchline"])
    assert arrays_of(CLUSTER) == ([], [], ["patchline"])


PATHS = st.text("abc/._@=%+-", max_size=12).map("/".__add__)


@settings(max_examples=40)
@given(st.lists(PATHS, max_size=3), WORDS.filter(str.isprintable))
def test_a_mount_stays_one_mount(mounts: list[str], folder: str) -> None:
    """Whatever the paths are, srun gets five options, and each mount two paths."""
    site = replace(CLUSTER, container=ContainerConfig(image="/p.sqsh", mounts=tuple(mounts)))
    options, _, _ = arrays_of(site, request=replace(REQUEST, chdir=Path("/", folder)))
    assert len(options) == 4 + bool(mounts)
    pairs = [one for option in options if "mounts" in option for one in option.partition("=")[2].split(",")]
    assert pairs == [f"{one}:{one}" for one in mounts]


def test_the_script_passes_the_container_to_srun() -> None:
    """The body starts the ranks with both arrays, and all else without them."""
    assert BODY.count('"${in_container[@]}"') == 1
    assert BODY.count('"${rank_command[@]}"') == 1


def test_names_are_plain() -> None:
    assert names_of(["pretrain", "my/own recipes.py:f"]) == "pretrain-own_recipes.py_f"


def test_spares_are_nodes_of_the_job_that_it_may_lose() -> None:
    with_one = replace(CLUSTER, spares=1)
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill"} <= set(lines_of(REQUEST, with_one))
    assert "\nexport PATCHLINE_SPARES=1\n" in batch_script(REQUEST, with_one, body=BODY)
    assert "--no-kill" not in "".join(lines_of(REQUEST, CLUSTER))


def test_a_job_of_one_process_takes_neither_spares_nor_torchrun() -> None:
    """An example is packing in a chain, on a cluster whose settings are for training."""
    cluster = replace(CLUSTER, spares=1, launcher="torchrun")
    assert "\nexport PATCHLINE_LAUNCHER=torchrun\n" in batch_script(REQUEST, cluster, body=BODY)
    script = batch_script(replace(REQUEST, has_ranks=False, nodes=1), cluster, body=BODY)
    assert "export PATCHLINE_SPARES" not in script
    assert "export PATCHLINE_LAUNCHER" not in script
    assert "#SBATCH --nodes=1\n" in script


def tasks_of(piece: Piece) -> list[int]:
    """Returns the tasks that Slurm would run."""
    found: list[int] = []
    for part in piece.array.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return [piece.offset + index for index in found]


def limit_of(piece: Piece) -> int:
    found = re.search(r"%(\d+)$", piece.array)
    return int(found[1]) if found else 0


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 50), st.integers(0, 40))
def test_every_task_is_in_one_piece_within_the_limits(tasks: set[int], most: int, at_once: int) -> None:
    pieces = pieces_of(sorted(tasks), most=most, at_once=at_once)
    assert [task for piece in pieces for task in tasks_of(piece)] == sorted(tasks)
    assert [task for piece in pieces for task in piece.tasks] == sorted(tasks)
    assert all(task - piece.offset < most for piece in pieces for task in piece.tasks)
    if at_once:
        running = [limit_of(piece) for piece in pieces if piece.waits_for is None]
        assert all(running)
        assert sum(running) <= at_once
        for place, piece in enumerate(pieces):
            if piece.waits_for is not None:
                assert piece.waits_for < place
                assert limit_of(piece) <= limit_of(pieces[piece.waits_for]), "a queue never grows wider"


def test_they_are_written_as_slurm_reads_them() -> None:
    (only,) = pieces_of([0, 1, 2, 5], most=1001, at_once=2)
    assert (only.array, only.offset) == ("0-2,5%2", 0)
    first, second = pieces_of([*range(1001), 1500], most=1001)
    assert (first.array, second.array, second.offset) == ("0-1000", "499", 1001)
