"""Base checkpoints: reading every form as a stream, refusing what is wrong, and writing in one step."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, CheckpointError, TruncatedAdapterError
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.base import writer as base_writer
from mindlora.files.base.convert import convert_base
from mindlora.files.base.reader import INDEX, BaseCheckpoint
from mindlora.files.base.writer import OutputTensor, Shard
from tests.conftest import ROOT
from tests.support.llama_checkpoints import assert_same, llama, load, save_base

HF = "model.layers.0.self_attn.q_proj.weight"
MF = "model.layers.0.attention.wq.weight"


def arrays(*names, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(6, 4)).astype(np.float32) for name in names}


def sharded(folder, *shards):
    """Writes one file for each dict of arrays, and the index; returns the table in it."""
    os.makedirs(folder)
    weight_map = {}
    for number, tensors in enumerate(shards):
        file = f"part-{number}.safetensors"
        write_arrays(os.path.join(folder, file), tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    write_index(folder, {"weight_map": weight_map})
    return weight_map


def write_index(folder, content):
    with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as file:
        json.dump(content, file)


def outputs(tensors):
    return [
        OutputTensor(
            name, array.dtype, array.shape, lambda begin, end, array=array: array[begin:end] if array.shape else array
        )
        for name, array in tensors.items()
    ]


# Reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_bare_model_s_tensors_have_the_names_of_the_model_with_a_head(tmp_path, shards, tied):
    """AutoModel's save_pretrained writes layers.0..., embed_tokens and norm; some tools leave lm_head beside them."""
    source = llama(tied=tied)
    bare = {name.removeprefix("model."): array for name, array in source.items()}
    assert_same(load(save_base(tmp_path / "base", bare, shards)), source)
    with BaseCheckpoint(str(tmp_path / "base")) as base:
        assert base.world == "hf" and "'model.'" in base.left_out[0]


def test_a_bare_model_of_mindformers_keeps_its_state_of_training_apart(tmp_path):
    tensors = arrays("layers.0.attention.wq.weight", "tok_embeddings.embedding_weight", "adam_m.norm_out.weight")
    write_arrays(str(tmp_path / "base.safetensors"), tensors | arrays("norm_out.weight"))
    with BaseCheckpoint(str(tmp_path / "base.safetensors")) as base:
        assert base.world == "mindformers" and base.training_state == ["adam_m.norm_out.weight"]
        assert set(base.tensors) == {MF, "model.tok_embeddings.embedding_weight", "model.norm_out.weight"}


def test_a_bare_model_without_a_head_says_what_it_is(tmp_path):
    """As e5-mistral, whose embeddings are not tied: nothing can be copied again that was left out on purpose."""
    bare = {name.removeprefix("model."): array for name, array in llama(tied=True).items()}
    path = save_base(tmp_path / "base", bare, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="It is a bare model .* give the model with a head."):
        convert_base(path, str(tmp_path / "out"), None, "mindformers")


def test_names_of_no_known_model_are_not_a_bare_model_s(tmp_path):
    write_arrays(str(tmp_path / "base.safetensors"), arrays("layers.0.dense.weight", "encoder.norm.weight"))
    with pytest.raises(CheckpointError, match=r"holds no parameter of a known model .* It holds: encoder.norm.weight"):
        BaseCheckpoint(str(tmp_path / "base.safetensors"))


def test_shards_with_an_index(tmp_path):
    first, second = arrays(HF), arrays("lm_head.weight", seed=1)
    sharded(tmp_path / "base", first, second)
    write_arrays(str(tmp_path / "base" / "stale.safetensors"), arrays(HF, seed=2))  # the index does not name it
    assert_same(load(tmp_path / "base"), {**first, **second})
    with BaseCheckpoint(tmp_path / "base") as base:
        assert (
            base.world == "hf"
            and base.config == {}
            and list(base.files) == ["part-0.safetensors", "part-1.safetensors"]
        )
        np.testing.assert_array_equal(base.read_rows(HF, 2, 5), first[HF][2:5])


def test_a_folder_without_an_index_and_a_single_file(tmp_path):
    tensors = arrays(MF, "model.norm_out.weight")
    tensors["scalar"] = np.array(3, np.int64)
    write_arrays(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 2}')
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert_same(load(path), tensors)
        with BaseCheckpoint(path) as base:
            assert base.world == "mindformers" and base.config == {"num_key_value_heads": 2}
            assert base.companions() == [str(tmp_path / "config.json")]


def test_a_ckpt_keeps_dtypes(tmp_path):
    tensors = arrays(MF)
    tensors["model.norm_out.weight"] = from_float32(np.array([1.5, -2.0], np.float32), BFLOAT16)
    tensors["model.half"] = np.array([1.5], np.float16)
    for output in ("base.ckpt", "base.safetensors"):
        base_writer.write(str(tmp_path / output), [Shard(outputs(tensors), {})], "mindformers")
        assert_same(load(tmp_path / output), tensors)
    import mindspore as ms

    loaded = ms.load_checkpoint(str(tmp_path / "base.safetensors"), format="safetensors")
    np.testing.assert_array_equal(loaded[MF].asnumpy(), tensors[MF])


@pytest.mark.parametrize(
    "names, kind",
    [
        ((HF, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"), "hf"),
        ((MF,), "mindformers"),
        (("model.layers.0.attention.w_qkv.bias",), "mindformers"),
        (("model.embed_tokens.weight",), "hf"),
        (("model.layers.3.feed_forward.w_gate_hidden.weight", "lm_head.weight"), "mindformers"),
    ],
)
def test_whose_names(tmp_path, names, kind):
    write_arrays(str(tmp_path / "a.safetensors"), arrays(*names))
    with BaseCheckpoint(tmp_path) as base:
        assert base.world == kind


@pytest.mark.parametrize(
    "names, said",
    [
        ((HF, MF), [HF, MF, "only one model"]),
        (("transformer.h.0.attn.c_attn.weight",), ["neither", "c_attn"]),
        (("lm_head.weight",), ["neither", "lm_head"]),
    ],
)
def test_names_of_neither_world_or_of_both(tmp_path, names, said):
    write_arrays(str(tmp_path / "a.safetensors"), arrays(*names))
    with pytest.raises(CheckpointError) as error:
        BaseCheckpoint(tmp_path)
    assert all(text in str(error.value) for text in said)


@pytest.mark.parametrize(
    "weight_map, said",
    [
        ({HF: "../secret.safetensors"}, "not the name of a file in the same folder"),
        ({HF: "/etc/passwd"}, "not the name of a file in the same folder"),
        ({HF: ".."}, "not the name of a file"),
        ({HF: "a/b.safetensors"}, "not the name of a file"),
        ({HF: 3}, "not the name of a file"),
        ({HF: "..\\secret"}, "not the name of a file"),
        ({HF: "absent.safetensors"}, "absent.safetensors, which does not exist"),
        ({HF: "part-0.safetensors", MF: "part-0.safetensors"}, "not in the files it names: " + MF),
        ({HF: "part-1.safetensors", "lm_head.weight": "part-1.safetensors"}, "not in the files it names: " + HF),
        ({HF: "part-1.safetensors", "lm_head.weight": "part-0.safetensors"}, "not in the files it names: " + HF),
        ({HF: "part-0.safetensors"}, None),
        ({"lm_head.weight": "part-1.safetensors", HF: "part-0.safetensors"}, None),
        ({}, "has no weight_map"),
        ([HF], "has no weight_map"),
        (None, "has no weight_map"),
    ],
)
def test_a_wrong_index(tmp_path, weight_map, said):
    sharded(tmp_path / "base", arrays(HF), arrays("lm_head.weight"))
    write_arrays(str(tmp_path / "secret.safetensors"), arrays(HF))
    write_index(tmp_path / "base", {"weight_map": weight_map})
    if said is None:
        BaseCheckpoint(tmp_path / "base").__exit__()
        return
    with pytest.raises(CheckpointError, match=said.replace("(", "\\(")):
        BaseCheckpoint(tmp_path / "base")


def test_an_index_that_leaves_a_tensor_out(tmp_path):
    sharded(tmp_path / "base", arrays(HF, "lm_head.weight"))
    write_index(tmp_path / "base", {"weight_map": {HF: "part-0.safetensors"}})
    with pytest.raises(CheckpointError, match="does not list lm_head.weight"):
        BaseCheckpoint(tmp_path / "base")


@pytest.mark.parametrize(
    "text, said", [("{", "is not JSON"), ("[]", "holds a list instead of a JSON object"), ("\xff", "is not JSON")]
)
def test_an_index_that_is_not_an_object(tmp_path, text, said):
    sharded(tmp_path / "base", arrays(HF))
    (tmp_path / "base" / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=said):
        BaseCheckpoint(tmp_path / "base")


def test_damaged_files(tmp_path):
    sharded(tmp_path / "base", arrays(HF), arrays("lm_head.weight"))
    path = tmp_path / "base" / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TruncatedAdapterError, match="part-1"):
        BaseCheckpoint(tmp_path / "base")
    path.write_bytes(b"no tensors at all, but some text")
    with pytest.raises((TruncatedAdapterError, AdapterFormatError), match="part-1"):
        BaseCheckpoint(tmp_path / "base")
    (tmp_path / "base.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(TruncatedAdapterError, match="is truncated or not a MindSpore checkpoint"):
        BaseCheckpoint(tmp_path / "base.ckpt")


def test_paths_without_a_checkpoint(tmp_path):
    (tmp_path / "pytorch_model.bin").write_text("")
    for path, said in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "pytorch_model.bin", "must be a folder"),
        (tmp_path, "holds no .safetensors file. It holds: pytorch_model.bin"),
    ):
        with pytest.raises(CheckpointError, match=said):
            BaseCheckpoint(path)


def test_the_same_tensor_in_two_files(tmp_path):
    for file in ("consolidated", "model"):
        write_arrays(str(tmp_path / f"{file}.safetensors"), arrays(HF))
    with pytest.raises(CheckpointError, match="in consolidated.safetensors and in model.safetensors"):
        BaseCheckpoint(tmp_path)


# Writing --------------------------------------------------------------------------------------------------------


def test_a_folder_of_shards(tmp_path):
    first, second = arrays(HF), {"lm_head.weight": np.arange(3, dtype=np.float16), "one": np.array(2.5, np.float32)}
    output = tmp_path / "out"
    files = base_writer.write(
        str(output),
        [Shard(outputs(first), {"format": "pt", "a": "b"}), Shard([], {}), Shard(outputs(second), {})],
        "hf",
    )
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(os.listdir(output)) == [*files, INDEX]
    index = json.loads((output / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 6 * 4 * 4 + 6 + 4},
        "weight_map": {HF: files[0], "lm_head.weight": files[1], "one": files[1]},
    }
    assert_same(load(output), {**first, **second})
    for file, metadata in zip(files, ({"format": "pt", "a": "b"}, {"format": "pt"})):
        with TensorFile(output / file) as tensors:
            assert tensors.metadata == metadata


def test_an_index_by_the_name_that_mindspore_looks_for(tmp_path):
    shards = [Shard(outputs(arrays(MF)), {"format": "pt"}), Shard(outputs(arrays("lm_head.weight")), {})]
    base_writer.write(str(tmp_path / "out"), shards, "mindformers")
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert json.loads((tmp_path / "out" / "param_name_map.json").read_text()) == index
    base_writer.write(str(tmp_path / "one"), shards[:1], "mindformers")
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    with TensorFile(tmp_path / "one" / "model.safetensors") as tensors:
        assert tensors.metadata == {"format": "ms"}


@pytest.mark.parametrize(
    "rows, width, unit",
    [(1, 1, 1), (70, 11, 7), (5000, 300, 1), (4096, 1000, 64), (0, 5, 1), (3, 0, 1), (2, 3_000_000, 1)],
)
def test_blocks_of_rows_cover_a_tensor_once(tmp_path, rows, width, unit):
    array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    asked, seen = [], []

    def part(begin, end):
        asked.append((begin, end))
        return array[begin:end]

    base_writer.write(
        str(tmp_path / "a.safetensors"),
        [Shard([OutputTensor(MF, array.dtype, array.shape, part, unit)], {})],
        "mindformers",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert_same(load(tmp_path / "a.safetensors"), {MF: array})
    assert all(begin % unit == 0 and end % unit == 0 for begin, end in asked)
    assert all((end - begin) * width * 4 <= max(base_writer._BLOCK, unit * width * 4) for begin, end in asked)
    assert sum(done for done, _ in seen) == array.nbytes and {total for _, total in seen} <= {array.nbytes}


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.ckpt"])
@pytest.mark.parametrize("old", [False, True])
def test_an_error_leaves_what_was_there(tmp_path, name, old):
    output = tmp_path / name
    if old:
        base_writer.write(str(output), [Shard(outputs(arrays(MF)), {})], "mindformers")

    def fails(begin, end):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        base_writer.write(
            str(output),
            [Shard([*outputs(arrays(MF, seed=1)), OutputTensor("lm_head.weight", np.dtype("<f4"), (6, 4), fails)], {})],
            "mindformers",
        )
    assert os.listdir(tmp_path) == ([name] if old else [])
    if old:
        assert_same(load(output), arrays(MF))


def test_what_an_output_must_not_be(tmp_path):
    base = tmp_path / "models" / "base"
    sharded(base, arrays(HF))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.txt").write_text("mine")
    (tmp_path / "link").symlink_to(base)
    for output in (base, base / "out", base / "part-0.safetensors", tmp_path / "models", tmp_path / "link"):
        with pytest.raises(CheckpointError, match="is, contains or is inside"):
            base_writer.check_checkpoint_output(str(output), [str(base)], True)
    with pytest.raises(CheckpointError, match="exists. Give another output, or --overwrite"):
        base_writer.check_checkpoint_output(str(tmp_path / "notes"), [str(base)], False)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        base_writer.check_checkpoint_output(str(tmp_path / "notes"), [str(base)], True)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.ckpt").mkdir()
    for output in ("file", "folder.ckpt"):
        with pytest.raises(CheckpointError, match="but the output must be a"):
            base_writer.check_checkpoint_output(str(tmp_path / output), [str(base)], True)
    (tmp_path / "empty").mkdir()
    sharded(tmp_path / "other", arrays(HF))
    for output in ("empty", "other", "new", "models/base2"):
        base_writer.check_checkpoint_output(str(tmp_path / output), [str(base)], True)


def test_nothing_in_base_imports_mindspore():
    code = (
        "import sys; from mindlora.files.base import convert, joined, merge, quantize, reader, writer; "
        "from mindlora.cli import base; "
        "sys.exit(any(name in sys.modules for name in ('mindspore', 'mindformers')))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
