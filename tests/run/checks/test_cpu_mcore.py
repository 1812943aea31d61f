"""What the YAML of an mcore model must set to run on a CPU."""

import pytest

from mindlora.run.checks.cpu import check_cpu
from mindlora.run.yaml_run import YamlRun

MODEL = {
    **dict.fromkeys(("params_dtype", "compute_dtype", "layernorm_compute_dtype"), "float32"),
    "architectures": "Qwen3ForCausalLM",
    "pet_config": {"pet_type": "lora"},
}


def changes(run=None, **model):
    """The keys that a YAML is told to set, and what is said of each."""
    config = {
        "use_legacy": False,
        "run_mode": "finetune",
        "context": {"device_target": "CPU"},
        "runner_wrapper": {"type": "LoraTrainOneStepCell"},
        "model": {"model_config": {**MODEL, **model}},
        **(run or {}),
    }
    findings = list(check_cpu(YamlRun(config)))
    return findings[0].advice.removeprefix("Set: ") if findings else ""


def test_float32_throughout_runs():
    assert not changes() and not changes(compute_dtype="fp32", attention_dropout=0.0, window_size=None)
    assert not changes({"context": {"device_target": "Ascend"}}, compute_dtype="bfloat16")


@pytest.mark.parametrize(
    "key, found, said",
    [
        ("compute_dtype", None, "compute_dtype: float32 (found bfloat16)"),
        ("layernorm_compute_dtype", "float16", "layernorm_compute_dtype: float32 (found float16)"),
        ("attention_dropout", 0.1, "attention_dropout: 0.0 (dropout of attention weights has no CPU kernel)"),
        ("window_size", [4, 0], "window_size: null (a sliding window has no CPU kernel)"),
        ("moe_permute_fusion", True, "moe_permute_fusion: False (the fused permutation has no CPU kernel)"),
    ],
)
def test_what_a_cpu_cannot_do_is_said_with_what_to_set(key, found, said):
    assert changes(**{key: found}) == f"model.model_config.{said}."


def test_a_run_without_adapters_can_be_and_a_sharded_one_is_refused():
    assert not changes(pet_config=None)
    sharded = {"use_parallel": True, "parallel": {"parallel_mode": 1}}
    assert changes(sharded) == "parallel.parallel_mode: 0 (CPU processes divide data alone)."
    assert not changes({**sharded, "parallel": {"parallel_mode": 0}})
    assert changes({"runner_wrapper": {"type": "MFTrainOneStepCell"}}).startswith("runner_wrapper.type: LoraTrain")
