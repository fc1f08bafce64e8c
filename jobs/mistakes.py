"""Makes the errors for wrong words on a command line. Each message says what the user may have meant.

An unknown field is compared with the names of the job's fields. There is also a note for a published model's name that
is given to a recipe with other sizes, because the name does not change the sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jobs.flags import Flag
from pipeline.models.config import NAMES, RESNETS, SIZES, ModelConfig
from shards.errors import UserError
from shards.output.url_secrets import has_secret, without_secrets

_CLOSE_BESIDE, _CLOSE_ELSEWHERE = 0.6, 0.8
Required = Sequence[str | tuple[str, ...]]  # the type of `Stage.required`
HELP_WORDS = ("-h", "--help", "--help-all")
_MOST_LISTED = 16
_INSTEAD = {"--data.url": "--data.mix"}  # either is enough
_TAKES_FOLDER = {  # the flag to suggest if a folder was given instead of a recipe
    "pack": "--source.root",
    "pretrain": "--data.url",
    "finetune": "--data.url",
    "evaluate": "--weights",
}
# Names in other programs -> our flags. Only those that the command has are suggested.
_SYNONYMS = {
    name: flags
    for flags, names in {
        ("--schedule.learning-rate",): "lr",
        ("--schedule.warmup-steps",): "warmup",
        ("--schedule.final-learning-rate",): "min-lr",
        ("--schedule.decay",): "scheduler",
        ("--global-batch", "--data.batch-size"): "batch batch-size bs",
        ("--micro-batch",): "grad-accum gradient-accumulation-steps",
        ("--steps",): "epochs num-epochs max-steps iterations",
        ("--optimizer.weight-decay",): "wd",
        ("--optimizer.name",): "opt optimizer",
        ("--model.name",): "model arch",
        ("--model.image-size", "--image-size"): "img-size resolution",
        ("--model.num-classes", "--num-classes"): "classes",
        ("--engine.precision",): "dtype amp bf16 fp16",
        ("--engine.float8",): "fp8",
        ("--engine.zero-stage",): "zero",
        ("--clip-norm",): "clip clip-grad grad-clip max-grad-norm",
        ("--ema-decay",): "ema average-factor",
        ("--data.mixup.alpha",): "mixup",
        ("--data.mixup.cutmix-alpha",): "cutmix",
        ("--data.augment.color-jitter",): "color-jitter",
        ("--label-smoothing",): "smoothing",
        ("--data.url",): "data dataset",
        ("--data.url", "--source.root"): "data-dir data-path train-dir",
        ("--evaluation.url", "--data.url"): "val",
        ("--evaluation.every-steps",): "eval-every",
        ("--checkpoint.every-steps",): "save-every save-interval",
        ("--log-every-steps",): "log-every log-interval",
        ("--out", "--run-dir"): "output output-dir out-dir",
        ("--run-dir",): "out logdir workdir resume",
        ("--run-dir", "--out"): "save-dir",
        ("--initial.weights", "--weights", "--checkpoint.url"): "checkpoint",
        ("--initial.weights", "--weights"): "ckpt pretrained",
        ("--workers", "--data.num-threads"): "num-workers",
        ("--data.num-threads",): "workers",
        ("--workers",): "jobs",
        ("--data.num-threads", "--workers"): "threads",
        ("--device",): "gpu cuda",
        ("--source.root", "--source.files", "--source.path"): "input source",
        ("--source.root", "--source.files"): "images",
        ("--source.root", "--run-dir"): "dir",
        ("--samples-per-shard",): "shard-size",
    }.items()
    for name in names.split()
}
# Options of sbatch, long and short -> their names in the file of `patchline submit --cluster`; "": submit sets it.
_SBATCH = {
    **dict.fromkeys(("partition", "p"), "partition:"),
    **dict.fromkeys(("account", "A"), "account:"),
    **dict.fromkeys(("qos", "q"), "qos:"),
    **dict.fromkeys(("constraint", "C"), "constraint:"),
    **dict.fromkeys(("gres", "gpus", "G", "gpus-per-node", "ntasks", "n", "ntasks-per-node"), "gpus_per_node:"),
    **dict.fromkeys(("cpus-per-task", "c", "cpus-per-gpu"), "cpus_per_rank:"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "options: [--mem=...]"),
    **dict.fromkeys(("exclude", "x"), "options: [--exclude=...]"),
    **dict.fromkeys(("nodelist", "w"), "options: [--nodelist=...]"),
    **{name: f"options: [--{name}=...]" for name in ("reservation", "licenses", "mail-user", "mail-type")},
    "exclusive": "exclusive:",
    **dict.fromkeys(("container-image", "container-mounts"), "container:"),
    **dict.fromkeys(("job-name", "J", "dependency", "d", "array", "a", "signal", "chdir", "D", "error", "o"), ""),
}
# Our commands -> their names in other programs.
_STAGES = {
    name: stage
    for stage, names in {
        "pretrain": "train training fit",
        "finetune": "ft",
        "evaluate": "eval test val",
        "predict": "infer",
        "verify": "check validate",
        "export": "convert save",
        "weights": "extract consolidate",
        "import": "load",
        "plan": "cost flops",
        "pack": "create prepare",
        "show": "config",
        "ls": "list runs status",
        "doctor": "env info",
    }.items()
    for name in names.split()
}


def kept_sizes(job: Any, words: Sequence[str]) -> str:
    """Returns a note for a user who gave `--model.name`: which sizes of the recipe it does not change, or which
    published name it may mean. Returns an empty string if there is nothing to note, such as if the words also give the
    sizes."""
    training = getattr(job, "training", job)  # a plan has a training job inside
    model, prefix = getattr(training, "model", None), "--model." if training is job else "--training.model."
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    if not isinstance(model, ModelConfig) or f"{prefix}name" not in given:
        return ""
    if model.name not in NAMES:
        near = get_close_matches(model.name, NAMES, n=1, cutoff=_CLOSE_ELSEWHERE)
        own = f"{prefix}name {model.name} is a name of your own, for the recipe's sizes"
        return f"{own}; did you mean {near[0]}?" if near else ""
    kept, flags = [], []
    for field, its in _published(model.name).items():
        flag = f"{prefix}{field.replace('_', '-')}"
        here = getattr(model, field)
        if here not in (None, its) and flag not in given:
            kept.append(f"{field.replace('_', ' ')} {_shown(here)} ({_shown(its)})")
            flags.append(f"{flag} {_shown(its)}")
    if not kept:
        return ""
    return (
        f"{prefix}name {model.name} leaves the recipe's own sizes as they are (in brackets: those of "
        f"{model.name}): {', '.join(kept)}; for {model.name} itself, add {' '.join(flags)}"
    )


def _published(name: str) -> dict[str, Any]:
    resnet = RESNETS.get(name)
    sizes = vars(SIZES[name]) if name in SIZES else {}
    return sizes | ({"resnet_units": resnet.units, "resnet_factor": resnet.factor} if resnet else {})


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every field, each group before its fields. If a field can hold one of several groups,
    yields the fields of each of them."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        yield f"{prefix}{each.name}"
        for inner in (hints[each.name], *get_args(hints[each.name])):
            if is_dataclass(inner):
                yield from field_names(inner, f"{prefix}{each.name}.")


def known_instead(given: str, prefix: str, root: type) -> str:
    """Returns a hint, such as `; did you mean ...?`, for a name that `root` does not have below `prefix`, or an empty
    string if no name is similar."""
    word = given.replace("-", "_").lower()
    every = list(dict.fromkeys(field_names(root)))
    if word in every and "." in word:
        return f"; write it as {nested(word)}"
    beside = [name.removeprefix(prefix) for name in every if name.rpartition(".")[0] == prefix.rstrip(".")]
    if word in beside:
        return f"; did you mean {word}?"
    by_last = {name.rpartition(".")[2]: name for name in reversed(every)}  # the first field of this name wins
    if word in by_last:
        return f"; did you mean {nested(by_last[word])}?"
    for close in get_close_matches(word, beside, n=1, cutoff=_CLOSE_BESIDE):
        return f"; did you mean {close}?"
    for close in get_close_matches(word, by_last, n=1, cutoff=_CLOSE_ELSEWHERE):
        return f"; did you mean {nested(by_last[close])}?"
    return ""


def nested(name: str) -> str:
    """Writes a dotted name as YAML does: `a.b` is `a: {b: ...}`."""
    *groups, last = name.split(".")
    return "".join(f"{group}: {{" for group in groups) + f"{last}: ..." + "}" * len(groups)


def unknown_stage(word: str, stages: Sequence[str]) -> UserError:
    """Returns the error for a first word that is not a stage."""
    meant = _STAGES.get(word.lower(), "")
    near = [meant] if meant in stages else similar(word, stages)
    return UserError(f"unknown stage {word!r}; {_meant(near)}allowed: {', '.join(stages)}")


def unknown_recipe(word: str, stage: str, recipes: Sequence[str]) -> UserError:
    """Returns the error for a second word that is neither a recipe nor a file."""
    near = [name for name in recipes if len(word) > 2 and word in name][:3] or similar(word, recipes)
    listed = ", ".join(recipes) if len(recipes) <= _MOST_LISTED else f"what 'patchline {stage}' lists"
    taker = _TAKES_FOLDER.get(stage, "") if word and Path(word).is_dir() else ""
    folder = f"it is a folder, which {taker} takes; " if taker else ""
    return UserError(
        f"unknown recipe {word!r} of patchline {stage}; {_meant(near)}{folder}allowed: {listed}, a YAML file "
        "(my.yaml, RUN/job.yaml), or a function in a Python file (my_recipes.py:my_vit)"
    )


def unknown_flag(name: str, flags: Sequence[str], *, command: str) -> UserError:
    """Returns the error for a flag that a command does not know."""
    meant = _of_sbatch(name) or _meant(similar_flags(name, flags))
    if "--steps" in flags and name.endswith("epochs"):
        meant += "steps are epochs x images of the dataset / --global-batch; "
    return UserError(f"unknown flag {name} of {command}; {meant}{command} --help-all lists all flags")


def unexpected_word(word: str, *, command: tuple[str, str]) -> UserError:
    """Returns the error for a word after the recipe that belongs to no flag."""
    taker = _TAKES_FOLDER.get(command[0], "") if Path(word).is_dir() else ""
    meant = f"it is a folder, which {taker} takes" if taker else "a value follows its flag, as in --flag VALUE"
    return UserError(f"unexpected word {word!r}; {meant}. See {' '.join(['patchline', *command]).rstrip()} --help")


def _of_sbatch(name: str) -> str:
    """Returns where an option of sbatch belongs, or an empty string for any other flag."""
    word = name.lstrip("-")
    setting = _SBATCH.get(word if len(word) == 1 else word.replace("_", "-").lower())
    if setting is None:
        return ""
    if not setting:
        return "it is an option of sbatch that `patchline submit` sets itself; "
    return f"it is an option of sbatch: write `{setting}` into the file of `patchline submit --cluster FILE`; "


def required_flags(flags: Sequence[Flag], required: Required) -> list[Flag]:
    """Returns the flags that a stage requires (see `Stage.required`) and that have no value in this job yet."""
    by_name = {flag.name: flag for flag in flags}
    groups = [(names,) if isinstance(names, str) else names for names in required]
    first = [next((name for name in names if name in by_name), "") for names in groups]
    return [by_name[name] for name in first if name and not by_name[name].default]


def refuse_bytes(words: Sequence[str]) -> None:
    """Raises UserError for a word that is not UTF-8: records and logs are UTF-8 and could not hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="backslashreplace").decode()
            raise UserError(
                f"the argument '{shown}' is not UTF-8; allowed: UTF-8. Rename the file or folder, or give a link to it "
                "that has another name"
            ) from error


def refuse_lost_folder() -> None:
    """Raises UserError if the current folder has been deleted: libraries cannot be loaded and child processes cannot be
    started there."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(
            f"the current folder is unusable ({error.strerror})", todo="change to another one with cd"
        ) from error


def refuse_secrets(flags: Sequence[Flag]) -> None:
    """Raises UserError for a URL with a password or a signature, because records would keep the URL, and others may
    read records."""
    for flag in flags:
        for value in flag.default if isinstance(flag.default, tuple) else (flag.default,):
            if isinstance(value, str) and has_secret(value):
                raise UserError(
                    f"{flag.name} is {without_secrets(value)!r}, with a password or a signature, which the run's files "
                    "would keep; leave it out of the URL, and give credentials by the environment or ~/.aws/credentials"
                )


def refuse_missing(flags: Sequence[Flag], required: Required) -> None:
    """Raises UserError if required flags have no value in the job, and names all of them."""
    given = {flag.name for flag in flags if flag.default}
    missing = [flag for flag in required_flags(flags, required) if _INSTEAD.get(flag.name) not in given]
    if missing:
        raise UserError("; ".join(f"{flag.name} is missing: {flag.sentence.rstrip('.')}" for flag in missing))


def similar_flags(name: str, flags: Sequence[str]) -> list[str]:
    """Returns the flags that an unknown flag may mean, found by names in other programs, by its last word, or by
    spelling."""
    word = name.lstrip("-").replace("_", "-").lower()
    synonyms = [flag for flag in _SYNONYMS.get(word, ()) if flag in flags]
    last = word.rpartition(".")[2]
    same_end = [flag for flag in flags if _last(flag) == last]
    by_letters = [
        flag for end in similar(last, list({_last(flag): 0 for flag in flags})) for flag in flags if _last(flag) == end
    ]
    return (synonyms or same_end or similar(f"--{word}", flags) or by_letters)[:3]


def similar(word: str, allowed: Sequence[str]) -> list[str]:
    """Returns at most three allowed words that are spelled like `word`. Words that begin with `word` come first."""
    begins = [other for other in allowed if len(word) > 2 and other.startswith(word)]
    near = get_close_matches(word, allowed, n=3, cutoff=0.6)
    return list(dict.fromkeys([*begins, *near]))[:3]


def _meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}? " if near else ""


def _last(flag: str) -> str:
    return flag.removeprefix("--").rpartition(".")[2]
