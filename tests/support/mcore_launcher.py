"""mindlora-run for MindFormers' mcore models on a CPU, with stand-ins for the operators that it lacks."""

import sys

from mindlora.run.checks import mcore
from mindlora.training.launch import launcher
from tests.support import mcore_cpu


def main() -> int:
    """Runs the command line that mindlora-run would."""
    mcore_cpu.install()
    mcore.check_device = lambda target: []
    return launcher.main()


if __name__ == "__main__":
    sys.exit(main())
