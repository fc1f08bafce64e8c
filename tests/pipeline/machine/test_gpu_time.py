"""Every millisecond of a step has a class, by the names that kernels have on GPUs."""

import json
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from pipeline.machine.gpu_time import (
    ACCUMULATE,
    CLASSES,
    FORWARD,
    STEP,
    UPDATE,
    account_of,
    class_of,
    kernel_gigabytes,
    kernels_of,
)

# Names from profiles of H100, H200 and A100 that are public; those of Triton from benchmarks/results/fusion_gpu.json,
# QuACK's from what it compiled there.
NAMES = {
    "products": (
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",  # float8
        "nvjet_sm90_tst_192x8_64x8_4x1_v_bz_bias_TNT",
        "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_dact_dbias_epi_e6623ebc6628b077__c_sm9_object_at__TiledMMA_T",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_nn_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>",
        "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_tn",
        "void internal::gemvx::kernel<int, int, __nv_bfloat16, float>",
        "triton_tem_fused_addmm_3",  # a template of products, which inductor wrote
        "triton_tem_fused__scaled_mm__to_copy_4",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>, cublasGemvTensor<float>>>",
        "aten::addmm",
        "aten::mm",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>",
        "void cudnn::fusion::convert_dq_to_16bits<true>",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 64, 128, 8>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 64, 128, 8>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90>>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "fmha_cutlassB_bf16_aligned_128x128_k128_sm80",
        "triton_tem_fused_flex_attention_backward_2",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "ours": (
        "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_sum_view_1",
        "triton_poi_fused__to_copy_add_mul_sigmoid_view_2",
        "triton_red_fused_native_layer_norm_0",
        # Named after all operators that they fuse, or whose results they convert:
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_1",
        "triton_red_fused__scaled_mm_abs_max_2",
        "triton_poi_fused__scaled_dot_product_efficient_attention_clone_12",
        "triton_poi_fused__scaled_dot_product_flash_attention_3",
        "triton_poi_fused_convolution_0",
        "triton_poi_fused_all_gather_into_tensor_5",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>",
        "void cudnn::engines_precompiled::nhwcToNchwKernel<float, float, float, true, false>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>, 4, 64, 64>",
        "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>",
        "void at_cuda_detail::cub::DeviceScanByKeyKernel",
        "aten::gelu_backward",
        "CompiledFunctionBackward",
        "autograd::engine::evaluate_function: AddmmBackward0",
    ),
    "exchange": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::allreduce_",
    ),
    "copies": ("Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"),
    "other": ("a_kernel_of_tomorrow", "void quantum::kernel<4>"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_has_a_class_by_its_name(kind: str, name: str) -> None:
    assert class_of(name) == kind
    assert class_of(name, phase="backward") == kind
    assert class_of(name, phase="update") == ("exchange" if kind == "exchange" else "update")


class Trace:
    """A trace of a GPU, made event by event, in microseconds. A kernel is launched by the host at `launched`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = count(1)

    def range(self, name: str, began: float, ended: float) -> None:
        self.events.append(
            {"ph": "X", "cat": "user_annotation", "name": name, "ts": began, "dur": ended - began, "tid": 1}
        )

    def kernel(self, name: str, began: float, ended: float, *, launched: float | None, cat: str = "kernel") -> None:
        """`launched`: None if the trace lacks the launch."""
        if launched is None:
            self.events.append({"ph": "X", "cat": cat, "name": name, "ts": began, "dur": ended - began, "tid": 7})
            return
        number = next(self._numbers)
        args = {"correlation": number}
        launch = "cudaLaunchKernel" if number % 2 else "cuLaunchKernelEx"
        group = "cuda_runtime" if number % 2 else "cuda_driver"
        self.events += [
            {"ph": "X", "cat": group, "name": launch, "ts": launched, "dur": 3.0, "tid": 1, "args": args},
            {"ph": "X", "cat": cat, "name": name, "ts": began, "dur": ended - began, "tid": 7, "args": args},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": began, "tid": 7},  # has no duration
        ]

    def steps(self, number: int = 5, *, length: float = 1000.0) -> Iterator[float]:
        """Adds the ranges of steps, which the host launches one after the other, and yields their beginnings."""
        for step in range(number):
            began = step * length
            self.range(STEP, began, began + length - 1)
            self.range(ACCUMULATE, began, began + 0.6 * length)
            self.range(FORWARD, began, began + 0.3 * length)
            self.range(UPDATE, began + 0.7 * length, began + 0.9 * length)
            yield began


def test_a_step_is_the_sum_of_its_classes() -> None:
    """The step begins with its first kernel. What overlaps counts once: as the first class of CLASSES."""
    trace = Trace()
    for step in trace.steps():
        trace.kernel("nvjet_tst_256x128", step + 50, step + 250, launched=step + 10)
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32", step + 200, step + 300, launched=step + 20)
        trace.kernel("triton_red_fused_0", step + 300, step + 420, launched=step + 310)
        trace.kernel("fmha_cutlassB_bf16", step + 440, step + 540, launched=step + 430)
        trace.kernel("Memset (Device)", step + 540, step + 550, launched=step + 440, cat="gpu_memset")
        trace.kernel("void at::native::reduce_kernel<512>", step + 720, step + 800, launched=step + 710)
        trace.kernel("from_elsewhere", step + 800, step + 830, launched=step + 420)
        trace.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": step + 5, "dur": 2}
        )
    found = account_of({"traceEvents": trace.events}, gigabytes={"triton_red_fused_0": 0.000_36})
    assert found["step_milliseconds"] == 1.0
    assert found["classes"] == {
        "products": 0.2,
        "attention": 0.1,
        "ours": 0.12,
        "update": 0.08,
        "copies": 0.01,
        "other": 0.03,
        "exchange": 0.05,
        "idle": 0.41,
    }
    assert (found["num_kernels"], found["num_waits"]) == (7, 1)
    kernels = {each["name"]: each for each in found["kernels"]}
    assert kernels["triton_red_fused_0"]["gigabytes_per_second"] == 3.0
    assert kernels["triton_red_fused_0"] == {
        "name": "triton_red_fused_0",
        "class": "ours",
        "phase": "backward",
        "milliseconds": 0.12,
        "count": 1.0,
        "gigabytes_per_second": 3.0,
    }
    assert kernels["ncclDevKernel_AllReduce_Sum_f32"]["milliseconds"] == 0.1  # its own time, half of it hidden
    assert kernels["from_elsewhere"]["class"] == "other"
    assert found["idle"] == [
        {"place": "between steps", "milliseconds": 0.22, "host_late_milliseconds": 0.22, "count": 1.0},
        {"place": "backward to update", "milliseconds": 0.17, "host_late_milliseconds": 0.17, "count": 1.0},
        {"place": "backward", "milliseconds": 0.02, "host_late_milliseconds": 0.02, "count": 1.0},
    ]
    assert found["gaps"][0] == {
        "milliseconds": 0.22,
        "place": "between steps",
        "is_host_late": True,
        "before": "from_elsewhere",
        "after": "nvjet_tst_256x128",
    }


def test_kernels_that_no_step_launched_are_no_idle_time() -> None:
    """Between two steps, or without a launch in the trace. Of what class they are by their names does not matter."""
    trace = Trace()
    for step in trace.steps():
        trace.kernel("nvjet", step + 100, step + 300, launched=step + 10)
        trace.kernel("triton_poi_fused_0", step + 300, step + 350, launched=step + 999.5)
        trace.kernel("triton_poi_fused_1", step + 350, step + 420, launched=None)
    found = account_of({"traceEvents": trace.events})
    assert found["classes"]["other"] == 0.12
    assert found["classes"]["idle"] == 0.68
    kernels = {each["name"]: (each["class"], each["phase"], each["milliseconds"]) for each in found["kernels"]}
    assert kernels["triton_poi_fused_0"] == ("other", "", 0.05)
    assert kernels["triton_poi_fused_1"] == ("other", "", 0.07)


def test_any_number_of_forward_passes_is_inside_the_backward_pass() -> None:
    trace = Trace()
    for number in range(4):
        step = 1000.0 * number
        trace.range(STEP, step, step + 900)
        trace.range(ACCUMULATE, step, step + 600)
        for micro in range(4):
            trace.range(FORWARD, step + 100 * micro, step + 100 * micro + 50)
            trace.kernel("one", step + 100 * micro + 20, step + 100 * micro + 30, launched=step + 100 * micro + 10)
        trace.kernel("two", step + 500, step + 600, launched=step + 500)
    phases = {
        (each["name"], each["phase"], each["count"]) for each in account_of({"traceEvents": trace.events})["kernels"]
    }
    assert phases == {("one", "forward", 4.0), ("two", "backward", 1.0)}


def test_a_gap_is_late_only_if_the_device_waited_for_the_launch() -> None:
    trace = Trace()
    for step in trace.steps():
        trace.kernel("nvjet_1", step + 500, step + 700, launched=step + 10)
        trace.kernel("nvjet_2", step + 702, step + 900, launched=step + 20)  # 2 us between kernels that both wait
    found = account_of({"traceEvents": trace.events})
    places = {each["place"]: (each["milliseconds"], each["host_late_milliseconds"]) for each in found["idle"]}
    assert places == {"forward": (0.002, 0.0), "between steps": (0.6, 0.6)}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["nvjet", "flash", "triton_0", "nccl", "Memset x", "unknown"]),
            st.integers(0, 999),
            st.integers(0, 600),
            st.integers(0, 999),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_any_timeline_is_accounted_for_completely(kernels: list[tuple[str, int, int, int]]) -> None:
    """Kernels may overlap, take no time, run into the next step, or be launched outside of all parts."""
    trace = Trace()
    for step in trace.steps():
        for name, began, length, launched in kernels:
            trace.kernel(name, step + began, step + began + length, launched=step + min(began, launched))
    found = account_of({"traceEvents": trace.events})
    step = found["step_milliseconds"]
    assert step == 1.0
    assert set(found["classes"]) == {*CLASSES, "idle"}
    assert sum(found["classes"].values()) == pytest.approx(step, abs=0.01)
    assert sum(each["milliseconds"] for each in found["idle"]) == pytest.approx(found["classes"]["idle"], abs=0.01)


@pytest.mark.parametrize(
    ("num_steps", "without", "says"),
    [
        pytest.param(2, (), "2 steps of 2", id="too few"),
        pytest.param(5, (1,), "4 steps of 5", id="the second one has no kernel"),
        pytest.param(5, (0, 1, 2, 3, 4), "no kernels on the GPU", id="none has"),
    ],
)
def test_a_trace_that_lacks_steps_is_refused(num_steps: int, without: tuple[int, ...], says: str) -> None:
    """The host's operators do not pass for the kernels of a GPU."""
    trace = Trace()
    for number, step in enumerate(trace.steps(num_steps)):
        trace.events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": step, "dur": 300, "tid": 1})
        if number not in without:
            trace.kernel("nvjet", step, step + 1, launched=step)
    with pytest.raises(ValueError, match=says):
        account_of({"traceEvents": trace.events})


def test_on_a_cpu_operators_take_the_place_of_kernels() -> None:
    """Each counts with the time in which it ran itself, from a real trace."""
    a = torch.randn(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(4):
            with record_function(STEP):
                with record_function(ACCUMULATE):
                    with record_function(FORWARD):
                        loss = torch.nn.functional.gelu(a @ a).sum()
                    loss.backward()  # type: ignore[no-untyped-call]
                with record_function(UPDATE), torch.no_grad():
                    a.mul_(0.5)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    found = account_of(trace, is_gpu=False)
    phases = {(each["name"], each["class"], each["phase"]) for each in found["kernels"]}
    assert phases >= {
        ("aten::mm", "products", "forward"),
        ("aten::mm", "products", "backward"),
        ("aten::gelu", "ours", "forward"),
        ("aten::mul_", "update", "update"),
    }
    assert found["classes"]["other"] == 0.0, found["kernels"]
    pieces = list(kernels_of(trace["traceEvents"], is_gpu=False))
    operators = [each for each in trace["traceEvents"] if each.get("cat") == "cpu_op"]
    longest = max(each["ts"] + each["dur"] for each in operators) - min(each["ts"] for each in operators)
    assert 0 < sum(each.ended - each.began for each in pieces) <= longest  # no time counts twice


CODE = """
triton_red_fused_0 = async_compile.triton('triton_red_fused_0', '''
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'triton_red_fused_0', 'kernel_num_gb': 0.337123328, 'x': 1}
''', device_str='cuda')

triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', '''
    inductor_meta={'kernel_name': 'triton_poi_fused_1', 'kernel_num_gb': 1e-05}
''', device_str='cuda')

triton_for_fused_2 = async_compile.triton('triton_for_fused_2', '''
    inductor_meta={'kernel_name': 'triton_for_fused_2'}
''', device_str='cuda')
"""


def test_the_bytes_of_kernels_are_read_from_inductors_code() -> None:
    """As torch 2.13 writes it, cut to what is read. A kernel may have none."""
    found = {"triton_red_fused_0": 0.337123328, "triton_poi_fused_1": 1e-05}
    assert kernel_gigabytes(CODE) == found
    assert kernel_gigabytes(CODE + CODE) == found
    again = CODE.replace("0.337123328", "0.5")  # another graph has a kernel of the same name
    assert kernel_gigabytes(CODE + again) == {"triton_poi_fused_1": 1e-05}
    assert kernel_gigabytes("") == {}


def test_the_bytes_of_a_kernel_include_the_parts_of_sums() -> None:
    """As in the backward pass of ViT-H/14's block: 4 x 2056 x 1280 values in fp32. Other workspaces do not count."""
    parts = """
        workspace_1 = empty_strided_cuda((10526720, ), (1, ), torch.float32)
        raw_stream0 = get_raw_stream(0)
        triton_red_fused_0.run(buf27, primals_1, buf32, workspace_1, 65792, 1280, stream=raw_stream0)
        buf12 = workspace_1[0 * (2056) * (1280) : (0 + 1) * (2056) * (1280)].view(2056, 1280).sum(dim=0).view([1280])
        del workspace_1
        workspace_2 = empty_strided_cuda((64, ), (1, ), torch.uint8)
        triton_poi_fused_1.run(buf1, workspace_2, 12, stream=raw_stream0)
    """
    found = kernel_gigabytes(CODE + parts)
    assert found == {"triton_red_fused_0": pytest.approx(0.337123328 + 0.042106880), "triton_poi_fused_1": 1e-05}
