"""Trains with MindFormers' PyNative Trainer and mindlora as each configuration of a JSON file says.

The arguments are the file, a list of YAML contents, and where to write what refused each, null if nothing did; the
name may have {rank} in it.
A YAML can name the callbacks of pynative_launcher.
"""

import json
import sys

from tests.support import pynative_cpu, pynative_launcher


def main():
    """Tries each configuration, with mindlora registered."""
    pynative_cpu.install()
    pynative_launcher.register_callbacks()
    from mindformers.pynative.trainer import Trainer
    from mindformers.tools.utils import get_real_rank

    from mindlora.core.errors import LoraError
    from mindlora.training.pynative import hooks  # noqa: F401

    messages = []
    with open(sys.argv[1], encoding="utf-8") as file:
        configs = json.load(file)
    for config in configs:
        try:
            Trainer(config).train()
            messages.append(None)
        except LoraError as error:
            messages.append(f"{type(error).__name__}: {error}")
    with open(sys.argv[2].format(rank=get_real_rank()), "w", encoding="utf-8") as file:
        json.dump(messages, file)


if __name__ == "__main__":
    main()
