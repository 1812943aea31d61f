"""merge_checkpoint: base + scale B A for every form of base and adapter, verified, or nothing at all."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mindlora.base import merge as module
from mindlora.base.convert import convert_base
from mindlora.base.merge import fold, merge_checkpoint
from mindlora.errors import (
    AdapterError,
    CheckpointError,
    MergeError,
    NotFiniteError,
    ScaleMismatchError,
    ShapeMismatchError,
    TruncatedAdapterError,
    UnexpectedTensorsError,
)
from mindlora.formats.safetensors_file import write_arrays
from mindlora.numerics.dtypes import BFLOAT16, from_float32, to_float32
from tests.conftest import ROOT
from tests.support.llama_checkpoints import (
    CONFIG,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    llama,
    load,
    save_base,
)

RANK, ALPHA = 4, 6
LINEARS = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
DTYPES = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": BFLOAT16}
Q = "model.layers.0.self_attn.q_proj"


def pairs(*paths, shapes=None, seed=1):
    """Returns {path: (A, B)} under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    result = {}
    for path in paths or [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS]:
        rows, columns = (shapes or {}).get(path) or LINEARS[path.split(".", 3)[-1]]
        result[path] = (
            rng.normal(size=(RANK, columns)).astype(np.float32),
            rng.normal(size=(rows, RANK)).astype(np.float32),
        )
    return result


def save_adapter(folder, found, whole=None, **config):
    os.makedirs(folder)
    tensors = {f"base_model.model.{name}": array for name, array in (whole or {}).items()}
    for path, (a, b) in found.items():
        tensors[f"base_model.model.{path}.lora_A.weight"], tensors[f"base_model.model.{path}.lora_B.weight"] = a, b
    write_arrays(os.path.join(folder, "adapter_model.safetensors"), tensors)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": ALPHA,
                "modules_to_save": sorted({name.rpartition(".")[0].rpartition(".")[2] for name in whole or ()}) or None,
                "target_modules": sorted({path.rpartition(".")[2] for path in found}),
                **config,
            },
            file,
        )
    return str(folder)


def expected(source, found, scale=ALPHA / RANK):
    """The oracle: rounded once from float64."""
    result = dict(source)
    for path, (a, b) in found.items():
        weight = to_float32(source[f"{path}.weight"]).astype(np.float64)
        result[f"{path}.weight"] = weight + scale * b.astype(np.float64) @ a.astype(np.float64)
    return result


def assert_merged(actual, source, found, scale=ALPHA / RANK):
    assert actual.keys() == source.keys()
    for name, array in expected(source, found, scale).items():
        assert (actual[name].dtype, actual[name].shape) == (source[name].dtype, array.shape)
        if name.rpartition(".")[0] not in found:
            assert actual[name].tobytes() == source[name].tobytes(), name
            continue
        half_a_step = {BFLOAT16: 2.0**-8, DTYPES["float16"]: 2.0**-11, DTYPES["float32"]: 2.0**-24}[actual[name].dtype]
        np.testing.assert_allclose(to_float32(actual[name]), array, rtol=half_a_step * 1.01, atol=2e-5, err_msg=name)


# Every form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", ["hf", "mindformers"])
def test_what_is_written(tmp_path, monkeypatch, dtype, world):
    # Blocks of single rows, so that their borders count.
    monkeypatch.setattr("mindlora.base.writer._BLOCK", 1)
    source, found = llama(DTYPES[dtype]), pairs()
    base = save_base(tmp_path / "base", source, shards=3)
    if world == "mindformers":
        convert_base(base, str(tmp_path / "mf"), "hf", "mindformers")
        base = str(tmp_path / "mf")
    report = merge_checkpoint(base, save_adapter(tmp_path / "adapter", found), str(tmp_path / "out"))
    if world == "mindformers":
        convert_base(str(tmp_path / "out"), str(tmp_path / "back"), "mindformers", "hf")
    assert_merged(load(tmp_path / ("back" if world == "mindformers" else "out")), source, found)
    assert (report.merged, report.replaced, report.unchanged) == (14, 0, len(source) - 14)
    assert report.bytes == sum(array.nbytes for array in source.values()) and len(report.files) == 3
    assert 0 < report.difference <= report.bound and report.tensor in load(base)
    assert "tensors merged: 14" in str(report) and report.tensor in str(report)


@pytest.mark.parametrize("form", ["base.safetensors", "base.ckpt"])
def test_single_files(tmp_path, form):
    source, found = llama(), pairs(Q)
    save_base(tmp_path / "hf", source)
    convert_base(str(tmp_path / "hf"), str(tmp_path / form), None, "mindformers")
    adapter = save_adapter(tmp_path / "adapter", found)
    for output in ("out.safetensors", "out.ckpt", "out"):
        merge_checkpoint(str(tmp_path / form), adapter, str(tmp_path / output))
        convert_base(str(tmp_path / output), str(tmp_path / "back"), None, "hf", overwrite=True)
        assert_merged(load(tmp_path / "back"), source, found)


def test_the_folder_is_complete_for_transformers(tmp_path):
    base = save_base(tmp_path / "base", llama(), tie_word_embeddings=False)
    for name in ("tokenizer.json", "generation_config.json", "notes.txt", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text(name)
    adapter = save_adapter(tmp_path / "adapter", pairs(Q))
    merge_checkpoint(base, adapter, str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "base" / "config.json").read_text()


def test_scales(tmp_path):
    source, found = llama(), pairs(Q)
    base = save_base(tmp_path / "base", source)
    merge_checkpoint(base, save_adapter(tmp_path / "rs", found, use_rslora=True), str(tmp_path / "out"))
    assert_merged(load(tmp_path / "out"), source, found, ALPHA / np.sqrt(RANK))
    name = "model.layers.0.attention.wq.mindpet_delta_lora_"
    write_arrays(str(tmp_path / "mf.safetensors"), {name + "a": found[Q][0], name + "b": found[Q][1]})
    with pytest.raises(ScaleMismatchError, match="lora_alpha"):
        merge_checkpoint(base, str(tmp_path / "mf.safetensors"), str(tmp_path / "out2"))
    merge_checkpoint(base, str(tmp_path / "mf.safetensors"), str(tmp_path / "out2"), lora_alpha=2.0)
    assert_merged(load(tmp_path / "out2"), source, found, 2.0 / RANK)
    with pytest.raises(ScaleMismatchError, match="lora_alpha is 2, but the adapter says itself: 6"):
        merge_checkpoint(base, str(tmp_path / "rs"), str(tmp_path / "out3"), lora_alpha=2.0)
    assert not (tmp_path / "out3").exists()


def test_modules_that_were_trained_whole(tmp_path):
    source, found = llama(), pairs(Q)
    whole = {"lm_head.weight": np.full((VOCAB, HIDDEN), 1.5, np.float32)}
    report = merge_checkpoint(
        save_base(tmp_path / "base", source), save_adapter(tmp_path / "adapter", found, whole), str(tmp_path / "out")
    )
    assert_merged(
        load(tmp_path / "out"), {**source, "lm_head.weight": from_float32(whole["lm_head.weight"], BFLOAT16)}, found
    )
    assert (report.merged, report.replaced, report.unchanged) == (1, 1, len(source) - 2)


# qkv_concat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [LINEARS, ["self_attn.v_proj", "mlp.up_proj"], ["self_attn.q_proj"]])
def test_an_adapter_of_parts_on_a_concatenated_base(tmp_path, names):
    source, found = llama(DTYPES["float32"]), pairs(*[f"model.layers.1.{name}" for name in names])
    save_base(tmp_path / "hf", source, **CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "joined"), None, "mindformers", concat=True)
    adapter = save_adapter(tmp_path / "adapter", found)
    merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out"), kv_heads=KV_HEADS)
    convert_base(str(tmp_path / "out"), str(tmp_path / "back"), None, "hf", heads=HEADS, kv_heads=KV_HEADS)
    assert_merged(load(tmp_path / "back"), source, found)
    with pytest.raises(MergeError, match="--kv-heads"):
        merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out2"))
    with pytest.raises(AdapterError, match="5 of them do not divide 32, 16, 16 rows of q, k, v"):
        merge_checkpoint(str(tmp_path / "joined"), adapter, str(tmp_path / "out2"), kv_heads=5)
    assert not (tmp_path / "out2").exists()


def test_a_concatenated_adapter_on_a_base_of_parts(tmp_path):
    source = llama(DTYPES["float32"])
    base = save_base(tmp_path / "hf", source, shards=2)
    rng, tensors = np.random.default_rng(3), {}
    for name, rows in (("attention.w_qkv", 64), ("feed_forward.w_gate_hidden", 2 * FFN)):
        path = f"model.layers.0.{name}.mindpet_delta_lora_"
        tensors[path + "a"] = rng.normal(size=(RANK, HIDDEN)).astype(np.float32)
        tensors[path + "b"] = rng.normal(size=(rows, RANK)).astype(np.float32)
    write_arrays(str(tmp_path / "joint.safetensors"), tensors)
    delta = {
        name: tensors[f"model.layers.0.{name}.mindpet_delta_lora_b"]
        for name in ("attention.w_qkv", "feed_forward.w_gate_hidden")
    }
    groups = delta["attention.w_qkv"].reshape(KV_HEADS, 4 * HEAD_DIM, RANK)
    a = {name: tensors[f"model.layers.0.{name}.mindpet_delta_lora_a"] for name in delta}
    found = {
        Q: (a["attention.w_qkv"], groups[:, :16].reshape(-1, RANK)),
        "model.layers.0.self_attn.k_proj": (a["attention.w_qkv"], groups[:, 16:24].reshape(-1, RANK)),
        "model.layers.0.self_attn.v_proj": (a["attention.w_qkv"], groups[:, 24:].reshape(-1, RANK)),
        "model.layers.0.mlp.gate_proj": (a["feed_forward.w_gate_hidden"], delta["feed_forward.w_gate_hidden"][::2]),
        "model.layers.0.mlp.up_proj": (a["feed_forward.w_gate_hidden"], delta["feed_forward.w_gate_hidden"][1::2]),
    }
    report = merge_checkpoint(
        base, str(tmp_path / "joint.safetensors"), str(tmp_path / "out"), lora_alpha=ALPHA, kv_heads=KV_HEADS
    )
    assert_merged(load(tmp_path / "out"), source, found)
    assert report.merged == 5
    with pytest.raises(MergeError, match="--kv-heads"):
        merge_checkpoint(base, str(tmp_path / "joint.safetensors"), str(tmp_path / "out2"), lora_alpha=ALPHA)


# Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's account of memory")
def test_memory_is_that_of_a_few_blocks(tmp_path):
    shape, rng = (16384, 4096), np.random.default_rng(0)
    os.makedirs(tmp_path / "base")
    write_arrays(
        str(tmp_path / "base" / "model.safetensors"), {f"{Q}.weight": np.zeros(shape, np.uint16).view(BFLOAT16)}
    )
    adapter = save_adapter(
        tmp_path / "adapter",
        {
            Q: (
                rng.normal(size=(RANK, shape[1])).astype(np.float32),
                rng.normal(size=(shape[0], RANK)).astype(np.float32),
            )
        },
    )
    code = (
        "from mindlora.base.merge import merge_checkpoint\n"
        "def peak(): return next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line)\n"
        f"before = peak(); merge_checkpoint({str(tmp_path / 'base')!r}, {adapter!r}, {str(tmp_path / 'out')!r})\n"
        "print(peak() - before)"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT, "OPENBLAS_NUM_THREADS": "1"}
    used = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    # In KiB; the one tensor has 128 MiB.
    assert int(used.stdout) < 100 * 1024


# What cannot be merged ------------------------------------------------------------------------------------------


def fails(tmp_path, error, said, base, found, whole=None, **keys):
    """Asserts that merging fails, and that only base and adapter are there afterwards."""
    adapter = save_adapter(tmp_path / "adapter", found, whole)
    with pytest.raises(error, match=said):
        merge_checkpoint(base, adapter, str(tmp_path / "out"), **keys)
    assert sorted(os.listdir(tmp_path)) == ["adapter", "base"]


def test_a_path_that_the_base_lacks(tmp_path):
    lost = "model.layers.7.self_attn.q_proj"
    fails(
        tmp_path,
        UnexpectedTensorsError,
        "model.layers.7.attention.wq.weight",
        save_base(tmp_path / "base", llama()),
        pairs(Q, lost),
    )


@pytest.mark.parametrize("shape", [(32, 31), (31, 32), (48, 32)])
def test_another_shape(tmp_path, shape):
    fails(
        tmp_path,
        ShapeMismatchError,
        r"q_proj.weight is \[32, 32\] in the base.*It belongs to another model",
        save_base(tmp_path / "base", llama()),
        pairs(Q, shapes={Q: shape}),
    )


def test_a_whole_tensor_of_another_shape(tmp_path):
    fails(
        tmp_path,
        ShapeMismatchError,
        "lm_head.weight is",
        save_base(tmp_path / "base", llama()),
        pairs(Q),
        {"lm_head.weight": np.ones((VOCAB + 1, HIDDEN), np.float32)},
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_that_is_not_finite(tmp_path, value):
    found = pairs(Q)
    found[Q][1][3, 2] = value
    fails(tmp_path, NotFiniteError, "wq B", save_base(tmp_path / "base", llama()), found)


@pytest.mark.parametrize("trained_whole", [False, True])
@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": True}])
def test_a_head_on_tied_embeddings(tmp_path, trained_whole, tied):
    base = save_base(tmp_path / "base", llama(tied=not tied), **tied)
    found = pairs(Q) if trained_whole else pairs("lm_head", shapes={"lm_head": (VOCAB, HIDDEN)})
    whole = {"lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)} if trained_whole else None
    fails(tmp_path, MergeError, "embeddings are tied", base, found, whole)


def test_quantized_weights(tmp_path):
    source = {**llama(), f"{Q}.weight": np.ones((32, 32), np.int8)}
    fails(tmp_path, MergeError, "quantized", save_base(tmp_path / "base", source), pairs(Q))


def test_a_sum_that_is_too_large_for_the_dtype(tmp_path):
    found = pairs(Q)
    found[Q][1][5] *= 1e5
    fails(
        tmp_path,
        MergeError,
        "q_proj.weight, row 5: .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        found,
    )


def test_one_element_that_is_too_large_for_the_dtype(tmp_path):
    """A single infinity in a row makes what is allowed infinite as well."""
    found = pairs(Q)
    found[Q][0][:], found[Q][1][:] = 0, 0
    found[Q][0][0, 3], found[Q][1][5, 0] = 1, 1e6
    fails(
        tmp_path,
        MergeError,
        "q_proj.weight, row 5: .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        found,
    )


def test_a_whole_tensor_that_is_too_large_for_the_dtype(tmp_path):
    fails(
        tmp_path,
        MergeError,
        "lm_head.weight of .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        pairs(Q),
        {"lm_head.weight": np.full((VOCAB, HIDDEN), 1e5, np.float32)},
    )


def test_a_base_with_nan(tmp_path):
    source = llama(DTYPES["float32"])
    source[f"{Q}.weight"][9, 3] = np.nan
    fails(tmp_path, MergeError, "row 9", save_base(tmp_path / "base", source), pairs(Q))


def test_a_truncated_shard(tmp_path):
    base = save_base(tmp_path / "base", llama(), shards=2)
    path = tmp_path / "base" / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    fails(tmp_path, TruncatedAdapterError, "model-1", base, pairs(Q))


def test_outputs_that_would_destroy_something(tmp_path):
    base, adapter = save_base(tmp_path / "base", llama()), save_adapter(tmp_path / "adapter", pairs(Q))
    for output in (base, adapter, os.path.join(base, "merged")):
        with pytest.raises(CheckpointError, match="which is read"):
            merge_checkpoint(base, adapter, output, overwrite=True)
    merge_checkpoint(base, adapter, str(tmp_path / "out"))
    before = load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists"):
        merge_checkpoint(base, adapter, str(tmp_path / "out"))
    merge_checkpoint(str(tmp_path / "out"), adapter, str(tmp_path / "twice"))
    merge_checkpoint(str(tmp_path / "twice"), adapter, str(tmp_path / "out"), overwrite=True)
    assert load(tmp_path / "out")[f"{Q}.weight"].tobytes() != before[f"{Q}.weight"].tobytes()


# The probe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_rounding_is_within_the_bound(dtype, size):
    rng = np.random.default_rng(0)
    weight, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 2000), (8, 2000), (64, 8)))
    rows, difference, bound = fold(weight * np.float32(size), b, a * np.float32(size), DTYPES[dtype])
    assert rows.dtype == DTYPES[dtype] and (difference <= bound).all()
    # Rounding errors are random, so their sum is far below the bound; in float32 they hardly show.
    assert (difference < bound / 3).all()
    # And no looser than half a step of each element, with a millionth for float32's sums.
    half_a_step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[dtype]
    size_of_rows = np.linalg.norm(to_float32(rows), axis=1) + np.abs(b) @ np.linalg.norm(a * np.float32(size), axis=1)
    assert (bound <= (half_a_step + 3e-6) * np.sqrt(2000) * size_of_rows + 2000 * 2.0**-25).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rounding_does_not_explain_is_found(tmp_path, monkeypatch, dtype):
    """A rounding that loses what the adapter adds, in one row of all."""
    exact = module.rounded

    def lossy(array, kind):
        if len(array) > 5:
            array[5] = 0
        return exact(array, kind)

    monkeypatch.setattr(module, "rounded", lossy)
    fails(
        tmp_path,
        MergeError,
        "row 5: the result on a random probe",
        save_base(tmp_path / "base", llama(DTYPES[dtype])),
        pairs(Q),
    )
