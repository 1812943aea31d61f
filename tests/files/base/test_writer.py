"""Bases in the form of MindFormers 2's PyNative trainer: written from Hugging Face's, read again, merged into."""

import json
import os

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, CheckpointError
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.dtypes import from_float32, to_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.reader import BaseCheckpoint
from tests.support import mcore_checkpoints
from tests.support.mcore_checkpoints import CONFIG, EXPERT_INNER, EXPERTS, HIDDEN
from tests.support.step_folders import ONE_RANK, rank_file, write_ranks

WEIGHT1 = "decoder.layers.1.mlp.experts.weight1"
RANK = 2


def hugging_face(folder, tensors, files=1):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + index * files // len(names)}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        write_arrays(str(folder / file), {name: tensors[name] for name in names if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(folder)


def stored(path):
    with TensorFile(str(path)) as file:
        return {key: file.read(key) for key in file.tensors}


@pytest.fixture
def deepseek(tmp_path):
    """A DeepSeek-V3 as the trainer loads it, and the tensors that it was made of."""
    tensors = mcore_checkpoints.deepseek_v3()
    convert_base(hugging_face(tmp_path / "hf", tensors), str(tmp_path / "base"), None, "pynative")
    return tmp_path / "base", tensors


def experts_adapter(folder):
    """Writes an adapter of the experts and of linear_proj; returns it and its path."""
    rng = np.random.default_rng(0)
    adapter = Adapter({})
    shapes = {"mlp.experts.weight1": (2 * EXPERT_INNER, HIDDEN), "mlp.experts.weight2": (HIDDEN, EXPERT_INNER)}
    for end, (rows, columns) in shapes.items():
        path = f"model.layers.1.{end}"
        adapter.tensors[path, "A"] = rng.normal(size=(EXPERTS, RANK, columns)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(EXPERTS, rows, RANK)).astype(np.float32)
        adapter.alphas[path] = 6.0
    adapter_files.write(adapter, str(folder), "pynative")
    return adapter, str(folder)


def test_the_form_is_the_trainers(deepseek):
    folder, tensors = deepseek
    assert sorted(os.listdir(folder)) == [ONE_RANK, "common.json", "config.json"]
    assert json.loads((folder / "common.json").read_text())["global_step"] == 0
    found = stored(folder / ONE_RANK)
    assert found[WEIGHT1].shape == (EXPERTS, HIDDEN, 2 * EXPERT_INNER)
    up = tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    np.testing.assert_array_equal(found[WEIGHT1][2, :, EXPERT_INNER:], up.T)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(found["decoder.layers.1.mlp.expert_bias"], bias)


@pytest.mark.parametrize("make", [mcore_checkpoints.deepseek_v3, mcore_checkpoints.qwen3], ids=["deepseek", "qwen3"])
@pytest.mark.parametrize("files", [1, 3])
def test_back_in_hugging_faces_form_every_bit_is_there_again(tmp_path, make, files):
    tensors = make()
    convert_base(hugging_face(tmp_path / "hf", tensors, files), str(tmp_path / "base"), None, "pynative")
    names = [name for name in os.listdir(tmp_path / "base") if name.endswith(".safetensors")]
    assert sorted(names) == [rank_file(number, files) for number in range(files)]
    convert_base(str(tmp_path / "base"), str(tmp_path / "again"), None, "hf")
    with BaseCheckpoint(str(tmp_path / "again")) as again:
        assert again.tensors.keys() == tensors.keys()
        for name, array in tensors.items():
            assert again.read_rows(name, 0, len(array)).tobytes() == array.tobytes(), name


def test_several_ranks_are_read_as_metadata_says(tmp_path, deepseek):
    folder, tensors = deepseek
    whole = stored(folder / ONE_RANK)
    # Experts on different ranks, and rows of a linear cell.
    cuts = {WEIGHT1: (EXPERTS, 1, 1), "output_layer.weight": (2, 1)}
    sharded = write_ranks(tmp_path / "ranks", whole, cuts, EXPERTS)
    convert_base(sharded, str(tmp_path / "again"), None, "hf")
    with BaseCheckpoint(str(tmp_path / "again")) as again:
        for name, array in tensors.items():
            assert again.read_rows(name, 0, len(array)).tobytes() == array.tobytes(), name
    os.unlink(os.path.join(sharded, rank_file(1, EXPERTS)))
    with pytest.raises(AdapterFormatError, match="is missing, but metadata.json names it"):
        convert_base(sharded, str(tmp_path / "other"), None, "hf")


def test_experts_are_merged_with_the_scale_of_the_manifest(tmp_path, deepseek):
    folder, _ = deepseek
    adapter, path = experts_adapter(tmp_path / "adapter")
    before = stored(folder / ONE_RANK)
    report = merge_checkpoint(str(folder), path, str(tmp_path / "merged"))
    assert (report.merged, report.replaced) == (2, 0)
    assert sorted(os.listdir(tmp_path / "merged")) == sorted(os.listdir(folder))
    after = stored(tmp_path / "merged" / ONE_RANK)
    assert {name for name in before if before[name].tobytes() != after[name].tobytes()} == {
        "decoder.layers.1.mlp.experts.weight1",
        "decoder.layers.1.mlp.experts.weight2",
    }
    a, b = adapter.pair("model.layers.1.mlp.experts.weight1")
    expected = to_float32(before[WEIGHT1]) + 6 / RANK * np.einsum("eri,eor->eio", a, b)
    np.testing.assert_array_equal(after[WEIGHT1], from_float32(expected.astype(np.float32), before[WEIGHT1].dtype))


def test_base_and_adapter_of_one_folder(tmp_path, deepseek):
    """As MindFormers 2.0 saves them."""
    folder, _ = deepseek
    _, path = experts_adapter(tmp_path / "adapter")
    both = tmp_path / "run" / "iteration_00000002"
    both.mkdir(parents=True)
    write_arrays(str(both / ONE_RANK), {**stored(folder / ONE_RANK), **stored(os.path.join(path, ONE_RANK))})
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    merge_checkpoint(str(folder), path, str(tmp_path / "apart"))
    report = merge_checkpoint(str(tmp_path / "run"), str(tmp_path / "run"), str(tmp_path / "together"), lora_alpha=6)
    assert "as an adapter's: 4 tensors" in str(report)
    apart, together = (stored(tmp_path / name / ONE_RANK) for name in ("apart", "together"))
    assert apart.keys() == together.keys()
    assert all(array.tobytes() == together[name].tobytes() for name, array in apart.items())


def test_what_the_trainer_does_not_have_is_refused(tmp_path, deepseek):
    llama = {"model.embed_tokens.weight": np.zeros((4, 4), np.float32), "model.norm.weight": np.zeros(4, np.float32)}
    source = hugging_face(tmp_path / "llama", llama)
    with pytest.raises(CheckpointError, match="PyNative trainer does not have Llama"):
        convert_base(source, str(tmp_path / "out"), None, "pynative")
    with pytest.raises(CheckpointError, match="is a file, and MindFormers' trainer loads a folder"):
        convert_base(str(tmp_path / "hf"), str(tmp_path / "out.safetensors"), None, "pynative")
    with pytest.raises(CheckpointError, match="names already: use it as it is"):
        convert_base(str(deepseek[0]), str(tmp_path / "out"), None, "pynative")
    assert not os.path.lexists(tmp_path / "out")
