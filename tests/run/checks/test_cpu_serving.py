"""What MindFormers' paged attention on Ascend cannot take is said before anything is loaded, and by the doctor."""

import pytest

from mindlora.cli.doctor.examination import check_yaml
from mindlora.run.checks.cpu import check_serving
from mindlora.run.yaml_run import YamlRun

MODEL = "model.model_config"
SERVED = {"type": "LlamaConfig", "hidden_size": 4096, "num_heads": 32, "compute_dtype": "bfloat16"}


def found(device, **changes):
    """The findings on a Llama for a device, as a message has them."""
    config = {"context": {"device_target": device}, "model": {"model_config": {**SERVED, **changes}}}
    return [str(finding) for finding in check_serving(YamlRun(config))]


def test_sixteen_bits_and_heads_in_sixteens_are_served_on_ascend():
    assert not found("Ascend") and not found("Ascend", hidden_size=2560)
    # What MindFormers takes where the YAML says nothing.
    assert not found("Ascend", compute_dtype=None, hidden_size=None, num_heads=None)


@pytest.mark.parametrize("name", ["float32", "fp32"])
def test_float32_is_refused_on_ascend(name):
    assert found("Ascend", compute_dtype=name) == [
        "compute_dtype is float32, and on Ascend MindFormers' paged attention computes in 16 bits alone. Set "
        "--model.model_config.compute_dtype bfloat16, or serve it on a CPU (--device_target CPU)."
    ]


def test_heads_of_other_sizes_are_refused_on_ascend():
    assert found("Ascend", hidden_size=64, num_heads=8) == [
        "hidden_size 64 and num_heads 8 make heads of 8 numbers, but on Ascend MindFormers' attention takes multiples "
        "of 16. Serve it on a CPU (--device_target CPU)."
    ]


def test_a_cpu_has_other_rules():
    changes = {"hidden_size": 64, "num_heads": 8, "compute_dtype": "float32", "fused_rms_norm": False}
    assert not found("CPU", **changes, param_init_type="float32")
    assert "compute_dtype: float32 (found bfloat16)" in found("CPU")[0]


def test_the_doctor_notes_what_a_training_run_on_ascend_could_not_serve(write):
    def notes(**changes):
        path = write({f"{MODEL}.{key}": value for key, value in changes.items()})
        findings = [finding for finding in check_yaml(path) if "cannot serve" in finding.found]
        assert all(finding.severity == "note" for finding in findings)
        return [finding.key for finding in findings]

    assert not notes(compute_dtype="bfloat16")
    assert notes(compute_dtype="float32") == [f"{MODEL}.compute_dtype"]
