"""Bytes and seconds as people read them: three digits and a unit."""

UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))  # of time, and how many make a second
MIB = 2**20
LARGEST = 2**24  # MiB


def time_unit(end_s: float) -> tuple[str, float]:
    """The largest unit of which `end_s` has one or more, and its number per second."""
    return next((unit for unit in UNITS if end_s * unit[1] >= 1), UNITS[-1])


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
    units = (*UNITS, ("ns", 1e9))
    unit, count = next((u for u in units if _shown(seconds * u[1]) >= 1), units[-1])
    return f"{_shown(seconds * count):g} {unit}"


def buffer_bytes(size_mb: float) -> int:
    """The bytes of a buffer of so many MiB.

    Raises:
        ValueError: Less than none, more than 16 TiB, or no number.
    """
    if not 0 <= size_mb <= LARGEST:
        raise ValueError(
            f"jaxdp.draw got a buffer of {size_mb} MiB. It must have between 0 and "
            f"{LARGEST} MiB. Give its size in MiB, such as 64."
        )
    return round(size_mb * MIB)


def _shown(number: float) -> float:
    """Rounded to three digits: 999.9 is no number below 1000 for a reader."""
    return float(f"{number:.3g}")
