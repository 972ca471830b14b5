"""Eight CPU devices for every test and doctest.

`JAX_PLATFORMS` in the environment chooses another platform.
"""

import os

import hypothesis
import jax
import pytest

import jaxdp
from experiments.harness import fast

fast.compile_quickly()  # here and in processes that tests start
# JAX refuses these once it has started; importing jaxdp must not start it.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # beside those of FLAGS
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
os.environ.setdefault("MPLBACKEND", "Agg")

# The same examples in every run; what is slow about them is their compilation.
hypothesis.settings.register_profile(
    "jaxdp",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jaxdp")

# They start first, so that at the end no process waits long for another.
COUNTING = {"replicated_watch_test"}  # counts all arrays that the process holds
LONGEST = {
    *("collectives_test", "ddp_torch_test", "designs_test", "experiments_gpu_test"),
    *("experiments_compression_test", "experiments_memory_test"),
    *("experiments_overlap_test", "experiments_staleness_test", "experiments_test"),
    *("launch_test", "processes_cases_test", "processes_designs_test"),
    *("processes_torch_test", "program_exact_test", "readme_test"),
    *("replicated_torch_test", "server_torch_test", "torch_parity_test"),
    *("zero_partition_test", "zero_torch_test"),
}


def pytest_configure(config):
    """Keeps pytest-xdist from starting with the modules that have most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Puts the longest modules first; each keeps the order of its tests."""

    def place(item):
        name = item.path.stem
        return name not in COUNTING, name not in LONGEST

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """The next module cannot use them, and the garbage collector looks at them all.

    Nor what a module has cached: thousands of arrays, which slow down whoever counts.
    """
    yield
    for kept in vars(request.module).values():
        own = getattr(kept, "__module__", "") == request.module.__name__
        if own and hasattr(kept, "cache_clear"):
            kept.cache_clear()
    jax.clear_caches()


@pytest.fixture(params=[1, 2, 3, 8], ids="n{}".format)
def mesh(request) -> jax.sharding.Mesh:
    """Meshes of 1 (degenerate), 2, 3 (no power of two) and 8 devices."""
    return jaxdp.data_mesh(request.param)
