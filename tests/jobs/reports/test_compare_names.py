"""Names of models and datasets in a comparison: no two different ones share a name."""

from dataclasses import replace
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from jobs.record import leaves_of
from jobs.reports.compare_names import (
    ScoredOn,
    dataset_names,
    fewshot_on,
    model_name,
    scored_on,
    sizes_of,
    what_differs,
)
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import EvaluationConfig, FewshotInTraining
from pipeline.models.config import NAMES, ModelConfig
from pipeline.training.settings.job import TeacherConfig
from pipeline.training.settings.tokens import TokensConfig
from shards.config import HeldOutConfig, SubsetConfig


@pytest.mark.parametrize("name", NAMES)
def test_a_published_model_has_its_name_alone(name: str) -> None:
    assert model_name(name, sizes_of(ModelConfig(name=name))) == name


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ({"name": "vit_b16", "depth": 4, "patch": 8}, "vit_b16, patch 8, depth 4"),
        ({"name": "bit_r50x1", "resnet_units": (1, 1)}, "bit_r50x1, units 1 1"),
        ({"name": "vit_b16", "image_size": 384}, "vit_b16"),
        ({"name": "vit_b16", "num_classes": 7}, "vit_b16"),
    ],
)
def test_sizes_that_are_not_the_published_ones_are_said(model: dict[str, Any], label: str) -> None:
    assert model_name(model["name"], sizes_of(ModelConfig(**model))) == label


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"position": "relative"}, "vit_b16, positions relative"),
        ({"position_at": "layers"}, "vit_b16, positions at layers"),
        ({"pooling": "average"}, "vit_b16, average pooling"),
        ({"pooling": "average", "attention": "axial"}, "vit_b16, average pooling, axial attention"),
        ({"image_size": 384}, "vit_b16, 384 px"),
    ],
)
def test_variants_are_told_apart_from_others(fields: dict[str, Any], label: str) -> None:
    """Tables 8 and Figure 9 of the paper."""
    plain, variant = sizes_of(ModelConfig()), sizes_of(ModelConfig(**fields))
    assert model_name("vit_b16", variant, others=[plain, variant]) == label
    assert model_name("vit_b16", plain, others=[plain, variant]) != label


def on(*urls: str, part: str = "", fingerprint: str = "") -> ScoredOn:
    return ScoredOn(urls=urls, part=part, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ([on("s3://b/pets-test"), on("data/pets-test/")], ["b/pets-test", "data/pets-test"]),
        ([on("d/pets/test"), on("d/digits/test"), on("d/other")], ["pets/test", "digits/test", "other"]),
        ([on("d/a", part="10 % held out"), on("d/a")], ["a, 10 % held out", "a"]),
        ([on("x/a", "x/b", part="5 images held out")], ["a and b, 5 images held out"]),
        ([on("a"), on("a")], ["a", "a"]),
        ([on("")], ["unnamed"]),
        ([on("s3://b/pets-test", fingerprint="1"), on("data/pets-test/", fingerprint="1")], ["pets-test"] * 2),
        ([on("b/pets", fingerprint="1"), on("data/pets", fingerprint="2")], ["b/pets", "data/pets"]),
        ([on("data/pets", fingerprint="1"), on("data/pets")], ["pets", "pets"]),
        ([on("a", part="10 % held out", fingerprint="1"), on("b", fingerprint="1")], ["a, 10 % held out", "b"]),
    ],
)
def test_datasets_have_names_of_their_own(found: list[ScoredOn], names: list[str]) -> None:
    assert [dataset_names(found)[one] for one in found] == names


def test_what_is_scored() -> None:
    """As in training: a held-out part goes before a dataset, and the test split lies beside the shots."""
    job = digits_smoke()
    assert (scored_on(job), fewshot_on(job.fewshot)) == (None, None)
    tested = replace(job, evaluation=EvaluationConfig(url="d/test"), fewshot=FewshotInTraining(url="d/few/"))
    assert (scored_on(tested), fewshot_on(tested.fewshot)) == (on("d/test"), on("d/few-test"))
    part = DataConfig(url="d/a", held_out=HeldOutConfig(share=0.1, seed=3), subset=SubsetConfig(first=5, share=0.5))
    held_out = scored_on(replace(tested, data=part))
    assert held_out == on("d/a", part="10 % of samples 5 to the end held out by seed 3")
    few = FewshotInTraining(url="d/few", held_out=HeldOutConfig(count=2000))
    assert fewshot_on(few) == on("d/few", part="2,000 images held out")


def test_what_differs_is_said_in_words_that_stand_alone() -> None:
    """A teacher's fields have vague names, and a list is one value. Its digest says no more than its weights."""
    base = digits_smoke()
    teacher = TeacherConfig(weights="runs/large/weights", target="hard", share=0.5, sha256="a" * 64)
    tokens, optimizer = TokensConfig(patch_sizes=(4, 8), patch_dropout=0.5), replace(base.optimizer, sam_rho=0.1)
    taught = replace(base, teacher=teacher, tokens=tokens, optimizer=optimizer)
    plain, found = what_differs([leaves_of(base), leaves_of(taught)])
    assert set(plain) == {"sam_rho 0.0", "patch_dropout 0.0"}
    assert set(found) >= {
        *("teacher.weights runs/large/weights", "teacher.target hard", "teacher.share 0.5"),
        *("sam_rho 0.1", "patch_sizes 4 8", "patch_dropout 0.5"),
    }
