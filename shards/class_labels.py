"""Decides what the labels in a source mean, by one rule for all sources of images.

A source passes its labels on as they are written. Only all labels together show whether a number is the id of a class,
and whether a list of 0 and 1 is a vector. `settle` decides this once for a collection. If labels could mean two things,
it raises an error that names the flag to set. `Meaning.of` then reads the labels of each image.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from shards.class_names import MOST_LABELS, class_name
from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import ImageRefusedError, UserError

log = logging.getLogger(__name__)

# The texts that programs write for a missing value: those that pandas.read_csv knows, and MySQL's \N. A lower-case
# "none" is left out, since it is a common name of a class.
MISSING = frozenset(
    {
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
        *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "\\N"),
    }
)
_WHOLE = re.compile(r"(-?[0-9]+)(?:\.0*)?")
_FRACTION = re.compile(r"-?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|-?[0-9]+e-[0-9]+")
_BITS = {"0": False, "false": False, "1": True, "true": True}
_NO_BITS = frozenset(("-1", "", "nan", "none", "null"))  # unknown values of a vector
_ARRAY = re.compile(r"[\w.]+\(\s*([\[({].*[\])}])\s*(?:,[^\])}]*)?\)")  # as NumPy and torch print it
_BRACKETS = re.compile(r"(\[)(.*)\]|(\{)(.*)\}|(\()(.*)\)")
_ITEM = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s,;|'"]+)""")
_NUMBERS = re.compile(r"-?[0-9]+(?:\.[0-9]*)?(?:[\s,;|]+-?[0-9]+(?:\.[0-9]*)?)+")
_SEPARATORS = ("|", ";", ",")
_MOST_SHOWN = 3
# Lists of 0 and 1 are taken for vectors if more than this share of the labelled images have one. The first value is for
# lists of length 2, the second for longer ones.
_PAIRS_SHARE, _VECTORS_SHARE = 0.9, 0.5


@dataclass(frozen=True, kw_only=True)
class LabelRules:
    """How to read labels that could mean two things. Names in folders and tars are always names."""

    numbers: Literal["auto", "from-0", "from-1", "names"] = "auto"
    """Whole numbers where classes have names: ids that count from 0, ids that count from 1, or names; auto: from 0,
    refused if the number of names is itself a label, or if they may count from -1."""
    lists: Literal["auto", "ids", "positions"] = "auto"
    """Lists of 0 and 1: the ids of classes, or a position for each class; auto: refused if all are of one length."""
    text: Literal["auto", "names", "lists"] = "auto"
    """Texts such as "['ant', 'bee']", "cat, dog" and "2.5": names as they are, or lists; auto: refused."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="labels.")


class UnknownLabelError(ImageRefusedError):
    """The image has a label that is not one of the known classes."""


@dataclass(frozen=True, kw_only=True)
class WrittenLabels:
    """All labels of a collection, as written. `num_vectors`: for each length, the number of images whose labels are a
    list of zeros and ones. `num_labelled`: the number of images with any label."""

    labels: frozenset[str]
    num_labelled: int
    num_vectors: Mapping[int, int]

    @staticmethod
    def of(images: Iterable[Sequence[str]]) -> "WrittenLabels":
        """Collects the labels of some images."""
        labels, num_labelled, num_vectors = set[str](), 0, Counter[int]()
        vectors = dict[str, int]()
        for written in images:
            labels.update(written)
            num_labelled += bool(written)
            if len(written) == 1 and written[0] not in vectors:
                vectors[written[0]] = len(_bits(written) or ())
            length = vectors[written[0]] if len(written) == 1 else len(_bits(written) or ())
            num_vectors.update([length] if length else [])
        return WrittenLabels(labels=frozenset(labels), num_labelled=num_labelled, num_vectors=dict(num_vectors))

    @staticmethod
    def joined(several: Iterable["WrittenLabels"]) -> "WrittenLabels":
        """Joins the labels of several parts of a collection."""
        labels, num_labelled, num_vectors = set[str](), 0, Counter[int]()
        for some in several:
            labels |= some.labels
            num_labelled += some.num_labelled
            num_vectors.update(some.num_vectors)
        return WrittenLabels(labels=frozenset(labels), num_labelled=num_labelled, num_vectors=dict(num_vectors))

    @property
    def vector_length(self) -> int:
        """The length of the vectors that the labels seem to be; 0 if they seem to be lists of classes. An image may
        well have the two classes 0 and 1, so lists of length 2 need a larger share; a longer list of zeros and ones
        would name a class twice."""
        length = self.commonest_length
        share = self.num_vectors.get(length, 0) / max(1, self.num_labelled)
        return length if share > (_PAIRS_SHARE if length == 2 else _VECTORS_SHARE) else 0

    @property
    def commonest_length(self) -> int:
        """The most common length of the lists of 0 and 1; 0 if there are none."""
        return max(self.num_vectors, key=lambda length: self.num_vectors[length], default=0)


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the labels of a collection mean.

    `names`: the allowed classes, in the order of their ids; None: any. `numbered`: the names of the numbers from
    `first` on, or of the positions of a vector; empty: a number is a name. `names_first`: whether a number that is also
    a name means that name. `vector_length`: the length of the vector that an image's labels form; 0: labels are
    classes. `text`: how to read texts that may be lists. `are_names`: whether labels are always names, such as those of
    folders.
    """

    names: tuple[str, ...] | None
    numbered: tuple[str, ...] = ()
    first: int = 0
    names_first: bool = True
    vector_length: int = 0
    text: Literal["auto", "names", "lists"] = "auto"
    are_names: bool = False

    def of(self, written: Sequence[str], weights: Sequence[float] = ()) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Returns the classes of an image, each once, and their weights. Raises ImageRefusedError for labels that
        cannot be read."""
        if self.vector_length:
            return self._of_vector(written, weights)
        pairs = zip(written, weights or [0.0] * len(written), strict=True)
        found = [(name, weight) for label, weight in pairs for name in self._outcomes(label)]
        labels_found = tuple(dict.fromkeys(name for name, _ in found))
        if len(labels_found) > MOST_LABELS:
            raise ImageRefusedError(f"too many labels: {len(labels_found)}, allowed: {MOST_LABELS}")
        if not weights:
            return labels_found, ()
        if len(labels_found) < len(found):
            raise ImageRefusedError("a label with a weight appears twice")
        return labels_found, tuple(weight for _, weight in found)

    def is_same(self, written: Iterable[str]) -> bool:
        """Returns whether each of these labels means itself, so that lists of them need no translation."""
        try:
            return not self.vector_length and all(self._outcomes(label) == (label,) for label in written)
        except ImageRefusedError:
            return False

    def _of_vector(self, written: Sequence[str], weights: Sequence[float]) -> tuple[tuple[str, ...], tuple[float, ...]]:
        bits = _bits(written) or ()
        if written and (len(bits) != self.vector_length or None in bits):
            shown = shown_value(", ".join(written))
            raise ImageRefusedError(f"its labels {shown} are not a vector of {self.vector_length} values, each 0 or 1")
        if weights and len(weights) != len(bits):
            raise ImageRefusedError(f"{len(weights)} weights for a vector of {self.vector_length} values")
        places = [place for place, bit in enumerate(bits) if bit]
        return tuple(self._allowed(self.numbered[place]) for place in places), tuple(
            weights[place] for place in places if weights
        )

    def _outcomes(self, label: str) -> tuple[str, ...]:
        """Returns the classes that one label names: none, one, or several if it is a list written as text."""
        if (known := self._known.get(label)) is None:
            listed = self.text == "lists" and not self.are_names and label not in self._name_set
            items = split_text(label) if listed else (label,)
            known = self._known[label] = tuple(name for item in items if (name := self._name(item)))
        return known

    @cached_property
    def _known(self) -> dict[str, tuple[str, ...]]:
        return {}

    @cached_property
    def _name_set(self) -> frozenset[str]:
        return frozenset(self.names or ())

    def _name(self, label: str) -> str:
        """Returns the class that one label names; empty if it names none."""
        number = None if self.are_names else _WHOLE.fullmatch(label)
        is_listed = label in self._name_set
        if is_listed and (number is None or self.names_first):
            return label
        if self.are_names:
            return self._allowed(label)
        if number is not None:
            return self._numbered(number[1])
        if label in MISSING:
            return ""
        if self.text != "names" and _FRACTION.fullmatch(label):
            raise ImageRefusedError(
                f"its label {label} is not a whole number; allowed: whole numbers and names; --labels.text names takes "
                "it for a name"
            )
        return self._allowed(label)

    def _numbered(self, digits: str) -> str:
        if self.names_first and digits in self._name_set:
            return digits
        if digits.startswith("-"):
            return ""
        if not self.numbered:
            return self._allowed(digits)
        place = _number(digits) - self.first
        if not 0 <= place < len(self.numbered):
            raise UnknownLabelError(f"unknown label {digits!r}")
        return self._allowed(self.numbered[place])

    def _allowed(self, name: str) -> str:
        if self.names is not None and name not in self._name_set:
            raise UnknownLabelError(f"unknown label {name!r}")
        return name


def are_names(names: tuple[str, ...] | None) -> Meaning:
    """Returns the meaning of labels that are always names, such as those of folders."""
    return Meaning(names=names, are_names=True)


def settle(
    rules: LabelRules, written: WrittenLabels, *, listed: tuple[str, ...] | None = None, numbered: tuple[str, ...] = ()
) -> Meaning:
    """Decides what the labels of a collection mean. `listed`: the names in a labels file. `numbered`: the names that a
    source gives to its numbers. Raises UserError, which names the flag to set, for labels that could mean two
    things."""
    length = _vector_length(rules, written)
    by_number, names = numbered or listed or (), listed or numbered or None
    if length:
        if by_number and len(by_number) != length:
            message = f"the labels are vectors of {length} values, but there are {len(by_number)} names of classes"
            raise UserError(f"{message}; give as many names, in the order of the positions, or none")
        by_number = by_number or tuple(map(str, range(length)))
        return Meaning(names=names or by_number, numbered=by_number, vector_length=length)
    labels = written.labels
    if missing := sorted(labels.intersection(MISSING).difference(names or (), ("",))):
        message = "%s is read as no label; if it is the name of a class, list the classes in --labels-file"
        log.warning(message, ", ".join(map(shown_value, missing)))
    if rules.text == "auto":
        _refuse_lists_in_text(labels.difference(names or ()), are_listed=names is not None)
    if rules.text == "lists":
        labels = frozenset(item for label in labels for item in split_text(label)) | labels
    if rules.numbers == "names":
        return Meaning(names=names, text=rules.text)
    zero = next((label for label in labels if (found := _WHOLE.fullmatch(label)) and _number(found[1]) == 0), None)
    if rules.numbers == "from-1" and not by_number and zero:
        raise UserError(f"{shown_value(zero)} is a label, but --labels.numbers is from-1; leave it out, or give from-0")
    if rules.numbers == "auto":
        _refuse_negative_classes(labels, num_names=len(by_number))
        if by_number:
            _check_numbers(labels, by_number, are_ids=bool(numbered))
    return Meaning(
        names=names,
        numbered=by_number,
        first=1 if rules.numbers == "from-1" else 0,
        names_first=rules.numbers == "auto" and not numbered,
        text=rules.text,
    )


def split_text(text: str) -> tuple[str, ...]:
    """Returns the items of a list that is written as text: in the form of JSON, Python or NumPy, or separated by | ; or
    , (numbers also by spaces). A text that is not a list is one item."""
    if (inner := _in_brackets(text)) is not None:
        items = _json_items(text)
        return tuple(filter(None, _bracketed_items(inner) if items is None else items))
    if _NUMBERS.fullmatch(text):
        return tuple(re.split(r"[\s,;|]+", text))
    for separator in _SEPARATORS:
        if separator in text:
            return tuple(name for item in text.split(separator) if (name := class_name(item.strip().strip("'\""))))
    return (text,)


def is_list(text: str) -> bool:
    """Returns whether a text has the brackets of a list, or is several numbers."""
    return _in_brackets(text) is not None or _NUMBERS.fullmatch(text) is not None


def is_vector(written: Sequence[str]) -> bool:
    """Returns whether labels are a list of at least two values, each 0, 1 or missing."""
    return _bits(written) is not None


def _json_items(text: str) -> list[str] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return [_json_text(value) for value in values]


def _json_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "1", False: "0", None: ""}[value]
    return class_name(str(value))


def _bracketed_items(inner: str) -> list[str]:
    if "'" in inner or '"' in inner:
        return [class_name(next(filter(None, found.groups()), "")) for found in _ITEM.finditer(inner)]
    parts = re.split(r"[,;|]", inner) if re.search(r"[,;|]", inner) else inner.split()
    return [class_name(part) for part in parts]


def _in_brackets(text: str) -> str | None:
    """Returns what is inside the brackets of a list; None for a text without brackets, or for a name such as
    `(other)`."""
    array = _ARRAY.fullmatch(text)
    found = _BRACKETS.fullmatch(array[1] if array else text)
    if found is None:
        return None
    bracket, inner = (found[place] for place in range(1, 7) if found[place] is not None)
    is_name = bracket == "(" and not re.search(r"[,;|'\"]", inner) and not _NUMBERS.fullmatch(inner.strip())
    return None if is_name else inner


def _bits(written: Sequence[str]) -> tuple[bool | None, ...] | None:
    """Returns the values of a vector of zeros and ones, with None for a missing value. Returns None if the labels are
    not such a vector."""
    if len(written) == 1:
        written = split_text(written[0])
    if len(written) < 2:
        return None
    bits = list[bool | None]()
    for item in written:
        value = found[1] if (found := _WHOLE.fullmatch(item)) else item.casefold()
        if value not in _BITS and value not in _NO_BITS:
            return None
        bits.append(_BITS.get(value))
    return tuple(bits) if any(bit is not None for bit in bits) else None


def _vector_length(rules: LabelRules, written: WrittenLabels) -> int:
    length = written.vector_length
    if rules.lists == "ids" or (rules.lists == "auto" and not length):
        return 0
    if rules.lists == "positions":
        if not written.commonest_length:
            raise UserError("--labels.lists is positions, but no labels are lists of 0 and 1; leave it out")
        return written.commonest_length
    raise UserError(
        f"the labels of {written.num_vectors[length]:,} of {written.num_labelled:,} images are lists of {length} "
        "values, each 0 or 1; if they are vectors with a position for each class, give --labels.lists positions; if "
        "they are the ids 0 and 1 of classes: --labels.lists ids"
    )


def _refuse_lists_in_text(labels: frozenset[str], *, are_listed: bool) -> None:
    found = set(filter(is_list, labels))
    for separator in _SEPARATORS if not found else ():
        joined = [label for label in labels if separator in label]
        pieces = Counter(piece for label in labels for piece in {item.strip() for item in label.split(separator)})
        again = [label for label in joined if any(pieces[item.strip()] > 1 for item in label.split(separator))]
        found.update(again if 2 * len(again) >= len(joined) else [])
        if joined and 2 * len(again) < len(joined) and not are_listed:
            log.warning(
                "the name of a class has %r, such as %s; it is one class; if it is a list: --labels.text lists",
                separator,
                shown_value(min(joined)),
            )
    if found:
        shown = ", ".join(map(shown_value, sorted(found)[:_MOST_SHOWN]))
        raise UserError(
            f"{len(found):,} labels are lists written as text, such as {shown}; if an image has each of the classes "
            "in its list, give --labels.text lists; if the whole text is the name of one class: --labels.text names"
        )


def _refuse_negative_classes(labels: frozenset[str], *, num_names: int) -> None:
    """Raises UserError if negative numbers, which mean no label, look like classes: if there are several of them, or -1
    and 1 alone. They do not if each of the `num_names` named classes has its number."""
    numbers = {_number(found[1]) for label in labels if (found := _WHOLE.fullmatch(label))}
    below = sorted(number for number in numbers if number < 0)
    is_complete = num_names > 0 and numbers.issuperset(range(num_names))
    if (len(below) > 1 or numbers == {-1, 1}) and not is_complete:
        shown = ", ".join(map(str, below[:_MOST_SHOWN]))
        raise UserError(
            f"the labels have the negative numbers {shown}; if these mean no label, give --labels.numbers from-0; if "
            "they are classes, write names or numbers from 0 in their place"
        )


def _check_numbers(labels: frozenset[str], names: tuple[str, ...], *, are_ids: bool) -> None:
    """Raises UserError if numbers could be ids or names, or could count from 0, from 1 or from -1. Warns if no number
    is 0, since they may then count from 1. `are_ids`: whether the source itself gives names to numbers; otherwise a
    number that is also a name means that name."""
    places, named, numbers = {name: place for place, name in enumerate(names)}, dict[int, int](), set[int]()
    for label in labels:
        if (found := _WHOLE.fullmatch(label)) and (number := _number(found[1])) >= 0:
            numbers.add(number)
            if (place := places.get(label, places.get(found[1]))) is not None:
                named[number] = place
    elsewhere = sorted(number for number, place in named.items() if place != number)
    ids = numbers if are_ids else numbers.difference(named)
    if elsewhere and (numbers == set(named) if are_ids else ids):
        one = elsewhere[0]
        raise UserError(
            f"the label {one} could be the name of class {named[one]} or the number of a class; give --labels.numbers "
            "names, from-0 or from-1"
        )
    if ids == set(named):  # each number is its own name
        return
    last = len(names)
    if last in ids:
        raise UserError(
            f"{last} is a label, but the {last} names of classes are for 0 to {last - 1}; if the labels count from 1, "
            f"give --labels.numbers from-1, with which 1 is {shown_value(names[0])}; if from 0: --labels.numbers "
            f"from-0, with which images with label {last} are refused"
        )
    below = {number for label in labels if (found := _WHOLE.fullmatch(label)) and (number := _number(found[1])) < 0}
    if below == {-1} and last > 1 and ids == set(range(last - 1)) and names[-1] not in labels:
        others = "the only other number is 0" if last == 2 else f"the other numbers are 0 to {last - 2}"
        raise UserError(
            f"-1 is a label and {others}, but the {last} names of classes are for 0 to {last - 1}, so that "
            f"{shown_value(names[-1])} would have no image; if -1 means no label, give --labels.numbers from-0, with "
            f"which 0 is {shown_value(names[0])}; if the labels count from -1, add 1 to each of them"
        )
    if 0 not in numbers and (largest := max((number for number in ids if number < last), default=0)):
        log.warning(
            "no image has label 0, which is %s; the largest label is %d, %s; if the labels count from 1, give "
            "--labels.numbers from-1",
            shown_value(names[0]),
            largest,
            shown_value(names[largest]),
        )


def _number(digits: str) -> int:
    """Returns the whole number. Only the first twenty characters count: a number that long is out of range anyway."""
    return int(digits[:20])
