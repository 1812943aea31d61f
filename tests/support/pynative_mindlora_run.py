"""mindlora-run on a CPU, with the stand-ins of pynative_cpu and the callbacks of pynative_launcher.

With --terminal, it takes its output for one.
"""

import sys

from tests.support import pynative_cpu


def main() -> int:
    """Runs the command line that mindlora-run would."""
    pynative_cpu.install()
    from mindlora.training.launch import launcher
    from tests.support.pynative_launcher import register_callbacks

    register_callbacks()
    words = sys.argv[1:]
    if "--terminal" in words:
        words.remove("--terminal")
        sys.stdout.isatty = sys.stderr.isatty = lambda: True
    return launcher.main(words)


if __name__ == "__main__":
    sys.exit(main())
