"""Data-parallel designs as small, explicit JAX programs."""

from jaxdp.collectives import all_gather as all_gather
from jaxdp.collectives import all_reduce as all_reduce
from jaxdp.collectives import broadcast as broadcast
from jaxdp.collectives import gather as gather
from jaxdp.collectives import reduce as reduce
from jaxdp.collectives import reduce_scatter as reduce_scatter
from jaxdp.collectives import scatter as scatter
from jaxdp.mesh import data_mesh as data_mesh
