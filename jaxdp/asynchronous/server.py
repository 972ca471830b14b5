"""The parameter server: parameters, optimizer, one version number, push and pull.

The version is the number of updates made. There is one for all parameters, also when
several servers own a part each: a push is committed when its last part has arrived, and
a pull names one version, so that parts never differ in age. JAX arrays cannot change,
so a snapshot stays what it was while updates go on, and nothing is donated.

The server decides by its policy and by counters alone. It knows no clock but the
function it is given, and locks nothing: threads hold one lock around each call.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.asynchronous import errors
from jaxdp.asynchronous.log import Event
from jaxdp.asynchronous.policies import Eventual, Policy
from jaxdp.asynchronous.update import init_program, inspect, like, update_program
from jaxdp.loss import Mean
from jaxdp.mesh import without_mesh
from jaxdp.state import check_params, own_copy

PyTree = Any
Fate = Literal["applied", "collected", "dropped", "refused"]


class Snapshot(NamedTuple):
    """What a pull hands out.

    Attributes:
        version: How many updates it holds; 0 are the initial parameters.
        params: The parameters, on the server's device.
        iteration: The worker's iteration that it is for.
    """

    version: int
    params: PyTree
    iteration: int


class _Push(NamedTuple):
    """A push of the open round; a refused one is zeros of weight 0."""

    worker: int
    snapshot: Snapshot
    gradients: PyTree
    weight: Any
    accepted: bool


class Server:
    """Holds the parameters, and updates them from pushes.

    Attributes:
        params: The current parameters.
        opt_state: The optimizer's state.
        version: Updates made.
        rounds: Rounds that have ended, those without an update included.
        clocks: Iterations finished, per worker.
        pushed: Pushes received, per worker: the sum of the next three, once `close` has
            been called.
        applied: Pushes that are part of an update, per worker.
        dropped: Pushes that came after their round, per worker.
        refused: Pushes that were not finite, per worker.
        events: The log, in order.
        losses: `(version, time_s, loss)` of every push that came with its loss, at the
            version it was computed on.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        *,
        policy: Policy = Eventual(),  # noqa: B008 (frozen and stateless)
        workers: int = 1,
        device: Any = None,
        now: Callable[[], float] | None = None,
    ):
        """Makes a server without parameters.

        Args:
            optimizer: Any optax transformation. It is passed `staleness=`, an int32
                scalar, the updates made between pull and apply, and `stale_params=`,
                the parameters that the gradient was computed on.
            policy: Who waits for whom, and how many pushes make an update.
            workers: Their number.
            device: Where the parameters live; None takes the default device.
            now: Gives the seconds since the run began; None takes real time.

        Raises:
            ValueError: The policy cannot serve so many workers.
            TypeError: `workers` is no integer.
        """
        policy.check(workers)
        began = time.perf_counter()
        self.policy = policy
        self.device = device or default_device()
        self.now = now or (lambda: time.perf_counter() - began)
        self.params: PyTree = None
        self.opt_state: PyTree = None
        self.version = self.rounds = 0
        self.clocks = [0] * workers
        self.pushed, self.applied = [0] * workers, [0] * workers
        self.dropped, self.refused = [0] * workers, [0] * workers
        self.events: list[Event] = []
        self.losses: list[tuple[int, float, float]] = []
        self._open_round: list[_Push] = []
        self._init, self._update = init_program(optimizer), update_program(optimizer)

    @without_mesh
    def init(self, params: PyTree) -> None:
        """Sets the initial parameters, version 0: copies, on the server's device.

        Raises:
            TypeError: Parameters that have no gradient.
            RuntimeError: Called before.
        """
        if self.params is not None:
            raise RuntimeError(
                "Server.init was called on a server that has parameters, at version "
                f"{self.version}. A server serves one run. Make another Server."
            )
        check_params(params, "Server.init")
        self.params = own_copy(jax.device_put(params, self.device))
        # JAX ties no constant to a device, and would compile the second update anew.
        self.opt_state = jax.device_put(self._init(self.params), self.device)

    def next_iteration(self, worker: int) -> int:
        """The iteration that a worker starts next."""
        return self.policy.next_iteration(self.clocks[worker], self.rounds)

    def waits_for(self, worker: int) -> list[int]:
        """The workers that a worker must wait for before its next pull."""
        iteration = self.next_iteration(worker)
        return self.policy.waits_for(iteration, self.clocks, self.rounds)

    def pull(self, worker: int = 0) -> Snapshot:
        """Hands out the current parameters, for the worker's next iteration.

        Returns:
            The same snapshot until something is pushed.

        Raises:
            RuntimeError: Before `init`, or while the policy makes the worker wait.
            ValueError: No such worker.
        """
        errors.check_call(self, worker, "pull")
        errors.check_turn(self, worker)
        iteration = self.clocks[worker] = self.next_iteration(worker)
        self._log("read", worker, iteration)
        return Snapshot(self.version, self.params, iteration)

    @without_mesh
    def push(
        self, worker: int, gradients: PyTree, snapshot: Snapshot, loss: Any = None
    ) -> Fate:
        """Takes a gradient, and updates if it ends a round.

        Waits for the gradient, to know whether it is finite; not for the update.

        Args:
            worker: Whose.
            gradients: Of the loss, or of the total of a `jaxdp.Mean`, like the
                parameters.
            snapshot: What the worker pulled, and computed on.
            loss: A scalar or a `jaxdp.Mean`, whose weight then divides `gradients`;
                None is not logged, and has weight 1.

        Returns:
            What became of it: "applied" in an update that it made happen, "collected"
            for one that lacks other workers' pushes, "dropped" because its round was
            over, or "refused" because a leaf or the loss is not finite, or the weight
            not positive.

        Raises:
            RuntimeError: Before `init`.
            ValueError: No such worker; gradients unlike the parameters; a snapshot of
                another server, or one that the worker has pushed before.
        """
        errors.check_call(self, worker, "push")
        errors.check_snapshot(self, worker, snapshot)
        loss = loss if loss is None or isinstance(loss, Mean) else Mean(loss, None)
        gradients = like(self.params, gradients, f"Server.push by worker {worker}")
        gradients, loss = jax.device_put((gradients, loss), self.device)
        accepted, value = jax.device_get(inspect(gradients, loss))
        if value is not None:
            self.losses.append((snapshot.version, self.now(), float(value)))
        self.clocks[worker] += 1
        self.pushed[worker] += 1
        late = self.policy.is_late(snapshot.iteration, self.rounds)
        weight = None if loss is None else loss.weight
        push = _Push(worker, snapshot, gradients, weight, bool(accepted))
        if not accepted:
            self.refused[worker] += 1
            self._log("refuse", worker, snapshot.iteration)
        elif late:
            self._drop(push)
        if not late:
            self._collect(push)
        if not accepted:
            return "refused"
        if late:
            return "dropped"
        return "collected" if self._open_round else "applied"

    def close(self) -> None:
        """Ends the run: drops what the open round has collected."""
        for push in self._open_round:
            if push.accepted:
                self._drop(push)
        self._open_round = []

    def _collect(self, push: _Push) -> None:
        """Adds a push to the open round, and ends it when it is complete."""
        if not push.accepted:
            zero = None if push.weight is None else jnp.zeros_like(push.weight)
            zeros = jax.tree.map(jnp.zeros_like, push.gradients)
            push = push._replace(gradients=zeros, weight=zero)
        self._open_round.append(push)
        needed = self.policy.pushes_per_update(len(self.clocks))
        if len(self._open_round) < needed:
            return
        # In the order of workers: the sum does not depend on the order of arrival.
        pushes, self._open_round = sorted(self._open_round, key=lambda p: p.worker), []
        self.rounds += 1
        if any(push.accepted for push in pushes):
            self._make_version(pushes)

    def _make_version(self, pushes: Sequence[_Push]) -> None:
        """Makes one update from a complete round."""
        accepted = [push for push in pushes if push.accepted]
        stale = accepted[0].snapshot
        staleness = self.version - stale.version
        self.params, self.opt_state = self._update(
            self.params,
            self.opt_state,
            [push.gradients for push in pushes],
            _weights(pushes),
            np.int32(staleness),
            stale.params,
        )
        self.version += 1
        now_s = self.now()  # one update is one instant, whatever the clock
        for push in accepted:
            self.applied[push.worker] += 1
            self._log("apply", push.worker, push.snapshot.iteration, staleness, now_s)

    def _drop(self, push: _Push) -> None:
        self.dropped[push.worker] += 1
        self._log("drop", push.worker, push.snapshot.iteration)

    def _log(self, kind, worker: int, iteration: int, staleness=0, time_s=None) -> None:
        time_s = self.now() if time_s is None else time_s
        event = Event(time_s, kind, worker, iteration, self.version, staleness)
        self.events.append(event)


@without_mesh
def default_device() -> Any:
    """Where JAX puts arrays by itself."""
    (device,) = jnp.zeros(()).devices()
    return device


def _weights(pushes: Sequence[_Push]) -> list[Any]:
    """The weights of a round; a push alone without one is not divided at all."""
    if len(pushes) == 1:
        return [pushes[0].weight]
    return [
        np.float32(push.accepted) if push.weight is None else push.weight
        for push in pushes
    ]
