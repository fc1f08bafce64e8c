"""Numbers as people read them: times, sizes, counts."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIMES = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """A time in words: `0.4 s`, `45 s`, `2 min 31 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, below, name_below in _TIMES:
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {name_below}"
    return f"{whole} s"


def clock(seconds: float) -> str:
    """A time for a narrow line: `2:31`, `5:12:00`, `3 d 4 h`."""
    whole = round(seconds)
    if whole >= _DAY:
        return duration(whole)
    minutes, rest = divmod(whole, _MINUTE)
    return f"{whole // _HOUR}:{minutes % 60:02d}:{rest:02d}" if whole >= _HOUR else f"{minutes}:{rest:02d}"


def size(num_bytes: int) -> str:
    """Bytes: `512 B`, `4.4 MB`."""
    for unit, name in _BYTES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def short_count(number: float) -> str:
    """A large number in three digits: `812`, `807 k`, `86.6 M`, `1.2 B`."""
    for unit, name in _COUNTS:
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number}"


def plural(number: int, noun: str) -> str:
    """A number and what it counts: `1 image`, `2,000 images`, `2 processes`, `2 batches`."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"
