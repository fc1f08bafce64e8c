"""Finds the tars that a URL stands for: all below a folder, those that match a pattern with braces, or those in a
list."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shards.config_values import whole_number
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_text
from shards.output.quantities import plural
from shards.sources.archives import NO_TAR, is_tar_name
from shards.sources.names import PassedOver, files_of_splits, is_archive, refuse_several
from shards.sources.tar_members import is_hidden
from shards.sources.tree import is_passed_over
from shards.store import open_store

_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_NAMES = 10_000_000
_MOST_LIST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ListedTar:
    """A tar, given by its path in the store."""

    path: str
    num_bytes: int


def split_pattern(url: str) -> tuple[str, str]:
    """Divides a URL into a store and a pattern below it. The pattern is empty if the URL has no braces."""
    if "{" not in url:
        return url, ""
    folder, slash, _ = url.partition("{")[0].rpartition("/")
    return folder or slash or ".", url[len(folder) + len(slash) :]


def find_tars(tars_url: str, *, pattern: str = "", tars_file: str = "") -> list[ListedTar]:
    """Returns the tars below `tars_url`: all of them, sorted, or those that a pattern or a list names, in its order.

    `tars_file`: a file with one path below `tars_url` per line. Raises UserError if there are no tars, if a listed one
    is missing or listed twice, or, without `tars_file`, if the tars belong to several splits, which would become one
    dataset.
    """
    if pattern and tars_file:
        raise UserError("the URL has a pattern in braces and --tars-file is given; give one of them")
    found, others = dict[str, int](), PassedOver(why=NO_TAR)
    for path, num_bytes in open_store(tars_url).list_sizes():
        if is_tar_name(path, where=tars_url):
            found[path] = num_bytes
        elif is_archive(path) and not is_hidden(path):
            others.add(path)
    if not pattern and not tars_file:
        names = [path for path in found if not is_passed_over(path)]
        others.mention(tars_url)
    else:
        names = list(expanded(pattern)) if pattern else _lines(tars_file)
        if missing := [name for name in names if name not in found]:
            more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
            raise UserError(f"{missing[0]}{more} not below {tars_url}; correct the names")
        if len(set(names)) < len(names):
            raise UserError(f"{pattern or tars_file} names {len(names) - len(set(names))} tars twice; name each once")
    if not names:
        raise UserError(f"no *.tar is below {tars_url}; give the folder or s3://bucket/prefix that holds the tars")
    if not tars_file:
        _refuse_mixed_splits(names, tars_url)
    return [ListedTar(path=name, num_bytes=found[name]) for name in names]


def _refuse_mixed_splits(names: list[str], tars_url: str) -> None:
    found = {split: f"{plural(len(some), 'tar')}: {some[0]}" for split, some in files_of_splits(names).items()}
    todo = (
        "index each split with --split and its own --index-url, and list its tars in a file for --tars-file, one path "
        "per line"
    )
    refuse_several(found, what=f"the tars at {tars_url} are", todo=todo)


def expanded(pattern: str) -> Iterator[str]:
    """Yields the names that a pattern with braces stands for, as in a shell: `{000..127}` counts, `{a,b}` lists, and
    several braces are combined.

    Raises UserError if braces do not match, if the text in them neither counts nor lists, or if there are too many
    names.
    """
    pieces = _BRACES.split(pattern)  # text, braces, text, braces, ..., text
    if any("{" in text or "}" in text for text in pieces[::2]):
        raise UserError(f"the braces of {pattern!r} do not match; use {{000..127}} or {{a,b}}")
    choices = [_choices(inner, pattern) for inner in pieces[1::2]]
    total = 1
    for some in choices:
        total *= len(some)
    if total > _MOST_NAMES:
        raise UserError(f"{pattern!r} expands to {total} names; allowed: {_MOST_NAMES}")
    names = [pieces[0]]
    for some, text in zip(choices, pieces[2::2], strict=True):
        names = [name + choice + text for name in names for choice in some]
    yield from names


def _choices(inner: str, pattern: str) -> list[str]:
    first, dots, last = inner.partition("..")
    begin, end = whole_number(first), whole_number(last)
    if dots and begin is not None and end is not None and begin <= end:
        if end - begin >= _MOST_NAMES:
            raise UserError(f"{pattern!r} expands to too many names; allowed: {_MOST_NAMES}")
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        return [f"{number:0{width}d}" for number in range(begin, end + 1)]
    if "," in inner:
        return inner.split(",")
    raise UserError(f"{{{inner}}} of {pattern!r} neither counts nor lists; use {{000..127}} or {{a,b}}")


def _lines(tars_file: str) -> list[str]:
    try:
        lines = read_local_text(tars_file, most_bytes=_MOST_LIST_BYTES).splitlines()
    except (OSError, InvalidDataError) as error:
        message = f"--tars-file {tars_file!r} cannot be read: {error}"
        raise UserError(message, todo="give a text file with the path of one tar per line") from error
    return [line.strip() for line in lines if line.strip()]
