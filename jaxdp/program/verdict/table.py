"""A verdict as plain text: one line, then findings, buckets and distances."""

from collections import defaultdict
from typing import TYPE_CHECKING

from jaxdp.program.verdict.distance import Distance

if TYPE_CHECKING:
    from jaxdp.program.verdict.judge import Verdict


def verdict_table(verdict: "Verdict") -> str:
    """Lays out a verdict."""
    lines = [_headline(verdict)]
    for finding in verdict.findings:
        mark = "broken" if finding.broken else "note"
        lines.append(f"{mark:7} {finding.kind}: {finding.text}")
    for bucket in verdict.buckets:
        state = "found" if bucket.found else "changed"
        what = ""
        if bucket.contents is not None:
            names = ", ".join(bucket.contents.names)
            what = f", {bucket.contents.nbytes} B {bucket.contents.dtype}: {names}"
        count = f"{bucket.collectives} collective{'s' * (bucket.collectives != 1)}"
        lines.append(f"{state:7} {bucket.name}, {count}{what}")
    groups: dict[str, list[Distance]] = defaultdict(list)
    for distance in verdict.distances:
        groups[distance.kind].append(distance)
    return "\n".join([*lines, *map(_distance_line, groups.values())])


def _headline(verdict: "Verdict") -> str:
    word = "kept" if verdict.kept else "not kept"
    if not verdict.written:
        sent = "nothing is" if verdict.kept else "something is"
        return f"{word}: nothing was written to be sent, and {sent}"
    if not verdict.buckets:
        count = f"{verdict.written} collective{'s' * (verdict.written != 1)}"
        return f"{word}: {count} written, {len(verdict.findings)} differences"
    found, asked = verdict.buckets_found, verdict.buckets_asked
    left = ""
    if verdict.kept and found < asked:
        left = "; the design leaves the others to XLA"
    return f"{word}: {found} of {asked} buckets travel as they were written{left}"


def _distance_line(distances: list[Distance]) -> str:
    """How far start and end are apart, for all collectives of a kind."""
    blocking = sum(distance.blocking for distance in distances)
    kernels = max(distance.kernels for distance in distances)
    matmuls = max(distance.matmuls for distance in distances)
    return (
        f"{distances[0].kind}: {blocking} of {len(distances)} block; at most {kernels} "
        f"kernels and {matmuls} matrix products between start and end"
    )
