"""The time that a check may take, so that it ends with what it has."""

import time


class Clock:
    """Counts down from when it is made."""

    def __init__(self, limit_s: float):
        """Starts it."""
        self.limit_s = limit_s
        self.started = time.perf_counter()

    @property
    def passed_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative after it."""
        return self.limit_s - self.passed_s

    def say(self, text: str) -> None:
        """Prints a line with the time that has passed."""
        print(f"{self.passed_s:5.0f} s  {text}", flush=True)
