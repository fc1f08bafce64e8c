"""Computes, before anything is allocated, how many bytes one rank's device needs to train. Pure.

Activations are exact (pipeline/models/activations.py). The rest follows the buffers of DeepSpeed 0.19.8, which were
found by recording every allocation of two steps, on one and two ranks, for each stage and precision; the tests repeat
some of these recordings. P is the number of parameters, R of ranks, w of bytes per weight (bf16 2, fp32 4):

    held all the time      weights         w P            (stage 3: w P / R, and small tensors as a whole)
                           masters         4 P / R
                           moments         8 P / R        (with the first in bf16 6 P / R; SGD, and Muon of its
                                                          matrices, 4 P / R)
                           average         4 P / R        (EMA)
                           teacher         w P_t          (with all its P_t parameters, under every stage)
                           gradients       w P / R        (stage 3; 4 P / R in bf16 with accumulation)
    as a backward pass begins              activations, and the gradients of the micro-batches before it; activations
                                           are those of the teacher's forward pass if these are more, since a teacher
                                           computes each micro-batch before the model does, and keeps only logits
    as the last one ends                   the gradients of all weights (stages 2 and 3: of this rank's), and copies
    in both, with stage 3                  the gathered weights of two blocks
    in the update                          copies of this rank's gradients (Muon: and of a few matrices)

The peak is the memory that is held all the time, plus the largest of the last three rows. A compiled block keeps less
than is counted here, because torch.compile recomputes what is cheap. How much less depends on torch's version, so the
difference is not subtracted.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache

from pipeline.models.activations import Activations, Pass, activations_of
from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig
from pipeline.models.flops import num_block_weights, num_parameters
from pipeline.training.settings.job import OptimizerConfig, TrainingJob, reduced_in, with_buckets_of
from pipeline.training.zero.flat_blocks import Layout, is_flat, largest_block, layout_of, sizes_of
from pipeline.training.zero.optimizer import ways_of

_FP32, _BF16 = 4, 2
# Without flat blocks, stage 3 keeps up to this many gathered weights that are needed again soon.
_MOST_GATHERED = 1_000_000_000
_KEPT_WHOLE = 100_000  # elements up to which stage 3 keeps a tensor on every rank
_IMAGE_BUFFERS = 2  # a rank's share of this batch and of the next one, on the device


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The number of ranks, and whether each has a GPU."""

    num_ranks: int
    is_on_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank's device at the peak. `gradients`: the gradients, and all buffers that reduce and copy them.
    `activations`: those of the model or, if they are more, of its teacher. `teacher`: the teacher's weights. `saved`:
    what a checkpoint holds of this rank, with moments in bf16 widened to fp32."""

    weights: int
    masters: int
    moments: int
    average: int
    gradients: int
    images: int
    activations: int
    teacher: int
    saved: int

    @property
    def state(self) -> int:
        """The bytes that updates change, apart from the weights themselves."""
        return self.masters + self.moments + self.average

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return self.weights + self.state + self.gradients + self.images + self.activations + self.teacher


def memory_of(job: TrainingJob, topology: Topology, *, micro_batch: int, teacher: ModelConfig | None = None) -> Memory:
    """Returns the memory that passes of `micro_batch` images need; `micro_batch` must divide a rank's share of the
    global batch. `teacher`: the configuration of the job's teacher, at the size of the images that it gets; None if the
    job has none.

    Raises ValueError if the job's precision or number of classes is not decided, or if its teacher is missing.
    """
    if job.engine.precision == "auto" or not job.model.num_classes:
        raise ValueError("engine.precision is 'auto' or model.num_classes 0: decide them before memory is planned")
    if (teacher is None) == bool(job.teacher.weights):
        raise ValueError("memory is planned for a teacher if teacher.weights names one, and only then")
    ranks, share = topology.num_ranks, job.global_batch // topology.num_ranks
    number, is_bf16 = num_parameters(job.model), job.engine.precision == "bf16"
    weight = _BF16 if is_bf16 else _FP32
    head = number - num_parameters(job.model, head=False)
    trained = head if job.optimizer.freeze_backbone else number
    gradients = _Gradients(
        job,
        number=trained,
        num_weights=number,
        head=head,
        topology=topology,
        weight=weight,
        is_summed=micro_batch < share,
    )
    part, trained_part = -(-number // ranks), -(-trained // ranks)
    densest = job.with_most_tokens
    kept = activations_of(densest.model, pass_of(densest, is_on_gpu=topology.is_on_gpu, element_bytes=weight))
    activations = _of_images(kept, micro_batch)
    if teacher:
        activations += micro_batch * _taught_bytes(job)
        activations = max(activations, _teaching_bytes(job, teacher, topology, micro_batch=micro_batch))
    begins = gradients.as_backward_begins() + activations
    peak = max(begins, gradients.as_backward_ends(), gradients.in_update()) + gradients.too_large()
    average = _FP32 * trained_part if job.ema_decay else 0
    in_fp32 = replace(job, optimizer=replace(job.optimizer, first_moment="fp32"))
    return Memory(
        weights=weight * part + gradients.kept_whole if job.engine.zero_stage == 3 else weight * number,
        masters=_FP32 * part,
        moments=-(-_moment_bytes(job, trained) // ranks),
        average=average,
        gradients=gradients.always() + peak - activations,
        images=_image_bytes(job, micro_batch, share),
        activations=activations,
        teacher=weight * num_parameters(teacher) if teacher else 0,
        saved=_FP32 * part + -(-_moment_bytes(in_fp32, trained) // ranks) + average,
    )


def _moment_bytes(job: TrainingJob, trained: int) -> int:
    """Returns the bytes of the optimiser's moments, on all ranks together."""
    if job.optimizer.name == "sgd":
        return _FP32 * trained
    if job.optimizer.name == "muon":
        return _FP32 * (2 * trained - num_block_weights(job.model))
    first = _BF16 if job.optimizer.first_moment == "bf16" else _FP32
    return (first + _FP32) * trained


@dataclass(frozen=True)
class _Gradients:
    """The bytes of DeepSpeed's gradients and their buffers. `number`: the number of trained weights. `num_weights`: the
    number of all weights. `head`: the number of weights in the head. `weight`: the bytes of one weight. `is_summed`:
    whether gradients are summed over several micro-batches."""

    job: TrainingJob
    number: int
    num_weights: int
    head: int
    topology: Topology
    weight: int
    is_summed: bool

    @property
    def _stage(self) -> int:
        return self.job.engine.zero_stage

    @property
    def _sums_whole(self) -> bool:
        """Whether every rank sums micro-batches of the whole gradient in fp32: stage 1 with bf16."""
        return self._stage == 1 and self.weight == _BF16 and self.is_summed

    @property
    def _overlaps(self) -> bool:
        """Whether gradients may be summed over ranks during the backward pass."""
        is_default = self.topology.is_on_gpu and self.topology.num_ranks > 1
        return {"on": True, "off": False, "auto": is_default}[self.job.engine.overlap]

    @property
    def _bucket(self) -> int:
        """The bytes of the buffers for gradients that are reduced at once. Gradients in bf16 may be added up in an fp32
        copy."""
        filled, elements = min(self._bucket_size, self.number), self._bucket_elements
        if self._overlaps and self._stage < 3:  # one bucket is filled while the other is reduced
            elements *= 2
        if self._sums_whole:
            return elements * _FP32
        is_widened = self.weight == _BF16 and reduced_in(self.job.engine) == "fp32"
        return elements * self.weight + (_FP32 * filled if is_widened else 0)

    @property
    def _bucket_elements(self) -> int:
        """The elements of a buffer that take memory. On a CPU, the unused part of a buffer takes none."""
        return self._bucket_size if self.topology.is_on_gpu else min(self._bucket_size, self.number)

    @property
    def _bucket_size(self) -> int:
        bucket = with_buckets_of(self.job.engine, on_cpu=not self.topology.is_on_gpu).reduce_bucket
        return max(bucket, largest_block(layout_in_engine(self.job.model, self.job.optimizer)))

    @property
    def _part(self) -> int:
        return -(-self.number // self.topology.num_ranks)

    @property
    def _own(self) -> int:
        """The bytes of this rank's gradients. Under stage 1, gradients are summed before they are divided among ranks,
        so they are not widened. Under stage 2, a rank keeps the gradients of a block as a whole if it owns a part."""
        is_wide = self.is_summed and self._stage > 1
        more = _cut_off(self.job.model, self.job.optimizer, self.topology.num_ranks) if self._stage == 2 else 0
        return (self._part + more) * (_FP32 if is_wide else self.weight)

    @property
    def _sizes(self) -> dict[str, int]:
        """The elements of the tensors of which stage 3 has only a part on each rank; none in other cases."""
        is_sharded = self._stage == 3 and self.topology.num_ranks > 1
        return sizes_of(layout_in_engine(self.job.model, self.job.optimizer)) if is_sharded else {}

    @property
    def kept_whole(self) -> int:
        """The bytes of the weights of other ranks that stage 3 always has."""
        if self.job.optimizer.freeze_backbone:  # its blocks are not flat, so DeepSpeed's defaults hold
            return self.gathered
        return self.weight * sum(size for size in self._sizes.values() if size <= _KEPT_WHOLE)

    @property
    def gathered(self) -> int:
        """The bytes of the weights that stage 3 has gathered during a pass: those of two blocks, and of the layers
        before and after them."""
        sizes = self._sizes
        if self.job.optimizer.freeze_backbone:
            return self.weight * min(sum(sizes.values()), _MOST_GATHERED)
        blocks = sorted((size for name, size in sizes.items() if is_flat(name)), reverse=True)
        others = sum(size for name, size in sizes.items() if not is_flat(name) and size > _KEPT_WHOLE)
        return self.weight * (sum(blocks[:2]) + others)

    def always(self) -> int:
        return self._own if self._stage == 3 else 0

    def as_backward_begins(self) -> int:
        """Returns the bytes that are held when the backward pass begins or, with several micro-batches, when the
        backward pass of the second one begins."""
        summed = (_FP32 if self._sums_whole else self.weight) * self.number
        held = {1: summed, 2: self._own, 3: 0}[self._stage] if self.is_summed else 0
        return self._bucket + held + self.gathered

    def as_backward_ends(self) -> int:
        if self._sums_whole:
            return _FP32 * (self.number + self._part) + self._bucket
        if self._stage == 1:
            # If sums overlap the pass, most gradients are freed by the time that this rank's are complete.
            held = max(self._bucket, self._own) if self._overlaps else self._bucket + self._own
            return self.weight * self.number + held
        if self._stage == 3:  # a block's gradient in one tensor, and in as many as it has parameters; gloo has a third
            block = largest_block(layout_in_engine(self.job.model, self.job.optimizer))
            num_copies = 2 if self.topology.is_on_gpu or self.topology.num_ranks == 1 else 3
            return self._bucket + self.gathered + num_copies * self.weight * block
        is_twice = self.is_summed and self.weight == _FP32
        return self._bucket + self._own * (2 if is_twice else 1)

    def too_large(self) -> int:
        """Returns the bytes of the head's gradient if it is larger than a bucket. Every rank that owns a part of the
        head then keeps that gradient until the update, and a copy of it if sums are kept in other tensors. Measured on
        1, 2 and 4 ranks, the total is within 10 %, except that it is 30 % too high for four ranks with stage 2 that sum
        micro-batches in fp32."""
        if self._stage == 3 or self._one_head <= self._bucket_size:
            return 0
        is_copied = self.is_summed and (self._stage == 2 or self.weight == _BF16)
        return self.weight * self.head * (2 if is_copied else 1)

    def in_update(self) -> int:
        """Returns the bytes in the update: the gradients, copies of them end to end and in fp32, and the matrices of
        Muon's iteration."""
        if self._stage < 3 and self.weight == _BF16 and self.is_summed:
            return _FP32 * self._part + self._iterated
        widened = _FP32 * self._part if self.weight == _BF16 else 0
        if self._stage == 3:  # it keeps its bucket
            return self._own + widened + self._iterated + self.weight * self._bucket_elements
        end_to_end = self.weight * self._part
        return end_to_end + max(self._own, widened + self._iterated)

    @property
    def _one_head(self) -> int:
        """The number of weights in one of the heads."""
        return self.head // self.job.model.num_classifiers

    @property
    def _iterated(self) -> int:
        """The bytes of Muon's iteration, which holds three matrices as large as the largest one. With several ranks, a
        rank also holds the two matrices that are cut at the ends of its slice. Adafactor copies one parameter twice, in
        fp32."""
        if self.job.optimizer.name == "adafactor":
            return 2 * _FP32 * max(self._one_head, self.job.model.size.width * self.job.model.size.mlp_width)
        if self.job.optimizer.name != "muon":
            return 0
        size = self.job.model.size
        return self.weight * size.width * size.mlp_width * (3 if self.topology.num_ranks == 1 else 5)


@cache
def layout_in_engine(model: ModelConfig, optimizer: OptimizerConfig) -> Layout:
    """Returns the tensors that DeepSpeed sees of a model."""
    shapes = shapes_of(model)
    return layout_of(shapes, ways_of(shapes, optimizer))


@cache
def _cut_off(model: ModelConfig, optimizer: OptimizerConfig, num_ranks: int) -> int:
    """Returns the most elements of flat tensors that a rank owns in part under stage 2, without the parts it owns."""
    layout = layout_in_engine(model, optimizer)
    ways = ways_of(shapes_of(model), optimizer)
    ends, spans = dict[Hashable, int](), list[tuple[Hashable, int, int, bool]]()
    for name, size in sizes_of(layout).items():
        if (way := ways.get(layout[name][0].name)) is not None:
            begin = ends.get(way, 0)
            ends[way] = begin + size
            spans.append((way, begin, begin + size, is_flat(name)))
    most = 0
    for rank in range(num_ranks):
        missing = 0
        for group, begin, end, is_of_block in spans:
            size = -(-ends[group] // num_ranks)
            held = min(end, (rank + 1) * size) - max(begin, rank * size)
            missing += end - begin - held if is_of_block and held > 0 else 0
        most = max(most, missing)
    return most


def pass_of(job: TrainingJob, *, is_on_gpu: bool, element_bytes: int) -> Pass:
    """Returns how the job computes a forward pass. Raises ValueError if its recomputation is not decided."""
    recomputed = job.engine.activation_checkpointing
    if recomputed == "auto":
        raise ValueError("engine.activation_checkpointing is 'auto': decide it before memory is planned")
    return Pass(
        element_bytes=element_bytes,
        loss=job.loss,
        has_dense_targets=job.data.mixup.is_on or job.data.label_weights,
        recomputed=recomputed,
        is_frozen=job.optimizer.freeze_backbone,
        is_on_gpu=is_on_gpu,
        num_stay=job.largest_phase.num_stay,
    )


def _teaching_bytes(job: TrainingJob, teacher: ModelConfig, topology: Topology, *, micro_batch: int) -> int:
    """Returns the bytes that the teacher's forward pass takes for a micro-batch. Images that are resized for it
    (teacher.py) are held in fp32 meanwhile. Resizing them takes the original ones and those resized in one direction,
    too."""
    element_bytes = _BF16 if job.engine.precision == "bf16" else _FP32
    how = Pass(element_bytes=element_bytes, is_frozen=True, is_on_gpu=topology.is_on_gpu)
    passing, given, side = (
        _of_images(activations_of(teacher, how), micro_batch),
        job.model.image_size,
        teacher.image_size,
    )
    if teacher.is_bit or side == given:
        return passing
    pixels = _FP32 * 3 * micro_batch
    return max(passing, pixels * (given**2 + given * side)) + pixels * side**2


def _taught_bytes(job: TrainingJob) -> int:
    """Returns the bytes per image that a teacher adds to what the model's pass keeps: the teacher's logits; its
    log-probabilities, if the target is soft; and the model's log-probabilities once more if labels have a share, since
    the loss of the labels keeps its own."""
    num_kept = 1 + (job.teacher.target == "soft") + (job.teacher.share < 1)
    return num_kept * _FP32 * job.model.num_classes


def _of_images(kept: Activations, num_images: int) -> int:
    fixed = kept.fixed_bytes + kept.fixed_working_bytes
    return num_images * (kept.image_bytes + kept.working_bytes) + fixed


def _image_bytes(job: TrainingJob, micro_batch: int, share: int) -> int:
    """Returns the bytes of a rank's pixels, of a micro-batch's mixed images in fp32 (with mixup), and of its targets
    (with mixup or weighted labels). With SAM, also those of a teacher's logits, which the second pass takes again."""
    pixels = 3 * job.model.image_size**2
    is_mixed = job.data.mixup.is_on
    mixed = _FP32 * (is_mixed * pixels + (is_mixed or job.data.label_weights) * job.model.num_classes)
    taught_again = _FP32 * job.model.num_classes * bool(job.teacher.weights and job.optimizer.sam_rho)
    return share * (_IMAGE_BUFFERS * pixels + taught_again) + micro_batch * mixed
