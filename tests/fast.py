"""How XLA makes machine code for CPUs fast, and code that is slower.

Tests run small programs a few times: most of the time would go into compiling them.
What XLA optimizes before that, and so what a program's text says, stays as it is.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator

FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax").startswith("0.10."):  # later ones refuse it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
# For processes that run nothing else.
LIGHT_FLAGS = f"{FLAGS} --xla_backend_optimization_level=0"


@contextlib.contextmanager
def light_code() -> Iterator[None]:
    """LLVM does little with the programs that are compiled meanwhile.

    Instructions, their memory and their results stay the same.
    """
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
