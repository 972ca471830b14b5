"""Whether the compiler kept what was written."""

from jaxdp.program.verdict.judge import JudgedBucket, Verdict, compare, verify

__all__ = ("JudgedBucket", "Verdict", "compare", "verify")
