"""What parameter servers and their references train: jobs, parameters and batches."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from tests.torch_reference import problem

Arrays = dict[str, np.ndarray]

MODEL = "mlp"
# No multiple of 4: the last window of `max_staleness=3` stays incomplete.
NUM_STEPS = 30
WORLD_SIZES = (2, 3, 4)
STALENESS = (1, 2, 3)
POLICIES = ("sliding", "window")
HYPER_PARAMETERS = {
    "sgd": {"learning_rate": 0.05},
    "momentum": {"learning_rate": 0.02, "momentum": 0.9},
    "adam": {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(problem.Job):
    """One training run; the fields are the options of `jaxdp.ParameterServer`.

    `design` is `ParameterServer` in JAX; in torch it says how gradients travel:
    `send_recv`, or `gather` with one server.
    """

    model: str = MODEL
    dtype: str = "float64"
    servers: int = 1
    dedicated: bool = False
    update_on: Literal["server", "worker"] = "server"
    max_staleness: int = 0
    policy: Literal["sliding", "window"] = "sliding"

    def __str__(self) -> str:
        """Return a name that can serve as test id and file name."""
        return (
            f"{super().__str__()}-{self.servers}{'-dedicated' * self.dedicated}-"
            f"{self.update_on}-stale{self.max_staleness}-{self.policy}"
        )

    @property
    def workers(self) -> range:
        """The ranks that compute gradients; ranks from 0 to `servers - 1` serve."""
        return range(self.servers if self.dedicated else 0, self.world_size)


def all_jobs() -> tuple[Job, ...]:
    """Return every job of either library."""
    jobs = tuple(itertools.chain(_synchronous(), _delayed(), _combined()))
    return jobs + tuple(
        dataclasses.replace(job, library="torch", design=design)
        for job in jobs
        for design in torch_designs(job)
    )


def torch_designs(job: Job) -> tuple[str, ...]:
    """Return the torch designs to compare with."""
    if job.servers == 1 and job.max_staleness == 0:
        return "gather", "send_recv"
    return ("send_recv",)


def _synchronous() -> Iterator[Job]:
    """Every place for servers on every number of devices; on 3, also for updates."""
    for world_size, servers, dedicated in itertools.product(
        WORLD_SIZES, (1, 2), (False, True)
    ):
        if dedicated and servers == world_size:
            continue  # no worker is left
        place = dict(world_size=world_size, servers=servers, dedicated=dedicated)
        if world_size == 3:
            yield _make_job(**place, optimizer="adam")
            yield _make_job(**place, optimizer="adam", update_on="worker")
        else:
            yield _make_job(**place, optimizer="momentum")
    yield _make_job(world_size=4, servers=2, optimizer="momentum", dtype="float32")


def _delayed() -> Iterator[Job]:
    """Every delay, with every optimizer."""
    for staleness, policy, optimizer in itertools.product(
        STALENESS, POLICIES, HYPER_PARAMETERS
    ):
        yield _make_job(
            world_size=2, max_staleness=staleness, policy=policy, optimizer=optimizer
        )


def _combined() -> Iterator[Job]:
    """Delays together with servers in other places."""
    for policy in POLICIES:
        yield _make_job(
            world_size=4,
            servers=2,
            dedicated=True,
            max_staleness=2,
            policy=policy,
            optimizer="adam",
        )
        yield _make_job(
            world_size=4,
            update_on="worker",
            max_staleness=3,
            policy=policy,
            optimizer="momentum",
        )


def _make_job(**fields) -> Job:
    return Job(library="jax", design="ParameterServer", **fields)


def make_data(dtype: str) -> problem.Inputs:
    """Draw what all jobs start from and train on, rounded to a dtype."""
    made = problem.make_inputs(MODEL, num_steps=NUM_STEPS)
    return problem.Inputs(
        {name: array.astype(dtype) for name, array in made.params.items()},
        made.inputs.astype(dtype),
        made.targets.astype(dtype),
    )


def stacked(prefix: str, trees: list[Arrays]) -> Arrays:
    """Stack arrays of the same name along a new first axis, as `PREFIX/NAME`."""
    return {
        f"{prefix}/{name}": np.stack([tree[name] for tree in trees])
        for name in trees[0]
    }
