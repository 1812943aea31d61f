"""The order of callbacks: every one of mindlora's has its place, and a YAML's own order does not matter."""

from mindformers.tools.register import MindFormerConfig

from mindlora.training.callbacks import registry as callbacks
from mindlora.training.callbacks.registry import ADDED, ORDER, arrange_callbacks


def test_every_callback_has_its_place():
    assert set(ORDER) == set(callbacks.__all__) and len(ORDER) == len(set(ORDER))


def test_what_measures_comes_before_what_decides_and_saves():
    given = ["RunReport", "LoraCheckpoint", "CheckpointMonitor", "EarlyStopping", "MFLossMonitor", "HeldOutLoss"]
    config = MindFormerConfig(callbacks=[{"type": name, "every": number} for number, name in enumerate(given)])
    arrange_callbacks(config)
    found = [callback["type"] for callback in config.callbacks]
    # Those of MindFormers stay first, in their own order; what every run gets is added once.
    assert found == [
        "CheckpointMonitor",
        "MFLossMonitor",
        "EmptySteps",
        "HeldOutLoss",
        "EarlyStopping",
        "GracefulStop",
        "LoraCheckpoint",
        "RunReport",
    ]
    assert set(ADDED) <= set(found)
    assert next(callback["every"] for callback in config.callbacks if callback["type"] == "RunReport") == 0


def test_a_run_without_callbacks_gets_those_of_every_run():
    config = MindFormerConfig(callbacks=None)
    arrange_callbacks(config)
    assert [callback["type"] for callback in config.callbacks] == list(ADDED)
