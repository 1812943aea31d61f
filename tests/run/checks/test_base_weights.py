"""A load_checkpoint that is not the base of the YAML's model, of which MindFormers leaves weights random or out."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindlora.core.formats import ckpt_file
from mindlora.models.architectures.llama import parameter_sizes
from mindlora.run.checks.base_weights import check_base_weights
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import launcher
from tests.support.runs import LORA_YAML, SIZE_FLAGS, SIZES

MODEL = "--model.model_config."


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the weights of the tiny model, with two layers, in both formats."""
    folder = tmp_path_factory.mktemp("base")
    sizes = parameter_sizes({**SIZES, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2})
    weights = {name: np.zeros(size.shape, np.float32) for name, size in sizes.items()}
    weights["adam_m.model.layers.7.attention.wq.weight"] = np.zeros((2, 2), np.float32)
    ckpt_file.write(str(folder / "base.ckpt"), weights, "")
    save_file(weights, folder / "base.safetensors")
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros((2, 2), np.float32)}, folder / "hf.safetensors")
    return folder


def mistakes(path, *words):
    two_layers = (*SIZE_FLAGS, f"{MODEL}num_layers", "2")
    config = launcher.build_config(["--config", LORA_YAML, *two_layers, "--load_checkpoint", path, *words])
    return [str(finding) for finding in check_base_weights(YamlRun(config))]


@pytest.mark.parametrize("name", ["base.ckpt", "base.safetensors"])
def test_layers_and_shapes_that_differ_are_named(base, name):
    path = str(base / name)
    assert mistakes(path) == []
    (more,) = mistakes(path, f"{MODEL}num_layers", "3")
    assert "lacks model.layers.2.attention_norm.weight" in more and "which would stay random" in more
    (fewer,) = mistakes(path, f"{MODEL}num_layers", "1")
    assert "has model.layers.1.attention" in fewer and "Correct num_layers" in fewer
    (other,) = mistakes(path, f"{MODEL}intermediate_size", "40")
    assert "feed_forward.w1.weight of shape (48, 32), but the model of the YAML has it of (40, 32)" in other
    assert "(shapes of 6 weights differ)" in other


@pytest.mark.parametrize("name", ["model.norm_out.weight", "model.tok_embeddings.embedding_weight"])
def test_any_weight_that_is_missing_is_named(base, name, tmp_path):
    weights, _ = ckpt_file.read(str(base / "base.ckpt"), lambda key: key != name)
    ckpt_file.write(str(tmp_path / "base.ckpt"), weights, "")
    (lacking,) = mistakes(str(tmp_path / "base.ckpt"))
    assert f"lacks {name}, which would stay random" in lacking


def test_a_base_with_names_of_hugging_face_is_to_be_converted(base):
    (base / "folder").mkdir()
    (base / "hf.safetensors").rename(base / "folder" / "model.safetensors")
    for path in (base / "folder", base / "folder" / "model.safetensors"):
        (found,) = mistakes(str(path))
        assert "has Hugging Face's names. Name its folder, with load_ckpt_format: safetensors, or convert it" in found
    # MindFormers converts a folder itself.
    as_safetensors = ("--load_ckpt_format", "safetensors")
    assert mistakes(str(base / "folder"), *as_safetensors) == []
    assert len(mistakes(str(base / "folder" / "model.safetensors"), *as_safetensors)) == 1


def test_a_folder_may_hold_both_forms(base, tmp_path):
    """MindFormers reads the one that load_ckpt_format names."""
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros((2, 2), np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "base.ckpt").write_bytes((base / "base.ckpt").read_bytes())
    assert mistakes(str(tmp_path), "--load_ckpt_format", "ckpt") == []


def test_what_cannot_be_compared_is_left_alone(base):
    path = str(base / "base.ckpt")
    assert mistakes(path, f"{MODEL}num_layers", "3", "--use_parallel", "True") == []
    assert mistakes(path, f"{MODEL}num_layers", "3", f"{MODEL}pet_config.quantize_base", "nf4") == []
    assert mistakes(str(base), f"{MODEL}num_layers", "3") == mistakes("nowhere.ckpt") == []


def test_a_bare_model_is_to_be_converted_where_mindformers_loads_it(base, tmp_path):
    """AutoModel's layers.0... MindFormers would leave random; where the base is loaded by tensor, it is read."""
    names = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
    weights = {f"layers.0.{name}": np.zeros((2, 2), np.float32) for name in names}
    (tmp_path / "bare").mkdir()
    save_file(weights, tmp_path / "bare" / "model.safetensors")
    path, flags = str(tmp_path / "bare"), ("--load_ckpt_format", "safetensors")
    assert mistakes(path, *flags) == []
    for words in (("--use_parallel", "True", "--parallel.parallel_mode", "1"), ("--run_mode", "eval")):
        (found,) = mistakes(path, *flags, *words)
        assert "has a bare model's names (layers.0." in found and "with 'model.' before them" in found
        assert found.endswith(f"Convert it: mindlora base convert {path} base.safetensors --to mindformers")
