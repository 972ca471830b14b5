"""What processes tell each other before they compute together.

A collective between processes that disagree hangs, or returns wrong numbers. So sizes,
parameters and programs are compared first, by short texts on the coordinator's board,
and a process that does not come is named.
"""

import collections
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.buckets import is_key
from jaxdp.processes import board

PyTree = Any
TIMEOUT_S = 60.0
# A process may have to compile, or to read its data, before it comes to a step.
STEP_TIMEOUT_S = 600.0
_made: collections.Counter = collections.Counter()  # agreements, by kind


def agree(
    name: str,
    value: Any,
    timeout_s: float = TIMEOUT_S,
    *,
    ranks: Sequence[int] | None = None,
) -> list[Any]:
    """Gives every process the values of all.

    All processes must call it equally often, in the same order for each name. Nothing
    runs on devices.

    Cost: one message to the coordinator, and one from it per process: about a
    millisecond on one host.

    Args:
        name: What is agreed on, as errors call it.
        value: What this process says; anything that JSON can say.
        timeout_s: How long to wait for the others, in seconds.
        ranks: The processes that take part; None for all.

    Returns:
        The values by rank, where a process's rank is its `jax.process_index()`; that of
        one process if there are no others.

    Raises:
        TimeoutError: A process did not come; names all that did not.
    """
    ranks = range(jax.process_count()) if ranks is None else ranks
    if len(ranks) < 2:
        return [json.loads(json.dumps(value))]
    kind = f"jaxdp/{name}/{','.join(map(str, ranks))}"
    folder = f"{kind}/{_made[kind]}"
    own = f"{folder}/{jax.process_index()}"
    board.post(own, json.dumps(value))
    texts = board.wait_for(folder, ranks, timeout_s)
    if missing := [rank for rank, text in texts.items() if text is None]:
        board.remove(own)  # so that it can be tried again
        raise TimeoutError(
            f"{_who()} waited {timeout_s:g} s for {_listed(missing)} to come to "
            f"{name!r}. All {len(ranks)} processes must get there: they have to call "
            "the same functions of jaxdp, in the same order and equally often. See "
            "what the others do; if they are only slow, wait longer."
        )
    if _made[kind]:  # all have read the one before, or they would not be here
        board.remove(f"{kind}/{_made[kind] - 1}/{jax.process_index()}")
    _made[kind] += 1
    return [json.loads(texts[rank] or "") for rank in ranks]


def from_zero(name: str, value: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """The value of process 0, on all: for decisions that only one may take.

    Which checkpoint is the newest, say, if processes may see different files.

    Args:
        name: What is decided, as errors call it.
        value: What this process says; anything that JSON can say.
        timeout_s: How long to wait for the others, in seconds.

    Returns:
        What process 0 says.

    Raises:
        TimeoutError: A process did not come; names all that did not.
    """
    return agree(name, value, timeout_s)[0]


def check_same_devices(mesh: jax.sharding.Mesh, ranks: Sequence[int]) -> None:
    """Refuses a mesh that has its devices in another order on some processes.

    Their programs would be the same text, and wait for each other in circles.

    Raises:
        ValueError: Names the processes that differ from most others.
        TimeoutError: A process did not come; its mesh may be without these processes.
    """
    has = [device.id for device in mesh.devices.flat]
    everyone = agree("the devices of the mesh", has, ranks=ranks)
    most, odd = _odd(everyone, ranks)
    if odd:
        raise ValueError(
            f"train.init got a mesh of the devices {next(iter(odd.values()))} on "
            f"{_listed(odd)}, and of {most} elsewhere. All processes must have the "
            "same devices in the same order. Make it on all by jaxdp.data_mesh(), or "
            "of one choice from jax.devices()."
        )


def check_same_tree(tree: PyTree, ranks: Sequence[int]) -> None:
    """Refuses a tree that is not the same on all processes, bit for bit.

    Structure comes first, then shapes and dtypes, then values. Arrays that span several
    processes already are left out.

    Args:
        tree: Host arrays, or arrays of this process, by what they are called.
        ranks: The processes that take part.

    Raises:
        ValueError: Names what differs, and where.
        TimeoutError: A process did not come; names all that did not.
    """
    if len(ranks) < 2:
        return
    facts = {
        jax.tree_util.keystr(path, simple=True, separator="."): _facts(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if getattr(leaf, "is_fully_addressable", True)
    }
    # One digest first, since that is all there is to say if everybody agrees.
    if len(set(agree("the first state", digest(facts), ranks=ranks))) == 1:
        return
    everyone = agree("the first state, by leaf", facts, ranks=ranks)
    for what in ("structure", "shape", "values"):
        views = [{leaf: has[what] for leaf, has in said.items()} for said in everyone]
        if different := _disagreement(views, ranks):
            raise ValueError(
                f"train.init got different {what} on some processes: {different}. All "
                "must start from the same. Make it from one seed everywhere, restore "
                "it everywhere, or take that of process 0 with "
                "jaxdp.processes.copies_of_zero."
            )


def check_same_program(text: str, ranks: Sequence[int]) -> None:
    """Refuses a step whose program is not the same on all processes.

    Args:
        text: The program, as JAX hands it to XLA.
        ranks: The processes that take part.

    Raises:
        ValueError: Names the processes that differ from most others.
        TimeoutError: A process did not come to its step.
    """
    if len(ranks) < 2:
        return
    # Callbacks to Python are numbered by each process for itself.
    text = re.sub(r"(?m)^.*callback.*$", "", text)
    digests = agree("the program of a step", digest(text), STEP_TIMEOUT_S, ranks=ranks)
    _, others = _odd(digests, ranks)
    if not others:
        return
    raise ValueError(
        f"train.step got another program on {_listed(others)} than on the other "
        f"{len(ranks) - len(others)} of {len(ranks)} processes: they would wait for "
        "each other, or exchange numbers that do not belong together. All must run "
        "the same code with the same options, on batches of the same dtypes. Compare "
        "versions, arguments, and constants that loss_fn closes over."
    )


def digest(value: Any) -> str:
    """A fingerprint of anything that JSON can say."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def _facts(leaf: Any) -> dict[str, str]:
    """What can be compared of a leaf, in order."""
    values = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return {
        "structure": "there",
        "shape": f"{values.dtype}{list(values.shape)}",
        "values": hashlib.sha256(values.tobytes()).hexdigest()[:32],
    }


def _odd(values: Sequence[Any], ranks: Sequence[int]) -> tuple[Any, dict[int, Any]]:
    """What most processes say, and what each of the others says."""
    most = max(values, key=values.count)
    return most, {r: v for r, v in zip(ranks, values, strict=True) if v != most}


def _disagreement(views: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """The leaves that differ, and on which processes from most others."""
    found = []
    for leaf in {leaf: None for view in views for leaf in view}:
        has = [view.get(leaf, "missing") for view in views]
        most, odd = _odd(has, ranks)
        if odd:
            text = f"{leaf} on {_listed(odd)}"
            if most == "there" or "[" in most:  # else a digest, which tells nobody
                text += f" ({next(iter(odd.values()))}; elsewhere {most})"
            found.append(text)
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more


def _who() -> str:
    return f"rank {jax.process_index()} of {jax.process_count()}"


def _listed(ranks: Iterable[int]) -> str:
    """Ranks as a text."""
    ranks = [*ranks]
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
