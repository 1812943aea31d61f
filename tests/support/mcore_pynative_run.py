"""mindlora-run whose steps are computed in PyNative, of mcore models too: for runs that others are compared with.

All cells, and the optimizer, are those that graph mode gets. No step is compiled.
"""

from unittest import mock

import mindspore as ms

from mindlora.training.launch import launcher
from tests.support.mcore_pynative import pynative_operators

# For ``script`` of tiny_runs.launch.
SCRIPT = "import sys; from tests.support.mcore_pynative_run import main; sys.exit(main())"

_train = ms.Model.train


def _train_in_pynative(self, *arguments, **keys):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    _train(self, *arguments, **keys)


def main(argv=None):
    """Does what mindlora-run does with its arguments, and returns its exit code."""
    with pynative_operators(), mock.patch.object(ms.Model, "train", _train_in_pynative):
        return launcher.main(argv)
