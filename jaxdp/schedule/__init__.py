"""A collective algorithm as data: who sends which chunk to whom, round by round.

A buffer is cut into `chunks` equal chunks. A `Schedule` lists `Round`s; a round lists
`Transfer`s that run at the same time; a transfer is one `jax.lax.ppermute`: every
source sends one chunk, and the target adds it to the chunk it holds or replaces that.
Every reader (executor, simulator, verifier, cost model, drawer) works on this data
alone.

One sentence defines every collective. Chunk `c` starts as one contribution on each
device of `starts[c]` and must end, as the sum of exactly those contributions, on each
device of `ends[c]`:

    collective       starts[c]      ends[c]
    all_reduce       all devices    all devices
    reduce_scatter   all devices    the owner of c
    all_gather       the owner      all devices
    reduce           all devices    the root
    broadcast        the root       all devices
    gather           device c       the root
    scatter          the root       device c
    push             the workers    the server of c
    collect          one worker     the server of c
    pull             the server     all devices
"""

from jaxdp.schedule.bundles import Bundle as Bundle
from jaxdp.schedule.bundles import bundles as bundles
from jaxdp.schedule.data import Pairs as Pairs
from jaxdp.schedule.data import Placement as Placement
from jaxdp.schedule.data import Round as Round
from jaxdp.schedule.data import Schedule as Schedule
from jaxdp.schedule.data import Transfer as Transfer
from jaxdp.schedule.data import local_row as local_row
from jaxdp.schedule.data import local_rows as local_rows
from jaxdp.schedule.holding import Holdings as Holdings
from jaxdp.schedule.holding import holdings as holdings
from jaxdp.schedule.simulator import simulate as simulate
from jaxdp.schedule.verifier import verify as verify
