"""Communication beside computation, on a second device of each process.

`two_streams` pairs the devices of each process, `data_parallel` makes a training whose
gradients are exchanged on one device of a pair while the other computes.

Its modules:

    meshes              two meshes, and arrays that cross between them
    segments, plan      the gradient of one replica, cut where a bucket is full
    programs            a segment, and the exchange of a bucket, compiled
    trainer, training   steps that dispatch them
"""

from jaxdp.streams.meshes import Streams as Streams
from jaxdp.streams.meshes import two_streams as two_streams
from jaxdp.streams.training import StreamParallel as StreamParallel
from jaxdp.streams.training import data_parallel as data_parallel
