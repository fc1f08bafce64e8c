"""Deterministic kernels are asked for on GPUs only, before any is used, and completely."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.ranks import devices
from pipeline.ranks.devices import WORKSPACE, use_deterministic_kernels
from shards.errors import UserError


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """PyTorch's switches, recorded."""
    switches: dict[str, Any] = {}
    found = SimpleNamespace(
        switches=switches,
        use_deterministic_algorithms=lambda mode: switches.update(algorithms=mode),
        utils=SimpleNamespace(deterministic=SimpleNamespace(fill_uninitialized_memory=True)),
        backends=SimpleNamespace(
            cuda=SimpleNamespace(enable_cudnn_sdp=lambda mode: switches.update(cudnn_attention=mode)),
            cudnn=SimpleNamespace(deterministic=False, benchmark=True),
        ),
    )
    monkeypatch.setattr(devices, "torch", found)
    return found


@pytest.mark.parametrize(
    ("environ", "workspace"),
    [
        pytest.param({}, ":4096:8", id="set for the user"),
        pytest.param({WORKSPACE: ":16:8"}, ":16:8", id="the user's own, as good"),
    ],
)
def test_every_switch_is_set(fake_torch: SimpleNamespace, environ: dict[str, str], workspace: str) -> None:
    use_deterministic_kernels(environ)
    assert environ[WORKSPACE] == workspace
    assert fake_torch.switches == {"algorithms": True, "cudnn_attention": False}
    assert vars(fake_torch.backends.cudnn) == {"deterministic": True, "benchmark": False}
    assert fake_torch.utils.deterministic.fill_uninitialized_memory is False


def test_the_names_are_pytorchs() -> None:
    """The switches that the fake has exist."""
    assert callable(torch.use_deterministic_algorithms)
    assert callable(torch.backends.cuda.enable_cudnn_sdp)
    assert isinstance(torch.utils.deterministic.fill_uninitialized_memory, bool)  # type: ignore[attr-defined]
    assert isinstance(torch.backends.cudnn.deterministic, bool)
    assert isinstance(torch.backends.cudnn.benchmark, bool)


def test_another_workspace_is_refused(fake_torch: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0' with .*; allowed: :4096:8 or :16:8; unset"):
        use_deterministic_kernels({WORKSPACE: ":0:0"})
    assert fake_torch.switches == {}
