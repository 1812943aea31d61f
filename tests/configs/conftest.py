"""MindFormers and the plug-in in graph mode on a CPU, for every test of the configurations."""

import pytest


@pytest.fixture(autouse=True)
def _cpu(mindformers, graph_mode):
    import mindspore as ms

    import mindlora.training.launch.hooks  # noqa: F401

    ms.set_context(device_target="CPU")


@pytest.fixture(autouse=True)
def _as_on_an_npu(mindformers, monkeypatch):
    # On a CPU, cells that cannot hold weights of 16 bits are refused, and the YAMLs for NPUs are built here too.
    monkeypatch.setattr("mindlora.training.model.pet.hold_weights", lambda network, product_dtype: None)
