"""What a host takes while the base is loaded: by tensor, or beside the whole checkpoint."""

import numpy as np
import pytest

from mindlora.files.base.convert import convert_base
from mindlora.run.plan.memory import loading_of, memory_of, needed_while_loading
from tests.support.llama_checkpoints import CONFIG, llama, save_base
from tests.support.planned_runs import LORA, run_of

# Elements of the base of planned_runs.TINY, and of the largest of its tensors, the embedding and the head.
BASE, LARGEST = 19616, 64 * 32
SAFETENSORS = {"load_ckpt_format": "safetensors"}


def test_by_tensor_one_tensor_as_stored_is_held_beside_the_network():
    assert loading_of(run_of(**SAFETENSORS)).size == 4 * BASE + 2 * LARGEST


def test_parameters_that_are_not_float32_are_float32_on_their_way():
    run = run_of({"param_init_type": "bfloat16", "embedding_init_type": "bfloat16"}, **SAFETENSORS)
    norms = sum(weight.elements for weight in run.weights if weight.dtype == "float32" and not weight.adapter)
    assert loading_of(run).size == 2 * BASE + 2 * norms + (2 + 4) * LARGEST


def test_of_a_base_in_4_bits_a_tensor_is_held_as_it_is():
    run = run_of({}, {**LORA, "quantize_base": "nf4"}, **SAFETENSORS)
    base = [weight for weight in run.weights if not weight.adapter]
    assert loading_of(run).size == sum(weight.size for weight in base) + 2 * LARGEST


@pytest.mark.parametrize("nodes", [{}, {**SAFETENSORS, "use_parallel": True}, {**SAFETENSORS, "run_mode": "eval"}])
def test_what_mindformers_loads_is_held_beside_the_network_as_a_whole(nodes):
    line = loading_of(run_of(**nodes))
    assert (line.name, line.size) == ("as MindFormers loads the base", 4 * BASE + 2 * BASE)


def test_a_file_that_is_there_counts_with_its_own_size(tmp_path):
    save_base(tmp_path / "hf", llama(np.dtype("<f4")), **CONFIG)
    path = tmp_path / "base.ckpt"
    convert_base(str(tmp_path / "hf"), str(path), "hf", "mindformers")
    assert loading_of(run_of(load_checkpoint=str(path))).size == 4 * BASE + path.stat().st_size
    files = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    folder = loading_of(run_of(load_checkpoint=str(tmp_path / "hf"), use_parallel=True))
    assert folder.size == 4 * BASE + files
    assert "by tensor" in loading_of(run_of(load_checkpoint=str(tmp_path / "hf"))).name


def test_on_a_cpu_a_run_needs_what_loading_takes_where_that_is_more_than_a_step():
    model = {"seq_length": 1, "vocab_size": 4096}
    on_cpu, on_npu = (run_of(model, context={"device_target": target}) for target in ("CPU", "Ascend"))
    assert needed_while_loading(on_cpu) == loading_of(on_cpu).size > memory_of(on_cpu).total
    assert needed_while_loading(on_npu) == memory_of(on_npu).total
