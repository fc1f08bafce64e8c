"""Names of classes: the normal form in which they are compared everywhere, and how they are checked."""

import json
import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_text
from shards.output.terminal import printable_name

MOST_LABELS = 10_000  # per image
MOST_LABEL_CHARACTERS = 1024
_MOST_FILE_BYTES = 256 << 20
_MOST_LISTED, _LISTED_ENDS = 12, 5
_UNSEEN = ("Cc", "Cf")
_HEADERS = frozenset(("name", "names", "class", "classes", "class_name", "label", "labels", "category", "id", "synset"))
_NUMBER = re.compile(r"0*([0-9]+?)(?:[.,]0+)?")
_PLAIN_NUMBER = re.compile(r"[0-9]{1,9}")
_LINE_BREAKS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")  # where str.splitlines divides a text

log = logging.getLogger(__name__)


def class_name(text: str) -> str:
    """Returns the text as the name of a class: in Unicode's form NFC, without spaces around it."""
    return unicodedata.normalize("NFC", text).strip()


def labels_fault(labels: Sequence[str]) -> str:
    """Returns why an image cannot have these labels; empty if it can."""
    if len(labels) > MOST_LABELS:
        return f"too many labels: {len(labels)}, allowed: {MOST_LABELS}"
    for label in labels:
        if len(label) > MOST_LABEL_CHARACTERS:
            return f"its label is too long: {len(label)} characters, allowed: {MOST_LABEL_CHARACTERS}"
        if not label.isprintable() and not _LINE_BREAKS.isdisjoint(label):
            return f"its label {shown_value(label)} has a line break; allowed: text on one line"
    return ""


def repeated_fault(names: Sequence[str]) -> str:
    """Returns a text that says which name two classes share, with the ids of both; empty if all names differ."""
    ids: dict[str, int] = {}
    for number, name in enumerate(names):
        if ids.setdefault(name, number) != number:
            return f"the classes {ids[name]} and {number} are both named {shown_value(name)}"
    return ""


def near_equal(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Returns groups of names that differ only in case, spaces, invisible characters, Unicode's compatibility forms
    (such as ligatures), or the way a number is written (7, 007 and 7,0)."""
    groups = defaultdict(list)
    for name in names:
        seen = "".join(one for one in unicodedata.normalize("NFKC", name) if unicodedata.category(one) not in _UNSEEN)
        seen = " ".join(seen.casefold().split())
        number = _NUMBER.fullmatch(seen)
        groups[number[1] if number else seen].append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def listed(names: Sequence[str]) -> str:
    """Returns the names on one line, escaped: all if there are at most twelve, otherwise the first and the last
    five."""
    if len(names) <= _MOST_LISTED:
        return printable_name(", ".join(names))
    return printable_name(", ".join([*names[:_LISTED_ENDS], "...", *names[-_LISTED_ENDS:]]))


def _is_a_name(text: str) -> bool:
    """Returns whether a file that begins with a bracket is not JSON but a list of names, the first of which begins with
    a bracket."""
    first = text.lstrip().split("\n", 1)[0].strip()
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return first not in ("[", "{")
    return False


def _are_numbered(names: Sequence[str]) -> bool:
    """Returns whether lines are names beside numbers that count from 0 or 1, as in a table, with or without a header.
    Numbers before a space may be part of names (`1 person`, `2 persons`), and count only if they contradict the order
    of the lines."""
    for separator, places in ((",", (0, -1)), (";", (0, -1)), ("\t", (0, -1)), (" ", (0,))):
        for begin in (0, 1):
            for place in places:
                numbers = _numbers_in(names[begin:], separator, place)
                first = min(numbers, default=-1)
                if len(numbers) < 2 or first > 1 or sorted(numbers) != list(range(first, first + len(numbers))):
                    continue
                shifts = {number - line for line, number in enumerate(numbers, start=begin)}
                if separator != " " or len(shifts) > 1 or not shifts <= {0, 1 - begin}:
                    return True
    return False


def _numbers_in(rows: Sequence[str], separator: str, place: int) -> list[int]:
    """Returns the number at this place of each row; empty if a row has none there."""
    fields = [row.split(separator)[place].strip() for row in rows if separator in row]
    if len(fields) < len(rows) or not all(map(_PLAIN_NUMBER.fullmatch, fields)):
        return []
    return [int(one) for one in fields]


def read_label_names(path: str) -> tuple[str, ...]:
    """Returns the names in a text file, one per line, in the order of their ids. Raises UserError if there are none, if
    one appears twice, or if one cannot be a name."""
    try:
        text = read_local_text(path, most_bytes=_MOST_FILE_BYTES)
    except (OSError, InvalidDataError) as error:
        message = f"--labels-file {path!r} cannot be read: {error}"
        raise UserError(message, todo="give a text file with one class name per line") from error
    if text.lstrip()[:1] in ("[", "{") and not _is_a_name(text):
        raise UserError(f"--labels-file {path!r} is JSON; give a text file with one class name per line")
    # str.splitlines would also divide a name at a form feed or a Unicode separator.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    names = tuple(class_name(line) for line in lines if line.strip())
    while lines and not lines[-1].strip():
        lines.pop()
    if empty := [number for number, line in enumerate(lines, start=1) if not line.strip()]:
        message = "--labels-file %r: line %d is empty and no class, so the class on line %d has the id %d"
        after = next(number for number in range(empty[0], len(lines)) if lines[number].strip())
        log.warning(message, path, empty[0], after + 1, after - sum(number <= after for number in empty))
    if len(names) > 1 and names[0].casefold() in _HEADERS:
        message = "--labels-file %r: line 1 is %r, which is the class 0 then; if it is a header, leave it out"
        log.warning(message, path, names[0])
    if not names:
        raise UserError(f"--labels-file {path!r} names no class; give one class name per line")
    if _are_numbered(names):
        raise UserError(
            f"--labels-file {path!r} has a number on each line, such as {shown_value(names[-1])}; give one class name "
            "per line, without numbers or a header, in the order of the numbers"
        )
    if reason := repeated_fault(names) or next((fault for name in names if (fault := labels_fault((name,)))), ""):
        raise UserError(f"--labels-file {path!r}: {reason}; give one class name per line, each once")
    return names
