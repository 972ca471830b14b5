"""Prints what a dumped program communicates: python -m jaxdp.program FILE.

FILE is the text of an optimized program: `compiled.as_text()`, or what XLA writes with
XLA_FLAGS=--xla_dump_to=DIR as `*after_optimizations.txt`. It may be compressed (.gz); a
dash reads standard input.
"""

import argparse
import gzip
import json
import pathlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.report import ProgramReport, analyze
from jaxdp.targets.hardware import hardware


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report of a file.

    Args:
        arguments: Of the command line; None takes those of the process.

    Returns:
        0; or 2 if the file cannot be read or counted, with the reason on stderr.
    """
    given = _parser().parse_args(arguments)
    try:
        machine = hardware(given.hardware) if given.hardware else None
        report = analyze(_text(given.file))
        timeline = report.timeline(machine) if machine else None
        record = _record(report, timeline)
        shown = report.summary()
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        print(f"{given.file}: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(record, indent=2))
    else:
        print(shown if timeline is None else f"{shown}\n\n{timeline}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdp.program",
        description="Collectives, bytes by device and link, and rounds of a program "
        "that XLA has optimized, from its text.",
    )
    parser.add_argument(
        "file", help="compiled.as_text(), or an *after_optimizations.txt; may be .gz"
    )
    parser.add_argument(
        "--hardware", help="also predict its times on this target, such as h100"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _text(file: str) -> str:
    """The text of a file, decompressed."""
    data = sys.stdin.buffer.read() if file == "-" else pathlib.Path(file).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"analyze got {len(data)} bytes that are not text: byte {error.start} is "
            "no UTF-8. It reads HLO as text, not as a proto. Dump with XLA_FLAGS="
            "'--xla_dump_to=DIR --xla_dump_hlo_as_text'."
        ) from error


def _record(report: ProgramReport, timeline: Any) -> dict[str, Any]:
    """A report as JSON."""
    record = {
        "devices": report.devices,
        "rounds": report.rounds,
        "sent_bytes": report.sent_bytes,
        "received_bytes": report.received_bytes,
        "link_bytes": [
            {"source": source, "target": target, "bytes": size}
            for (source, target), size in sorted(report.link_bytes.items())
        ],
        "collectives": [_collective(op) for op in report.collectives],
    }
    if timeline is not None:
        names = ("step_s", "compute_s", "communication_s", "exposed_s")
        record["timeline"] = {name: getattr(timeline, name) for name in names}
        record["timeline"]["hardware"] = timeline.hardware.name
    return record


def _collective(op: CollectiveOp) -> dict[str, Any]:
    return {
        "name": op.name,
        "kind": op.kind,
        "arrays": [str(array) for array in op.arrays],
        "bytes": op.bytes,
        "count": op.count,
        "conditional": op.conditional,
        "groups": op.groups,
        "pairs": op.pairs,
        "op_name": op.op_name,
        "source": op.source,
    }


if __name__ == "__main__":
    sys.exit(main())
