"""Collectives over pytrees, for use inside `shard_map` and `pmap`.

`N` is the number of devices on the axis, `K` the bytes of the tree. Every call packs
the leaves of one dtype into one flat buffer, cuts it into chunks and moves those by
explicit `ppermute` rounds (`jaxdp.algorithms`). JAX's own counterparts: `lax.psum`,
`lax.psum_scatter`, `lax.all_gather`; the rest has none.

Sums are made in float32 or wider, whatever the leaves' dtype, and rounded once. Summing
collectives leave integer, bool, key, `float0` and `None` leaves untouched; moving ones
move integers, bools and keys as they are. All are linear, and differentiate so in
forward and reverse mode, with `check_vma` on and off. With it on, what every device
ends with alike (`all_reduce`, `all_gather`, `broadcast`) is typed as replicated, so
`out_specs=P()` is accepted.

`axis_name` may be a tuple of mesh axes: their devices are N ranks in a row, counted
through the last axis first, as `lax.axis_index` counts them.

`unroll=True` writes every round of an algorithm out in the program. `unroll=False` runs
rounds that repeat in a loop, to the same bits: a ring is then a program of the same
size for any N, and halving-doubling, whose rounds all differ, stays as it is. XLA
overlaps nothing with a loop, so None, the default, makes loops only of schedules longer
than `jaxdp.executor.MOST_ROUNDS`.

Errors raised by all: ValueError for an unknown algorithm or axis, a root that is no
rank, or a call outside `shard_map` and `pmap`.
"""

from jaxdp.collectives.moving import all_gather as all_gather
from jaxdp.collectives.moving import broadcast as broadcast
from jaxdp.collectives.moving import gather as gather
from jaxdp.collectives.moving import scatter as scatter
from jaxdp.collectives.summing import all_reduce as all_reduce
from jaxdp.collectives.summing import all_reduce_in_turn as all_reduce_in_turn
from jaxdp.collectives.summing import reduce as reduce
from jaxdp.collectives.summing import reduce_scatter as reduce_scatter
from jaxdp.packing import PyTree as PyTree
from jaxdp.scheduled import Algorithm as Algorithm
