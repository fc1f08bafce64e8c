"""Vision Transformers of timm and transformers are read with the library's own results, or refused with a reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.conversion.timm_architectures import ARCHITECTURES
from tests.pipeline.models.conversion.published import of_timm
from tests.pipeline.models.conversion.zoo import (
    BOUND,
    PAGE,
    TOWERS,
    names_in,
    outcomes,
    outcomes_of_towers,
    page,
    row,
)
from tests.rigs.faults import every_fault

# One of each kind, with what it has that the paper's models do not have.
READ = {
    "vit_base_patch16_clip_quickgelu_224": "QuickGELU, a norm before the layers, epsilon 1e-5, no bias of patches",
    "vit_medium_patch16_gap_240": "no biases of q, k and v",
    "vit_wee_patch16_reg1_gap_256": "a norm of the mean",
    "vit_base_patch16_radio_v3": "no last norm",
    "deit_tiny_distilled_patch16_224": "a distillation token",
    "vit_giant_patch14_reg4_dinov2": "SwiGLU in one tensor",
    "beit3_base_patch16_224": "norms inside, the mean beside a class token",
    "eva_giant_patch14_224": "biases of queries and values alone",
    "eva02_tiny_patch14_336": "learned and rotary positions, of a stretched grid",
    "eva02_base_patch16_clip_224": "q, k and v apart, SwiGLU in two tensors, a norm in attention",
    "vit_small_plus_patch16_dinov3_qkvb": "DINOv3's rotary positions, halves of channels",
    "vit_small_patch16_rope_ape_224": "learned and rotary positions",
    "vit_mediumd_patch16_rope_reg1_gap_256": "rows before columns",
    "vit_pe_spatial_tiny_patch16_512": "places from 1",
    "aimv2_large_patch14_224": "RMSNorm, a norm of patches, no biases of dense layers",
    "vit_base_patch16_sapiens2": "RMSNorm of queries and keys, LayerScale of attention alone",
    "vit_large_patch16_sapiens2": "heads that share keys in some blocks",
    "naflexvit_base_patch16_parfac_gap": "a table of rows and one of columns, flattened patches",
}
REFUSED = {
    "vit_base_patch16_18x2_224": "in parallel",
    "vit_base_patch16_rpn_224": "normalises what attention and MLP return",
    "vit_dwee_patch16_reg1_gap_256": "differential attention",
    "vit_small_patch16_rope_mixed_224": "learned",
    "vit_pe_core_tiny_patch16_384": "attention pooling",
    "beit_base_patch16_224": "BEiT",
    "naflexvit_base_patch16_radio_v3": "cuts its positions",
}


@every_fault
def test_one_of_each_kind_has_timms_logits(timm: ModuleType) -> Iterator[str]:
    for found in outcomes(timm, READ):
        if found.difference is None or found.difference > BOUND:
            yield f"{found.name} ({READ[found.name]}): {found.words}"
        if row(found) not in PAGE.read_text():
            yield f"the page has no such row: {row(found)}"


def test_a_model_of_wide_images_without_positions_says_that_it_is_made_square(timm: ModuleType, tmp_path: Path) -> None:
    """Sapiens 2 is published for 1024 x 768 px and has rotary positions, so that no tensor depends on the size."""
    of_timm(timm, "vit_base_patch16_sapiens2", tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())
    description["model_args"]["img_size"] = [64, 48]
    (tmp_path / "config.json").write_text(json.dumps(description))
    weights = open_any(str(tmp_path), Hints())
    assert weights.config.image_size == 224
    assert "image_size 224 px, a square (the file: 64 x 48 px)" in map(str, weights.assumed)


@every_fault
def test_another_architecture_is_refused_with_its_reason(timm: ModuleType) -> Iterator[str]:
    for found in outcomes(timm, REFUSED):
        if REFUSED[found.name] not in found.reason:
            yield f"{found.name}: {found.words}"
        if row(found) not in PAGE.read_text():
            yield f"the page has no such row: {row(found)}"


@every_fault
def test_towers_have_transformers_features_or_logits(transformers: ModuleType) -> Iterator[str]:
    for found in outcomes_of_towers(transformers, TOWERS):
        if found.difference is None or found.difference > BOUND:
            yield f"{found.name}: {found.words}"
        if row(found) not in PAGE.read_text():
            yield f"the page has no such row: {row(found)}"


@pytest.mark.long
@every_fault
def test_every_model_is_read_or_refused_with_a_reason(timm: ModuleType, transformers: ModuleType) -> Iterator[str]:
    found = [*outcomes(timm, names_in(timm))]
    yield from (f"{each.name}: {each.words}" for each in found if each.reason == "not refused")
    yield from (f"{each.name}: {each.words}" for each in found if each.difference and each.difference > BOUND)
    left_out = [each.name for each in found if each.difference is None and each.name in ARCHITECTURES]
    yield from (f"{name} is in the table of architectures, and is refused" for name in left_out)
    versions = {"timm": timm.__version__, "transformers": transformers.__version__}
    if page(found, [*outcomes_of_towers(transformers, TOWERS)], versions=versions) != PAGE.read_text():
        yield f"{PAGE} is older than the code (run: python -m tests.pipeline.models.conversion.zoo)"
