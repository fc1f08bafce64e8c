"""The general part of the reasons for which images are left out, so that those of one kind can be counted together."""

import pyarrow as pa
import pyarrow.compute as pc

# "list.csv row 27: the weight 'x': allowed are numbers": the row of a table comes first where a reason is about one.
_ROW = r"(?s)^.*?\.(?:csv|csv\.gz|tsv|tsv\.gz|parquet) row \d+: "
# What is about one image is quoted as Python's repr does it. No quote opens within a word: "the source's root".
_QUOTED = r"""(?s)\B'(?:[^'\\]|\\.)*'|\B"(?:[^"\\]|\\.)*\""""
# Numbers and the like come last: "too large: 70000000 bytes".
_DETAIL = r"(?s): .*"


def general_reasons(reasons: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Each reason without what is about one image; null becomes empty."""
    general = pc.fill_null(reasons, "")
    # The quoted go first: they can have what looks like a row or a detail.
    for pattern, replacement in ((_QUOTED, "…"), (_ROW, ""), (_DETAIL, "")):
        general = pc.replace_substring_regex(general, pattern=pattern, replacement=replacement)
    return general
