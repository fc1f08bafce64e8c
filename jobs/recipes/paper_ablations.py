"""Pre-training on JFT-300M: the ablations of "An Image is Worth 16x16 Words", appendix D, and Figure 4's ViT-b.

For these runs, the paper gives only the training values that are named below. All other values are from Table 3's row
of the same model, 7 epochs [unverified]. 5-shot accuracies are on ImageNet, as `--fewshot.shots 5` measures them.
Command of each: patchline pretrain RECIPE --data.url URL --run-dir DIR (RECIPE_smoke: the same, tiny, on a CPU)
"""

from dataclasses import replace

from jobs.recipes import paper_jft, recipes_in
from pipeline.models.config import Position, PositionAt
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig

_BATCH = 4096
_BIT_EPOCHS, _BIT_FALLS = 40, (10, 23, 30, 37)  # BiT on JFT-300M: its epochs, and those after which the rate falls


def vit_b16_jft_no_positions() -> TrainingJob:
    """ViT-B/16 without positions: a bag of patches (Table 8).

    Source: Table 8. Expected: 61.382 %, 5-shot.
    """
    return _positions("none", "input")


def vit_b16_jft_1d_layers() -> TrainingJob:
    """ViT-B/16, separate 1-D positions before each layer (Table 8).

    Source: Table 8. Expected: 63.964 %, 5-shot; vit_b16_jft, with one at the input, has 64.206 %.
    """
    return _positions("learned_1d", "layers")


def vit_b16_jft_1d_shared() -> TrainingJob:
    """ViT-B/16, the same 1-D positions before each layer (Table 8).

    Source: Table 8. Expected: 64.292 %, 5-shot.
    """
    return _positions("learned_1d", "layers_shared")


def vit_b16_jft_2d() -> TrainingJob:
    """ViT-B/16 with 2-D positions at the input (Table 8).

    Source: Table 8. Expected: 64.001 %, 5-shot.
    """
    return _positions("learned_2d", "input")


def vit_b16_jft_2d_layers() -> TrainingJob:
    """ViT-B/16, separate 2-D positions before each layer (Table 8).

    Source: Table 8. Expected: 64.046 %, 5-shot.
    """
    return _positions("learned_2d", "layers")


def vit_b16_jft_2d_shared() -> TrainingJob:
    """ViT-B/16, the same 2-D positions before each layer (Table 8).

    Source: Table 8. Expected: 64.022 %, 5-shot.
    """
    return _positions("learned_2d", "layers_shared")


def vit_b16_jft_relative() -> TrainingJob:
    """ViT-B/16, relative positions in every layer (Table 8).

    Source: Table 8. Expected: 64.032 %, 5-shot.
    """
    return _positions("relative", "input")


def vit_b16_jft_average() -> TrainingJob:
    """ViT-B/16 without a class token: the mean of all tokens, a linear classifier, and the lower rate that it needs.

    Source: appendix D.3; Figure 9, whose legend has the rate. Expected: as vit_b16_jft; at its rate of 8e-4, clearly
    worse.
    """
    return _averaged(paper_jft.vit_b16_jft())


def vit_h14_jft_average() -> TrainingJob:
    """ViT-H/14 without a class token: the mean of all tokens and a linear classifier. Its 256 tokens fill two tiles
    of 128 in a GPU's attention, where 257 fill three.

    Source: appendix D.3, for B/16 alone; its rate [unverified]: Figure 9's 3e-4, which is also Table 3's for H/14.
    Expected: as vit_h14_jft, if its rate is right.
    """
    return _averaged(paper_jft.vit_h14_jft())


def vit_shapes_jft() -> TrainingJob:
    """The model that Figure 8 varies in each direction: 8 layers of width 1024, MLPs of 2048, patches of 32 px.

    Source: appendix D.2; its rate [unverified]: that of L/32. Vary --model.depth, --model.patch, --model.mlp-width, or
    --model.width with --model.num-heads. Expected: depth helps most, up to 64 layers.
    """
    job = paper_jft.vit_l32_jft()
    return replace(
        job, model=replace(job.model, name="vit", patch=32, depth=8, width=1024, mlp_width=2048, num_heads=16)
    )


def bit_r50x1_jft_sgd() -> TrainingJob:
    """BiT ResNet-50x1 by SGD instead of Adam (Table 7).

    Source: Table 7, with BiT's values; see _sgd. Expected: 78.24 % on ImageNet after fine-tuning (bit_r50x1_jft, by
    Adam: 77.54 %).
    """
    return _sgd(paper_jft.bit_r50x1_jft())


def bit_r152x2_jft_sgd() -> TrainingJob:
    """BiT ResNet-152x2 by SGD instead of Adam (Table 7).

    Source: Table 7, with BiT's values; see _sgd. Expected: 84.37 % on ImageNet after fine-tuning (bit_r152x2_jft, by
    Adam: 84.97 %).
    """
    return _sgd(paper_jft.bit_r152x2_jft())


def vit_b32_half_jft() -> TrainingJob:
    """ViT-b/32: ViT-B/32 with all hidden dimensions halved, the smallest Transformer of Figure 4.

    Source: Figure 4's caption; its rate, 7 epochs and 12 heads [unverified]: those of B/32. Add --data.subset.count
    9000000, 30000000 or 90000000 with early stopping (docs/reference/transfer.md). Expected: a curve of 5-shot
    accuracies on ImageNet, for which the paper gives no numbers.
    """
    job = paper_jft.vit_b32_jft()
    return replace(job, model=replace(job.model, name="vit_b32_half"))


def vit_b16_axial_jft() -> TrainingJob:
    """Axial-ViT-B/16: each block is replaced by one that attends along rows and one that attends along columns.

    Source: appendix D.6; see _axial. Expected: above vit_b16_jft, 5-shot on ImageNet (Figure 13, without numbers).
    Cost: ours, 427 exaFLOPs, 1.9 times B/16's.
    """
    return _axial(paper_jft.vit_b16_jft())


def vit_b32_axial_jft() -> TrainingJob:
    """Axial-ViT-B/32: each block is replaced by one that attends along rows and one that attends along columns.

    Source: appendix D.6; see _axial. Expected: above vit_b32_jft, 5-shot on ImageNet (Figure 13, without numbers).
    Cost: ours, 108 exaFLOPs, 1.9 times B/32's.
    """
    return _axial(paper_jft.vit_b32_jft())


def _averaged(job: TrainingJob) -> TrainingJob:
    schedule = replace(job.schedule, learning_rate=3e-4)
    return replace(job, model=replace(job.model, pooling="average", representation=False), schedule=schedule)


def _axial(job: TrainingJob) -> TrainingJob:
    """Returns the job with axial attention. The paper says that inputs are 2-dimensional, and does not mention a class
    token, which has no place in them. Here the mean of all tokens replaces it, as in Scenic's xvit.py by one of the
    paper's authors, with the linear classifier and the rate of vit_b16_jft_average [unverified]. Scenic has 2-D
    positions (--model.position learned_2d); the paper's default, and ours, is 1-D. The paper's AxialResNet, a baseline
    from "Axial-DeepLab", is not implemented."""
    job = _averaged(job)
    return replace(job, model=replace(job.model, attention="axial"))


def _positions(position: Position, position_at: PositionAt) -> TrainingJob:
    job = paper_jft.vit_b16_jft()
    return replace(job, model=replace(job.model, position=position, position_at=position_at))


def _sgd(job: TrainingJob) -> TrainingJob:
    """Returns the job with SGD as in BiT (Kolesnikov et al., 2020, section 3.3): momentum 0.9, rate 0.03 for every 256
    images, weight decay 1e-4, 5,000 steps of warm-up, and a tenth of the rate after 10, 23, 30 and 37 of 40 epochs.
    [unverified]: whether the paper kept Table 3's 7 epochs, and these falls in proportion."""
    falls = tuple(job.steps * fall // _BIT_EPOCHS for fall in _BIT_FALLS)
    return replace(
        job,
        optimizer=OptimizerConfig(name="sgd", momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(
            learning_rate=0.03 * _BATCH / 256, decay="staircase", warmup_steps=5_000, stair_steps=falls
        ),
    )


RECIPES = recipes_in(globals())
