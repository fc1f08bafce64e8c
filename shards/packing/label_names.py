"""Class names in a text file, one per line, in the order of their ids."""

from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_text
from shards.schema.config_values import shown_text
from shards.sources.table_labels import MOST_LABEL_CHARACTERS

MOST_BYTES = 256 << 20


def read_label_names(path: str) -> tuple[str, ...]:
    """The names; UserError if there are none or one appears twice."""
    try:
        lines = read_local_text(path, most_bytes=MOST_BYTES).splitlines()
    except (OSError, InvalidDataError) as error:
        message = f"--labels-file {path!r} cannot be read: {error}"
        raise UserError(f"{message}; give a text file with one class name per line") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if not names or len(set(names)) < len(names):
        what = f"names {len(names) - len(set(names))} classes twice" if names else "names no class"
        raise UserError(f"--labels-file {path!r} {what}; give one class name per line, each once")
    if longest := next((name for name in names if len(name) > MOST_LABEL_CHARACTERS), ""):
        what = f"names a class with {len(longest):,} characters ({shown_text(longest)})"
        raise UserError(
            f"--labels-file {path!r} {what}; allowed: {MOST_LABEL_CHARACTERS:,}; give one class name per line"
        )
    return names
