"""mindlora-run from a checkout: takes the flags of MindFormers' run_mindformer.py, even without mindlora installed."""

import importlib.util
import pathlib
import sys

if importlib.util.find_spec("mindlora") is None:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mindlora.training.launch.launcher import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
