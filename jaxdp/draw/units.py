"""Bytes and seconds as people read them: three digits and a unit."""


def bytes_text(size: float) -> str:
    """Such as "48 MiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}"


def seconds_text(seconds: float) -> str:
    """Such as "142 µs"."""
    if not seconds:
        return "0 µs"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, size = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"
