"""The command `patchline`, which `python -m patchline` runs too. It finds our packages even if the current folder has
others of the same names.

The current folder may contain a jobs/, a pipeline/ or a torch.py. Neither this process nor its children look for
modules there.
"""

import itertools
import os
import sys

from patchline import refuse_others

_OURS = ("jobs", "pipeline", "shards")


def entry() -> None:
    """Runs the console script `patchline`."""
    _find_ours_first()
    try:
        refuse_others(_OURS)
    except ImportError as error:
        sys.stderr.write(f"patchline: {error}\n")
        sys.exit(2)
    from jobs.cli import entry as run  # noqa: PLC0415 - only after our packages come first on the path

    run()


def _find_ours_first() -> None:
    """Puts our folder on the path before any folder with packages of the same names, also for child processes."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib may be shadowed
    before = list(itertools.takewhile(lambda folder: os.path.realpath(folder) != os.path.realpath(home), sys.path))
    hiding = [place for place, folder in enumerate(before) if _has_such(folder)]
    if len(before) < len(sys.path) and not hiding:
        return
    sys.path.insert(hiding[0] if hiding else len(sys.path), home)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([home, others] if others else [home])


def _has_such(folder: str) -> bool:
    """Returns whether a folder contains a module with the name of one of our packages."""
    return any(os.path.exists(f"{folder or '.'}/{name}{end}") for name in _OURS for end in ("", ".py"))  # noqa: PTH110


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder
    entry()
