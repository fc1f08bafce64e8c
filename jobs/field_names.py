"""The names of a job's fields, and the one that an unknown name was probably meant to be."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

_CLOSE_BESIDE, _CLOSE_ELSEWHERE = 0.6, 0.8


def field_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """The dotted name of every field, each group before its fields; if there is a choice of groups, of all of them."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        yield f"{prefix}{each.name}"
        for inner in (hints[each.name], *get_args(hints[each.name])):
            if is_dataclass(inner):
                yield from field_names(inner, f"{prefix}{each.name}.")


def known_instead(given: str, prefix: str, root: type) -> str:
    """`; did you mean ...?` for a name that `root` does not have below `prefix`; empty if none is similar."""
    word = given.replace("-", "_").lower()
    every = list(dict.fromkeys(field_names(root)))
    if word in every and "." in word:
        return f"; write it as {nested(word)}"
    beside = [name.removeprefix(prefix) for name in every if name.rpartition(".")[0] == prefix.rstrip(".")]
    if word in beside:
        return f"; did you mean {word}?"
    by_last = {name.rpartition(".")[2]: name for name in reversed(every)}  # the first field of this name wins
    if word in by_last:
        return f"; did you mean {nested(by_last[word])}?"
    for close in get_close_matches(word, beside, n=1, cutoff=_CLOSE_BESIDE):
        return f"; did you mean {close}?"
    for close in get_close_matches(word, by_last, n=1, cutoff=_CLOSE_ELSEWHERE):
        return f"; did you mean {nested(by_last[close])}?"
    return ""


def nested(name: str) -> str:
    """A dotted name as YAML has it: `a.b` is `a: {b: ...}`."""
    *groups, last = name.split(".")
    return "".join(f"{group}: {{" for group in groups) + f"{last}: ..." + "}" * len(groups)
