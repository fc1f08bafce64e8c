"""The stages of the command line: what each is for, and what its second word is."""

from dataclasses import dataclass

RECIPE, URL, PATH = "RECIPE|FILE.yaml", "URL|FILE.yaml", "PATH|FILE.yaml"
JOB = "RECIPE|FILE|RUN"  # of show and diff, which read their words themselves
WITH_SMOKE = ("pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage is a module of jobs/ with `run(job) -> exit code`; `second` says what its second word is.

    `module`: its name where it is not the stage's (`import` is a word of Python's).
    """

    summary: str
    second: str
    module: str = ""


STAGES = {
    "pack": Stage(summary="pack images into verified WebDataset shards", second=RECIPE),
    "index": Stage(summary="index WebDataset tars made by others, in place", second=URL),
    "verify": Stage(summary="check a dataset against its manifest", second=URL),
    "card": Stage(summary="one page that shows what is in a dataset", second=URL),
    "pretrain": Stage(summary="pre-train; the same command again continues the run", second=RECIPE),
    "finetune": Stage(summary="fine-tune a run's weights, usually at higher resolution", second=RECIPE),
    "evaluate": Stage(summary="accuracy of a run's weights on a dataset", second=RECIPE),
    "plan": Stage(summary="what a recipe costs: parameters, operations, images a second", second=RECIPE),
    "import": Stage(
        summary="weights of others (.npz, timm, Hugging Face) as a weights folder",
        second=PATH,
        module="import_weights",
    ),
    "export": Stage(
        summary="a run's weights for others: .npz, timm, Hugging Face", second=PATH, module="export_weights"
    ),
    "show": Stage(summary="a recipe or file with every field, as YAML", second=JOB),
    "diff": Stage(summary="the fields in which two recipes, files or runs differ", second=f"{JOB} {JOB}"),
    "demo": Stage(summary="the whole pipeline on real images in five minutes", second=""),
}
