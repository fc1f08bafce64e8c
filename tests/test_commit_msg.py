"""The commit-msg hook, as `make setup` installs it and git runs it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[1] / ".githooks"
TOO_LONG = "Refuse a global batch that the ranks do not divide, and say which would do"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new repository with our hooks, not installed yet; nobody's own settings of git apply."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text("[user]\n\tname = a\n\temail = a@example.org\n")
    folder = tmp_path / "checkout"
    shutil.copytree(HOOKS, folder / ".githooks")
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", ".githooks")
    return folder


def run(folder: Path, *words: str, stdin: str = "") -> str:
    """What a command says; CalledProcessError if it fails."""
    done = subprocess.run(words, cwd=folder, input=stdin, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def commit(folder: Path, message: str) -> str:
    return run(folder, "git", "commit", "--allow-empty", "--file=-", stdin=message)


def refusal(folder: Path, message: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as error:
        commit(folder, message)
    return str(error.value.stderr)


@pytest.fixture
def installed(checkout: Path) -> Path:
    assert run(checkout, ".githooks/install") == "commit subjects are checked by .githooks/commit-msg\n"
    return checkout


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("Refuse a global batch that the ranks do not divide\n\nA body. " + 100 * "x", id="a long body"),
        pytest.param("x" * 72, id="72 characters"),
        pytest.param("Refuse " + "ß" * 65, id="72 characters of more bytes"),
        pytest.param("Speed up the loader", id="an imperative that ends in -ed"),
        pytest.param("Process a page at a time", id="an imperative that ends in -s"),
        pytest.param("Bring the tests in order", id="an imperative that ends in -ing"),
        pytest.param("Merge branch 'a' of https://example.org/a-repository-with-a-long-name into main.", id="a merge"),
        pytest.param(f'Revert "{TOO_LONG}"', id="a revert"),
        pytest.param("fixup! " + TOO_LONG, id="a fixup"),
    ],
)
def test_a_subject_that_passes(installed: Path, message: str) -> None:
    commit(installed, message)
    assert run(installed, "git", "log", "--format=%B").strip() == message


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (TOO_LONG, "it has 74 characters, allowed: 72"),
        ("Refuse a global batch.", "it ends with a full stop, none is allowed"),
        *(
            (f"{first} a check", f"it begins with '{first}', allowed: the imperative")
            for first in ["Added", "Adds", "adding", "Fixes", "Fixed:", "Uses", "Using", "Moved", "Dropped", "Splits"]
        ),
        *(
            (f"{first} a check", "allowed: the imperative")
            for first in ["Simplifies", "Made", "Wrote", "Running", "The", "A"]
        ),
    ],
)
def test_a_subject_that_is_refused(installed: Path, subject: str, said: str) -> None:
    told = refusal(installed, f"{subject}\n\nThe body says why.")
    assert f"the subject '{subject}' is refused: " in told
    assert said in told
    assert told.count("allowed") == 1


def test_all_faults_are_said_at_once_and_the_message_is_kept(installed: Path) -> None:
    told = refusal(installed, f"Added: {TOO_LONG}.\n\nThe body.")
    assert told.count("allowed") == 3
    command = "git commit --edit --file='.git/COMMIT_EDITMSG'"
    assert command in told
    run(installed, "sh", "-c", f"GIT_EDITOR='sed -i 1s/.*/Refuse/' {command} --allow-empty")
    assert run(installed, "git", "log", "--format=%B").strip() == "Refuse\n\nThe body."


def test_comments_of_an_edited_message_are_no_subject(installed: Path) -> None:
    editor = "printf '\\n# Added.\\nRefuse\\n# Added.\\n' >"
    run(installed, "git", "-c", f"core.editor={editor}", "commit", "--allow-empty", "--verbose")
    assert run(installed, "git", "log", "--format=%s").strip() == "Refuse"


def test_one_installation_is_for_all_worktrees(installed: Path, tmp_path: Path) -> None:
    commit(installed, "Begin")
    run(installed, "git", "worktree", "add", "--quiet", str(tmp_path / "other"))
    assert run(tmp_path / "other", ".githooks/install") == ""
    assert "begins with 'Added'" in refusal(tmp_path / "other", "Added")
    run(tmp_path / "other", "git", "rm", "--quiet", "-r", ".githooks")
    commit(tmp_path / "other", "Added")  # a branch from before the hook


def test_it_is_installed_from_a_worktree(checkout: Path, tmp_path: Path) -> None:
    commit(checkout, "Begin")
    run(checkout, "git", "worktree", "add", "--quiet", str(tmp_path / "other"))
    run(tmp_path / "other", ".githooks/install")
    assert "begins with 'Added'" in refusal(checkout, "Added")


def test_a_hook_of_ones_own_stays(checkout: Path) -> None:
    hook = checkout / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 0\n")
    assert "not checked: .git/hooks/commit-msg is there already" in run(checkout, ".githooks/install")
    hook.write_text('#!/bin/sh\nexec .githooks/commit-msg "$1"\n')
    assert run(checkout, ".githooks/install") == ""
    assert hook.read_text() == '#!/bin/sh\nexec .githooks/commit-msg "$1"\n'


def test_a_folder_of_hooks_that_is_configured_stays(checkout: Path, tmp_path: Path) -> None:
    run(checkout, "git", "config", "core.hooksPath", str(tmp_path / "hooks"))
    assert f"not checked: core.hooksPath is '{tmp_path / 'hooks'}'" in run(checkout, ".githooks/install")
    assert not (tmp_path / "hooks").exists()
    assert not (checkout / ".git/hooks/commit-msg").exists()


def test_without_a_checkout_nothing_happens(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(HOOKS, tmp_path / "unpacked/.githooks")
    shutil.copytree(HOOKS, checkout / "vendored/.githooks")
    for folder in (tmp_path / "unpacked", checkout / "vendored"):
        assert run(folder, ".githooks/install") == ""
    assert not (checkout / ".git/hooks/commit-msg").exists()


def test_make_setup_installs_it() -> None:
    assert "\t@.githooks/install\n" in (HOOKS.parent / "Makefile").read_text()
