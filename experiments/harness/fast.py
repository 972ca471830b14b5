"""How XLA makes machine code for CPUs fast, and code that is slower.

Tests and tiny runs execute small programs a few times: most of the time would go into
compiling them. What XLA optimizes before that, and so what a program's text says, stays
as it is; so does all that it makes for accelerators, but for the machine code.
"""

import importlib.metadata
import os

FLAGS = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
if importlib.metadata.version("jax").startswith("0.10."):  # later ones refuse it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """Adds the flags to those of the environment, for processes started later, too.

    XLA reads them once, when it starts. What is set there already counts more.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{FLAGS} {given}"
