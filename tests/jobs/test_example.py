"""`patchline example`: the files are those of slurm/, they can be read, and a wheel has them."""

import tomllib
from pathlib import Path

import pytest

from jobs.chains.steps import read_chain
from jobs.cli import main
from jobs.cluster.settings import read_cluster

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "read"), [("cluster.yaml", read_cluster), ("chain.yaml", read_chain)])
def test_an_example_is_printed_and_can_be_read(
    name: str, read: object, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["example", name]) == 0
    said = capfd.readouterr().out
    assert said == (CHECKOUT / "slurm" / name.replace(".yaml", ".example.yaml")).read_text()
    (tmp_path / name).write_text(said)
    assert callable(read)
    read(tmp_path / name)


def test_a_wheel_has_the_examples_and_says_that_it_is_typed() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in (CHECKOUT / "slurm").glob("*.example.yaml"):
        assert included[f"slurm/{path.name}"] == f"jobs/examples/{path.name}"
    for room in ("shards", "pipeline", "jobs", "patchline"):
        assert (CHECKOUT / room / "py.typed").is_file()
