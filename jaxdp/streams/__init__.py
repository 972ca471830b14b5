"""Communication beside computation, on a second device of each process."""

from jaxdp.streams.meshes import Streams as Streams
from jaxdp.streams.meshes import two_streams as two_streams
from jaxdp.streams.training import StreamParallel as StreamParallel
from jaxdp.streams.training import data_parallel as data_parallel
