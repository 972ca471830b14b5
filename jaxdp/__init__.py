"""Data-parallel designs as small, explicit JAX programs."""

from jaxdp import replicated as replicated
from jaxdp.collectives import all_gather as all_gather
from jaxdp.collectives import all_reduce as all_reduce
from jaxdp.collectives import broadcast as broadcast
from jaxdp.collectives import gather as gather
from jaxdp.collectives import reduce as reduce
from jaxdp.collectives import reduce_scatter as reduce_scatter
from jaxdp.collectives import scatter as scatter
from jaxdp.data import shard_batch as shard_batch
from jaxdp.designs import Design as Design
from jaxdp.designs import GatherToRoot as GatherToRoot
from jaxdp.designs import NativeAllReduce as NativeAllReduce
from jaxdp.designs import ParameterServer as ParameterServer
from jaxdp.designs import RingAllReduce as RingAllReduce
from jaxdp.loss import Aux as Aux
from jaxdp.loss import Mean as Mean
from jaxdp.loss import masked_mean as masked_mean
from jaxdp.mesh import data_mesh as data_mesh
from jaxdp.program import ProgramReport as ProgramReport
from jaxdp.program import analyze as analyze
from jaxdp.replicated import DataParallel as DataParallel
from jaxdp.synchronization import synchronize_gradients as synchronize_gradients
from jaxdp.training import TrainState as TrainState
from jaxdp.training import data_parallel as data_parallel
