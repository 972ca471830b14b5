"""Several processes, on one host or many: joining them, agreeing, and failing well.

The engine is `jax.distributed`: a coordinator in process 0, gloo between CPUs and NCCL
between GPUs. A process's rank is its `jax.process_index()`; a device's rank is its
place on the mesh axis.

Its modules:

    start, roll_call   who is there, before JAX connects them
    board, agreement   short texts by which they compare what must be the same
    batches, values    rows that each has, arrays that span all
    failures           how one that fails ends the others, and is named
"""

from jaxdp.processes.agreement import agree as agree
from jaxdp.processes.agreement import from_zero as from_zero
from jaxdp.processes.batches import together as together
from jaxdp.processes.start import initialize as initialize
from jaxdp.processes.values import copies_of_zero as copies_of_zero
from jaxdp.processes.values import fetch as fetch
from jaxdp.processes.values import process_zero as process_zero
