"""MindFormers and the plug-in in graph mode on a CPU, for every test of the configurations."""

import pytest


@pytest.fixture(autouse=True)
def _cpu(mindformers, graph_mode):
    import mindspore as ms

    import mindlora.training.launch.hooks  # noqa: F401

    ms.set_context(device_target="CPU")
