"""Data-parallel designs: how the gradients of replicas become one update."""

from jaxdp.designs.all_reduce import AllReduce as AllReduce
from jaxdp.designs.all_reduce import NativeAllReduce as NativeAllReduce
from jaxdp.designs.all_reduce import RingAllReduce as RingAllReduce
from jaxdp.designs.base import Design as Design
from jaxdp.designs.gather_to_root import GatherToRoot as GatherToRoot
from jaxdp.designs.local_sgd import LocalSGD as LocalSGD
from jaxdp.designs.parameter_server import ParameterServer as ParameterServer
from jaxdp.designs.zero import Zero as Zero
