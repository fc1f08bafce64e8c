"""How much memory there is, as /proc and the control groups of both versions say it."""

from pathlib import Path

import pytest

from pipeline.ranks.host_memory import available_bytes

GB = 1 << 30


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {"cgroup": "0::/slurm/job\n", "slurm/job/memory.max": "max\n"}


@pytest.mark.parametrize(
    ("files", "gigabytes"),
    [
        pytest.param({}, 8, id="no groups"),
        pytest.param({"cgroup": "0::/\n"}, 8, id="the top group has no limit"),
        pytest.param(
            V2 | {"slurm/memory.max": f"{5 * GB}\n", "slurm/memory.current": f"{2 * GB}\n"}, 3, id="a group above"
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "job/memory.max": f"{5 * GB}",
                "job/memory.current": f"{4 * GB}",
                "job/memory.stat": f"anon 7\ninactive_file {2 * GB}\n",
            },
            3,
            id="page cache can be taken back",
        ),
        pytest.param(
            {"cgroup": "0::/job\n", "job/memory.max": "5", "job/memory.current": "9"}, 0, id="above its limit"
        ),
        pytest.param({"cgroup": "0::/../..\n", "memory.max": f"{GB}", "memory.current": "0"}, 1, id="a container"),
        pytest.param(
            {
                "cgroup": "5:cpu:/a\n4:memory:/a\n0::/\n",
                "memory/a/memory.limit_in_bytes": f"{6 * GB}",
                "memory/a/memory.usage_in_bytes": f"{3 * GB}",
                "memory/a/memory.stat": f"total_inactive_file {GB}\n",
            },
            4,
            id="version 1",
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "memory/memory.limit_in_bytes": f"{6 * GB}",
                "memory/memory.usage_in_bytes": f"{3 * GB}",
            },
            3,
            id="version 1, in a container",
        ),
        pytest.param(
            {
                "cgroup": "0::/job\n",
                "memory.max": f"{4 * GB}",
                "memory.current": f"{3 * GB}",
                "memory.stat": f"anon 7\ninactive_file {GB}\n",
                "job/memory.max": f"{5 * GB}",
                "job/memory.current": f"{2 * GB}",
            },
            2,
            id="the tightest, less what the page cache can give back",
        ),
        pytest.param(
            {"cgroup": "0::/job\n", "job/memory.max": "-3\n", "job/memory.current": "x\n"}, 8, id="no numbers"
        ),
        pytest.param({"cgroup": "0::/job\n", "meminfo": "MemAvailable: lots\n"}, 1 << 30, id="nothing known"),
    ],
)
def test_the_least_of_all_counts(tmp_path: Path, files: dict[str, str], gigabytes: int) -> None:
    put(tmp_path, {"meminfo": f"MemTotal: 99 kB\nMemAvailable:    {8 * GB // 1024} kB\n", **files})
    found = available_bytes(meminfo=tmp_path / "meminfo", groups=tmp_path / "cgroup", mount=tmp_path)
    assert found == gigabytes * GB


def test_this_host_has_some() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
