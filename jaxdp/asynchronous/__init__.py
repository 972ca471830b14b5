"""Asynchronous parameter servers, simulated and real, with one server and one proof.

A `Server` updates from pushes by a policy: `Sequential`, `Eventual`, `Bounded` or
`Backup`. `simulate` runs workers by a virtual clock, with real gradients; `train` runs
them as threads on real devices. Both give back a `Run`, whose log `verify` proves.

Its modules:

    policies                     who waits for whom
    server, update, errors       parameters, push and pull
    worker                       the loss of a batch and its gradient
    virtual, simulation, times   workers by a virtual clock
    threads, crew                workers as threads
    run, log                     what came of it, and the proof
"""

from jaxdp.asynchronous.log import Event as Event
from jaxdp.asynchronous.log import Span as Span
from jaxdp.asynchronous.log import verify as verify
from jaxdp.asynchronous.policies import Backup as Backup
from jaxdp.asynchronous.policies import Bounded as Bounded
from jaxdp.asynchronous.policies import Eventual as Eventual
from jaxdp.asynchronous.policies import Policy as Policy
from jaxdp.asynchronous.policies import Sequential as Sequential
from jaxdp.asynchronous.run import Run as Run
from jaxdp.asynchronous.server import Server as Server
from jaxdp.asynchronous.server import Snapshot as Snapshot
from jaxdp.asynchronous.threads import train as train
from jaxdp.asynchronous.times import Constant as Constant
from jaxdp.asynchronous.times import Link as Link
from jaxdp.asynchronous.times import LogNormal as LogNormal
from jaxdp.asynchronous.times import Stops as Stops
from jaxdp.asynchronous.virtual import simulate as simulate
