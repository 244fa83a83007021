"""Speed, memory and accuracy over the commits of this repository, for asv.

What a benchmark looks like, and how to add one: docs/benchmarks.md.
"""

import os

# One thread: how long two take depends on what else the machine is doing. Libraries read these
# when they are first imported, which is later than this.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
