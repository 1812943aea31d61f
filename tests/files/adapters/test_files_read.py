"""adapter_files.read: every form of folder and file, and which contents are refused."""

import json
import os
import pathlib

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, MissingTensorsError, UnexpectedTensorsError
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.files.adapters import files as adapter_files
from tests.support import torch_zip
from tests.support.adapter_samples import (
    CONFIG,
    WEIGHTS,
    K,
    Q,
    assert_same,
    ckpt_records,
    folder,
    header_of,
    key,
    make,
    peft_tensors,
    record,
    safetensors,
)


def test_the_weights_of_a_folder_find_their_config(tmp_path):
    path = folder(tmp_path / "a", peft_tensors(make()), use_rslora=True, lora_alpha=5)
    found = adapter_files.read(os.path.join(path, WEIGHTS))
    assert_same(found, adapter_files.read(path))
    assert found.alphas == {Q: 5.0, K: 5.0} and found.use_rslora
    # Without the config, the file does not state lora_alpha.
    os.unlink(os.path.join(path, CONFIG))
    alone = adapter_files.read(os.path.join(path, WEIGHTS))
    assert alone.alphas == {} and alone.paths == [Q, K]
    # If the file has another name, the config beside it belongs to another adapter.
    path = pathlib.Path(folder(tmp_path / "b", peft_tensors(make())))
    (path / WEIGHTS).rename(path / "other.safetensors")
    assert adapter_files.read(str(path / "other.safetensors")).alphas == {}


def test_mindformers_2_s_folder_with_its_manifest(tmp_path):
    path = tmp_path / "step_4"
    path.mkdir()
    adapter = make()
    tensors = {
        f"decoder.layers.0.self_attention.linear_{path[-1]}.lora_{half.lower()}": array
        for (path, half), array in adapter.tensors.items()
    }
    (path / "model-0.safetensors").write_bytes(safetensors(*header_of(tensors)))
    (path / "model-opt-0.safetensors").write_bytes(b"the optimizer's state, which is not looked at")
    manifest = path / "mindformers_adapter_config.json"
    manifest.write_text(json.dumps({"lora_config": {"lora_alpha": 5, "lora_rank": 2}}))
    found = adapter_files.read(str(path))
    adapter.alphas = {Q: 5.0, K: 5.0}
    assert_same(found, adapter)
    assert found.dialect == "MindFormers 2's LoRA"
    for content, shown in [
        ({"lora_config": {}}, "None"),
        ({}, "None"),
        ({"lora_config": [1]}, "None"),
        ({"lora_config": {"lora_alpha": float("nan")}}, "nan"),
        ({"lora_config": {"lora_alpha": float("inf")}}, "inf"),
        ({"lora_config": {"lora_alpha": "5"}}, "'5'"),
        ({"lora_config": {"lora_alpha": 0}}, "0"),
        ({"lora_config": {"lora_alpha": True}}, "True"),
        ({"lora_config": {"lora_alpha": 10**310}}, "1" + "0" * 199 + "..."),
    ]:
        manifest.write_text(json.dumps(content))
        with pytest.raises(AdapterFormatError) as error:
            adapter_files.read(str(path))
        assert str(error.value) == f"{manifest}: lora_config.lora_alpha is {shown}; it must be a number above 0."


def test_a_bin_is_read_only_where_it_is_allowed(tmp_path):
    adapter = make(dtype=BFLOAT16)
    path = pathlib.Path(folder(tmp_path / "a", {}))
    (path / WEIGHTS).unlink()
    torch_zip.save(path / "adapter_model.bin", peft_tensors(adapter))
    for name in (path, path / "adapter_model.bin"):
        with pytest.raises(AdapterFormatError) as error:
            adapter_files.read(str(name))
        assert str(error.value) == (
            f"{path / 'adapter_model.bin'} is a pickle, which can run programs. Ask for "
            "safetensors, or allow it with allow_pickle (--allow-pickle): only tensors are "
            "then taken from it."
        )
        adapter.selection = {"target_modules": ["q_proj", "k_proj"]}
        assert_same(adapter_files.read(str(name), allow_pickle=True), adapter)


def test_tensors_of_the_base_and_of_the_optimizer_are_ignored(tmp_path):
    adapter = make()
    tensors = {f"{path}.mindpet_delta_lora_{half.lower()}": array for (path, half), array in adapter.tensors.items()}
    others = {"adam_m." + name: array + 1 for name, array in tensors.items()} | {"lm_head.weight": np.ones(3, np.int64)}
    (tmp_path / "a.safetensors").write_bytes(safetensors(*header_of(tensors | others)))
    adapter.alphas = {}
    assert_same(adapter_files.read(str(tmp_path / "a.safetensors")), adapter)


def test_two_forms_in_one_file_are_refused(tmp_path):
    tensors = {
        f"{Q}.mindpet_delta_lora_a": np.ones((2, 6), np.float32),
        f"{Q}.mindpet_delta_lora_b": np.ones((6, 2), np.float32),
        f"{K}.tk_delta_lora_a": np.ones(2, np.float32),
    }
    (tmp_path / "a.safetensors").write_bytes(safetensors(*header_of(tensors)))
    with pytest.raises(UnexpectedTensorsError) as error:
        adapter_files.read(str(tmp_path / "a.safetensors"))
    assert str(error.value) == (
        f"{tmp_path / 'a.safetensors'} holds LoRA tensors of MindFormers' LoRA "
        f"(mindpet_delta_lora), and others in another form: {K}.tk_delta_lora_a. Keep one form in a file."
    )


@pytest.mark.parametrize(
    "first, second, message",
    [
        (f"{Q}.mindpet_delta_lora_a", f"{Q}.mindpet_delta_lora_A", f"holds the A of {Q} twice, under two names."),
        (
            key(Q, "B"),
            "base_model.model.model.layers.0.attention.wq.lora_B.weight",
            f"holds the B of {Q} twice, under two names.",
        ),
        (
            "base_model.model.lm_head.weight",
            "base_model.model.lm_head.base_layer.weight",
            "holds lm_head.weight twice, under two names.",
        ),
    ],
)
def test_one_tensor_under_two_names_is_refused(tmp_path, first, second, message):
    tensors = {} if "mindpet" in first else peft_tensors(make())
    tensors.update({first: np.ones((6, 2), np.float32), second: np.zeros((6, 2), np.float32)})
    path = folder(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    with pytest.raises(AdapterFormatError) as error:
        adapter_files.read(path)
    assert str(error.value) == f"{os.path.join(path, WEIGHTS)} {message} Remove one of the two."


def test_modules_to_save_without_tensors(tmp_path):
    path = folder(tmp_path / "a", peft_tensors(make()), modules_to_save=["lm_head"])
    with pytest.raises(MissingTensorsError) as error:
        adapter_files.read(path)
    assert str(error.value) == (
        f"{path}: modules_to_save names 'lm_head', but the file holds no tensor of it. Copy or save the adapter again, "
        "or remove the module from modules_to_save."
    )


def test_an_adapted_head_may_come_with_the_weight_of_its_base(tmp_path):
    adapter = make({"lm_head": 2})
    weight = np.ones((6, 6), np.float32)
    path = folder(
        tmp_path / "a",
        {
            **{f"base_model.model.lm_head.lora_{half}.weight": array for (_, half), array in adapter.tensors.items()},
            "base_model.model.lm_head.base_layer.weight": weight,
        },
        target_modules=["lm_head"],
    )
    np.testing.assert_array_equal(adapter_files.read(path).saved_modules["lm_head.weight"], weight)


def test_large_tensors_of_a_ckpt_come_in_pieces(tmp_path):
    adapter = make(alphas={})
    pieces = []
    for name, dtype, dims, content in ckpt_records(adapter):
        pieces += [(name, dtype, dims, content[:8]), (name, dtype, dims, content[8:])]
    (tmp_path / "a.ckpt").write_bytes(record(*pieces))
    adapter.alphas = {}
    assert_same(adapter_files.read(str(tmp_path / "a.ckpt")), adapter)


def test_mindspore_s_checksum_is_checked(tmp_path):
    import mindspore as ms

    from mindlora.core.errors import TruncatedAdapterError

    path = tmp_path / "a.ckpt"
    ms.save_checkpoint(
        [{"name": f"{Q}.mindpet_delta_lora_{half}", "data": ms.Tensor(np.ones((2, 2), np.float32))} for half in "ab"],
        str(path),
        crc_check=True,
    )
    assert adapter_files.read(str(path)).rank(Q) == 2
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content.replace(np.float32(1).tobytes(), np.float32(2).tobytes(), 1))
    with pytest.raises(TruncatedAdapterError) as error:
        adapter_files.read(str(path))
    assert str(error.value) == f"{path} is damaged: its checksum does not match its content. Copy or save it again."
