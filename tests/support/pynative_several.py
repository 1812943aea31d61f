"""pynative_series in one process that mindlora takes for one of two: a CPU has nothing that divides a model.

MindFormers sees the one process, whose gradients are those of all.
"""

from tests.support import pynative_cpu, pynative_series


def main():
    """Has mindlora's callbacks and its update count two processes."""
    pynative_cpu.install()
    from mindlora.training.pynative import callbacks, pet

    callbacks.get_world_size = pet.get_world_size = lambda: 2
    pynative_series.main()


if __name__ == "__main__":
    main()
