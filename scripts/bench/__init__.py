"""The benchmarks of scripts/bench.py, one module each, and their common parts.

Importing this package sets variables that MindSpore reads at import: import it before MindSpore.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
# mindlora-run sets this too: threads that spin between kernels disturb the next side.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")
# Each measurement compiles its graphs, unless it is about kept ones.
os.environ.setdefault("MINDLORA_GRAPH_CACHE", "")
