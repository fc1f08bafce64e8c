"""Finds names that tell the points of a comparison apart: models of the same name get their sizes added, and datasets
their folders. All functions are pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from jobs.settings.models import EvaluateJob
from pipeline.evaluation.config import FewshotImages, FewshotInTraining
from pipeline.models.config import NAMES, ModelConfig
from pipeline.training.settings.job import TrainingJob
from shards.config import HeldOutConfig, SubsetConfig
from shards.output.quantities import plural

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "lamb": "LAMB", "adafactor": "Adafactor"}
_SIZES = ("patch", "depth", "width", "mlp_width", "num_heads", "resnet_units", "resnet_factor")
# These fields are not listed, because they do not change the result, other columns show them, or they only say how a
# run is scored.
_NOT_TOLD = (
    *("run_dir", "device", "threads", "micro_batch", "engine.", "checkpoint.", "evaluation.", "fewshot.", "hang."),
    *("loggers.", "log_every_steps", "norms_every_steps", "similarity_every_steps", "max_skipped_updates", "guard."),
    *("data.reading.", "data.num_threads", "data.steps_ahead", "data.memory_limit_bytes", "data.max_quarantined"),
    *("data.allow_other_decoder", "model.name", "model.num_classes", "model.image_size", "teacher.sha256"),
)
# Field names that are unclear without their group.
_VAGUE = ("name", "url", "share", "count", "decay", "weights", "target", "temperature")
_MOST_VALUE_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class ScoredOn:
    """What a score is measured on: a whole dataset or, if `part` is not empty, a part of it or other labels, described
    in words. A mix of datasets has several URLs. `fingerprint`: that of the dataset, if it is known."""

    urls: tuple[str, ...]
    part: str = ""
    fingerprint: str = ""

    def name(self, *, num_folders: int = 1) -> str:
        """Returns a name such as `digits-test`, or `digits, 10 % held out`."""
        names = ["/".join(url.rstrip("/").split("/")[-num_folders:]) or "unnamed" for url in self.urls]
        return ", ".join(filter(None, (" and ".join(names), self.part)))


def scored_on(job: TrainingJob) -> ScoredOn | None:
    """Returns what a run's accuracy is measured on; None if it is not measured. A held-out part takes precedence over a
    separate dataset."""
    data = job.data
    if not data.held_out.is_none:
        urls = (data.url,) if data.url else tuple(url for url, _ in data.mix)
        return ScoredOn(urls=urls, part=_part(data.subset, data.held_out))
    return ScoredOn(urls=(job.evaluation.url,)) if job.evaluation.url else None


def evaluated_on(job: EvaluateJob, *, fingerprint: str) -> ScoredOn:
    """Returns what `patchline evaluate` has measured an accuracy on."""
    part = "" if job.held_out.is_none else _part(job.subset, job.held_out)
    given = {name: value for name, value in asdict(job.subset).items() if value != getattr(SubsetConfig, name)}
    samples = "" if part else ", ".join(f"subset.{name} {value}" for name, value in given.items())
    ways = {"ReaL's labels": job.real, f"classes of {job.class_map}": job.class_map, "label weights": job.label_weights}
    words = [part, samples, *(name for name, is_used in ways.items() if is_used)]
    return ScoredOn(urls=(job.data.url,), part=", ".join(filter(None, words)), fingerprint=fingerprint)


def fewshot_on(few: FewshotImages | FewshotInTraining) -> ScoredOn | None:
    """Returns what a few-shot accuracy is measured on; None if it is not measured."""
    if not few.url:
        return None
    if not few.held_out.is_none:
        return ScoredOn(urls=(few.url,), part=_part(few.subset, few.held_out))
    return ScoredOn(urls=(few.test_url or f"{few.url.rstrip('/')}-test",))


def dataset_names(found: Iterable[ScoredOn]) -> dict[ScoredOn, str]:
    """Returns a name for each dataset. A dataset at several URLs has one name, if its fingerprint is known. If the
    names of different datasets would be equal, they include as many parent folders as needed to differ."""
    each = list(dict.fromkeys(found))
    known = {one.urls: one.fingerprint for one in each if one.fingerprint}
    firsts: dict[tuple[object, str], ScoredOn] = {}
    first = {}
    for one in each:
        same = one.fingerprint or known.get(one.urls) or one.urls
        first[one] = firsts.setdefault((same, one.part), one)
    names = {one: one.name() for one in firsts.values()}
    most = max((url.count("/") for one in names for url in one.urls), default=0)
    for num_folders in range(2, most + 2):
        times = Counter(names.values())
        names = {one: one.name(num_folders=num_folders) if times[name] > 1 else name for one, name in names.items()}
    return {one: names[first[one]] for one in each}


def sizes_of(model: ModelConfig) -> dict[str, str]:
    """Returns a model's sizes and options in words, by field."""
    found = {}
    if not model.is_bit:
        size = model.size
        found = {
            "patch": f"patch {size.patch}",
            "depth": f"depth {size.depth}",
            "width": f"width {size.width}",
            "mlp_width": f"MLP {size.mlp_width}",
            "num_heads": plural(size.num_heads, "head"),
            "pooling": "class token" if model.pooling == "token" else f"{model.pooling} pooling",
            "position": f"positions {model.position.replace('_', ' ')}",
            "position_at": f"positions at {model.position_at.replace('_', ' ')}",
            "representation": "hidden layer" if model.representation else "no hidden layer",
            "masked_patches": "masked patches" if model.masked_patches else "labels",
            "qk_norm": "norms of queries and keys" if model.qk_norm else "no norms of queries and keys",
            "registers": plural(model.registers, "register") if model.registers else "no registers",
            "distillation_token": "distillation token" if model.distillation_token else "no distillation token",
            "layer_scale": f"LayerScale {model.layer_scale:g}" if model.layer_scale else "no LayerScale",
            "attention": f"{model.attention} attention",
            "mlp": f"{model.mlp} MLP",
            "inner_norms": f"inner norms {model.inner_norms}",
            "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
            "patch_norm": "norm of patches" if model.patch_norm else "no norm of patches",
            "first_norm": "first norm" if model.first_norm else "no first norm",
            "last_norm": f"last norm {model.last_norm}",
            "rotary_temperature": f"rotary temperature {model.rotary_temperature:g}",
            "rotary_places": f"rotary places {model.rotary_places.replace('_', ' ')}",
            "rotary_grid": f"rotary grid {model.rotary_grid}",
            "masked_target": f"target {model.masked_target}",
            "masked_share": f"{100 * model.masked_share:.4g} % masked",
        }
    if model.resnet:
        found["resnet_units"] = f"units {' '.join(map(str, model.resnet.units)) or 'none'}"
        found["resnet_factor"] = f"factor {model.resnet.factor}"
    return found | {"image_size": f"{model.image_size} px"}


def model_name(name: str, sizes: Mapping[str, str], *, others: Sequence[Mapping[str, str]] = ()) -> str:
    """Returns the name, followed by the sizes in which the model differs from the published model of this name or from
    `others`."""
    own = sizes_of(ModelConfig(name=name)) if name in NAMES else {}
    differing = {field for field in sizes if any(one.get(field) != sizes[field] for one in others)}
    differing |= {field for field in _SIZES if field in own and sizes.get(field) != own[field]}
    return ", ".join((name, *(text for field, text in sizes.items() if field in differing)))


def what_differs(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Returns for each run the settings in which the runs differ, such as `learning_rate 0.001`. `settings`: the values
    of each run by field. Empty values are left out. A field is named by its last word if that word is clear and unique,
    otherwise by its whole path. The elements of a list are one value, such as `patch_sizes 8 16 32`."""
    settings = [_as_told(one) for one in settings]
    fields = [name for name in dict.fromkeys(name for one in settings for name in one) if _is_told(name)]
    told = [name for name in fields if len({one.get(name) for one in settings}) > 1]
    words = {name: name.rpartition(".")[2] for name in told}
    number = Counter(words.values())
    short = {name: name if number[word] > 1 or word in _VAGUE else word for name, word in words.items()}
    return [
        tuple(f"{short[name]} {one[name][-_MOST_VALUE_CHARACTERS:]}" for name in told if one.get(name))
        for one in settings
    ]


def _as_told(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings with the elements of each list, whose fields end in their places, as one value. Settings of
    a teacher are left out if there is none."""
    found = dict[str, str]()
    for name, value in settings.items():
        if name.startswith("teacher.") and not settings.get("teacher.weights"):
            continue
        whole = re.sub(r"(\.\d+)+$", "", name)
        found[whole] = f"{found[whole]} {value}" if whole in found else value
    return found


def _is_told(name: str) -> bool:
    is_size = name.removeprefix("model.") in _SIZES
    return not is_size and not name.startswith(_NOT_TOLD)


def _part(subset: SubsetConfig, held_out: HeldOutConfig) -> str:
    amount = f"{held_out.count:,} images" if held_out.count else f"{100 * held_out.share:.4g} %"
    span = f" of samples {subset.first} to {subset.end or 'the end'}" if subset.first or subset.end else ""
    return f"{amount}{span} held out" + (f" by seed {held_out.seed}" if held_out.seed else "")
