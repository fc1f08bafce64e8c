"""Commands that run no job of their own, and parse their own words: they show jobs, submit them, or look after runs."""

from jobs.stage import Stage

JOB, RUN = "RECIPE|FILE|RUN", "RUN"

TOOLS = {
    "show": Stage(
        summary="print a recipe or file with every field, as YAML",
        second=f"[STAGE] {JOB}",
        module="jobs.reports.show",
        examples=("show digits_smoke", "show my.yaml --schedule.learning-rate 1e-4", "show finetune cifar10"),
    ),
    "diff": Stage(
        summary="list the fields in which two recipes, files or runs differ",
        second="[STAGE] A B",
        module="jobs.reports.diff",
        examples=("diff vit_b16_i21k vit_b16_i21k_augreg", "diff my.yaml runs/mine"),
    ),
    "submit": Stage(
        summary="submit a stage, or a chain of stages, to Slurm",
        second="STAGE RECIPE|CHAIN.yaml --cluster FILE [--nodes N] [--time LIMIT] [--links K] [--spares K] [--dry-run]",
        module="jobs.chains.submit",
        examples=(
            "submit pretrain vit_h14_jft --cluster cluster.yaml --nodes 8 --data.url URL --run-dir /shared/h14",
            "submit pretrain vit_h14_jft --cluster cluster.yaml --dry-run --data.url URL --run-dir /shared/h14",
            "submit chain.yaml --cluster cluster.yaml",
            "submit sweep finetune imagenet_384 --schedule.learning-rate .003 .01 --cluster cluster.yaml ...",
        ),
    ),
    "sweep": Stage(
        summary="try values of flags, then repeat the best with several seeds",
        second="pretrain|finetune RECIPE --run-dir DIR [--any.field A B C ...] [--data.held-out.share X] "
        "[--select-on URL] [--score accuracy|mean_per_class] [--seeds N] [--phase tries|seeds [--part I/N]] "
        "[--dry-run]",
        module="jobs.train.sweep",
        examples=(
            "sweep finetune cifar10 --schedule.learning-rate .003 .01 .03 .06 --data.held-out.share .02 "
            "--initial.weights runs/vit/weights --data.url data/cifar10 --evaluation.url data/cifar10-test "
            "--run-dir runs/sweep",
            "sweep finetune cifar10 --seeds 5 --initial.weights runs/vit/weights --data.url data/cifar10 "
            "--evaluation.url data/cifar10-test --run-dir runs/five-seeds",
        ),
    ),
    "vtab": Stage(
        summary="fine-tune on the tasks of VTAB-1k, and show their mean",
        second="WEIGHTS --data-root URL --run-dir DIR [--tasks NAME ...] [--seeds N]",
        module="jobs.train.vtab",
        examples=("vtab runs/vit/weights --data-root data/vtab --run-dir runs/vit-vtab",),
    ),
    "compare": Stage(
        summary="draw accuracy over compute and data of runs, on one page",
        second="RUN|FOLDER ... [--out FILE.html] [--json]",
        module="jobs.reports.compare",
        is_about_jobs=False,
        examples=("compare runs/study", "compare runs/b16 runs/l16 --out b16-l16.html", "compare runs --json"),
    ),
    "status": Stage(
        summary="show where runs and chains stand, and what their jobs wait for",
        second="[RUN|CHAIN ...] [--json]",
        module="jobs.monitor.status",
        is_about_jobs=False,
        examples=("status /shared/h14", "status /shared/runs/* --json"),
    ),
    "watch": Stage(
        summary="watch a run or a chain, its jobs and its log, drawn again",
        second="RUN|CHAIN [--seconds N]",
        module="jobs.monitor.watch",
        is_about_jobs=False,
        examples=("watch /shared/h14", "watch /shared/birds"),
    ),
    "logs": Stage(
        summary="show the last lines of a run's job, of all ranks or of one",
        second="RUN [--rank N] [--lines N] [--follow]",
        module="jobs.monitor.logs",
        is_about_jobs=False,
        examples=("logs /shared/h14 --rank 3", "logs /shared/h14 --follow"),
    ),
    "stop": Stage(
        summary="ask a run to save and stop, and to stay stopped",
        second=RUN,
        module="jobs.monitor.ask",
        is_about_jobs=False,
        examples=("stop /shared/h14",),
    ),
    "save": Stage(
        summary="ask a running run to save now, and to go on",
        second=RUN,
        module="jobs.monitor.ask",
        is_about_jobs=False,
        examples=("save /shared/h14",),
    ),
    "cancel": Stage(
        summary="cancel all jobs of a run or a chain, waiting or running",
        second="RUN|CHAIN",
        module="jobs.monitor.cancel",
        is_about_jobs=False,
        examples=("cancel /shared/h14", "cancel /shared/birds"),
    ),
}
