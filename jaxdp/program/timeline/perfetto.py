"""A timeline in the Trace Event Format, which https://ui.perfetto.dev opens.

The device is a process and its streams are threads: compute above communication.
"""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdp.program.timeline.replay import Timeline

_THREADS = {"compute": 1, "communication": 2}  # shown in this order


def trace(timeline: "Timeline") -> str:
    """The text of a trace file; times in it are microseconds."""
    device = timeline.device
    events = [_meta("process_name", device, 0, name=f"device {device}")]
    for stream, thread in _THREADS.items():
        events.append(_meta("thread_name", device, thread, name=stream))
        events.append(_meta("thread_sort_index", device, thread, sort_index=thread))
    for bar in timeline.bars:
        events.append(
            {
                "ph": "X",
                "name": bar.name,
                "cat": bar.kind,
                "ts": 1e6 * bar.start_s,
                "dur": 1e6 * (bar.end_s - bar.start_s),
                "pid": bar.device,
                "tid": _THREADS[bar.stream],
                "args": {"kind": bar.kind},
            }
        )
    about = {"hardware": timeline.hardware.name, "step_ms": 1e3 * timeline.step_s}
    document = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    return json.dumps(document)


def _meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
