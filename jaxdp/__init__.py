"""Data-parallel designs as small, explicit JAX programs."""

from typing import TYPE_CHECKING, Any

from jaxdp import aggregation as aggregation
from jaxdp import asynchronous as asynchronous
from jaxdp import checkpoint as checkpoint
from jaxdp import compression as compression
from jaxdp import processes as processes
from jaxdp import replicated as replicated
from jaxdp import streams as streams
from jaxdp import targets as targets
from jaxdp.choice import Choice as Choice
from jaxdp.choice import choose_algorithm as choose_algorithm
from jaxdp.collectives import all_gather as all_gather
from jaxdp.collectives import all_reduce as all_reduce
from jaxdp.collectives import broadcast as broadcast
from jaxdp.collectives import gather as gather
from jaxdp.collectives import reduce as reduce
from jaxdp.collectives import reduce_scatter as reduce_scatter
from jaxdp.collectives import scatter as scatter
from jaxdp.compression import Compression as Compression
from jaxdp.data import PaddedBatch as PaddedBatch
from jaxdp.data import shard_batch as shard_batch
from jaxdp.designs import AllReduce as AllReduce
from jaxdp.designs import Design as Design
from jaxdp.designs import GatherToRoot as GatherToRoot
from jaxdp.designs import LocalSGD as LocalSGD
from jaxdp.designs import NativeAllReduce as NativeAllReduce
from jaxdp.designs import ParameterServer as ParameterServer
from jaxdp.designs import RingAllReduce as RingAllReduce
from jaxdp.designs import Zero as Zero
from jaxdp.epochs import epoch_batches as epoch_batches
from jaxdp.loss import Aux as Aux
from jaxdp.loss import Mean as Mean
from jaxdp.loss import masked_mean as masked_mean
from jaxdp.mesh import data_mesh as data_mesh
from jaxdp.normalization import batch_moments as batch_moments
from jaxdp.precision import Precision as Precision
from jaxdp.prediction import predict as predict
from jaxdp.processes import fetch as fetch
from jaxdp.processes import initialize as initialize
from jaxdp.processes import process_zero as process_zero
from jaxdp.processes import together as together
from jaxdp.program import ProgramReport as ProgramReport
from jaxdp.program import analyze as analyze
from jaxdp.replicated import DataParallel as DataParallel
from jaxdp.sampling import Sampler as Sampler
from jaxdp.staleness import compensate_delay as compensate_delay
from jaxdp.staleness import scale_by_staleness as scale_by_staleness
from jaxdp.synchronization import synchronize_gradients as synchronize_gradients
from jaxdp.targets import compile_for as compile_for
from jaxdp.training import TrainState as TrainState
from jaxdp.training import data_parallel as data_parallel
from jaxdp.zero.layers import scan_layers as scan_layers

if TYPE_CHECKING:
    from jaxdp.batch_norm import BatchNorm as BatchNorm


def __getattr__(name: str) -> Any:
    """`BatchNorm`, which alone needs Flax NNX, when it is first asked for."""
    if name != "BatchNorm":
        raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")
    from jaxdp.batch_norm import BatchNorm

    globals()[name] = BatchNorm
    return BatchNorm


def __dir__() -> list[str]:
    """All names, also the one that is not there yet."""
    return sorted({*globals(), "BatchNorm"})
