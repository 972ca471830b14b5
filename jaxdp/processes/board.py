"""The coordinator's board: short texts that processes leave for each other.

`jax.distributed` keeps such a store in process 0 and offers no public name for it. It
needs no devices and waits no longer than it is told, so that a process that does not
come is named instead of waited for. The only place that reaches into `jax._src`.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

SLICE_MS = 500


def jax_is_in_use() -> bool:
    """Whether JAX has started its devices, after which no process can join."""
    return xla_bridge.backends_are_initialized()


def cluster() -> str | None:
    """What JAX detects that this process runs in, such as "slurm"; None for nothing.

    A class without a name, as that of Kubernetes, goes by its own.
    """
    detected = _cluster()
    return detected and (detected.name or detected.__name__)


def place_in_cluster(timeout_s: float) -> tuple[str, int, int]:
    """Where the cluster says this process belongs: coordinator, count and rank."""
    detected = _cluster()
    assert detected is not None
    address = detected.get_coordinator_address(
        round(timeout_s), os.environ.get("JAX_COORDINATOR_PORT")
    )
    return address, detected.get_process_count(), detected.get_process_id()


def post(key: str, text: str) -> None:
    """Leaves a text under a key, once."""
    _client().key_value_set(key, text)


def remove(key: str) -> None:
    """Takes a text off the board."""
    _client().key_value_delete(key)


def posted(folder: str) -> dict[str, str]:
    """The texts under `FOLDER/...`, by what follows."""
    found = _client().key_value_dir_get(folder + "/")
    return {key.rpartition("/")[2]: text for key, text in found}


def look(key: str) -> str:
    """A text, as soon as it is there; empty if it is not within half a second.

    In slices, because a thread must not be in a call of JAX when Python ends.

    Raises:
        jax.errors.JaxRuntimeError: The board is gone.
    """
    try:
        return _client().blocking_key_value_get(key, SLICE_MS)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return ""
        raise


def wait_for(
    folder: str, ranks: Sequence[int], timeout_s: float
) -> dict[int, str | None]:
    """The text of every rank under `FOLDER/RANK`; None for who has not come in time."""
    deadline = time.monotonic() + timeout_s
    texts = {}
    for rank in ranks:
        left_ms = max(1, int(1e3 * (deadline - time.monotonic())))
        try:
            texts[rank] = _client().blocking_key_value_get(f"{folder}/{rank}", left_ms)
        except jax.errors.JaxRuntimeError:
            texts[rank] = None
    return texts


def _cluster():
    """What JAX detects: one of its kinds of cluster, or None."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind
    return None


def _client() -> Any:
    """The connection to the coordinator."""
    return distributed.global_state.client
