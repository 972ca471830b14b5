"""Training states cut into shards: what `jaxdp.Zero` is made of."""

from jaxdp.zero.shards import Shard as Shard
