"""How XLA makes machine code for CPUs fast, and code that is slower.

Tests run small programs a few times: most of the time would go into compiling them.
What XLA optimizes before that, and so what a program's text says, stays as it is; so
does all that it makes for accelerators, but for the machine code.
"""

import importlib.metadata

FLAGS = "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
if importlib.metadata.version("jax").startswith("0.10."):  # later ones refuse it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
