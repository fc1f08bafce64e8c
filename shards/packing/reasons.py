"""The general part of the reasons why images are left out, so that reasons of one kind can be counted together."""

import pyarrow as pa
import pyarrow.compute as pc

# "list.csv row 27: the weight 'x': allowed: numbers": a reason about a table's row begins with it.
_ROW = r"(?s)^.*?\.(?:csv|csv\.gz|tsv|tsv\.gz|parquet) row \d+: "
# Details of one image are quoted as Python's repr does it. No quote opens within a word: "the source's root".
_QUOTED = r"""(?s)\B'(?:[^'\\]|\\.)*'|\B"(?:[^"\\]|\\.)*\""""
# Numbers and the like come last, or what is allowed: "too large: 70000000 bytes", "a label is a dict; allowed: text".
_DETAIL = r"(?s)(?:[;,] allowed)?: .*"


def general_reasons(reasons: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Each reason without the details of one image; null becomes empty."""
    general = pc.fill_null(reasons, "")
    # Quoted parts go first: they may contain what looks like a row or a detail.
    for pattern, replacement in ((_QUOTED, "…"), (_ROW, ""), (_DETAIL, "")):
        general = pc.replace_substring_regex(general, pattern=pattern, replacement=replacement)
    return general
