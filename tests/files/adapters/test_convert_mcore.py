"""Adapters to and from what MindFormers' own LoRA on its mcore models reads."""

import json

import numpy as np
import pytest

from mindlora.cli import main
from mindlora.core.errors import AdapterError, MissingTensorsError
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.files import read, write

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, RANK = 4, 2, 3, 10, 7, 2
ATTENTION = {"wq": (12, HIDDEN), "wk": (6, HIDDEN), "wv": (6, HIDDEN), "wo": (HIDDEN, 12)}
FEED_FORWARD = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
CELLS = {
    **{f"model.layers.0.attention.{name}": size for name, size in ATTENTION.items()},
    **{f"model.layers.0.feed_forward.{name}": size for name, size in FEED_FORWARD.items()},
}
SIZES = Heads(HEADS, KV_HEADS, HEAD_DIM)


def adapter_of(cells, rank=RANK, **fields):
    rng, adapter = np.random.default_rng(0), Adapter({}, **fields)
    for path, (rows, columns) in cells.items():
        adapter.tensors[path, "A"] = rng.normal(size=(rank, columns)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(rows, rank)).astype(np.float32)
        adapter.alphas[path] = 6.0
    return adapter


def peft_folder(folder, adapter, base="Qwen/Qwen3-8B"):
    adapter.base_model = base
    write(adapter, str(folder), "peft")
    return str(folder)


def stored(path):
    with TensorFile(path) as file:
        return {key: file.read(key) for key in file.tensors}


def assert_same(found, wanted):
    assert found.tensors.keys() == wanted.tensors.keys()
    for key, array in wanted.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)
    assert found.alphas == pytest.approx(wanted.alphas)


def test_peft_to_mcore_has_mindformers_names_one_rank_and_the_same_update(tmp_path):
    adapter, path = adapter_of(CELLS), str(tmp_path / "mcore.safetensors")
    report = convert_adapter(peft_folder(tmp_path / "peft", adapter), path, "mcore", heads=SIZES)
    assert (report.ranks, report.alphas) == ((3 * RANK,), (18.0,))
    tensors = stored(path)
    names = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
    assert set(tensors) == {f"decoder.layers.0.{name}.lora_{half}.weight" for name in names for half in "AB"}
    assert {len(array) for key, array in tensors.items() if "lora_A" in key} == {3 * RANK}

    def delta(name):
        layer = f"decoder.layers.0.{name}"
        return 3.0 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]

    q, k, v = (adapter.delta(f"model.layers.0.attention.{name}") for name in ("wq", "wk", "wv"))
    # SelfAttention.get_query_key_value_tensors: for each key-value head, its heads of q, then k, then v.
    by_head = [rows for head in range(2) for rows in (q[6 * head :][:6], k[3 * head :][:3], v[3 * head :][:3])]
    np.testing.assert_allclose(delta("self_attention.linear_qkv"), np.concatenate(by_head), rtol=1e-5, atol=1e-6)
    gate, up = (adapter.delta(f"model.layers.0.feed_forward.{name}") for name in ("w1", "w3"))
    # MLPInterleaved.construct: (inner, 2).
    in_turn = np.stack([gate, up], axis=1).reshape(2 * INNER, HIDDEN)
    np.testing.assert_allclose(delta("mlp.linear_fc1"), in_turn, rtol=1e-5, atol=1e-6)
    wo = adapter.delta("model.layers.0.attention.wo")
    np.testing.assert_allclose(delta("self_attention.linear_proj"), wo, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=["float32", "bfloat16"])
def test_back_to_peft_every_bit_is_there_again(tmp_path, dtype):
    adapter = adapter_of(CELLS)
    adapter.tensors = {key: from_float32(array, dtype) for key, array in adapter.tensors.items()}
    first = peft_folder(tmp_path / "first", adapter)
    convert_adapter(first, str(tmp_path / "m.safetensors"), "mcore", heads=SIZES)
    convert_adapter(str(tmp_path / "m.safetensors"), str(tmp_path / "again"), "peft", heads=SIZES)
    assert_same(read(str(tmp_path / "again")), read(first))


def test_cells_without_an_adapter_are_zeros_in_the_joined_one_and_come_back_as_nothing(tmp_path):
    cells = {path: size for path, size in CELLS.items() if path.endswith(("wq", "wv"))}
    first = peft_folder(tmp_path / "first", adapter_of(cells))
    with pytest.raises(AdapterError, match="Name the model's folder or YAML"):
        convert_adapter(first, str(tmp_path / "m.safetensors"), "mcore")
    convert_adapter(first, str(tmp_path / "m.safetensors"), "mcore", heads=SIZES)
    convert_adapter(str(tmp_path / "m.safetensors"), str(tmp_path / "again"), "peft", heads=SIZES)
    assert_same(read(str(tmp_path / "again")), read(first))


def test_the_base_s_config_tells_heads_and_kind(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
    (base / "config.json").write_text(json.dumps(config))
    folder = peft_folder(tmp_path / "peft", adapter_of(CELLS), str(base))
    convert_adapter(folder, str(tmp_path / "m.safetensors"), "mcore")
    with pytest.raises(AdapterError, match="Qwen3 .*config.json says qwen3.* as an mcore model alone.*'mcore'"):
        convert_adapter(folder, str(tmp_path / "m.ckpt"), "ckpt")


@pytest.mark.parametrize("to, name", [("ckpt", "a.ckpt"), ("mindformers", "a.safetensors"), ("slora", "a")])
def test_legacy_names_of_a_model_without_a_legacy_model_are_refused(tmp_path, to, name):
    folder = peft_folder(tmp_path / "peft", adapter_of(CELLS))
    with pytest.raises(AdapterError, match=r"Qwen3 \(its base is called Qwen/Qwen3-8B\)"):
        convert_adapter(folder, str(tmp_path / name), to)
    convert_adapter(folder, str(tmp_path / name), to, architecture="qwen2")


@pytest.mark.parametrize(
    "base, title",
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen3-MoE"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-MoE"),
        ("unsloth/Qwen3-0.6B-unsloth-bnb-4bit", "Qwen3"),
        ("Qwen/Qwen3-VL-8B-Instruct", None),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3"),
        ("THUDM/GLM-4-9B-0414", "GLM4"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("Qwen/Qwen2.5-7B", None),
        ("THUDM/chatglm3-6b", None),
        (None, None),
    ],
)
def test_names_of_bases_tell_the_kind(tmp_path, base, title):
    folder = peft_folder(tmp_path / "peft", adapter_of(CELLS), base)
    if title is None:
        convert_adapter(folder, str(tmp_path / "a.ckpt"), "ckpt")
        return
    with pytest.raises(AdapterError, match=f"MindFormers has {title} "):
        convert_adapter(folder, str(tmp_path / "a.ckpt"), "ckpt")


@pytest.mark.parametrize("cells, title", [(("w_gate_up", "w2"), "GLM4"), (("w_gate_up", "qkv_proj"), None)])
def test_cells_that_one_model_alone_has_tell_the_kind(tmp_path, cells, title):
    # Phi-3 has GLM4's gate_up_proj, and a qkv_proj that GLM4 lacks.
    folder = peft_folder(
        tmp_path / "peft", adapter_of({f"model.layers.0.feed_forward.{c}": (4, 4) for c in cells}), None
    )
    if title is None:
        convert_adapter(folder, str(tmp_path / "a.ckpt"), "ckpt")
        return
    with pytest.raises(AdapterError, match=r"MindFormers has GLM4 \(it has the cells of GLM4\)"):
        convert_adapter(folder, str(tmp_path / "a.ckpt"), "ckpt")


def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path):
    folder = peft_folder(tmp_path / "peft", adapter_of(CELLS))
    with pytest.raises(AdapterError, match="architecture is 'qwen_3', which is not known.*qwen3"):
        convert_adapter(folder, str(tmp_path / "a.ckpt"), "ckpt", architecture="qwen_3")


@pytest.mark.parametrize("half", "AB")
def test_a_file_with_half_of_a_pair_is_refused(tmp_path, half):
    path = str(tmp_path / "a.safetensors")
    key = f"decoder.layers.0.self_attention.linear_proj.lora_{half}.weight"
    write_arrays(path, {key: np.ones((2, 2), np.float32)}, {"format": "np"})
    with pytest.raises(MissingTensorsError, match=f"attention.wo {half} without its other half"):
        read(path)


def test_what_mindformers_cannot_read_is_refused(tmp_path):
    output = str(tmp_path / "m.safetensors")
    dora = adapter_of({"model.layers.0.attention.wo": (4, 4)})
    dora.tensors["model.layers.0.attention.wo", "magnitude"] = np.ones(4, np.float32)
    saved = adapter_of({"model.layers.0.attention.wo": (4, 4)})
    saved.saved_modules["lm_head.weight"] = np.ones((3, 4), np.float32)
    for adapter, message in [
        (dora, "do not read"),
        (saved, "no place for saved modules"),
        (adapter_of({"model.vision.patch": (4, 4)}), "put no LoRA on cells such as model.vision.patch"),
        (adapter_of({"transformer.encoder.layers.0.mlp.dense_h_to_4h": (4, 4)}), "put no LoRA on cells"),
    ]:
        with pytest.raises(AdapterError, match=message):
            convert_adapter(peft_folder(tmp_path / "peft", adapter, None), output, "mcore")


LATENT = {
    "model.layers.0.attention.wq_down": (5, HIDDEN),
    "model.layers.0.attention.wkv_down": (4, HIDDEN),
    "model.layers.0.attention.wq_up": (12, 5),
    "model.layers.0.attention.wkv_up": (12, 3),
    "model.layers.0.attention.wo": (HIDDEN, 12),
    "model.layers.0.mlp.shared_experts.w1": (INNER, HIDDEN),
    "model.layers.0.mlp.shared_experts.w3": (INNER, HIDDEN),
}


def test_deepseek_s_latents_are_joined_one_after_the_other(tmp_path):
    adapter, path = adapter_of(LATENT), str(tmp_path / "m.safetensors")
    first = peft_folder(tmp_path / "first", adapter, None)
    modules = json.loads((tmp_path / "first" / "adapter_config.json").read_text())["target_modules"]
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in modules
    convert_adapter(first, path, "mcore")
    tensors = stored(path)
    cells = ["linear_qkv", "linear_qb", "linear_kvb", "linear_proj"]
    own = {f"self_attention.{cell}" for cell in cells} | {"mlp.shared_experts.linear_fc1"}
    assert {key.partition(".lora_")[0] for key in tensors} == {f"decoder.layers.0.{cell}" for cell in own}
    down = "decoder.layers.0.self_attention.linear_qkv"
    delta = 3.0 * tensors[down + ".lora_B.weight"] @ tensors[down + ".lora_A.weight"]
    parts = [adapter.delta(f"model.layers.0.attention.{name}") for name in ("wq_down", "wkv_down")]
    np.testing.assert_allclose(delta, np.concatenate(parts), rtol=1e-5, atol=1e-6)
    with pytest.raises(AdapterError, match="q_lora_rank"):
        convert_adapter(path, str(tmp_path / "again"), "peft")
    convert_adapter(path, str(tmp_path / "again"), "peft", heads=Heads(q_rank=5))
    assert_same(read(str(tmp_path / "again")), read(first))


@pytest.mark.parametrize("heads", [Heads(), Heads(q_rank=5)])
def test_a_checkpoint_of_a_network_s_own_paths_goes_to_peft(tmp_path, heads):
    # As save_lora and MindSpore's own checkpoints name them in an mcore network.
    cells = {"linear_qkv": (9, HIDDEN), "linear_kvb": (12, 3), "linear_proj": (HIDDEN, 12)}
    start = "decoder.layers.0.self_attention."
    adapter = adapter_of({start + cell: size for cell, size in cells.items()})
    write(adapter, str(tmp_path / "a.ckpt"), "ckpt")
    if heads.q_rank is None:
        with pytest.raises(AdapterError, match="model.layers.0.attention.wkv_down in 9 rows.*q_lora_rank"):
            convert_adapter(str(tmp_path / "a.ckpt"), str(tmp_path / "peft"), "peft", heads=heads)
        return
    convert_adapter(str(tmp_path / "a.ckpt"), str(tmp_path / "peft"), "peft", heads=heads)
    found = read(str(tmp_path / "peft"))
    rows = [found.delta(f"model.layers.0.attention.{cell}") for cell in ("wq_down", "wkv_down")]
    np.testing.assert_allclose(np.concatenate(rows), adapter.delta(start + "linear_qkv"), rtol=1e-5, atol=1e-6)


def test_the_command_takes_sizes_and_kind_from_the_base(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    first, base = peft_folder(tmp_path / "peft", adapter_of(CELLS), None), ["--base", str(tmp_path / "base")]
    middle, again = str(tmp_path / "m.safetensors"), str(tmp_path / "again")
    assert main(["adapter", "convert", first, middle, "--to", "mcore", *base]) == 0
    assert main(["adapter", "convert", middle, again, "--to", "peft", *base]) == 0
    assert_same(read(again), read(first))
    assert main(["adapter", "convert", first, str(tmp_path / "a.ckpt"), "--to", "ckpt", *base]) == 1
    assert "MindFormers has Qwen3 (its base is a qwen3) as an mcore model alone" in capsys.readouterr().err
    assert not (tmp_path / "a.ckpt").exists()


def test_the_parts_of_a_chatglm_are_joined_for_peft(tmp_path):
    layer = "transformer.encoder.layers.0"
    sizes = {"wq": (12, HIDDEN), "wk": (6, HIDDEN), "wv": (6, HIDDEN), "dense": (HIDDEN, 12)}
    adapter = adapter_of({f"{layer}.self_attention.{name}": size for name, size in sizes.items()})
    write(adapter, str(tmp_path / "a.ckpt"), "ckpt")
    convert_adapter(str(tmp_path / "a.ckpt"), str(tmp_path / "peft"), "peft")
    found = read(str(tmp_path / "peft"))
    joined = f"{layer}.self_attention.query_key_value"
    assert sorted(found.paths) == [f"{layer}.self_attention.dense", joined]
    rows = [adapter.delta(f"{layer}.self_attention.{name}") for name in ("wq", "wk", "wv")]
    np.testing.assert_allclose(found.delta(joined), np.concatenate(rows), rtol=1e-5, atol=1e-6)
