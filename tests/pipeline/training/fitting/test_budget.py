"""A rank's share of its host, by the files of a made-up one, and of a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.training.fitting.budget import available_bytes, budget_of, gpu_budget, host_budget
from tests.rigs.processes import one_world

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4000 kB\n"
HOST = 4000 * 1024


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, HOST, id="no limit"),
        pytest.param({"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n"}, HOST, id="no number"),
        pytest.param(
            {"cgroup/job/memory.max": "1000\n", "cgroup/job/memory.current": "700\n"}, 300, id="the process's own group"
        ),
        pytest.param(
            {
                "cgroup/memory.max": "900\n",
                "cgroup/memory.current": "800\n",
                "cgroup/memory.stat": "anon 700\ninactive_file 50\n",
                "cgroup/job/memory.max": "1000\n",
                "cgroup/job/memory.current": "700\n",
            },
            150,
            id="the tightest above it, less what the page cache can give back",
        ),
        pytest.param(
            {
                "cgroup/memory/memory.limit_in_bytes": "2000\n",
                "cgroup/memory/memory.usage_in_bytes": "1500\n",
                "cgroup/memory/memory.stat": "total_inactive_file 20\n",
            },
            520,
            id="version 1",
        ),
        pytest.param(
            {"cgroup/job/memory.max": "100\n", "cgroup/job/memory.current": "700\n"}, 0, id="above its limit already"
        ),
        pytest.param({"cgroup/job/memory.max": "-3\n", "cgroup/job/memory.current": "x\n"}, HOST, id="no numbers"),
        pytest.param({"proc/meminfo": "MemAvailable: lots\n"}, 1 << 60, id="nothing known"),
    ],
)
def test_what_is_left_of_a_host(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job\n"} | files)
    assert available_bytes(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup") == expected


def test_this_host_has_memory() -> None:
    assert 0 < available_bytes() < 1 << 60


def test_ranks_share_what_reading_ahead_leaves() -> None:
    one = budget_of(one_world(), read_ahead_bytes=1_000_000_000)
    two = budget_of(replace(one_world(0, 2)), read_ahead_bytes=1_000_000_000)
    assert one.total_bytes == pytest.approx(2 * two.total_bytes, rel=0.3), "other processes come and go"
    assert one.total_bytes < available_bytes() - 500_000_000


def test_reserves() -> None:
    host = host_budget(21_000_000_000, num_local_ranks=2)
    assert (host.total_bytes, host.reserve_bytes, host.bytes) == (10_500_000_000, 1_025_000_000, 9_475_000_000)
    assert host_budget(-5, num_local_ranks=2).bytes == 0
    h100 = gpu_budget(85_000_000_000, where="H100")
    assert (h100.reserve_bytes, h100.bytes) == (8_800_000_000, 76_200_000_000)
