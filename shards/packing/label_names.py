"""Class names in a text file, one per line, in the order of their ids."""

from shards.class_names import class_name, labels_fault, repeated_fault
from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_text

MOST_BYTES = 256 << 20


def read_label_names(path: str) -> tuple[str, ...]:
    """The names; UserError if there are none, one appears twice, or one cannot be a name."""
    try:
        text = read_local_text(path, most_bytes=MOST_BYTES)
    except (OSError, InvalidDataError) as error:
        message = f"--labels-file {path!r} cannot be read: {error}"
        raise UserError(f"{message}; give a text file with one class name per line") from error
    # str.splitlines would also divide a name at a form feed or a Unicode separator.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    names = tuple(class_name(line) for line in lines if line.strip())
    if not names:
        raise UserError(f"--labels-file {path!r} names no class; give one class name per line")
    if reason := repeated_fault(names) or next((fault for name in names if (fault := labels_fault((name,)))), ""):
        raise UserError(f"--labels-file {path!r}: {reason}; give one class name per line, each once")
    return names
