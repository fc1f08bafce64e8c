"""What inductor makes of a block of ViT-H/14 for a GPU, found without one: launches, bytes, registers and spills.

A block is traced without values, its two graphs are moved to a GPU that does not exist, and inductor writes Triton
kernels for them, which Triton and ptxas compile for sm_90; none runs. Attention is cuDNN's operator, or the one that
writes the gradients of q, k and v into one tensor (pipeline/models/packed_attention.py). A tensor counts once for each
kernel that reads or writes it, so neither bytes that a cache saves nor those inside a product or attention are counted.
Registers, warps and shared memory say how many warps an SM holds at once (occupancy). Two things differ on a GPU: norms
keep mean and deviation in fp32, and inductor may pad products.

The fused products of an MLP are QuACK's. Like other products they are counted by their operands: with T tokens, width D
and MLP width M, in bf16, 2 (T D + D M + M + 2 T M) bytes for the first product, which writes its sums and their GELU,
and 2 (T D + D M + 2 T M + M) for the gradient, which reads those sums. The gradient's kernel also leaves an fp32 sum of
each 128 tokens, 4 M T / 128 bytes, which PyTorch reads and adds up in two kernels. QuACK compiles its kernels for
sm_90a, if it is installed. It looks for itself in a folder of this name. Command (two minutes):

    pip install --no-deps --target runs/site-packages triton==3.7.1 quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 \
        nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu12==4.8.1 \
        apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 einops==0.8.2 cuda-bindings==12.9.10 \\
        cuda-pathfinder==1.9.1
    export PYTHONPATH=runs/site-packages:runs/site-packages/nvidia_cutlass_dsl/dsl_packages
    python -m benchmarks.fusion_gpu --out benchmarks/results/fusion_gpu.json
"""

import argparse
import ast
import copy
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, graph
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import coordinate_descent_tuner, triton_helpers
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch._inductor.scheduler import BaseSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from benchmarks.rounds import write
from pipeline.models import vit
from pipeline.models.bias_sums import FuseBiasSums
from pipeline.models.build import blocks_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.fused_mlp import fuse_mlps, hidden_by_quack, hidden_gradients_by_quack
from pipeline.models.packed_attention import CUDNN_PACKED, by_operator
from pipeline.models.residuals import KeepResiduals

IMAGES = 256
# As inductor writes them: the parts of a sum that a kernel leaves, the kernels, and PyTorch's that finish such a sum.
_PARTS = r"workspace_\d+\[\d+ \* \((\d+)\) \* \((\d+)\)"
_LAUNCHES = r"^ +triton_\w+\.run\(|\.sum\(dim=0\)|(?<=\))\.to\(torch\.\w+\)"
_SUMMED_TOKENS, _SUM_LAUNCHES = 128, 2  # of the gradient of an MLP's first bias, after QuACK's kernel
_LARGE_MEGABYTES = 100  # a kernel that moves at least this much has a row of its own
# Of an SM of compute capability 9.0 (CUDA C++ Programming Guide, table of technical specifications).
_MOST_WARPS, _MOST_BLOCKS, _SHARED_BYTES, _RESERVED_BYTES = 64, 32, 228 << 10, 1 << 10
_NUM_PARTS, _PART_REGISTERS, _REGISTER_UNIT, _SHARED_UNIT = 4, 16_384, 256, 128
_H200 = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 << 30,
    shared_memory_per_block_optin=232_448,
    L2_cache_size=50 << 20,
)
_OF_DEVICES = {
    "is_available": True,
    "current_device": 0,
    "device_count": 1,
    "get_device_properties": _H200,
}
_ANSWERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.cuda, _OF_DEVICES | {"is_initialized": True, "get_device_capability": (9, 0), "set_rng_state": None}),
    (torch.cuda, {"_exchange_device": 0, "_maybe_exchange_device": 0, "get_rng_state": torch.zeros(16).byte()}),
    (CudaInterface, _OF_DEVICES | {"get_compute_capability": 90, "is_triton_capable": True, "synchronize": None}),
    (CudaInterface, {"raise_if_triton_unavailable": None, "set_device": None, "is_bf16_supported": True}),
    (joint_graph, {"lazy_init": None}),  # patterns of attention, which is one operator here
    (triton_helpers, {"set_driver_to_gpu": None}),
    (StaticTritonCompileResult, {"can_statically_launch": None}),
]


@dataclass(frozen=True)
class Lowered:
    """A block's two passes. `megabytes`: what products, attention and each Triton kernel read and write, in their
    order, and the parts of sums over tokens that a kernel leaves to PyTorch, written and read. `kernels`: the names of
    those Triton kernels, by pass. `kept_megabytes`: what the forward pass keeps, beside weights and input. `launches`:
    of Triton's kernels, and of PyTorch's that add up those parts. `variants`: of each Triton kernel, what ptxas says of
    each variant that a GPU would choose from, and how many of its warps an SM holds. `neighbours`: the same of a large
    kernel's variants that differ from these in one number, with which coordinate descent begins."""

    megabytes: dict[str, dict[str, float | list[float]]] = field(default_factory=dict)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    kept_megabytes: list[float] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    variants: dict[str, list[str]] = field(default_factory=dict)
    neighbours: dict[str, list[str]] = field(default_factory=dict)

    def gigabytes(self, *kinds: str) -> float:
        """Returns the sum over both passes."""
        counts = [count[kind] for count in self.megabytes.values() for kind in kinds]
        return sum(sum(count) if isinstance(count, list) else count for count in counts) / 1e3

    def said(self, what: str, *kernels: str) -> list[int]:
        """The registers, spilled bytes or resident warps of each variant of these kernels, or of all."""
        return numbers_in([line for name in kernels or self.variants for line in self.variants[name]], what)

    def large(self) -> Iterator[tuple[str, float]]:
        """The names of the kernels that move many bytes, and their MB, in their order."""
        for phase, count in self.megabytes.items():
            triton = count["triton"]
            for name, megabytes in zip(
                self.kernels[phase], triton if isinstance(triton, list) else [triton], strict=True
            ):
                if megabytes >= _LARGE_MEGABYTES:
                    yield name, megabytes


def numbers_in(lines: Sequence[str], what: str) -> list[int]:
    """The number before `what` in each line."""
    return [int(found[1]) for found in (re.search(rf"(\d+) {what}", line) for line in lines) if found]


class WrittenError(Exception):
    """Ends a compilation when the code is written: what would follow needs a GPU."""


def main() -> None:
    """Lowers each way; prints the tables and keeps what they are made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)  # of each compilation that ends early, a warning
    packed = by_operator(CUDNN_PACKED)
    with stand_in_gpu():
        ways = {
            "inductor's choice": lowered(None),
            "sums kept": lowered(KeepResiduals()),
            "sums kept, biases' sums fused": lowered(KeepResiduals(), FuseBiasSums()),
            "sums kept, MLP fused": lowered(KeepResiduals(), is_mlp_fused=True),
            "sums kept, biases' sums and MLP fused": lowered(KeepResiduals(), FuseBiasSums(), is_mlp_fused=True),
            "sums kept, gradients of q, k, v packed": lowered(KeepResiduals(), attend=packed),
            "sums kept, norms and GELU recomputed": lowered(KeepResiduals(recomputes=True)),
            "all": lowered(KeepResiduals(), FuseBiasSums(), is_mlp_fused=True, attend=packed),
        }
    has_quack = find_spec("quack") is not None
    quack = quack_kernels() if has_quack else {}
    command = "python -m benchmarks.fusion_gpu --out benchmarks/results/fusion_gpu.json"
    names = ("torch", "triton", *(("quack-kernels", "nvidia-cutlass-dsl") if has_quack else ()))
    results = {way: asdict(result) for way, result in ways.items()}
    found = {"command": command, "versions": {name: version(name) for name in names}, "images": IMAGES}
    write(arguments.out, found | {"ways": results, "quack": quack})
    sys.stdout.write(
        "| | launches | their GB | GB with products and attention | GB kept | registers | spilled bytes "
        "| warps of an SM |\n|---|---|---|---|---|---|---|---|\n"
    )
    for way, result in ways.items():
        numbers = [
            f"{sum(result.launches)}",
            f"{result.gigabytes('triton', 'parts'):.2f}",
            f"{result.gigabytes('triton', 'parts', 'products', 'attention'):.2f}",
            f"{sum(result.kept_megabytes) / 1e3:.2f}",
            f"{max(result.said('registers'))}",
            f"{max(result.said('spilled bytes'))}",
            f"{min(result.said('resident warps'))} to {max(result.said('resident warps'))}",
        ]
        sys.stdout.write(f"| {way} | {' | '.join(numbers)} |\n")
    for way, result in ways.items():
        sys.stdout.write(f"\n| {way} | MB | registers | warps of an SM | in a step of coordinate descent |\n")
        sys.stdout.write("|---|---|---|---|---|\n")
        for name, megabytes in result.large():
            steps = numbers_in(result.neighbours.get(name, []), "resident warps")
            ranges = (result.said("registers", name), result.said("resident warps", name), steps)
            words = (
                f"{min(some)} to {max(some)}" if len(set(some)) > 1 else "".join(map(str, some[:1])) for some in ranges
            )
            sys.stdout.write(f"| {name} | {megabytes:,.0f} | {' | '.join(words)} |\n")
    sys.stdout.writelines(f"\n{name}: {said}" for name, said in quack.items())
    sys.stdout.write("\n" if quack else "QuACK is not installed: its kernels were not compiled\n")


def resident_warps(*, warps: int, registers: int, shared_bytes: int) -> int:
    """Returns how many warps an SM of compute capability 9.0 holds at once, of at most 64, if each group of threads has
    this many warps and shared bytes, and each thread this many registers; 0 if it cannot hold a group. This function is
    pure. As in NVIDIA's occupancy calculator: each of the SM's four parts has 16,384 registers, of which a warp gets a
    multiple of 256."""
    of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _NUM_PARTS * (_PART_REGISTERS // of_warp) // warps if registers else _MOST_BLOCKS
    of_block = -(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_BYTES
    return warps * min(_MOST_BLOCKS, _MOST_WARPS // warps, by_registers, _SHARED_BYTES // of_block)


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """What the compilers ask of a GPU is answered for an H200."""
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - installed for this benchmark alone
    from triton.runtime import driver  # noqa: PLC0415

    limits = {"max_shared_mem": _H200.shared_memory_per_block_optin, "multiprocessor_count": 132}
    utils = SimpleNamespace(get_device_properties=always(limits))
    target, number = always(GPUTarget("cuda", 90, 32)), always(0)
    driver.set_active(SimpleNamespace(get_current_target=target, get_current_device=number, utils=utils))
    with ExitStack() as stack:
        for owner, names in _ANSWERS:
            for name, answer in names.items():
                stack.enter_context(mock.patch.object(owner, name, staticmethod(always(answer))))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, compile_threads=1))
        yield


def always(answer: Any) -> Callable[..., Any]:
    """A function that answers the same whatever it is asked."""
    return lambda *_, **__: answer


def by_cudnn(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    """The operator that PyTorch calls on a GPU, which needs none to be traced."""
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(*qkv_3BhNd.unbind(0), None, True)[0]
    return result


def lowered(
    keep: KeepResiduals | None,
    fuse: FuseBiasSums | None = None,
    *,
    is_mlp_fused: bool = False,
    attend: Callable[[torch.Tensor], torch.Tensor] = by_cudnn,
) -> Lowered:
    """Lowers a block's forward and backward pass, with attention by `attend`."""
    torch.compiler.reset()
    result = Lowered()

    def write_code(gm: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        if not how.get("is_backward"):
            result.kept_megabytes.append(kept_bytes(gm) / 1e6)
        lower(*on_gpu(gm, inputs), result, **how)

        def run(arguments: list[Any]) -> Any:
            return gm(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=write_code)

    model = unfilled_model(ModelConfig(name="vit_h14", image_size=224, num_classes=10, depth=1))
    model.to(torch.bfloat16).train()
    if is_mlp_fused:
        fuse_mlps(model)
    options = inductor_config.patch(joint_custom_pre_pass=keep, post_grad_custom_pre_pass=fuse)
    with options, mock.patch.object(vit, "attend", attend), FakeTensorMode():
        (block,) = blocks_of(model)
        without_values(block)
        block.compile(backend=backend, dynamic=False)
        z_BND = torch.empty(IMAGES, 257, 1280, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.backward(block(z_BND), torch.empty_like(z_BND))
    return result


def without_values(block: torch.nn.Module) -> None:
    """Replaces the parameters by ones of the same shapes, in the mode that is on."""
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))


def kept_bytes(gm: GraphModule) -> int:
    """The bytes that a forward pass makes and keeps; its result, the first of them, among them."""
    kept: Any = gm.graph.output_node().args[0]
    values = [node.meta["val"] for node in kept if node.op != "placeholder"]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in values}.values())


def on_gpu(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """A copy of a traced graph and of its inputs, on a GPU that does not exist."""
    gm, mode = copy.deepcopy(gm), FakeTensorMode()
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    with mode:
        moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*moved)
    return gm, moved


def lower(gm: GraphModule, inputs: list[Any], result: Lowered, **how: Any) -> None:
    """Adds the kernels of one pass to the result."""
    written: list[str] = []
    launched: list[int] = []  # beside those that inductor writes
    names: dict[str, str] = {}  # of kernels, by the operations in them

    def define_kernel(scheduling: TritonScheduling, source: str, nodes: Sequence[Any], *others: Any) -> str:
        name: str = write_kernel(scheduling, source, nodes, *others)
        names.update({node.get_name(): name for node in nodes if isinstance(node, BaseSchedulerNode)})
        return name

    def codegen(lowering: graph.GraphLowering) -> None:
        code, _ = write_wrapper(lowering)
        written.append(code.value)
        parts = (int(rows) * int(width) for rows, width in re.findall(_PARTS, code.value))
        count: dict[str, Any] = {"products": 0.0, "attention": 0.0, "triton": [], "parts": 2 * 4 * sum(parts) / 1e6}
        kernels = []
        for node, words in lowering.count_bytes()[1]:
            name, megabytes = getattr(node.node, "python_kernel_name", None), round(4 * words / 1e6, 2)
            if name:
                count["attention" if "attention" in name or "attend" in name else "products"] += megabytes
                if "mlp_hidden_gradients" in name:
                    operands: Any = node.node
                    tokens, width = operands.inputs[2].get_size()
                    count["parts"] += 2 * 4 * int(width) * -(-int(tokens) // _SUMMED_TOKENS) / 1e6
                    launched.append(_SUM_LAUNCHES)
            elif own := {names[each.get_name()] for each in node.get_nodes() if each.get_name() in names}:
                count["triton"].append(megabytes)
                kernels.append(own.pop())
        phase = "backward" if how.get("is_backward") else "forward"
        result.megabytes[phase], result.kernels[phase] = count, kernels
        raise WrittenError

    write_wrapper = graph.GraphLowering.codegen
    write_kernel: Any = TritonScheduling.define_kernel
    context = torch._guards.TracingContext(inputs[0].fake_mode)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(graph.GraphLowering, "codegen", codegen))
        stack.enter_context(mock.patch.object(TritonScheduling, "define_kernel", define_kernel))
        stack.enter_context(torch._guards.tracing(context))
        try:
            compile_fx.compile_fx_inner(gm, inputs, **how)
        except InductorError:
            if not written:
                raise
    (code,) = written
    result.launches.append(len(re.findall(_LAUNCHES, code, re.MULTILINE)) + sum(launched))
    large = {name for name, _ in result.large()}
    for name, kernel in kernels_in(code):
        result.variants[name] = [resources(kernel, variant) for variant in kernel.configs]
        if name in large:
            result.neighbours[name] = [resources(kernel, variant) for variant in neighbours_of(kernel)]


def kernels_in(code: str) -> Iterator[tuple[str, Any]]:
    """The Triton kernels of inductor's code, and their names."""
    for statement in ast.parse(code).body:
        call = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in call.args[:2])
            yield name, getattr(PyCodeCache.load(source), name)


def neighbours_of(kernel: Any) -> list[Any]:
    """The variants that differ from one of the kernel's in one block size, in warps or in stages."""
    descent: Any = coordinate_descent_tuner
    tuner, found = kernel.coordesc_tuner, {}
    for variant in kernel.configs:
        for name in tuner.tunable_fields:
            value = descent.get_field(variant, name)
            for neighbour in [] if value is None else tuner.get_neighbour_values(name, value):
                changed = copy.deepcopy(variant)
                descent.set_field(changed, name, neighbour)
                found[str(changed)] = changed
    own = set(map(str, kernel.configs))
    return [variant for words, variant in found.items() if words not in own]


def resources(kernel: Any, variant: Any) -> str:
    """Registers of each thread, its bytes that did not fit them, shared bytes of each group of threads, and the warps
    that an SM holds."""
    binary = kernel._precompile_config(variant).kernel
    registers, spilled_bytes = registers_of(binary.asm["cubin"])
    warps, shared = variant.num_warps, binary.metadata.shared
    resident = resident_warps(warps=warps, registers=registers, shared_bytes=shared)
    own = f"{warps} warps, {registers} registers, {spilled_bytes} spilled bytes"
    return f"{own}, {shared} shared bytes, {resident} resident warps"


def registers_of(cubin: bytes) -> tuple[int, int]:
    """The registers of each thread of a kernel, and its bytes that did not fit them."""
    import triton  # noqa: PLC0415 - installed for this benchmark alone

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60)
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said.stdout + said.stderr)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def quack_kernels() -> dict[str, str]:
    """Registers and spilled bytes of QuACK's kernels for an MLP of ViT-H/14, which are compiled as on a GPU, but not
    launched."""
    x_TD, weight_MD, bias_M, u_TM = (
        torch.empty(*size, dtype=torch.bfloat16)
        for size in ((IMAGES * 257, 1280), (5120, 1280), (5120,), (IMAGES * 257, 5120))
    )
    result = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        told = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_DIR": str(folder)}
        stack.enter_context(mock.patch.dict(os.environ, told))
        stack.enter_context(mock.patch("quack.gemm_runtime.host.get_max_active_clusters", always(66)))
        stack.enter_context(mock.patch("quack.epilogue.frontend.run_gemm_epi_plan"))
        for form, is_tanh in {"tanh": True, "exact": False}.items():
            for name, compute, tensors in (
                ("first product and GELU", hidden_by_quack, (x_TD, weight_MD, bias_M)),
                ("gradients of GELU and bias", hidden_gradients_by_quack, (x_TD, weight_MD.mT.contiguous(), u_TM)),
            ):
                before = set(folder.rglob("*.o"))
                compute(*tensors, is_tanh)
                (written,) = set(folder.rglob("*.o")) - before
                code = written.read_bytes()  # an object file of the host, with the kernel's inside
                registers, spilled_bytes = registers_of(code[code.index(b"\x7fELF", 1) :])
                result[f"{name}, {form}"] = f"{registers} registers, {spilled_bytes} spilled bytes"
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        main()
