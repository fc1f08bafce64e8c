"""The stages of the command line: what each is for, and what its second word is."""

from dataclasses import dataclass

RECIPE, URL, PATH = "RECIPE|FILE.yaml", "URL|FILE.yaml", "PATH|FILE.yaml"
WEIGHTS = "WEIGHTS IMAGE..."  # the second word, and what follows it without a flag
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
    "predict": Stage(summary="the most probable classes of images, by a run's weights", second=WEIGHTS),
    "plan": Stage(summary="what a recipe costs: parameters, operations, images a second", second=RECIPE),
    "import": Stage(
        summary="weights of others (.npz, timm, Hugging Face) as a weights folder",
        second=PATH,
        module="import_weights",
    ),
    "export": Stage(
        summary="a run's weights for others: .npz, timm, Hugging Face", second=PATH, module="export_weights"
    ),
    "demo": Stage(summary="the whole pipeline on real images in five minutes", second=""),
}
