"""Which runs can load a base in a quantized form: those whose base mindlora loads, and NF4 of others on a CPU alone."""

import numpy as np
import pytest

from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.run.checks.base_weights import check_base_weights
from mindlora.run.checks.files import check_quantized_base
from mindlora.run.yaml_run import YamlRun
from tests.support.held_bases import save_bases
from tests.support.quantized_checkpoints import quantized_llama, save_quantized

MODEL = {"type": "LlamaConfig", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "n_kv_heads": 2, "vocab_size": 64}


def run(path, device="CPU", pet_config=None, **keys):
    return YamlRun(
        {
            "run_mode": "finetune",
            "load_checkpoint": str(path),
            "load_ckpt_format": "safetensors",
            "context": {"device_target": device},
            "model": {
                "arch": {"type": "LlamaForCausalLM"},
                "model_config": {**MODEL, **({"pet_config": pet_config} if pet_config else {})},
            },
            **keys,
        }
    )


@pytest.fixture
def folder(tmp_path):
    return save_quantized(tmp_path / "base", "fp8-blocks", quantized_llama("fp8-blocks")[0])


def test_a_run_whose_base_mindlora_loads_takes_a_quantized_folder(folder):
    lora = {"pet_type": "lora", "target_modules": "all-linear"}
    assert not list(check_base_weights(run(folder, pet_config=lora)))


@pytest.mark.parametrize("keys", [{}, {"run_mode": "eval"}])
def test_where_mindformers_loads_the_base_it_is_to_be_converted(folder, keys):
    (found,) = check_base_weights(run(folder, **keys))
    assert found.severity == "error" and "holds quantized weights (FP8 in blocks of 16 x 24)" in str(found)
    assert f"Convert it once: mindlora base convert {folder} base --to hf" in str(found)


AS_STORED = {"pet_type": "lora", "target_modules": "all-linear", "quantize_base": "as_stored"}


def test_a_base_as_it_is_stored_is_for_a_cpu_and_for_a_base_that_mindlora_loads(tmp_path):
    held, decoded, _ = save_bases(tmp_path, "llama", "gptq")
    assert not list(check_quantized_base(run(held, pet_config=AS_STORED)))
    for keys, message in (
        ({"device": "Ascend"}, "operators of a CPU alone multiply by integers"),
        ({"resume_training": True}, "in this run MindFormers loads the base, in float"),
    ):
        (found,) = check_quantized_base(run(held, pet_config=AS_STORED, **keys))
        assert message in str(found) and "set quantize_base: nf4" in str(found)
    (found,) = check_quantized_base(run(decoded, pet_config=AS_STORED))
    assert "holds no weights in a quantized form" in str(found)


def test_a_form_that_cannot_be_held_is_refused_before_the_run(folder):
    (found,) = check_quantized_base(run(folder, pet_config=AS_STORED))
    assert "it is in FP8 in blocks of 16 x 24, but only integers of 4 or 8 bits can be held" in str(found)


def test_nf4_of_another_library_is_for_a_cpu(tmp_path):
    path = tmp_path / "base.safetensors"
    cell = "model.layers.0.attention.wq"
    groups = np.ones(64, "f4")
    arrays = {f"{cell}.weight": np.zeros((64, 32), "u1"), f"{cell}.weight_absmax": np.zeros((64, 1), "u1")}
    write_arrays(str(path), {**arrays, f"{cell}.weight_scales": groups, f"{cell}.weight_offsets": groups})
    nf4 = {"pet_type": "lora", "quantize_base": "nf4", "target_modules": "all-linear"}
    assert not list(check_quantized_base(run(path, "CPU", nf4)))
    (found,) = check_quantized_base(run(path, "Ascend", nf4))
    assert "keeps the NF4 of another library (model.layers.0.attention.wq.weight), which operators of a CPU" in str(
        found
    )
