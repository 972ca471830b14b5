"""`nn.DataParallel` on real devices: its pieces, the model, the step and views into it.

One Python program, one compiled program per device, arrays on the devices they belong
to. The designs of `jaxdp.designs` are one program over all devices instead.
"""

from jaxdp.replicated.adapters import from_linen as from_linen
from jaxdp.replicated.adapters import from_nnx as from_nnx
from jaxdp.replicated.functional import gather as gather
from jaxdp.replicated.functional import parallel_apply as parallel_apply
from jaxdp.replicated.functional import replicate as replicate
from jaxdp.replicated.functional import scatter as scatter
from jaxdp.replicated.model import DataParallel as DataParallel
from jaxdp.replicated.step import State as State
from jaxdp.replicated.step import TrainStep as TrainStep
from jaxdp.replicated.views.anomaly import Anomaly as Anomaly
from jaxdp.replicated.views.anomaly import find_nan as find_nan
from jaxdp.replicated.views.diagnosis import Diagnosis as Diagnosis
from jaxdp.replicated.views.diagnosis import diagnose as diagnose
from jaxdp.replicated.views.findings import Finding as Finding
from jaxdp.replicated.views.layers import Layer as Layer
from jaxdp.replicated.views.layers import layers as layers
from jaxdp.replicated.views.memory import Memory as Memory
from jaxdp.replicated.views.memory import Snapshot as Snapshot
from jaxdp.replicated.views.trace import Record as Record
from jaxdp.replicated.views.trace import Trace as Trace
from jaxdp.replicated.watch import MemoryWatch as MemoryWatch
from jaxdp.replicated.watch import WatchEvent as WatchEvent
