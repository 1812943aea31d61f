"""mindlora doctor --ascend where nothing is compiled: it says why a run is not tried. tests/ascend_backend compiles."""

import pytest

from mindlora.cli import main
from mindlora.core.yaml_file import PET


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{PET}.lora_rank": 0}, "correct the error first"),
        ({f"{PET}.lora_rank": 0, "runner_config.batch_size": 0}, "correct the errors first"),
    ],
)
def test_a_yaml_with_errors_is_not_compiled(changes, message, write, capsys):
    assert main(["doctor", write(changes), "--ascend"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"The run is not tried on MindSpore's own Ascend backend, on a stand-in for CANN: {message}." in text


@pytest.mark.parametrize(
    "changes, words, message",
    [
        ({"context.mode": 1}, (), "The run is in PyNative mode"),
        ({"run_mode": "predict", "load_checkpoint": ""}, (), "run_mode is 'predict', and only training is tried"),
        ({}, ("--devices", "0"), "--devices is 0, and the YAML divides the model among 1"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_with_the_reason(changes, words, message, write, capsys):
    assert main(["doctor", write(changes), "--ascend", *words]) == 1
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_number_of_devices_needs_ascend(write, capsys):
    assert main(["doctor", write(), "--devices", "8"]) == 1
    assert capsys.readouterr().err.startswith("mindlora: error: --devices says for how many devices")
