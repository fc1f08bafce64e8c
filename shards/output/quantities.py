"""Formats numbers for people: times, sizes, counts, shares."""

_MINUTE, _HOUR, DAY_SECONDS = 60, 3600, 86_400
_TIMES = ((DAY_SECONDS, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
_SHORT_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_FLOPS = ((1.0, "exaFLOPs"), (1e3, "petaFLOPs"), (1e6, "teraFLOPs"), (1e9, "gigaFLOPs"), (1e12, "megaFLOPs"))


def duration(seconds: float) -> str:
    """Returns a time in words: `0.4 s`, `45 s`, `2 min 31 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, below, name_below in _TIMES:
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {name_below}"
    return f"{whole} s"


def clock(seconds: float) -> str:
    """Returns a time for a narrow line: `2:31`, `5:12:00`, `3 d 4 h`."""
    whole = round(seconds)
    if whole >= DAY_SECONDS:
        return duration(whole)
    minutes, rest = divmod(whole, _MINUTE)
    return f"{whole // _HOUR}:{minutes % 60:02d}:{rest:02d}" if whole >= _HOUR else f"{minutes}:{rest:02d}"


def short_time(seconds: float) -> str:
    """Returns a time that may be far below a second: `26 µs`, `1.5 ms`, `2 s`."""
    unit, name = next((each for each in _SHORT_TIMES if abs(seconds) >= each[0]), _SHORT_TIMES[-1])
    return f"{_in_three_digits(seconds / unit)} {name}" if seconds else "0 s"


def size(num_bytes: float) -> str:
    """Returns a number of bytes in words: `512 B`, `4.4 MB`."""
    for unit, name in _BYTES:
        if num_bytes >= 0.9995 * unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"


def number(value: float) -> str:
    """Returns any number in at most five digits: `0.0123`, `1,622`, `807 k`, `2.03e-05`."""
    amount = abs(value)
    if amount < 1000:
        return f"{value:.4g}" if amount >= 0.001 else f"{value:.3g}"
    if amount < 99_999.5:
        return f"{value:,.0f}"
    return ("-" if value < 0 else "") + short_count(amount) if amount < 1e12 else f"{value:.3g}"


def short_count(count: float) -> str:
    """Returns a large number in three digits: `812`, `807 k`, `86.6 M`, `1.2 B`."""
    for unit, name in _COUNTS:
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count}"


def flops_unit(exaflops: float) -> tuple[float, str]:
    """Returns the largest unit in which a number of operations is at least 1: how many of it are an exaFLOP, and its
    name."""
    return next((each for each in _FLOPS if exaflops * each[0] >= 1), _FLOPS[-1])


def flops(exaflops: float) -> str:
    """Returns a number of operations in words: `4,262 exaFLOPs`, `1.3 teraFLOPs`."""
    factor, unit = flops_unit(exaflops)
    return f"{number(exaflops * factor)} {unit}"


def percent(value: float) -> str:
    """Returns a value in percent, in three digits: `0.012 %`, `33.3 %`, `100 %`."""
    return f"{_in_three_digits(100 * value)} %"


def share(part: float, whole: float = 1.0) -> str:
    """Returns a share in percent: `0 %`, `<0.1 %`, `33.3 %`, `100 %`. A share is shown as 0 % or 100 % only if it is
    exactly that."""
    found = 100 * part / whole if whole else 0.0
    if found in (0, 100):
        return f"{found:.0f} %"
    return "<0.1 %" if found < 0.1 else ">99.9 %" if found > 99.9 else f"{found:.1f} %"


def plural(count: int, noun: str) -> str:
    """Returns a number and what it counts: `1 image`, `2,000 images`, `2 processes`, `2 batches`."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def _in_three_digits(value: float) -> str:
    return f"{value:.3g}" if 1e-3 <= abs(value) < 999.5 else number(value)
