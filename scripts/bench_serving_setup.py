"""What must be set for bench_serving.py before MindSpore is imported: import this first."""

import os

import bench_common  # noqa: F401  it sets what every benchmark needs

# Both sides of a comparison get as many, in this process and in another.
THREADS = 2
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
# Without it MindFormers builds networks for training.
os.environ["RUN_MODE"] = "predict"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
