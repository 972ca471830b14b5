"""Measured points over bound lines, bytes of every link, and what steps consist of."""

from typing import TYPE_CHECKING, Any

from matplotlib.ticker import LogLocator

from experiments.harness import plots
from experiments.harness.result import Rows
from experiments.parts import bandwidth_ways as ways

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {  # colour, marker
    ways.STAR: ("#D55E00", "s"),
    "2 servers": ("#E69F00", "D"),
    ways.DOUBLING: ("#CC79A7", "v"),
    "servers": ("#56B4E9", "P"),
    ways.RING: ("#0072B2", "o"),
    ways.PSUM: ("#009E73", "^"),
    ways.TORCH: ("#1f2933", "x"),
    ways.PERMUTE: ("#999999", "."),
}
ALL = "N servers"
SHARING = (ALL, ways.PSUM, ways.TORCH)  # the ring's bound
NOTE = "points: medians measured; lines: bounds of links of {}; one for ring, {}"


def against_hosts(rows: Rows, rate: str, size_mb: float) -> "Figure":
    """Time, on a logarithmic scale, against N."""
    note = NOTE.format(rate, ", ".join(SHARING))
    title = f"All-reduce of {size_mb:g} MiB"
    figure, axes = plots.plot(title, "hosts N", "milliseconds", note, size=(8.0, 4.6))
    _draw(axes, _by_way(rows), "devices")
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["devices"] for row in rows}))
    return _finished(figure, axes)


def against_size(rows: Rows, rate: str, devices: int) -> "Figure":
    """Time against size, both logarithmic."""
    note = NOTE.format(rate, ", ".join(SHARING))
    title = f"All-reduce over {devices} hosts"
    figure, axes = plots.plot(
        title, "MiB of gradients Φ", "milliseconds", note, size=(8.0, 4.6)
    )
    _draw(axes, _by_way(rows), "size_mb")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["size_mb"] for row in rows})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    return _finished(figure, axes)


def traffic(rows: Rows, size_mb: float) -> "Figure":
    """Bytes that every link sends, by way: kernel's counters over programs' bytes."""
    names = [*dict.fromkeys(row["algorithm"] for row in rows)]
    hosts = sorted({row["host"] for row in rows})
    note = "bars: the kernel's counters; marks: the compiled program, without headers"
    figure, axes = plots.plot(
        "What each link sends in one all-reduce", "", "sent / Φ", note, (8.0, 4.2)
    )
    width = 0.8 / len(hosts)
    for row in rows:
        x = names.index(row["algorithm"]) + width * (row["host"] - (len(hosts) - 1) / 2)
        phi = size_mb * 2**20
        color = _style(row["algorithm"])[0]
        axes.bar(x, row["sent_bytes"] / phi, 0.9 * width, color=color)
        if row["program_bytes"] is not None:
            y = row["program_bytes"] / phi
            half = 0.45 * width
            axes.plot([x - half, x + half], [y, y], color="white", linewidth=1.6)
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    axes.grid(axis="x", visible=False)
    return figure


def training(rows: Rows) -> "Figure":
    """Steps as bars, over what they consist of."""
    names = [row["design"] for row in rows]
    figure, axes = plots.plot(
        "A training step, and what it consists of", "milliseconds", "", size=(8.0, 4.6)
    )
    parts = (
        ("compute alone_ms", "computation alone", "#56B4E9", -0.26),
        ("communication alone_ms", "communication alone", "#E69F00", 0.0),
        ("step_ms", "step", plots.INK, 0.26),
    )
    for column, label, color, offset in parts:
        y = [i + offset for i in range(len(names))]
        axes.barh(y, [row[column] for row in rows], 0.24, color=color, label=label)
    for i, row in enumerate(rows):
        text = f"hides {row['hidden / shorter']:.0%} of the shorter"
        style = {"va": "center", "fontsize": 8, "color": plots.MUTED}
        axes.text(row["step_ms"], i + 0.26, f"  {text}", **style)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * max(row["step_ms"] for row in rows))
    axes.legend(frameon=False, loc="lower right")
    return figure


def _by_way(rows: Rows) -> dict[str, list[Any]]:
    """Rows of each way; as many servers as hosts are one way, for any N."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        name = row["algorithm"]
        if name == ways.servers(row["devices"]) and row["devices"] > 2:
            name = ALL
        found.setdefault(name, []).append(row)
        if name == ways.servers(2) and row["devices"] == 2:
            found.setdefault(ALL, []).append(row)
    return found


def _style(name: str) -> tuple[str, str]:
    return STYLES[_key(name)]


def _draw(axes: Any, found: dict[str, list[Any]], column: str) -> None:
    """Points and bound lines of every way."""
    for name in sorted(found, key=lambda name: [*STYLES].index(_key(name))):
        rows = sorted(found[name], key=lambda row: row[column])
        color, marker = _style(name)
        x = [row[column] for row in rows]
        if name not in SHARING:
            axes.plot(x, [row["bound_ms"] for row in rows], color=color, linewidth=1)
        y = [row["time_ms"] for row in rows]
        axes.plot(x, y, color=color, marker=marker, linestyle="", label=name)


def _key(name: str) -> str:
    return name if name in STYLES else "servers"


def _finished(figure: "Figure", axes: Any) -> "Figure":
    """With a legend beside the plot, which has points everywhere."""
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
