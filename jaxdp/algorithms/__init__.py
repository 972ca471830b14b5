"""Collective algorithms: short functions that return schedules.

Legend: `N` devices in a circle or around a root, `K` bytes in the whole buffer, cut
into `C` chunks. All arithmetic on devices and chunks is modulo `N`.

    file            who sends to whom                     rounds of an all-reduce
    rings           neighbours, one way or both           2 (N - 1), or N
    stars           everybody and a root                  2
    servers         everybody and S roots                 2
    trees           parents and children                  2 log2 N
    double_trees    the same in two trees at once         at most 2 (C + 2 log2 N)
    doubling        ranks that differ in one bit          log2 N, or 2 log2 N
    exchanges       everybody and everybody               2
    hierarchies     D in a host, then H across hosts      2 (D - 1) + 2 (H - 1)

Functions take N, `devices`; those with a root its rank, 0 unless given; pipelined ones
`chunks`, C; and return a `jaxdp.schedule.Schedule`. `registry` has them by the name
that collectives take.

Errors raised by all: ValueError for fewer than one device.
"""

from jaxdp.algorithms.double_trees import double_binary_tree as double_binary_tree
from jaxdp.algorithms.doubling import halving_doubling as halving_doubling
from jaxdp.algorithms.doubling import recursive_doubling as recursive_doubling
from jaxdp.algorithms.exchanges import direct as direct
from jaxdp.algorithms.exchanges import direct_all_gather as direct_all_gather
from jaxdp.algorithms.exchanges import direct_reduce_scatter as direct_reduce_scatter
from jaxdp.algorithms.hierarchies import hierarchical as hierarchical
from jaxdp.algorithms.registry import SCHEDULES as SCHEDULES
from jaxdp.algorithms.registry import build as build
from jaxdp.algorithms.rings import bidirectional_ring as bidirectional_ring
from jaxdp.algorithms.rings import (
    bidirectional_ring_all_gather as bidirectional_ring_all_gather,
)
from jaxdp.algorithms.rings import (
    bidirectional_ring_reduce_scatter as bidirectional_ring_reduce_scatter,
)
from jaxdp.algorithms.rings import ring as ring
from jaxdp.algorithms.rings import ring_all_gather as ring_all_gather
from jaxdp.algorithms.rings import ring_reduce_scatter as ring_reduce_scatter
from jaxdp.algorithms.servers import serving_workers as serving_workers
from jaxdp.algorithms.servers import sharded_servers as sharded_servers
from jaxdp.algorithms.servers import sharded_servers_collect as sharded_servers_collect
from jaxdp.algorithms.servers import sharded_servers_pull as sharded_servers_pull
from jaxdp.algorithms.servers import sharded_servers_push as sharded_servers_push
from jaxdp.algorithms.stars import pipelined_star as pipelined_star
from jaxdp.algorithms.stars import star as star
from jaxdp.algorithms.stars import star_broadcast as star_broadcast
from jaxdp.algorithms.stars import star_gather as star_gather
from jaxdp.algorithms.stars import star_reduce as star_reduce
from jaxdp.algorithms.stars import star_scatter as star_scatter
from jaxdp.algorithms.trees import pipelined_tree as pipelined_tree
from jaxdp.algorithms.trees import pipelined_tree_broadcast as pipelined_tree_broadcast
from jaxdp.algorithms.trees import pipelined_tree_reduce as pipelined_tree_reduce
from jaxdp.algorithms.trees import tree as tree
from jaxdp.algorithms.trees import tree_broadcast as tree_broadcast
from jaxdp.algorithms.trees import tree_reduce as tree_reduce
