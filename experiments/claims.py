"""What became of every claim of the two articles?

Command:   make experiment EXP=claims          ARGS="--only CB1 CA3"
Hardware:  any, with 15 GiB of free memory. Some evidence is compiled for H100 GPUs,
           which need not be there; links of limited rate need Linux, root and
           iproute2, and are left out elsewhere.
Runtime:   about 15 min on two cores if nothing is there yet, and seconds if all is;
           --tiny about 3.

Each claim is tested by one experiment or more. A result of today's code is read; what
is missing, damaged or older is made, each experiment in a process of its own, one after
the other (two at once if it is tiny), its output in OUTPUT/logs. --fresh makes all
anew. Then every claim has one row: what was claimed, what was measured, the verdict and
the reason, the evidence that counts, and what else testifies. Experiments of more than
a few minutes run with fewer options than by hand, and most that testify only are read
if they are there: after `make experiment EXP=gpu`, for example. With --only nothing
runs but what counts for those claims.

Expected numbers:
  claims          25: 16 of document A, on nn.DataParallel, and 9 of document B, from
                  the parameter server to ring all-reduce
  document A      3 hold, 9 hold in part, 4 are refuted
  document B      7 hold, 2 hold in part
"""

import dataclasses

from experiments.harness import config as harness
from experiments.harness import devices
from experiments.harness.result import Result
from experiments.ledger import catalogue, figures, gathering, judging


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 1  # of this process, which only reads; experiments have their own
    only: tuple[str, ...] = ()  # claims to judge, such as CB1 CA3; none: all
    fresh: bool = False  # run experiments also where current results are there

    def check(self) -> None:
        """Checks the options."""
        super().check()
        catalogue.chosen(self.only)
        if self.devices != 1:
            raise ValueError(
                f"--devices got {self.devices}. This experiment runs on 1 device and "
                "reads what others found: give --devices to one of them, as in "
                f'`make experiment EXP=ring ARGS="--devices {self.devices}"`.'
            )

    def start(self) -> None:
        """Leaves GPUs to the experiments."""
        devices.start(1, "cpu")

    def where(self) -> str:
        """Says where experiments run."""
        return "results of experiments, each of which says what it ran on"


def run(config: Config) -> Result:
    """Answers the question."""
    entries = catalogue.chosen(config.only)
    gathered = gathering.gather(
        gathering.Wish(
            entries=entries,
            results=config.output,
            platform=config.platform,
            tiny=config.tiny,
            fresh=config.fresh,
            all_claims=not config.only,
        )
    )
    judged = [judging.judge(entry, gathered) for entry in entries]
    folder = config.output / "claims"
    return Result(
        claims=judging.claims(judged),
        tables={
            "summary": judging.summary(judged),
            "ledger": judging.ledger(judged, folder),
            "evidence": judging.sources(gathered),
        },
        figures={figures.TITLE: figures.glance(judged)},
        unprinted=["ledger", "evidence"],
        failures=judging.failures(judged),
    )
