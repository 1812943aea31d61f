"""Runs the command ``mindlora`` as ``python -m mindlora.cli``."""

import sys

from mindlora.cli import main

sys.exit(main())
