"""A base in 16 bits on a CPU: which YAMLs may have one, and what is said of it."""

import pytest

from mindlora.run.checks.cpu import check_cpu, check_held_base, held_dtype
from mindlora.run.yaml_run import YamlRun
from tests.support.cpu_llama import ON_CPU

PET = {"pet_type": "lora", "target_modules": ["wq"]}
LLAMA = {"type": "LlamaConfig", **ON_CPU, "param_init_type": "bfloat16", "pet_config": PET}
QWEN3 = {
    "architectures": "Qwen3ForCausalLM",
    **dict.fromkeys(("compute_dtype", "layernorm_compute_dtype"), "float32"),
    "params_dtype": "float16",
    "pet_config": PET,
}


def run(model, device="CPU", pet=(), arch="LlamaForCausalLM", **nodes):
    model = {**model, "pet_config": {**model["pet_config"], **dict(pet)}} if model.get("pet_config") else model
    config = {
        "use_legacy": "type" in model,
        "run_mode": "finetune",
        "context": {"device_target": device, "mode": 0},
        "runner_wrapper": {"type": "LoraTrainOneStepCell"},
        "model": {"model_config": model, "arch": {"type": arch}},
    }
    return YamlRun({**config, **nodes})


@pytest.mark.parametrize(
    "model, dtype, key", [(LLAMA, "bfloat16", "param_init_type"), (QWEN3, "float16", "params_dtype")]
)
def test_a_frozen_base_stays_in_16_bits_and_a_note_says_so(model, dtype, key):
    held = run(model)
    assert held_dtype(held) == dtype and not list(check_cpu(held))
    (note,) = check_held_base(held)
    assert note.severity == "note" and note.key == f"model.model_config.{key}"
    assert note.found.startswith(f"The base stays in {dtype} on the CPU") and "products in float32" in note.found
    assert ("product_dtype: bfloat16 is faster" in note.advice) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"pet": {"use_dora": True}},
        {"pet": {"modules_to_save": ["norm"]}},
        {"pet": {"freeze_exclude": ["*norm*"]}},
        {"pet": {"adapters": [{"name": "a"}]}},
        {"runner_wrapper": {"type": "LoraTrainOneStepCell", "preference": {"loss": "dpo"}}},
        {"model": {**QWEN3, "architectures": "Qwen3MoeForCausalLM"}},
    ],
    ids=str,
)
def test_what_computes_beside_a_base_in_16_bits_keeps_it(change):
    kept = run(**{"model": LLAMA, **change})
    assert held_dtype(kept) and not list(check_cpu(kept))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"pet": {"compute_dtype": "bfloat16"}}, "pet_config.compute_dtype is bfloat16"),
        ({"run_mode": "predict"}, "run_mode predict computes in float32"),
        ({"context": {"device_target": "CPU", "mode": 1}}, "context.mode is not 0"),
        ({"arch": "ChatGLM2ForConditionalGeneration"}, "of the legacy models of MindFormers, Llama alone holds one"),
    ],
)
def test_what_needs_float32_is_refused_with_the_reason(change, reason):
    refused = run(LLAMA, **change)
    (finding,) = check_cpu(refused)
    assert f"model.model_config.param_init_type: float32 (found bfloat16: {reason}" in finding.advice
    assert held_dtype(refused) is None and not list(check_held_base(refused))


def test_a_base_that_trains_is_refused():
    (finding,) = check_cpu(run({**LLAMA, "pet_config": None}))
    assert "(found bfloat16: weights of 16 bits do not train there, and without a pet_config all do)" in finding.advice


def test_a_llama_that_does_not_say_its_dtype_is_refused_as_before():
    model = {key: value for key, value in LLAMA.items() if key != "param_init_type"}
    (finding,) = check_cpu(run(model))
    assert "param_init_type: float32 (found float16)" in finding.advice


@pytest.mark.parametrize(
    "model, device, words",
    [
        ({**LLAMA, "param_init_type": "float32"}, "CPU", "product_dtype is bfloat16 and the base is in float32."),
        (QWEN3, "CPU", "product_dtype is bfloat16 and the base is in float16."),
        (LLAMA, "Ascend", "product_dtype is bfloat16, which is for a CPU."),
    ],
)
def test_a_product_dtype_without_effect_is_refused(model, device, words):
    (finding,) = check_held_base(run(model, device, pet={"product_dtype": "bfloat16"}))
    assert finding.severity == "error" and finding.found == words


def test_products_in_bfloat16_need_no_advice():
    (note,) = check_held_base(run(LLAMA, pet={"product_dtype": "bfloat16"}))
    assert "products in bfloat16" in note.found and not note.advice
