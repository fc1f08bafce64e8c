"""Every kind of published model that is read passes through the commands: import, fine-tuning, evaluation, few-shot
classification, inspection, and export to each format that holds it.

Models are small and random. test_zoo.py compares what each computes with its library; here, what a run has learned is
compared with its exports, which timm computes, too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import exit_codes
from jobs.data import pack
from jobs.models import export_weights
from jobs.settings.models import ExportJob
from pipeline.models.build import shapes_of
from pipeline.models.conversion.config import Change, Format, Hints
from pipeline.models.conversion.convert import changed
from pipeline.models.conversion.open_any import open_any
from pipeline.models.weights.folder import Weights, filled_model, open_weights
from shards.errors import UserError
from shards.sources.digits import DigitsSource
from tests.jobs.models.test_evaluate import FORMATS
from tests.pipeline.inspection.test_model_figures import photographs
from tests.pipeline.models.conversion.published import (
    BOTH,
    DINOV2,
    DINOV3,
    FLEXIBLE,
    GATED,
    GRID,
    SIZES,
    of_timm,
    of_transformers,
)
from tests.pipeline.models.parity import imported, random_images, theirs_of
from tests.rigs.faults import every_fault
from tests.rigs.processes import patchline_in_turn
from tests.rigs.training import losses, run

NUM_CLASSES, NUM_CHUNKS = 10, 6
CPU = ("--device", "cpu")
STEPS = (
    "--steps",
    "3",
    "--global-batch",
    "8",
    "--schedule.learning-rate",
    "0.1",
    "--evaluation.every-steps",
    "3",
    *CPU,
)
FP32, BF16 = ("--engine.precision", "fp32"), ("--engine.precision", "bf16")
BOUND = 1e-5
NOWHERE: tuple[Format, ...] = ()
TIMM: tuple[Format, ...] = ("timm",)
MEAN: tuple[Format, ...] = ("timm", "vision_transformer", "big_vision")
MAP: tuple[Format, ...] = ("timm", "big_vision")
ALL: tuple[Format, ...] = ("timm", "hugging_face", "vision_transformer", "big_vision")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model: the name of timm's function or, with `fields` of its configuration, of transformers' class; what
    it has that the paper's models do not have; the formats other than ours that hold it; whether it has a head."""

    name: str
    what: str
    held_by: tuple[Format, ...] = NOWHERE
    fields: dict[str, Any] | None = None
    has_head: bool = True

    def write(self, folder: Path) -> str:
        """Writes the folder that the library publishes."""
        if self.fields is None:
            of_timm(imported("timm"), self.name, folder, num_classes=3 * self.has_head)
        else:
            of_transformers(imported("transformers"), self.name, folder, self.fields)
        return str(folder)


def tower(name: str, what: str, fields: dict[str, Any], held_by: tuple[Format, ...] = NOWHERE) -> Kind:
    return Kind(name=name, what=what, fields=fields, held_by=held_by, has_head="num_labels" in fields)


CLIP = Kind(name="vit_base_patch16_clip_quickgelu_224", what="a norm before the layers, quick GELU")
SIGLIP = Kind(name="vit_base_patch16_siglip_512", what="attention pooling, no head", held_by=MAP, has_head=False)
EVA02 = Kind(name="eva02_base_patch16_clip_224", what="learned and rotary positions, SwiGLU, norms inside")
DINOV2_REGISTERS = Kind(name="vit_small_patch14_reg4_dinov2", what="LayerScale and registers", held_by=TIMM)
AIMV2 = Kind(name="aimv2_large_patch14_224", what="RMSNorms, a norm of patches")
GATE = (CLIP, SIGLIP, EVA02, DINOV2_REGISTERS, AIMV2)
KINDS = (
    *GATE,
    Kind(name="vit_base_patch16_224", what="the paper's model", held_by=ALL),
    Kind(name="vit_base_patch16_clip_224", what="CLIP without its projection", has_head=False),
    Kind(name="vit_base_patch16_siglip_224", what="attention pooling", held_by=MAP),
    Kind(name="vit_base_patch16_siglip_gap_224", what="the mean of patches", held_by=MEAN),
    Kind(name="vit_so400m_patch16_siglip_256", what="the tanh GELU", held_by=MAP),
    Kind(name="vit_so150m_patch16_reg4_map_256", what="attention pooling that leaves out registers", held_by=TIMM),
    Kind(name="vit_small_patch14_dinov2", what="LayerScale", held_by=ALL, has_head=False),
    Kind(name="vit_wee_patch16_reg1_gap_256", what="a norm of the mean, registers, LayerScale", held_by=TIMM),
    Kind(name="vit_giant_patch14_reg4_dinov2", what="SwiGLU in one tensor"),
    Kind(name="vit_small_patch16_dinov3", what="rotary positions of a fixed length, epsilon 1e-5"),
    Kind(name="vit_small_plus_patch16_dinov3_qkvb", what="SwiGLU in two tensors"),
    Kind(name="vit_small_patch16_lingbot", what="DINOv3's positions with a class token"),
    Kind(name="eva02_tiny_patch14_336", what="stretched positions, a norm in MLPs"),
    Kind(name="eva_giant_patch14_224", what="biases of queries and values alone", held_by=TIMM),
    Kind(name="eva_large_patch14_196", what="EVA without rotary positions", held_by=TIMM),
    Kind(name="beit3_base_patch16_224", what="norms inside, the mean beside a class token"),
    Kind(name="vit_medium_patch16_gap_240", what="no biases of q, k and v", held_by=MEAN),
    Kind(name="vit_pe_spatial_tiny_patch16_512", what="places from 1, no last norm"),
    Kind(name="vit_pe_lang_large_patch14_448", what="places from 1, the mean of patches"),
    Kind(name="vit_base_patch16_radio_v3", what="no last norm, many registers", held_by=TIMM, has_head=False),
    Kind(name="vit_intern300m_patch14_448", what="no last norm, LayerScale", held_by=TIMM),
    Kind(name="vit_large_patch16_sapiens2", what="RMSNorms of queries and keys, which heads share in some blocks"),
    Kind(name="deit3_small_patch16_224", what="no row for the class token", held_by=ALL),
    Kind(name="deit_tiny_distilled_patch16_224", what="a distillation token", held_by=("timm", "hugging_face")),
    Kind(name="vit_small_patch16_rope_224", what="rotary positions", held_by=TIMM),
    Kind(name="vit_small_patch16_rope_ape_224", what="learned and rotary positions", held_by=TIMM),
    Kind(name="vit_mediumd_patch16_rope_reg1_gap_256", what="rows before columns", held_by=TIMM),
    Kind(name="vit_tiny_r_s16_p8_224", what="the root of a ResNet", held_by=("timm", "vision_transformer")),
    Kind(name="naflexvit_base_patch16_gap", what="flattened patches", held_by=TIMM),
    Kind(name="naflexvit_base_patch16_map", what="flattened patches, attention pooling", held_by=TIMM),
    Kind(name="naflexvit_base_patch16_parfac_gap", what="a table of rows and one of columns", held_by=TIMM),
    tower("ViTModel", "a hidden layer, epsilon 1e-12", SIZES, ALL[1:]),
    tower("ViTForImageClassification", "epsilon 1e-12", SIZES | {"num_labels": 3}, ALL[1:]),
    tower(
        "DeiTForImageClassificationWithTeacher", "a distillation token", SIZES | {"num_labels": 3}, ("hugging_face",)
    ),
    tower("DeiTForImageClassification", "a distillation token that nothing reads", SIZES | {"num_labels": 3}),
    tower("CLIPVisionModel", "a norm before the layers", SIZES),
    tower("Dinov2Model", "LayerScale", DINOV2, ALL),
    tower("Dinov2WithRegistersModel", "registers, LayerScale", DINOV2 | {"num_register_tokens": 2}, TIMM),
    tower("Dinov2Model", "SwiGLU", DINOV2 | {"use_swiglu_ffn": True}),
    tower("DINOv3ViTModel", "rotary positions", DINOV3),
    tower("DINOv3ViTModel", "a gate", DINOV3 | GATED),
    tower("SiglipVisionModel", "attention pooling", SIZES, MAP),
    tower("SiglipForImageClassification", "the mean of patches", BOTH, MEAN),
    tower("Siglip2VisionModel", "flattened patches", FLEXIBLE, MAP),
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The test split of the digits as both splits: 359 images at URL and at URL-test."""
    folder = tmp_path_factory.mktemp("digits")
    for name in ("digits", "digits-test"):
        assert pack.run(pack.PackJob(out=str(folder / name), source=DigitsSource(split="test"), split="test")) == 0
    return str(folder / "digits")


def larger(weights: Weights) -> int:
    """The side of images with one patch more."""
    return weights.config.image_size + weights.config.stride


def commands_of(kind: Kind, digits: str, folder: Path, *, is_long: bool) -> Iterator[Sequence[str]]:
    """Import at another size with a new head, fine-tuning of the published folder, and what reads the run. The long
    part also fine-tunes and measures what was imported and published."""
    source, run_dir, out = str(folder / "published"), str(folder / "run"), str(folder / "imported")
    side = str(larger(open_any(source, Hints())))
    head = ("--new-head", "--num-classes", str(NUM_CLASSES))
    yield "import", source, "--out", out, "--image-size", side, *head
    tuned = ("finetune", "photos", "--data.url", digits, *FP32, *STEPS)
    yield *tuned, "--initial.weights", source, "--model.image-size", side, "--run-dir", run_dir
    yield "evaluate", run_dir, "--data.url", digits, *CPU
    few = ("--data.url", digits, "--shots", "2", "--seeds", "1", *CPU)
    yield "fewshot", source, *few
    if is_long:
        yield "fewshot", run_dir, *few
        yield *tuned, "--initial.weights", out, "--run-dir", str(folder / "again")
    for written in ("patchline", *kind.held_by):
        yield "export", f"{run_dir}/weights", "--out", str(folder / FORMATS[written]), "--format", written


def faults_of(kind: Kind, folder: Path) -> Iterator[str]:
    """What is wrong with what the commands have written."""
    before, after = open_any(str(folder / "published"), Hints()), open_weights(str(folder / "run"))
    if (before.config.num_classes > 0) != kind.has_head:
        yield f"has {before.config.num_classes} classes"
    start = open_weights(str(folder / "imported"))
    if after.config != start.config:
        yield f"is fine-tuned as {after.config}, and imported as {start.config}"
    if same := [name for name in after.shapes if torch.equal(start.tensor(name), after.tensor(name))]:
        yield f"did not learn {', '.join(same)}"
    images_BHW3 = random_images(larger(before), larger(before))
    with torch.no_grad():
        expected_BK = filled_model(after)(images_BHW3)
        for written in FORMATS:
            out = folder / FORMATS[written]
            if written == "patchline":
                found_BK = filled_model(open_weights(str(out)))(images_BHW3)
            elif written in kind.held_by:
                found_BK = filled_model(open_any(str(out), hints_for(after, written)))(images_BHW3)
            else:
                yield from not_refused(after, written, out)
                continue
            yield from differing(found_BK, expected_BK, written)
            if written == "timm":
                other = imported("timm").create_model(f"local-dir:{out}", pretrained=True).eval()
                yield from differing(other(theirs_of(images_BHW3)), expected_BK, "timm's own model")


def hints_for(weights: Weights, written: Format) -> Hints:
    """What an .npz file does not say."""
    if not FORMATS[written].endswith(".npz"):
        return Hints()
    config = weights.config
    return Hints(
        num_heads=config.size.num_heads,
        gelu=config.gelu,
        layer_norm_epsilon=config.layer_norm_epsilon,
        resnet_epsilons=config.resnet_epsilons if config.resnet else None,
    )


def not_refused(weights: Weights, written: Format, out: Path) -> Iterator[str]:
    """A fault if a format that does not hold the model leaves something behind. Fails if it is written."""
    with pytest.raises(UserError, match=r"the model has|cannot have"):
        export_weights.run(ExportJob(path=weights.where, out=str(out), format=written))
    if out.exists():
        yield f"{written} is refused, and leaves {out}"


def differing(found_BK: torch.Tensor, expected_BK: torch.Tensor, what: str) -> Iterator[str]:
    difference = float((found_BK - expected_BK).abs().max() / expected_BK.abs().max())
    if difference > BOUND:
        yield f"{what} differs by {difference:.1e}"


def all_faults(kinds: Sequence[Kind], digits: str, folder: Path, *, is_long: bool) -> Iterator[str]:
    """Runs the commands of all kinds in one process. Outside the long part, only the first is inspected."""
    commands, pictures = list[Sequence[str]](), folder / "pictures"
    pictures.mkdir()
    photographs(pictures, 2)
    for number, kind in enumerate(kinds):
        own = folder / str(number)
        own.mkdir()
        kind.write(own / "published")
        commands += commands_of(kind, digits, own, is_long=is_long)
        if is_long or not number:
            out = ("--images", str(pictures), "--out", str(own / "figures"))
            commands.append(("inspect", str(own / "published"), *out, *CPU))
    ended = patchline_in_turn(*commands)
    if ended.code or "Traceback" in ended.errors:
        yield ended.errors[-3000:]
        return
    for number, kind in enumerate(kinds):
        for fault in faults_of(kind, folder / str(number)):
            yield f"{kind.name} ({kind.what}): {fault}"


@every_fault
def test_kinds_pass_through_the_commands(digits: str, tmp_path: Path) -> Iterator[str]:
    yield from all_faults(GATE, digits, tmp_path, is_long=False)


@pytest.mark.long  # the gate has one of each part
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
@every_fault
def test_every_kind_passes_through_the_commands(digits: str, tmp_path: Path, chunk: int) -> Iterator[str]:
    yield from all_faults(KINDS[chunk::NUM_CHUNKS], digits, tmp_path, is_long=True)


STAGE_3 = ("--engine.zero-stage", "3", "--micro-batch", "2")


@pytest.mark.parametrize(
    ("kind", "num_ranks", "more", "bound"),
    [
        pytest.param(AIMV2, 2, STAGE_3, 1e-4, id="RMSNorms, ZeRO-3 on 2 ranks"),
        pytest.param(EVA02, 2, (*STAGE_3, *BF16), 0.02, id="rotary positions, bf16 with ZeRO-3 on 2 ranks"),
        *(
            pytest.param(kind, num_ranks, more, bound, id=f"{kind.what}, {words}", marks=pytest.mark.long)
            for kind, words, num_ranks, more, bound in (
                (EVA02, "ZeRO-3 on 2 ranks", 2, STAGE_3, 1e-4),
                (SIGLIP, "ZeRO-3 on 2 ranks", 2, STAGE_3, 1e-4),
                (AIMV2, "bf16", 1, BF16, 0.02),
                (AIMV2, "compiled", 1, ("--engine.compile", "on"), 1e-4),
                (CLIP, "compiled", 1, ("--engine.compile", "on"), 1e-4),
                (AIMV2, "recomputed", 1, ("--engine.activation-checkpointing", "selective"), 1e-6),
            )
        ),
    ],
)
def test_kinds_learn_the_same_by_other_means(
    digits: str, tmp_path: Path, kind: Kind, num_ranks: int, more: Sequence[str], bound: float
) -> None:
    """Each has the losses of one rank in fp32 with stage 1, as far as rounding allows."""
    source = kind.write(tmp_path / "published")
    words = ("finetune", "photos", "--data.url", digits, "--initial.weights", source, *STEPS, "--log-every-steps", "1")
    found = list[list[float]]()
    for number, own in ((1, FP32), (num_ranks, more if "--engine.precision" in more else (*FP32, *more))):
        run_dir = tmp_path / f"run-{len(found)}"
        assert run([*words, *own, "--run-dir", str(run_dir)], num_ranks=number, log_dir=tmp_path) == exit_codes.DONE
        found.append(list(losses(run_dir).values()))
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], rel=bound)
    assert found[0][0] != found[0][2]


@pytest.mark.long  # test_positions.py compares each way of resampling with its library's, and test_zoo.py each kind
@every_fault
def test_every_kind_has_timms_logits_at_another_size(tmp_path: Path) -> Iterator[str]:
    """5 x 5 patches instead of 3 x 3, with positions that are resampled as timm does."""
    timm = imported("timm")
    for number, kind in enumerate(KINDS):
        if kind.fields is not None or kind.name.startswith("naflex"):
            continue
        folder = tmp_path / str(number)
        model: Any = of_timm(timm, kind.name, folder)
        weights, state = open_any(str(folder), Hints()), model.state_dict()
        side = weights.config.image_size + 2 * weights.config.stride
        given = json.loads((folder / "config.json").read_text())["model_args"]
        other = timm.create_model(kind.name, num_classes=3, **given | {"img_size": side}).eval()
        if (table := state.get("pos_embed")) is not None:
            num_prefix_tokens = table.shape[1] - GRID**2
            state["pos_embed"] = timm.layers.resample_abs_pos_embed(
                table, new_size=[GRID + 2] * 2, old_size=[GRID] * 2, num_prefix_tokens=num_prefix_tokens
            )
        other.load_state_dict(state)
        config, tensor = changed(weights, Change(image_size=side, resample="timm"))
        ours = filled_model(replace(weights, config=config, tensor=tensor, shapes=shapes_of(config)))
        images_BHW3 = random_images(side, side)
        mean, deviation = (torch.tensor(model.pretrained_cfg[key]) for key in ("mean", "std"))
        with torch.no_grad():
            theirs_BK = other.double()(((images_BHW3.double() / 255 - mean) / deviation).permute(0, 3, 1, 2))
            yield from differing(ours.double()(images_BHW3), theirs_BK, kind.name)
