"""pynative_series in one process that mindlora takes for one of two that divide a model: a CPU has nothing for that.

MindFormers sees the one process, whose gradients are those of all.
"""

from tests.support import pynative_cpu, pynative_series


def main():
    """Makes mindlora's callbacks and its update count two processes."""
    pynative_cpu.install()
    from mindlora.training.pynative import callbacks, configuration

    callbacks.division_of_model = configuration.division_of_model = lambda: 2
    pynative_series.main()


if __name__ == "__main__":
    main()
