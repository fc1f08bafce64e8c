"""Class names in a text file, one per line, in the order of their ids."""

from pathlib import Path

from shards.errors import UserError


def read_label_names(path: str) -> tuple[str, ...]:
    """The names; UserError if there are none or one appears twice."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"--labels-file {path!r} cannot be read: {error}"
        raise UserError(f"{message}; give a text file with one class name per line") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if not names or len(set(names)) < len(names):
        what = f"names {len(names) - len(set(names))} classes twice" if names else "names no class"
        raise UserError(f"--labels-file {path!r} {what}; give one class name per line, each once")
    return names
