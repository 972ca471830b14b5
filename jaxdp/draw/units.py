"""Bytes and seconds as people read them: three digits and a unit."""


def bytes_text(size: float) -> str:
    """Such as "48 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while _shown(size) >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{_shown(size):g} {units[0]}"


def seconds_text(seconds: float) -> str:
    """Such as "142 µs"."""
    if not seconds:
        return "0 µs"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    fits = (each for each in units if _shown(seconds / each[1]) >= 1)
    unit, size = next(fits, units[-1])
    return f"{_shown(seconds / size):g} {unit}"


def _shown(number: float) -> float:
    """Rounded to three digits: 999.9 is no number below 1000 for a reader."""
    return float(f"{number:.3g}")
