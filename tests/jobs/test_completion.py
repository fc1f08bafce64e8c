"""Completion of words: what the shell is told, and a real bash that is told it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.completion import ASK, candidates
from jobs.stages import COMMANDS

SCRIPTS = ("bash", "zsh", "fish")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], [*COMMANDS, "--help", "--version"]),
        (["pretr"], ["pretrain"]),
        (["show", "vit_h14"], ["vit_h14_jft", "vit_h14_i21k", "vit_h14_jft_average"]),
        (["show", "e"], ["evaluate", "export"]),
        (
            ["diff", "finetune", "digits_48", "cifar10_"],
            ["cifar10_48", "cifar10_code", "cifar10_paper", "cifar10_augreg", "cifar10_bit"],
        ),
        (["diff", "digits_smoke", "pets"], ["pets", "pets_paper", "pets_augreg", "pets_bit"]),
        (["pretrain", "digits"], ["digits_smoke"]),
        (["evaluate", ""], []),
        (["completion", ""], list(SCRIPTS)),
        (["pretrain", "digits_smoke", "--schedule.w"], ["--schedule.warmup-steps"]),
        (["pretrain", "digits_smoke", "--data.augment.no-f"], ["--data.augment.no-flip"]),
        (["pretrain", "cifar10_small_smoke", "--ste"], ["--steps"]),
        (["pack", "parquet", "--source.f"], ["--source.files"]),
        (["verify", "somewhere", "--d"], ["--deep"]),
        (["verify", "--h"], ["--help", "--help-all"]),
        (["pretrain", "digits_smoke", "--engine.zero-stage", ""], ["1", "2", "3"]),
        (["pretrain", "digits_smoke", "--run-dir", ""], []),
        (["verify", ""], []),
        (["status", "--"], ["--json", "--help"]),
        (["logs", "runs/a", "--"], ["--rank", "--lines", "--follow", "--help"]),
        (["doctor", "runs/a", "--j"], ["--json"]),
        (["preflight", "--nodes", "2", "--d"], ["--deep"]),
        (["sweep", "finetune", "cifar10", "--d"], ["--data.held-out.share", "--dry-run"]),
        (["cancel", ""], []),
        (["nothing", ""], []),
        (["pretrain", "nothing", "--"], ["--help", "--help-all"]),
        (["pretrain", "gone.yaml", "--s"], []),
    ],
)
def test_what_a_word_may_become(words: list[str], found: list[str]) -> None:
    assert candidates(words) == found


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_scripts_of_shells_that_are_here_are_right(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"patchline {ASK} " in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes(tmp_path: Path) -> None:
    """As when TAB is pressed: bash calls the function with the words of the line."""
    (tmp_path / "patchline").write_text(f'#!/bin/sh\nexec {sys.executable} -m jobs.cli "$@"\n')
    (tmp_path / "patchline").chmod(0o755)
    program = f"""\
        PATH={tmp_path}:$PATH
        eval "$(patchline completion bash)"
        complete -p patchline
        COMP_WORDS=(patchline finetune pets --checkpoint.keep-); COMP_CWORD=3; _patchline; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(patchline fine); COMP_CWORD=1; _patchline; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(patchline verify ""); COMP_CWORD=2; _patchline; echo "${{#COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    wanted = "--checkpoint.keep-newest --checkpoint.keep-every --checkpoint.keep-best"
    assert done.stdout.splitlines() == ["complete -o default -F _patchline patchline", wanted, "finetune", "0"]
