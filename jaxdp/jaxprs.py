"""Reading traced programs: what every reader of them needs."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params


def opened(jaxpr: Any) -> Jaxpr:
    """The jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner(eqn: Any) -> list[Jaxpr]:
    """The programs inside an operation."""
    return [opened(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)]


def called(eqn: Any) -> Jaxpr | None:
    """The program that an operation only calls, argument by argument."""
    programs = inner(eqn)
    if len(programs) == 1 and len(programs[0].invars) == len(eqn.invars):
        return programs[0]
    return None
