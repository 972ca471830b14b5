"""Hosts with links of limited rate, on one Linux machine: no simulation, real packets.

Each host is a network namespace with one interface, `eth0`. A bridge, in a namespace of
its own, joins them, so nothing of it touches the network of the machine. Both
directions of every link are limited by a token bucket (`tc ... tbf`).
"""

from experiments.network.hosts import Hosts as Hosts
from experiments.network.hosts import missing as missing
from experiments.network.rates import bytes_per_s as bytes_per_s
