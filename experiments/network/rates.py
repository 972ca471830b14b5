"""Rates as `tc` writes them."""

import re

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def bytes_per_s(rate: str) -> float:
    """What a link of that rate carries, headers included.

    Args:
        rate: A number and a unit of `UNITS`, such as "400mbit" or "1.5gbit".

    Raises:
        ValueError: Something else, or nothing to carry.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", rate.strip().lower())
    number, unit = match.groups() if match else ("0", "")
    if unit not in UNITS or float(number) <= 0:
        raise ValueError(
            f"The rate of a link is given as {rate!r}. It must be a number above 0 and "
            f"one of the units {', '.join(UNITS)}, without a space. Write '400mbit' "
            "for 400 megabits, which are 50,000,000 bytes, a second."
        )
    return float(number) * UNITS[unit] / 8
