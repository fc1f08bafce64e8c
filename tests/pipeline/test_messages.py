"""What evaluation, ranks and plans say when they refuse, each message once; other folders have tables of their own."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.recipes import pretrain
from pipeline.evaluation.config import EvaluationConfig, FewshotConfig
from pipeline.evaluation.targets import read_class_map
from pipeline.inspection import figures
from pipeline.inspection.attention import Rollout
from pipeline.inspection.model_figures import draw_attention, draw_shifts
from pipeline.planning.forecast import cost_of
from pipeline.planning.rates import Rates
from pipeline.planning.step_time import gpu_named
from pipeline.ranks.devices import refuse_missing_kernel
from pipeline.ranks.environment import numbers_from, place_from, refuse_for_deepspeed, threads_from
from pipeline.ranks.host import free_port
from pipeline.ranks.rendezvous import reach_store
from pipeline.ranks.world import joined, rank_and_size, world_from
from tests.pipeline.evaluation.test_scores import weighted_scores
from tests.pipeline.inspection.test_model_figures import photographs, predictor_of
from tests.pipeline.models.test_vit import random_model
from tests.pipeline.planning.test_cluster_plan import planned
from tests.pipeline.planning.test_forecast import forecast_of
from tests.pipeline.ranks.test_environment import SRUN
from tests.pipeline.ranks.test_environment import TORCHRUN as TORCHRUN_ENVIRONMENT
from tests.pipeline.ranks.test_world import MASTER, ONE_OF_TWO
from tests.pipeline.ranks.test_world import TORCHRUN as TORCHRUN_WORLD
from tests.pipeline.runs.test_comparison import with_losses
from tests.rigs.datasets import packed_with_weights
from tests.rigs.messages import Row, row, table
from tests.rigs.processes import one_world, run_ranks


def class_map(folder: Path, text: str) -> None:
    (folder / "map.json").write_text(text)
    read_class_map(str(folder / "map.json"))


def fewshot_settings(_: Path, fields: dict[str, Any]) -> None:
    FewshotConfig(**fields)


def evaluation_settings(_: Path, fields: dict[str, Any]) -> None:
    EvaluationConfig(**fields)


def no_label_that_counts(folder: Path) -> None:
    url = str(packed_with_weights(folder, ["c0,0", "c1|c2,0|0"]))
    run_ranks(weighted_scores, url, "softmax", (2.0, 0.0, 1.0), num_ranks=1)


def world_of(_: Path, environ: Mapping[str, str]) -> None:
    world_from(environ, device="cpu", num_cpus=8)


def ambiguous_number(_: Path, environ: Mapping[str, str], given: tuple[int | None, int | None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "environ", {**environ})
        rank_and_size(*given)


def rank_without_a_gpu(_: Path) -> None:
    environ = {"RANK": "99", "WORLD_SIZE": "100", **MASTER}
    world_from(environ, device="cuda", num_cpus=8)


def own_error_at_the_rendezvous(_: Path) -> None:
    with joined(one_world()):
        raise RuntimeError("ours")


def store_that_nobody_serves(_: Path) -> None:
    port, soon = free_port(), timedelta(seconds=1)
    reach_store("127.0.0.1", port, num_ranks=3, timeout=soon)


def master_address(_: Path, value: str) -> None:
    place_from(TORCHRUN_ENVIRONMENT | {"MASTER_ADDR": value})


def tasks_per_node(_: Path, value: str) -> None:
    place_from(SRUN | {"SLURM_STEP_TASKS_PER_NODE": value})


def threads(_: Path, name: str, value: str) -> None:
    threads_from({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", name: value}, num_local_ranks=1)


def deepspeed_timeout(_: Path, value: str) -> None:
    refuse_for_deepspeed({"DEEPSPEED_TIMEOUT": value})


def ranks_without_a_number(_: Path, value: str) -> None:
    place_from({"WORLD_SIZE": value})


def operator_without_a_deterministic_kernel(_: Path) -> None:
    pytorchs = RuntimeError(
        "some_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
    )
    refuse_missing_kernel(pytorchs)


def folder_of_pages(folder: Path) -> None:
    figures.save(figures.filters(torch.zeros(1, 2, 2, 3)), folder / "nowhere", "filters")


def attention_that_is_not_finite(folder: Path) -> None:
    model = random_model()
    with torch.no_grad():
        dict(model.named_parameters())["blocks.1.attention.qkv.weight"].fill_(float("nan"))
    draw_attention(predictor_of(model), model, photographs(folder, 1), folder)


def features_that_are_not_finite(folder: Path) -> None:
    model = random_model()
    with torch.no_grad():
        dict(model.named_parameters())["norm.weight"].fill_(float("nan"))
    draw_shifts(predictor_of(model), photographs(folder, 1), folder)


def forecast(_: Path, changed: dict[str, Any]) -> None:
    forecast_of(**changed)


def rates(_: Path, mfu: float) -> None:
    Rates(mfu=mfu)


def compared_run(_: Path, change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"num_images": 10, "num_classes": 10, "days": 1.0}
    cost_of(pretrain.RECIPES["digits_smoke"](), **(fields | change))


def times_of(_: Path, changes: dict[str, float]) -> None:
    planned(8, **changes)


@table(
    # targets
    row("class map ", class_map, "{").says(
        "cannot read --class-map DIR/map.json: Expecting property name enclosed in double quotes: line 1 column 2 "
        "(char 1); give a JSON file"
    ),
    row("class map []", class_map, "[]").says(
        '--class-map DIR/map.json has no classes; allowed: {"label": ["class of the model", ...], ...}'
    ),
    row("class map ", class_map, "{}").says(
        '--class-map DIR/map.json has no classes; allowed: {"label": ["class of the model", ...], ...}'
    ),
    row('class map "a": []', class_map, '{"a": []}').says(
        "--class-map DIR/map.json: 'a' stands for []; allowed: names"
    ),
    row('class map "a": ["b", 3]', class_map, '{"a": ["b", 3]}').says(
        "--class-map DIR/map.json: 'a' stands for ['b', 3]; allowed: names"
    ),
    # fewshot
    row("few-shot shots: ()", fewshot_settings, {"shots": ()}).says(
        "--shots is none; allowed: one or more different numbers, such as --shots 1 5 10"
    ),
    row("few-shot shots: (5, 5)", fewshot_settings, {"shots": (5, 5)}).says(
        "--shots is 5 5; allowed: one or more different numbers, such as --shots 1 5 10"
    ),
    row("few-shot shots: (0,)", fewshot_settings, {"shots": (0,)}).says("shots.0 is 0; allowed: 1 or more"),
    row("few-shot l2: 0.0", fewshot_settings, {"l2": 0.0}).says("l2 is 0.0; allowed: above 0"),
    # scores
    row("evaluation batch_size: 0", evaluation_settings, {"batch_size": 0}).says(
        "evaluation.batch_size is 0; allowed: 1 or more"
    ),
    row("evaluation every_steps: -1", evaluation_settings, {"every_steps": -1}).says(
        "evaluation.every_steps is -1; allowed: 0 (only at the end) or more"
    ),
    row(
        "evaluation url: x, also: (s3://a/test, /b/test/)",
        evaluation_settings,
        {"url": "x", "also": ("s3://a/test", "/b/test/")},
    ).says("evaluation.also has a folder 'test' twice, or without a name; rename it"),
    row(
        "evaluation url: x, also: tuple(map(str, range(40)))",
        evaluation_settings,
        {"url": "x", "also": tuple(map(str, range(40)))},
    ).says("evaluation.also has 40 datasets; allowed: at most 32"),
    row("a dataset without a label that counts", no_label_that_counts).says(
        "no image of DIR/packed has a label that counts: there is nothing to score"
    ),
    # world
    row("nowhere to meet", world_of, {"RANK": "0", "WORLD_SIZE": "2"}).says(
        "MASTER_ADDR is not set for 2 ranks; start with torchrun, or export MASTER_ADDR and MASTER_PORT in the "
        "batch script before srun (slurm/stage.sbatch does)"
    ),
    row("no port", world_of, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}).says(
        "MASTER_PORT is not set for 2 ranks; start with torchrun, or export MASTER_ADDR and MASTER_PORT in the "
        "batch script before srun (slurm/stage.sbatch does)"
    ),
    row("no number", world_of, TORCHRUN_WORLD | {"RANK": "x"}).says(
        "the environment variable RANK is 'x'; allowed: a whole number from 0 to 3; torchrun, srun and "
        "--processes set it: start with one of them, or unset it"
    ),
    row("negative", world_of, TORCHRUN_WORLD | {"RANK": "-1"}).says(
        "the environment variable RANK is '-1'; allowed: a whole number from 0 to 3; torchrun, srun and "
        "--processes set it: start with one of them, or unset it"
    ),
    row("a port by name", world_of, TORCHRUN_WORLD | {"MASTER_PORT": "http"}).says(
        "the environment variable MASTER_PORT is 'http'; allowed: a whole number from 1 to 65535; torchrun, srun "
        "and --processes set it: start with one of them, or unset it"
    ),
    row("threads in words", world_of, {"OMP_NUM_THREADS": "two"}).says(
        "the environment variable OMP_NUM_THREADS is 'two'; allowed: a whole number from 1 to 4096; set it to the "
        "number of threads of each rank, or unset it"
    ),
    row("too high", world_of, TORCHRUN_WORLD | {"RANK": "4"}).says(
        "the environment variable RANK is '4'; allowed: a whole number from 0 to 3; torchrun, srun and "
        "--processes set it: start with one of them, or unset it"
    ),
    row("which of the four is unknown", ambiguous_number, {}, (None, 4)).says(
        "num_ranks is 4, but nothing says which this is; give rank=, from 0 to 3, too"
    ),
    row("another number of ranks", ambiguous_number, ONE_OF_TWO, (None, 4)).says(
        "num_ranks is 4, but this is rank 1 of 2; give rank=, from 0 to 3, too"
    ),
    row("half of a name", ambiguous_number, {"WORLD_SIZE": "2"}, (None, None)).says(
        "the environment variable WORLD_SIZE is '2', and RANK is not set; torchrun, srun and --processes set it: "
        "start with one of them, or unset it, or give rank= and num_ranks="
    ),
    row("the other half", ambiguous_number, {"RANK": "1"}, (None, None)).says(
        "the environment variable RANK is '1', and WORLD_SIZE is not set; torchrun, srun and --processes set it: "
        "start with one of them, or unset it, or give rank= and num_ranks="
    ),
    row("too high", ambiguous_number, ONE_OF_TWO | {"RANK": "2"}, (None, None)).says(
        "the environment variable RANK is '2'; allowed: a whole number from 0 to 1; torchrun, srun and "
        "--processes set it: start with one of them, or unset it, or give rank= and num_ranks="
    ),
    row("a rank without a GPU", rank_without_a_gpu).says(
        "--device is cuda, and torch sees no GPU on this machine: this torch is built without CUDA; repair that, or "
        "give --device cpu"
    ),
    row("an error of our own at the rendezvous", own_error_at_the_rendezvous).says("RuntimeError: ours"),
    # rendezvous
    row("a store that nobody serves", store_that_nobody_serves).says(
        "TransientError: rank 0 of 3 has not arrived within 1 s: nothing answers at 127.0.0.1:…, where the ranks "
        "meet ([Errno 111] Connection refused); see its log, and whether this host reaches that one"
    ),
    # environment
    row("address, http://n1", master_address, "http://n1").says(
        "the environment variable MASTER_ADDR is 'http://n1'; allowed: a host name or an IP address, without a "
        "port; set it to the address of rank 0's host"
    ),
    row("address, n1:1 2", master_address, "n1:1 2").says(
        "the environment variable MASTER_ADDR is 'n1:1 2'; allowed: a host name or an IP address, without a port; "
        "set it to the address of rank 0's host"
    ),
    row("address, n\n1", master_address, "n\n1").says(
        "the environment variable MASTER_ADDR is 'n\\n1'; allowed: a host name or an IP address, without a port; "
        "set it to the address of rank 0's host"
    ),
    row("address, [::1]", master_address, "[::1]").says(
        "the environment variable MASTER_ADDR is '[::1]'; allowed: a host name or an IP address, without a port; "
        "set it to the address of rank 0's host"
    ),
    row("address, é", master_address, "é").says(
        "the environment variable MASTER_ADDR is 'é'; allowed: a host name or an IP address, without a port; set "
        "it to the address of rank 0's host"
    ),
    row(
        "address, too long",
        master_address,
        "n" * 254,
    ).says(
        "the environment variable MASTER_ADDR is 'nnnnnnnnnn…; allowed: a host name or an IP address, without a "
        "port; set it to the address of rank 0's host"
    ),
    *(
        row(f"tasks per node, {value}", tasks_per_node, value).says(
            "the environment variable SLURM_STEP_TASKS_PER_NODE is '…'; allowed: numbers of tasks such as 4(x2),3, of "
            "2 tasks in all; torchrun, srun and --processes set it: start with one of them, or unset it"
        )
        for value in ("x", "2(x)", "0", "3", "1(x3)", "1(x9999999)", "1,,1", "2(x²)")
    ),
    *(
        row(f"threads, {name}, {value}", threads, name, value).says(
            "the environment variable … is '…'; allowed: a whole number from 1 to 4096; …set it… of th…, or unset it"
        )
        for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")
        for value in ("0", "abc", "-1", "4097", "²")
    ),
    *(
        row(f"DeepSpeed's time limit, {value}", deepspeed_timeout, value).says(
            "the environment variable DEEPSPEED_TIMEOUT is '…'; allowed: a whole number from 1 to 1048576; unset it: "
            "Patchline sets its own time limits"
        )
        for value in ("abc", "0", "-1", "1.5")
    ),
    *(
        row(f"ranks that do not know which they are, {value}", ranks_without_a_number, value).says(
            "the environment variable WORLD_SIZE is '…', and RANK is not set; torchrun, srun and --processes set it: "
            "start with one of them, or unset it"
        )
        for value in ("4", "x")
    ),
    row("empty variables are as good as unset", lambda _: numbers_from({"RANK": "", "WORLD_SIZE": "2"})).says(
        "the environment variable WORLD_SIZE is '2', and RANK is not set; torchrun, srun and --processes set it: "
        "start with one of them, or unset it"
    ),
    # determinism
    row("an operator without a deterministic kernel", operator_without_a_deterministic_kernel).says(
        "WillNotSucceedError: engine.deterministic is on, but PyTorch has no deterministic kernel for "
        "some_backward_cuda on this GPU; give --engine.no-deterministic: the run then continues, equal to rounding"
    ),
    # attention
    row("a rollout of no layer", lambda _: Rollout().maps(grid=(1, 1), num_prefix_tokens=0)).says(
        "ValueError: no layer was added"
    ),
    # figures
    row("a folder that cannot be written to", folder_of_pages).says(
        "cannot write filters.png in 'DIR/nowhere': No such file or directory; give another --out"
    ),
    # model_figures
    row("attention that is not finite", attention_that_is_not_finite).says(
        "the model's attention is not finite: its weights are too large or damaged; export them again"
    ),
    row("features that are not finite", features_that_are_not_finite).says(
        "the model's features are not finite: its weights are too large or damaged; export them again"
    ),
    # forecast
    row("unknown", forecast, {"gpu": "v100"}).says(
        "--gpu is 'v100'; known: a100-40, a100, h100, h200, b200, l40s, rtx4090"
    ),
    row("24", forecast, {"num_gpus": 24}).says(
        "--global-batch is 4096, not divisible by 24 ranks; start 8 or 16 or 32 ranks, or change --global-batch"
    ),
    row("slower than nothing", rates, -0.5).says("--mfu is -0.5; allowed: 0 (as measured), up to 1"),
    row("faster than light", rates, 1.5).says("--mfu is 1.5; allowed: 0 (as measured), up to 1"),
    row("more ranks than images", forecast, {"num_gpus": 8192}).says(
        "--global-batch is 4096, not divisible by 8192 ranks; start 1024 or 2048 or 4096 ranks, or change "
        "--global-batch"
    ),
    row("an unknown gpu is answered with those that are known", lambda _: gpu_named("v100")).says(
        "--gpu is 'v100'; known: a100-40, a100, h100, h200, b200, l40s, rtx4090"
    ),
    *(
        row(f"a run of, {change}", compared_run, change).says(
            "--num-images is …, --num-classes … and --days ….0; allowed: images and classes of 0 (not known) or more, "
            "and more than 0 days"
        )
        for change in ({"num_images": -1}, {"num_classes": -1}, {"days": 0.0}, {"days": -2.0})
    ),
    # cluster_plan
    row("restart", times_of, {"restart_seconds": 60.0}).says(
        "--restart-seconds is 60, less than the start-up in it, --startup-seconds 180; raise the first or lower "
        "the second"
    ),
    row("limit", times_of, {"limit_seconds": 300.0}).says(
        "--max-time is 0.0833333 hours, and a job starts up for 180 seconds and ends 120 seconds before them: no "
        "time is left to train; raise --max-time"
    ),
    # comparison
    row(
        "a run without checkpoints does not say how it was computed",
        lambda folder: with_losses(folder / "run", {1: 1.0}).engine(),
    ).says("InvalidDataError: DIR/run/checkpoints has no checkpoint that says how it was computed"),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
