"""What a forward pass keeps, compared with what autograd saves, on models that have shapes but no values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.models.activations import Pass, activations_of
from pipeline.models.build import build_model, checkpoint_blocks, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.loss import classification_loss, targets_of
from pipeline.models.masked import masked_loss, masked_targets
from pipeline.models.recompute import recompute_selectively
from tests.rigs.peaks import peak_of

BF16 = Pass(element_bytes=2, loss="sigmoid", is_on_gpu=False)
FP32 = replace(BF16, element_bytes=4)
AXIAL: dict[str, Any] = {"attention": "axial", "pooling": "average"}
MASKED = {"masked_patches": True}
RMS: dict[str, Any] = {"norm": "rmsnorm"}
AIMV2: dict[str, Any] = {**RMS, "patch_norm": True, "mlp": "swiglu", "pooling": "average"}
TINY_BYTES = 64  # sums of the loss


@pytest.mark.parametrize(
    ("name", "changed", "how"),
    [
        pytest.param("vit_h14", {"representation": True}, BF16, id="h14"),
        pytest.param("vit_h14", {"image_size": 518}, BF16, id="h14 at 518 px"),
        pytest.param("vit_l16", {}, BF16, id="l16"),
        pytest.param("vit_l16", {"image_size": 384}, BF16, id="l16 at 384 px"),
        pytest.param("vit_b16", {"image_size": 384}, FP32, id="b16 at 384 px"),
        pytest.param("vit_b16", {"image_size": 512}, BF16, id="bf16 on a CPU above 640 tokens"),
        pytest.param("vit_b16", {"dropout": 0.1}, replace(FP32, loss="softmax"), id="dropout"),
        pytest.param("vit_s16", {"pooling": "average"}, replace(BF16, has_dense_targets=True), id="mean, mixup"),
        pytest.param("vit_s16", {}, replace(FP32, loss="softmax", has_dense_targets=True), id="softmax and mixup"),
        pytest.param("r50_vit_b16", {}, BF16, id="hybrid"),
        pytest.param("r50_vit_l16", {"image_size": 384, "representation": True}, FP32, id="hybrid at 384 px"),
        pytest.param("r50_vit_b16", {"patch": 2, "depth": 1}, BF16, id="hybrid with larger patches"),
        pytest.param("r_vit_ti16", {}, BF16, id="hybrid with the root alone"),
        pytest.param("bit_r50x1", {}, BF16, id="bit"),
        pytest.param("bit_r18x1", {}, BF16, id="bit of basic units"),
        pytest.param("bit_r34x1", {"image_size": 201}, replace(FP32, recomputed="full"), id="basic, checkpointing"),
        pytest.param("bit_r50x2", {"image_size": 201}, FP32, id="bit whose maps are rounded up"),
        pytest.param("vit_h14", {}, replace(BF16, recomputed="full"), id="h14 with checkpointing"),
        pytest.param("r50_vit_b16", {}, replace(BF16, recomputed="full"), id="hybrid with checkpointing"),
        pytest.param("bit_r50x1", {}, replace(FP32, recomputed="full"), id="bit with checkpointing"),
        pytest.param("vit_s16", {"stochastic_depth": 0.1}, BF16, id="stochastic depth"),
        pytest.param("vit_s16", {"layer_scale": 1e-4, "stochastic_depth": 0.1}, BF16, id="LayerScale"),
        pytest.param("vit_s16", {"layer_scale": 1e-4}, replace(FP32, recomputed="full"), id="LayerScale, recomputed"),
        pytest.param("vit_s16", {"qk_norm": True}, BF16, id="norms of queries and keys"),
        pytest.param("vit_s16", {"qk_norm": True}, replace(FP32, recomputed="full"), id="these norms, recomputed"),
        pytest.param("vit_s16", {"pooling": "attention"}, BF16, id="attention pooling, bf16"),
        pytest.param(
            "vit_s16",
            {"pooling": "attention", "registers": 4, "representation": True},
            FP32,
            id="attention pooling, fp32, registers, hidden layer",
        ),
        pytest.param(
            "vit_s16", {"pooling": "attention"}, replace(BF16, recomputed="full"), id="attention pooling, recomputed"
        ),
        pytest.param(
            "vit_s16", {"pooling": "attention"}, replace(BF16, is_frozen=True), id="attention pooling, frozen"
        ),
        pytest.param("vit_s16", {"position": "rope2d"}, BF16, id="rotary positions"),
        pytest.param("vit_s16", {"position": "rope2d", "qk_norm": True}, FP32, id="rotary positions after norms"),
        pytest.param("vit_s16", {"position": "relative"}, BF16, id="relative positions"),
        pytest.param("vit_s16", {"position": "relative", "qk_norm": True}, FP32, id="relative positions after norms"),
        pytest.param(
            "vit_s16", {"position": "relative"}, replace(FP32, recomputed="full"), id="relative positions, recomputed"
        ),
        pytest.param("vit_s16", {"mlp": "swiglu"}, BF16, id="SwiGLU"),
        pytest.param("vit_s16", {"mlp": "swiglu", "inner_norms": "both"}, FP32, id="SwiGLU, norms inside"),
        pytest.param("vit_s16", {"gelu": "quick", "first_norm": True}, BF16, id="CLIP"),
        pytest.param("vit_s16", {"pooling": "average", "last_norm": "pooled"}, BF16, id="norm of the mean"),
        pytest.param("vit_s16", {"last_norm": "none"}, BF16, id="no last norm, bf16"),
        pytest.param("vit_s16", {"last_norm": "none"}, FP32, id="no last norm, fp32"),
        pytest.param("vit_s16", {"last_norm": "none", "pooling": "average"}, FP32, id="no last norm, mean"),
        pytest.param("vit_s16", AIMV2, FP32, id="AIMv2"),
        pytest.param("vit_s16", AIMV2, BF16, id="AIMv2, bf16"),
        pytest.param("vit_s16", AIMV2, replace(BF16, recomputed="full"), id="AIMv2, recomputed"),
        pytest.param("vit_s16", AIMV2 | {"pooling": "attention"}, FP32, id="RMSNorms and attention pooling"),
        pytest.param("vit_s16", RMS | {"qk_norm": True, "first_norm": True}, FP32, id="RMSNorms, a class token"),
        pytest.param("vit_s16", RMS | {"inner_norms": "both", "pooling": "average"}, BF16, id="RMSNorms inside"),
        pytest.param("vit_s16", {"position": "learned_rope2d"}, BF16, id="learned and rotary positions"),
        pytest.param("vit_s16", {"registers": 4}, BF16, id="registers"),
        pytest.param("vit_s16", {"distillation_token": True}, BF16, id="a distillation token, bf16"),
        pytest.param("vit_s16", {"distillation_token": True, "last_norm": "none"}, FP32, id="a distillation token"),
        pytest.param(
            "vit_s16", {"distillation_token": True}, replace(BF16, is_frozen=True), id="a distillation token, frozen"
        ),
        pytest.param("vit_s16", {"registers": 4, "pooling": "average"}, FP32, id="registers, mean"),
        pytest.param("vit_s16", AXIAL, BF16, id="axial"),
        pytest.param("vit_s16", AXIAL | {"position_at": "layers_shared"}, FP32, id="axial in fp32"),
        pytest.param("vit_s16", AXIAL, replace(BF16, recomputed="full"), id="axial with checkpointing"),
        *(
            pytest.param(name, changed, replace(how, recomputed="selective"), id=f"selective, {words}")
            for name, changed, how, words in [
                ("vit_h14", {}, BF16, "H/14"),
                ("vit_s16", {}, FP32, "fp32"),
                ("vit_s16", {"dropout": 0.1}, BF16, "dropout keeps the hidden layer"),
                ("vit_s16", {"mlp": "swiglu"}, BF16, "SwiGLU"),
                ("vit_s16", {"gelu": "quick"}, BF16, "quick GELU"),
                ("vit_s16", {"mlp": "swiglu", "inner_norms": "both"}, BF16, "SwiGLU and norms inside"),
                ("vit_s16", {"inner_norms": "mlp", "dropout": 0.1}, BF16, "a norm after dropout"),
                ("vit_s16", {"layer_scale": 1e-4, "stochastic_depth": 0.1}, BF16, "LayerScale"),
                ("vit_s16", {"qk_norm": True}, FP32, "norms of queries and keys"),
                ("vit_s16", {"position": "rope2d", "qk_norm": True}, BF16, "rotary positions after norms"),
                ("vit_s16", {"position": "relative", "qk_norm": True}, FP32, "relative positions after norms"),
                ("vit_s16", {"position": "relative"}, BF16, "relative positions"),
                ("vit_s16", {"pooling": "attention"}, BF16, "attention pooling keeps all"),
                ("vit_s16", AIMV2, FP32, "AIMv2"),
                ("vit_s16", AIMV2, BF16, "AIMv2, bf16"),
                ("vit_s16", AXIAL, BF16, "axial"),
                ("r50_vit_b16", {}, BF16, "a hybrid's ResNet keeps all"),
            ]
        ),
        pytest.param("vit_s16", AXIAL | {"image_size": 416}, BF16, id="axial above 640 tokens"),
        pytest.param("vit_s16", MASKED | {"num_classes": 512}, replace(BF16, loss="softmax"), id="masked, means"),
        pytest.param(
            "r26_vit_s32",
            MASKED | {"num_classes": 8192, "masked_target": "parts"},
            replace(FP32, loss="softmax"),
            id="masked, parts",
        ),
        pytest.param(
            "vit_s16",
            MASKED | {"num_classes": 768, "masked_target": "pixels", "pooling": "average"},
            replace(BF16, loss="softmax"),
            id="masked, pixels",
        ),
        pytest.param("vit_s16", {}, replace(BF16, num_stay=98), id="PatchDropout"),
        pytest.param(
            "vit_s16",
            {"pooling": "average", "registers": 4, "dropout": 0.1},
            replace(FP32, num_stay=49),
            id="PatchDropout, mean, dropout",
        ),
        pytest.param(
            "vit_s16",
            {"pooling": "attention"},
            replace(BF16, num_stay=98, recomputed="full"),
            id="PatchDropout, pooling",
        ),
        pytest.param("r26_vit_s32", {}, replace(FP32, num_stay=24, recomputed="selective"), id="PatchDropout, hybrid"),
        pytest.param("vit_s16", {"position": "rope2d"}, replace(BF16, num_stay=98), id="PatchDropout, rotations"),
        pytest.param("vit_s16", {}, replace(BF16, is_frozen=True), id="frozen"),
        pytest.param("vit_s16", {"representation": True}, replace(BF16, is_frozen=True), id="frozen, hidden layer"),
        pytest.param("vit_s16", {"representation": True}, replace(FP32, is_frozen=True), id="frozen in fp32"),
        pytest.param("bit_r50x1", {}, replace(FP32, is_frozen=True, recomputed="full"), id="frozen bit"),
    ],
)
def test_it_is_what_autograd_saves(name: str, changed: dict[str, Any], how: Pass) -> None:
    config = ModelConfig(name=name, **changed)
    # Not with 1 image, for which some views of several images' copies are enough.
    two, four = (saved_bytes(config, how, num_images=number) for number in (2, 4))
    found = activations_of(config, how)
    assert found.image_bytes == pytest.approx((four - two) / 2, abs=TINY_BYTES)
    assert found.fixed_bytes == pytest.approx(two - (four - two), abs=TINY_BYTES)


def saved_bytes(config: ModelConfig, how: Pass, *, num_images: int) -> int:
    """Bytes of all storages that autograd saves in one forward pass, without parameters and labels. Fake tensors choose
    the CPU's kernels, as real ones do, but hold no values."""
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # kept alive, so that no other gets its place
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16 if how.element_bytes == 2 else torch.float32)
        try:
            model = unfilled_model(config)
        finally:
            torch.set_default_dtype(torch.float32)
        if how.recomputed == "full":
            checkpoint_blocks(model)
        elif how.recomputed == "selective":
            recompute_selectively(model)
        for part, parameter in model.named_parameters():
            parameter.requires_grad_(not how.is_frozen or part.startswith(("head.", "head_dist.", "representation.")))
        images = torch.empty(num_images, config.image_size, config.image_size, 3, dtype=torch.uint8)
        labels = torch.zeros(num_images, 1, dtype=torch.int64)
        targets = targets_of(labels, config.num_classes, name=how.loss).clone() if how.has_dense_targets else labels
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            depth = config.size.depth if config.stochastic_depth else 0
            branches = torch.ones(depth, num_images, 2) if depth else None
            stay = None if how.num_stay is None else torch.zeros(num_images, how.num_stay, dtype=torch.int64)
            more = () if branches is None and stay is None else (branches, None, (), stay)
            if config.masked_patches:
                labels = masked_targets(images, config)
                sources = torch.zeros(labels.shape[:2], dtype=torch.int64)
                masked_loss(model(images, None, sources), labels, target=config.masked_target)
                given = [labels, sources]
            else:
                classification_loss(model(images, *more), targets, name=how.loss)
                given = [labels]
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *given)}
        return sum(int(storage.nbytes()) for key, storage in kept.items() if key not in own)


SMALL: dict[str, Any] = {"image_size": 64, "depth": 2}
UNITS: dict[str, Any] = {"image_size": 64, "resnet_units": (1, 1)}


@pytest.mark.parametrize(
    ("name", "changed", "most"),
    [
        pytest.param("vit_s16", SMALL, 1.01, id="the MLP"),
        pytest.param("vit_s16", SMALL | {"mlp": "swiglu", "qk_norm": True}, 1.01, id="SwiGLU"),
        pytest.param("vit_s16", SMALL | {"gelu": "quick"}, 1.01, id="quick GELU"),
        pytest.param("vit_s16", SMALL | {"mlp_width": 64}, 1.01, id="attention, beside a narrow MLP"),
        pytest.param("vit_s16", SMALL | {"width": 24, "num_heads": 2, "mlp_width": 24}, 1.05, id="pixels"),
        pytest.param("vit_s16", SMALL | {"position": "relative", "image_size": 160}, 1.5, id="relative positions"),
        pytest.param("r_vit_ti16", SMALL, 1.5, id="hybrid"),
        pytest.param("bit_r50x1", UNITS, 2.0, id="bit"),
    ],
)
def test_a_pass_without_gradients_takes_what_is_counted(name: str, changed: dict[str, Any], most: float) -> None:
    """At least that, and at most `most` times that, by PyTorch's record of every allocation."""
    config, num_images = ModelConfig(name=name, num_classes=10, **changed), 8
    model = build_model(config).eval().requires_grad_(False)
    side, kept = config.image_size, list[torch.Tensor]()
    images = torch.zeros(num_images, side, side, 3, dtype=torch.uint8)
    before = peak_of(lambda: kept.append(torch.zeros(16)))
    needed = peak_of(lambda: kept.append(model(images))) - before
    found = activations_of(config, replace(FP32, loss="softmax", is_frozen=True))
    counted = num_images * (found.image_bytes + found.working_bytes) + found.fixed_bytes + found.fixed_working_bytes
    assert needed <= counted <= most * needed


def test_vit_h14_keeps_337_mb_an_image_on_a_gpu() -> None:
    """The number that was worked out by hand: 512 images need 172 GB."""
    config = ModelConfig(name="vit_h14", num_classes=18_291, representation=True)
    found = activations_of(config, Pass(element_bytes=2, loss="sigmoid"))
    assert found.image_bytes / 1e6 == pytest.approx(337, rel=0.01)
    assert 512 * found.image_bytes / 1e9 == pytest.approx(172, rel=0.01)


@pytest.mark.parametrize("name", ["vit_l16", "r50_vit_b16", "bit_r50x1"])
def test_a_gpu_keeps_dropouts_masks_as_bytes_and_all_statistics_in_fp32(name: str) -> None:
    config = ModelConfig(name=name, dropout=0.0 if name.startswith("bit") else 0.1)
    on_cpu, on_gpu = activations_of(config, FP32), activations_of(config, replace(FP32, is_on_gpu=True))
    assert on_gpu.fixed_bytes == on_cpu.fixed_bytes
    assert (on_gpu.image_bytes < on_cpu.image_bytes) == bool(config.dropout)
