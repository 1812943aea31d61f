"""lm-eval's command line in PEFT's process, which has imported most of what it needs: the folder, and its words."""

import os
import sys

os.chdir(sys.argv.pop(1))
os.environ.update(HF_DATASETS_OFFLINE="1", HF_DATASETS_CACHE="hub")

from lm_eval.__main__ import cli_evaluate  # noqa: E402

cli_evaluate()
