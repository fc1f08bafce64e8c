"""What to evaluate on, and how images are prepared for it. This module does not import torch, because the command line
imports it."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.shared_settings import EvaluationTransform
from shards.config import HeldOutConfig, SubsetConfig
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError

_MOST_ALSO = 32
NUM_CLASSES_SHOWN = 5  # the number of most probable classes that a prediction shows
FewshotTransform = Literal["fewshot", "weights", "resize", "central_crop"]


@dataclass(frozen=True, kw_only=True)
class EvaluatedData:
    """A dataset to evaluate on, and how its images are prepared."""

    url: str = ""
    """Dataset to evaluate on: a folder or s3://bucket/prefix."""
    batch_size: Annotated[int, Range(1)] = 100
    """Images per batch on each rank."""
    transform: EvaluationTransform = EvaluationTransform()
    """How images are brought to the model's size."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to evaluate on during training, and how often."""

    url: str = ""
    """Dataset to evaluate on: a folder or s3://bucket/prefix; empty: no evaluation."""
    also: tuple[str, ...] = ()
    """More datasets to score on at the same steps, each under the name of its folder."""
    every_steps: Annotated[int, Range(0, zero="only at the end")] = 0
    """Steps between two evaluations during training; 0: only at the end."""
    batch_size: Annotated[int, Range(1)] = EvaluatedData.batch_size
    transform: EvaluationTransform = EvaluatedData.transform

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="evaluation.")
        if len(self.also) > _MOST_ALSO:
            raise UserError(f"evaluation.also has {len(self.also)} datasets; allowed: at most {_MOST_ALSO}")
        names = [_set_name(url) for url in self.also]
        for name in names:
            if not name or names.count(name) > 1:
                raise UserError(f"evaluation.also has a folder {shown_value(name)} twice, or without a name; rename it")

    def sets(self, *, has_held_out: bool = False) -> dict[str, str]:
        """Returns the URL of each dataset by its name.

        The dataset at `url` has an empty name. With `has_held_out`, the part that is held out of the training data has
        the empty name, and the dataset at `url` has the name of its folder. Raises UserError if a dataset in `also` has
        that name, too.
        """
        also = {_set_name(url): url for url in self.also}
        if not self.url:
            return also
        name = _set_name(self.url) if has_held_out else ""
        if name in also:
            raise UserError(f"evaluation.url and evaluation.also have a folder {shown_value(name)} each; rename one")
        return {name: self.url} | also


def _set_name(url: str) -> str:
    """Returns the name of a dataset: its folder's, cut to 64 characters, with _ for each character that is no letter,
    digit, dot or dash."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", url.rstrip("/").rpartition("/")[2])[:64]


@dataclass(frozen=True, kw_only=True)
class FewshotImages:
    """The images of a few-shot measurement: where they are, and how they are prepared."""

    url: str = ""
    """Dataset to take the shots from: a folder or s3://bucket/prefix."""
    test_url: str = ""
    """Dataset to measure on; empty: the part that is held out, or the test split beside the first, URL-test."""
    subset: SubsetConfig = SubsetConfig()
    """Part of the dataset to take the shots from."""
    held_out: HeldOutConfig = HeldOutConfig()
    """Part of the dataset to measure on, from which no shots are taken."""
    transform: FewshotTransform = "fewshot"
    """How images are brought to the model's size: fewshot, as big_vision does; weights, as in the evaluations of the
    run that made them."""
    batch_size: Annotated[int, Range(1)] = EvaluatedData.batch_size

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.")


@dataclass(frozen=True, kw_only=True)
class FewshotConfig:
    """What to measure with a few images per class."""

    shots: tuple[Annotated[int, Range(1)], ...] = (1, 5, 10, 25)
    """Numbers of training images per class."""
    seeds: Annotated[int, Range(1, 1000)] = 3
    """Number of different choices of these images; the scores are means over them."""
    l2: Annotated[float, Range(above=0)] = 1024.0
    """Strength of the ridge regression; big_vision's is 1024."""
    probe: bool = False
    """Also fit a linear probe by L-BFGS to the same features, as a cross-check."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="fewshot." if isinstance(self, FewshotInTraining) else "")
        if not self.shots or len(set(self.shots)) != len(self.shots):
            raise UserError(
                f"{self.shots_flag} is {shown_value(self.shots)}; allowed: one or more different numbers, such as "
                f"{self.shots_flag} 1 5 10"
            )

    @property
    def shots_flag(self) -> str:
        """The flag on the command line: `--shots` in `patchline fewshot`, `--fewshot.shots` in training."""
        return "--fewshot.shots" if isinstance(self, FewshotInTraining) else "--shots"


@dataclass(frozen=True, kw_only=True)
class FewshotInTraining(FewshotConfig):
    """What to measure with a few images per class while a run trains."""

    shots: tuple[Annotated[int, Range(1)], ...] = (10,)
    url: str = ""
    """Dataset to take the shots from: a folder or s3://bucket/prefix; empty: no few-shot scores."""
    test_url: str = FewshotImages.test_url
    subset: SubsetConfig = FewshotImages.subset
    held_out: HeldOutConfig = FewshotImages.held_out
    transform: FewshotTransform = FewshotImages.transform
    """How images are brought to the model's size: fewshot, as big_vision does; weights, as in the evaluations of the
    run."""
    every_steps: Annotated[int, Range(0, zero="only at the end")] = 0
    """Steps between two measurements; 0: only at the end."""
