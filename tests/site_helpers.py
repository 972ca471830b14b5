"""Results that no experiment made, for tests of the site."""

import gzip
import json
import pathlib
import struct
from typing import Any

CLAIM = {
    "id": "CB7",
    "claim": "Replicas are identical.",
    "expected": 0,
    "measured": 0,
    "unit": "copies",
    "verdict": "holds",
    "why": "Compared bit by bit.",
}
HOSTILE = '<script>alert("1")</script>'


def document(name: str, **changes: Any) -> dict[str, Any]:
    """A result in the format of `result.json`; no commit, so that it is current."""
    made = {
        "experiment": name,
        "question": f"What does {name} find?",
        "config": {"devices": 8, "tiny": False},
        "environment": {
            "jax": "0.10.2",
            "platform": "cpu",
            "device_kind": "cpu",
            "devices": 8,
            "commit": None,
            "date": "2026-01-02T03:04:05+00:00",
        },
        "claims": [CLAIM],
        "tables": {"numbers": [{"size_bytes": 1234567, "label": "counted by hand"}]},
        "artifacts": [],
    }
    return made | changes


def write(results: pathlib.Path, name: str, text: str = "", **changes: Any) -> None:
    """Writes a result, or any text in its place."""
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    text = text or json.dumps(document(name, **changes))
    (folder / "result.json").write_text(text)


def png(path: pathlib.Path, width: int, height: int) -> None:
    """A white picture."""
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = (b"\0" + b"\xff" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def some_results(results: pathlib.Path) -> None:
    """One of each kind: in full, tiny, damaged, hostile; most are missing."""
    write(
        results,
        "compare",
        tables={
            "designs": [
                cost("gather to root", 7.0, 14.0, 2, 0.5, 20.0),
                cost("8 servers", 1.75, 14.0, 2, 0.3125, 15.5),
                cost("ring", 1.75, 14.0, 14, 0.5, 10.0),
            ],
            "sent_in_a_step": [
                {"design": name, "Φ_bytes": 2**18}
                for name in ("gather to root", "8 servers", "ring")
            ],
        },
        artifacts=["step-times.png", "ring-step.hlo.txt", "long.hlo.txt.gz", "log.txt"],
    )
    png(results / "compare" / "step-times.png", 2000, 40)
    program = "HloModule ring\n" + "  add\n" * 20_000
    (results / "compare" / "ring-step.hlo.txt").write_text("HloModule <small>")
    (results / "compare" / "long.hlo.txt.gz").write_bytes(
        gzip.compress(program.encode())
    )
    (results / "compare" / "log.txt").write_text("all is well")
    write(
        results,
        "traffic",
        config={"tiny": True},
        tables={
            "designs": [
                sent("ring", 99.0, "N = 8, compiled"),
                sent("DataParallel", 3.5, "N = 8, compiled"),
                sent("4 servers", 2.5, "N = 8, compiled"),
                sent("doubling", 2.0, "N = 4, compiled"),
            ]
        },
    )
    write(results, "ring", "{")
    hostile(results, "errors")
    write(results, "amp", artifacts=["gone.png"])
    rows = [
        ledger_row("CB7", "../compare/report.html#CB7", "traffic: holds"),
        ledger_row("CB1", "../compare/report.html#CB1"),  # which has no such claim
        ledger_row("CA2", "../dp/report.html#CA2"),  # which has no result
        ledger_row("CA3", "javascript:alert(1)"),
    ]
    rows[0]["verdict"] = "holds"
    rows[-1] |= {"verdict": "no verdict", "measured": ""}
    judged = [{key: row[key] for key in CLAIM} for row in rows[:-1]]
    write(results, "claims", claims=judged, tables={"ledger": rows})


def cost(
    design: str, busiest: float, total: float, rounds: int, kept: float, step: float
) -> dict[str, Any]:
    """A row of what `compare` writes."""
    return {
        "design": design,
        "busiest (Φ)": busiest,
        "all (Φ)": total,
        "rounds": rounds,
        "kept_mb": kept,
        "step_ms": step,
    }


def sent(design: str, busiest: float, label: str) -> dict[str, Any]:
    """A row of what `traffic` writes; of DataParallel it knows no rounds."""
    rounds = None if design == "DataParallel" else 99
    every = {"in Φ": busiest, "all links": 14.0, "rounds": rounds, "label": label}
    return {"design": design} | every


def ledger_row(name: str, link: str, others: str = "") -> dict[str, Any]:
    """A row of the ledger."""
    place = {"evidence": "compare", "link": link, "others": others}
    return CLAIM | {"id": name, "verdict": "refuted"} | place


def hostile(results: pathlib.Path, name: str) -> None:
    """A result that tries to be a program, to leave its folder and to be too wide."""
    long = "W" * 400
    bad = ["<script>alert(1).png", "not.hlo.txt.gz", '" onload="x.png']
    bad += ["evil.html", "javascript:alert(1)", "..", "away.txt"]
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in bad[:5]:
        (folder / file).write_text("x")
    (folder / "away.txt").symlink_to("/etc/passwd")
    write(
        results,
        name,
        question=f"{HOSTILE} {long}",
        config={HOSTILE: HOSTILE, long: {"deep": [1, [2]]}},
        claims=[
            CLAIM | {"id": HOSTILE, "measured": 10**400, "why": long},
            CLAIM | {"id": long, "claim": "\ud800 half", "expected": 1e999},
        ],
        tables={
            HOSTILE: [{HOSTILE: HOSTILE, "n": 1}, {"other": 10**300, "n": None}],
            "empty": [],
            "designs": [{"design": "ring", "in Φ": "many"}],
        },
        artifacts=bad,
    )
