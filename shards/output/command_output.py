"""Everything that a command and its worker processes say, escaped: standard output, standard error, log, warnings.

It covers what other libraries write in Python, too. Libraries in C write to the file descriptors themselves; see
`pipeline/data/decode.py` for the one that repeated names from data.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shards.output.terminal import LogFormatter, escaped_output

log = logging.getLogger(__name__)
_NOISY = ("botocore", "boto3", "urllib3", "s3transfer")


@contextmanager
def command_output(*, level: int = logging.INFO, rank: int = 0) -> Iterator[None]:
    """While this is open, the log goes to standard error, and both standard streams are escaped.

    Warnings, and errors that end a thread, become messages of the log: Python would write their further lines as they
    are. A program with its own log keeps its handlers.
    """
    with escaped_output(), ExitStack() as stack:
        root = logging.getLogger()
        if not root.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(LogFormatter(sys.stderr, rank=rank))
            stack.callback(root.removeHandler, handler)
            root.addHandler(handler)
            root.setLevel(level)
        for noisy in _NOISY:
            logging.getLogger(noisy).setLevel(logging.WARNING)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata and large sizes, which are checked
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        for module, say in ((threading, _say_end_of_thread), (sys, _say_unraisable)):
            name = "excepthook" if module is threading else "unraisablehook"
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, say)
        yield


def _say_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread else "a thread"
        log.error("%s ended", name, exc_info=ended.exc_value)


def _say_unraisable(ignored: Any) -> None:
    log.error("%s", ignored.err_msg or "an error was ignored", exc_info=ignored.exc_value)
