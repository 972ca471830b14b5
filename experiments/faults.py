"""Does training come back to the same bits when a process, a link or a disk fails?

Command:   make experiment EXP=faults         ARGS="--kills 20 --steps 200"
Hardware:  any, on CPUs. The full disk and the cut link need root on Linux, and the
           experiment says so where that is missing.
Runtime:   about 5 minutes on two cores, of which JAX starts in 4.

A small network learns the digits with Adam and noise on the images, in 2 processes that
`python -m jaxdp.launch` starts. Every 10 steps `jaxdp.checkpoint` saves the state, the
position in the data and the state of the noise. First without faults. Then again, while
processes are killed: at random, in steps, in saves and at start-up; the launcher starts
all again and each time the training goes on from the last complete checkpoint. Then a
process is stopped, a disk is full, a link is cut. Losses are compared as exact numbers.

Expected numbers:
  losses and parameters  the same bits, after every fault
  named                  the rank that was killed or stopped, every time
  noticed                a kill at once; a stopped process or a cut link when its
                         heartbeats have been missing for 10 s
  back in training       within 60 s: 1 s of grace for the others, then JAX starts
  steps lost             at most 10: those since the last complete checkpoint
  processes left over    none
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal

from experiments.harness import config as harness
from experiments.harness import show
from experiments.harness.result import Result, Rows
from experiments.parts import faults_figures as figures
from experiments.parts import faults_kills as kills
from experiments.parts import faults_others as others
from experiments.parts.faults_launch import Launch, write_digits
from experiments.parts.faults_training import Options

HANGS_S = 60.0  # from a fault to the next step
TIMELINE = "Steps against time, with kills"
SHOWN = [  # columns of the table of kills
    *("kill", "moment", "rank", "named", "last step", "noticed_s", "back_s"),
    *("steps lost", "identical", "saving"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 1  # of each process
    platform: Literal["auto", "cpu", "gpu"] = "cpu"
    processes: int = 2  # of the training
    kills: int = 20  # of random processes, during one training
    steps: int = 200  # of the training
    save_every: int = 10  # steps
    batch_size: int = 64  # rows of a step, over all processes
    pause_s: float = 0.03  # after every step, as if the network were larger
    heartbeat_s: float = 10.0  # after which a silent process is given up
    seed: int = 0  # of who is killed when

    def where(self) -> str:
        """Says what it runs on."""
        return f"{self.processes} processes of one CPU device each, on this machine"

    def check(self) -> None:
        """Checks the options."""
        super().check()
        if self.devices != 1 or self.platform != "cpu":
            raise ValueError(
                f"--devices got {self.devices} and --platform {self.platform}. Each "
                "process of this experiment trains on one CPU device. Use --processes "
                "for more of them."
            )
        least = 2 * self.save_every
        if self.processes < 2 or self.kills < 1 or self.steps < least or least < 2:
            raise ValueError(
                f"--processes got {self.processes}, --kills {self.kills}, --steps "
                f"{self.steps} and --save-every {self.save_every}. It takes 2 "
                "processes, a kill and two saves at least. Use --processes 2 --kills "
                "20 --steps 200 --save-every 10, for example."
            )
        if self.batch_size % self.processes:
            raise ValueError(
                f"--batch-size got {self.batch_size} for {self.processes} processes. "
                "Each takes equally many rows. Use --batch-size "
                f"{32 * self.processes}, for example."
            )

    @property
    def sizes(self) -> "Config":
        """What is run: itself, or the smallest."""
        if not self.tiny:
            return self
        return dataclasses.replace(
            self, kills=1, steps=12, save_every=4, pause_s=0.1, processes=2
        )


def run(config: Config) -> Result:
    """Answers the question."""
    sizes = config.sizes
    with tempfile.TemporaryDirectory(prefix="jaxdp-faults-") as folder:
        return _run(sizes, pathlib.Path(folder))


def _run(config: Config, folder: pathlib.Path) -> Result:
    options = Options(
        *(config.steps, config.save_every, config.batch_size),
        *(config.pause_s, config.heartbeat_s, ""),
    )
    problem = others.Problem(
        *(folder, write_digits(folder / "digits.npz"), options, config.processes),
        *({}, set(), config.seed),
    )
    with (
        show.progress("training, with faults", 5 - 3 * config.tiny) as advance,
        problem.launch("without", 0) as without,
    ):
        without.end()
        advance()
        expected = {row["step"]: row["loss"] for row in without.losses()}
        problem = dataclasses.replace(
            problem, expected=expected, digests=without.digests()
        )
        pace = kills.pace(without, config.save_every)
        killed, rows, same = kill(config, problem, pace)
        advance()
        found = [] if config.tiny else befall(problem, advance)
    tables: dict[str, Rows] = {
        "kills": [{name: row[name] for name in SHOWN} for row in rows],
        "summary": [summary(rows, killed, same, pace)],
    }
    if found:
        tables["other_faults"] = found
    note = f"{config.processes} processes, saved every {config.save_every} steps"
    figure = figures.timeline(TIMELINE, note, log(without), log(killed), rows)
    return Result(
        claims=[],
        tables=tables,
        figures={TIMELINE: figure},
        files={"launcher.txt": killed.said()},
    )


def kill(
    config: Config, problem: others.Problem, pace: kills.Pace
) -> tuple[Launch, Rows, bool]:
    """Trains while processes are killed; also whether it ended with the same bits."""
    plan = kills.plan(
        *(config.kills, config.steps, config.save_every),
        *(config.processes, config.seed),
    )
    # A port may be taken by somebody else, which costs a restart, too.
    with problem.launch("killed", len(plan) + 2) as launch:
        checkpoints = launch.folder / "checkpoints"
        done = kills.carry_out(plan, launch, checkpoints, pace)
        launch.end()
        rows = kills.became(done, launch, problem.expected)
    return launch, rows, problem.same(launch)


def befall(problem: others.Problem, advance: Callable[[], None]) -> Rows:
    """The other faults; those that cannot be made here say why."""
    rows = []
    for fault, happen, missing in (
        ("stopped process", others.stopped, lambda: ""),
        ("full disk", others.full_disk, others.no_small_disk),
        ("cut link", others.cut_link, others.no_links),
    ):
        reason = missing()
        if reason:
            show.console.print(f"Left out, {fault}: {reason}")
        row = {"fault": fault, "says": reason} if reason else happen(problem)
        rows.append(row)
        advance()
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def summary(rows: Rows, killed: Launch, same: bool, pace: kills.Pace) -> dict[str, Any]:
    """All kills, in one row."""
    backs = [row["back_s"] for row in rows]
    return {
        "kills": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "same parameters at the end": same,
        "named as killed": sum(map(named_as_killed, rows)),
        "steps compared": sum(row["compared"] for row in rows),
        "while saving": sum(row["saving"] for row in rows),
        "longest_noticed_s": max(row["noticed_s"] for row in rows),
        "longest_ended_s": max(row["ended_s"] for row in rows),
        "longest_back_s": max(backs),
        "hangs": sum(back > HANGS_S for back in backs),
        "most steps lost": max(row["steps lost"] for row in rows),
        "orphans": len(killed.orphans()),
        "other failures": len(killed.failures()) - len(rows),
        "start_s": pace.start_s,
        "save_s": pace.save_s,
    }


def named_as_killed(row: Mapping[str, Any]) -> bool:
    """Whether the launcher said of a kill who was killed, and by what."""
    return row["named"] == row["rank"] and row["how"] == "killed by SIGKILL"


def log(launch: Launch) -> list[tuple[float, int]]:
    """Seconds since the launch, and steps."""
    return [(row["time_s"] - launch.start_s, row["step"]) for row in launch.losses()]
