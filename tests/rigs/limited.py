"""A command in a child process that may take little memory and time: for input that asks for more."""

from tests.rigs.processes import Ended, program

_PROGRAM = """
import resource, signal, sys
from pathlib import Path
from jobs.cli import main

mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30),) * 2)
signal.alarm(60)
sys.exit(main(sys.argv[1:]))
"""


def limited_patchline(*words: str) -> Ended:
    """`patchline WORDS` in 1 GiB more than the imports take, and 60 seconds; exit code -14 if it takes longer."""
    return program(_PROGRAM, *words)
