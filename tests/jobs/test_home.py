"""`~` is the home folder wherever a path is read: after `=`, in quotes, in job files, cluster.yaml and chain.yaml."""

from pathlib import Path

import pytest

from jobs.cli import main
from jobs.record import Fields, Scalar, read_tree
from shards.files.local_files import at_home
from shards.store import open_store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder, and another working directory beside it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize("words", [["--out=~/data/x"], ["--out", "~/data/x"]], ids=["after =", "quoted"])
def test_a_dataset_is_packed_at_home(words: list[str], home: Path) -> None:
    assert main(["pack", "digits", "--split", "test", *words]) == 0
    assert (home / "data/x/manifest.json").is_file()
    assert list(Path.cwd().iterdir()) == []
    assert main(["verify", "~/data/x"]) == 0


def test_a_tool_finds_a_run_at_home(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "~/runs/none"]) == 2
    assert f"{home}/runs/none" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("~/s", "{home}/s"),
        ('"~/s"', "{home}/s"),
        ("'~/a b'", "{home}/a b"),
        ("~", None),
        ("a/~/b", "a/~/b"),
        ("~nobody-of-this-name/s", "~nobody-of-this-name/s"),
        ("about ~/s", "about ~/s"),
    ],
)
def test_values_of_yaml_files(written: str, read: str | None, home: Path) -> None:
    Path("job.yaml").write_text(f"scratch: {written}\n")
    tree = read_tree(Path("job.yaml"))
    assert isinstance(tree, Fields)
    value = tree.entries["scratch"]
    assert isinstance(value, Scalar)
    assert value.is_nothing if read is None else value.text == read.replace("{home}", str(home))


def test_python_code_may_name_its_home(home: Path) -> None:
    assert open_store("~/data/python").url == f"{home}/data/python"
    assert at_home("data/~") == "data/~"
