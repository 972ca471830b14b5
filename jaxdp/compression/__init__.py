"""Gradients that travel compressed: what PyTorch calls communication hooks.

A `Compression` makes the mean of one bucket's gradients over the replicas; `exchange`
adds error feedback around it. Every one of them keeps three promises. Replicas end with
the same bits. Sums are made in float32 or wider. What becomes of a parameter does not
depend on which others share its bucket, but for the order in which a ring adds.

`N` devices, `n` elements of a leaf in float32; bytes sent per device and step, and
their share of a ring's at N = 8, for a matrix of 512 x 512:

    compression    bytes                                        error feedback    share
    none, a ring   8 n (N - 1) / N                                                    1
    Bf16, Fp16     4 n (N - 1) / N                              on request          1/2
    Int8(B)        (2 n + 4 n / B) (N - 1) / N                  yes              1/3.97
    TopK(ratio)    8 n ratio (N - 1)                            yes            8 ratio
    PowerSGD(r)    8 r (rows + columns) (N - 1) / N             yes              r/256
"""

from jaxdp.compression.base import Compression as Compression
from jaxdp.compression.base import Exact as Exact
from jaxdp.compression.base import Travelled as Travelled
from jaxdp.compression.base import Wire as Wire
from jaxdp.compression.exchange import exchange as exchange
from jaxdp.compression.int8 import Int8 as Int8
from jaxdp.compression.powersgd import PowerSGD as PowerSGD
from jaxdp.compression.quantized import Bf16 as Bf16
from jaxdp.compression.quantized import Fp16 as Fp16
from jaxdp.compression.quantized import Quantized as Quantized
from jaxdp.compression.sparse import TopK as TopK
from jaxdp.compression.wire import BucketWire as BucketWire
