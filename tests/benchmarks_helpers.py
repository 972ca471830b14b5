"""Made-up runs of benchmarks."""

import datetime

from benchmarks import history
from benchmarks.rows import Row, Unit

MACHINE = {
    "jax": "0.10.2",
    "python": "3.11.9",
    "platform": "cpu",
    "device_kind": "cpu",
    "cores": 2,
    "cpu": "A Processor",
}
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def row(name="ring", value=1.0, spread=0.02, unit: Unit = "ratio", **more):
    """A row whose quartiles are `spread` below and above its value."""
    quartiles = (value - spread, value + spread)
    given = {"group": "by hand", "repeats": 100, **more}
    return Row(name=name, unit=unit, value=value, quartiles=quartiles, **given)


def run(hour, rows, dirty=False, ran=None):
    """A run of the commit of that hour; or a later one, of the hour `ran`."""
    committed = (START + datetime.timedelta(hours=hour)).isoformat()
    date = (START + datetime.timedelta(hours=ran or hour, minutes=1)).isoformat()
    code = {
        "commit": f"{hour:040x}",
        "committed": committed,
        "dirty": dirty,
    }
    made = history.begun(code, MACHINE, date)
    return {**made, "rows": [history.written(each) for each in rows], "complete": True}
