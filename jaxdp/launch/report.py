"""Which process failed first, how, and which failures only followed from it.

The first to end is nearly always the culprit: its peers notice only afterwards. Two
cases are different. A stopped process never ends, and its peers give it up, one after
the other; and a process whose peer is busy with an error may end before that peer does.
So a failure that says that a peer went away is a consequence, if another one explains
it.
"""

import re
import signal
from collections.abc import Callable, Sequence

from jaxdp.launch.group import End, Outcome

Lines = Callable[[int], Sequence[str]]  # the last lines that a rank has printed

SHOWN = 40  # lines of a traceback, at most
NO_TRACEBACK = 10  # lines shown of a process that printed none
TRACEBACK = "Traceback (most recent call last):"
CHAINED = re.compile(
    "During handling of the above exception|"
    "The above exception was the direct cause|"
    "The stack trace below excludes JAX-internal frames"
)
# What is printed where a peer is gone: by jaxdp.initialize, by gloo and NCCL, by the
# coordination service of JAX and by gRPC below it.
PEER_GONE = re.compile(
    r"rank \d+ failed first|peer has gone|[Cc]onnection (closed|reset) by peer|"
    "Gloo .* failed|NCCL .*(remote|peer)|(?i:coordination.?service)|"
    "[Ss]ocket closed|[Bb]roken pipe|heartbeat"
)
NAMED = re.compile(
    r"rank (\d+) failed first|stopped sending heartbeats\):\s*(?:\[\d+\] )?(\d+)"
)
FRAME = re.compile(r"\s+@ +0x")  # of the stack that an aborting C++ library prints


def first_failure(outcome: Outcome, lines: Lines) -> int:
    """The rank whose failure explains those of the others.

    Args:
        outcome: Of a group that failed.
        lines: What its processes printed.
    """
    by_launcher = (-signal.SIGTERM, -signal.SIGKILL)
    failed = [
        end
        for end in outcome.ends
        if end.returncode and not (end.asked and end.returncode in by_launcher)
    ]
    first, *later = failed
    if not _follows(first, lines):
        return first.rank
    if outcome.stopped:
        return min(outcome.stopped)
    named = NAMED.search("\n".join(lines(first.rank)))
    if named:
        rank = int(named[1] or named[2])
        if rank in {end.rank for end in outcome.ends}:
            return rank
    causes = [end.rank for end in later if not _follows(end, lines)]
    # Ended by the launcher while it was busy with an error of its own.
    causes += [
        end.rank
        for end in outcome.ends
        if end.asked and _raised(shown := _tail(lines(end.rank))) and not _lost(shown)
    ]
    return (causes or [first.rank])[0]


def notice(end: End, processes: int, grace_s: float) -> str:
    """What is said at once, before the others have ended and the cause is known."""
    return (
        f"rank {end.rank} of {processes} has ended: {_exit(end.returncode)}. The "
        f"others are asked to end (SIGTERM), and killed after {grace_s:g} s."
    )


def describe(outcome: Outcome, lines: Lines) -> str:
    """Who failed first, how, when, with which traceback, and what became of the rest.

    Args:
        outcome: Of a group that failed.
        lines: What its processes printed.
    """
    rank = first_failure(outcome, lines)
    end = _of(outcome, rank)
    how = manner(end, outcome)
    text = [
        f"rank {rank} of {len(outcome.ends)} failed first: {how}, {end.after_s:.1f} s "
        "after its start."
    ]
    if end.returncode == -signal.SIGKILL and rank not in outcome.stopped:
        text.append("Where nobody killed it, the kernel did, for memory: see dmesg.")
    tail = _tail(lines(rank))
    if tail:
        kind = "traceback" if _raised(tail) else "lines"
        text += [f"Its last {kind}:", *(f"    {line}" for line in tail)]
    others = [
        f"rank {other.rank}: {manner(other, outcome)}, {other.after_s:.1f} s"
        for other in outcome.ends
        if other.rank != rank
    ]
    if others:
        text.append(f"The others: {'; '.join(others)}.")
    return "\n".join(text)


def status(outcome: Outcome, lines: Lines) -> int:
    """The exit status of the rank that failed first, as a shell has it."""
    code = _of(outcome, first_failure(outcome, lines)).returncode
    return code if code >= 0 else 128 - code


def manner(end: End, outcome: Outcome) -> str:
    """How a process ended, in words."""
    if end.rank in outcome.stopped:
        return "it was stopped (by SIGSTOP or a debugger) and then killed"
    if end.asked and -end.returncode in (signal.SIGTERM, signal.SIGKILL):
        return f"ended by the launcher with {signal_name(-end.returncode)}"
    return _exit(end.returncode)


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of those for real time only the first and last have names
        return f"signal {number}"


def _exit(returncode: int) -> str:
    """The end of a process by itself, or by somebody else."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal_name(-returncode)}"


def _of(outcome: Outcome, rank: int) -> End:
    return next(end for end in outcome.ends if end.rank == rank)


def _follows(end: End, lines: Lines) -> bool:
    """Whether a failure says that a peer went away: in an exception, or an abort."""
    if end.returncode == -signal.SIGABRT:
        return _lost(lines(end.rank)[-SHOWN:])
    return end.returncode == 1 and _lost(_tail(lines(end.rank)))


def _lost(tail: Sequence[str]) -> bool:
    return any(PEER_GONE.search(line) for line in tail)


def _raised(tail: Sequence[str]) -> bool:
    return any(TRACEBACK in line for line in tail)


def _tail(lines: Sequence[str]) -> list[str]:
    """From the last traceback on, with those that led to it; else the last lines."""
    starts = [i for i, line in enumerate(lines) if TRACEBACK in line]
    if not starts:
        return [line for line in lines if not FRAME.match(line)][-NO_TRACEBACK:]
    start = starts.pop()
    while starts and any(CHAINED.search(line) for line in lines[starts[-1] : start]):
        start = starts.pop()
    tail = [*lines[start:]]
    if len(tail) > SHOWN:
        half = SHOWN // 2
        left_out = f"... {len(tail) - 2 * half} lines more ..."
        tail = [*tail[:half], left_out, *tail[-half:]]
    return tail
