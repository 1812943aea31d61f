"""load_lora on files that are cut, foreign or incomplete: refused, with the network unchanged."""

import os
import pathlib

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import save_file

from mindlora import load_lora, save_lora
from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError, UnexpectedTensorsError
from tests.support.networks import TinyModel
from tests.support.saved_adapters import CONFIG, WEIGHTS, edited, load_refused, network


def test_a_cut_anywhere_in_the_tensors_is_noticed(saved):
    file = pathlib.Path(saved, WEIGHTS)
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    target = network()
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) - 1, *range(0, len(content), 61)}
    for cut in sorted(cuts):
        file.write_bytes(content[:cut])
        load_refused(
            target,
            saved,
            TruncatedAdapterError,
            f"{file} is truncated or damaged: its {cut} bytes are not what its header declares (",
        )
    file.write_bytes(content)
    load_lora(target, saved)


def test_a_cut_anywhere_in_a_ckpt_is_noticed(tmp_path):
    file, target = tmp_path / "adapter.ckpt", network(["wq"], cell=lambda: TinyModel(1))
    save_lora(target, file, format="ckpt")
    content = file.read_bytes()
    messages = set()
    # At every byte, because a cut between two records leaves what MindSpore takes for a complete file.
    for cut in range(len(content)):
        file.write_bytes(content[:cut])
        load_refused(target, file, TruncatedAdapterError, "PATH is truncated")
        with pytest.raises(TruncatedAdapterError) as error:
            load_lora(target, file, strict=False)
        messages.add(str(error.value).split(":", 1)[0] + (" last" if "last record" in str(error.value) else ""))
    assert messages == {
        f"{file} is truncated",
        f"{file} is truncated last",
        f"{file} is truncated or not a MindSpore checkpoint",
    }
    file.write_bytes(content)
    load_lora(target, file)


def test_paths_that_hold_no_adapter(tmp_path):
    (tmp_path / "adapter.bin").write_bytes(b"PK")
    (tmp_path / "adapter.pth").write_bytes(b"PK")
    (tmp_path / "no.safetensors").write_bytes(b"this is no safetensors file, but it is long enough to be one")
    (tmp_path / "no.ckpt").write_bytes(b"this is no checkpoint of MindSpore's, but it is long enough to be one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.bin").touch()
    (tmp_path / "other" / "a.txt").touch()
    target = network()
    for name, message in [
        ("absent", "PATH does not exist."),
        ("absent.ckpt", "PATH does not exist."),
        ("adapter.pth", "PATH must be an adapter folder or a .safetensors, .ckpt or .bin file."),
        ("adapter.bin", "PATH is a pickle, which can run programs."),
        ("empty", "PATH holds no adapter_model.safetensors. It holds: nothing."),
        ("other", "PATH holds no adapter_model.safetensors. It holds: a.txt, b.bin."),
    ]:
        load_refused(target, tmp_path / name, AdapterFormatError, message)
    load_refused(
        target, tmp_path / "no.ckpt", TruncatedAdapterError, "PATH is truncated or not a MindSpore checkpoint: "
    )
    load_refused(target, tmp_path / "no.safetensors", AdapterFormatError, "PATH is not a safetensors file: ")


def test_a_folder_without_a_config(saved):
    os.unlink(os.path.join(saved, CONFIG))
    load_refused(
        network(),
        saved,
        AdapterFormatError,
        f"{os.path.join(saved, CONFIG)} is missing: copy it into the folder, beside the weights.",
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"r": 2', f"{CONFIG} is not JSON: "),
        ("", f"{CONFIG} is not JSON: "),
        ("[2, 3]", f"{CONFIG} holds a list instead of a JSON object."),
        ('{"r": "2", "lora_alpha": 3}', f"{CONFIG}: r is '2'; it must be a whole number of at least 1."),
        ('{"r": 2, "lora_alpha": 3, "use_bdlora": true}', f"{CONFIG}: use_bdlora is True, which is not supported"),
    ],
)
def test_a_config_that_cannot_be_used(saved, text, message):
    pathlib.Path(saved, CONFIG).write_text(text)
    load_refused(network(), saved, AdapterFormatError, message)


def test_a_safetensors_file_without_lora_tensors(saved):
    base = {f"model.layers.{i}.weight": np.ones(2, np.float32) for i in range(7)}
    save_file(base, os.path.join(saved, WEIGHTS))
    load_refused(
        network(),
        saved,
        AdapterFormatError,
        f"{WEIGHTS} holds no LoRA tensor. It holds: model.layers.0.weight, model.layers.1.weight, "
        "model.layers.2.weight, model.layers.3.weight, model.layers.4.weight, ....",
    )
    save_file({}, os.path.join(saved, WEIGHTS))
    load_refused(network(), saved, AdapterFormatError, f"{WEIGHTS} holds no LoRA tensor. It holds: nothing.")


def test_a_ckpt_without_lora_tensors(tmp_path):
    path = str(tmp_path / "base.ckpt")
    ms.save_checkpoint(TinyModel(), path)
    load_refused(network(), path, AdapterFormatError, "PATH holds no LoRA tensor: no name in it belongs to an adapter.")


def test_a_file_of_peft_with_foreign_tensors(saved):
    edited(
        saved,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": np.ones(2, np.float32),
                "base_model.model.model.layers.0.self_attn.q_proj.lora_other.weight": np.ones(6, np.float32),
            }
        ),
    )
    load_refused(
        network(),
        saved,
        UnexpectedTensorsError,
        f"{WEIGHTS} holds tensors that are not LoRA's: base_model.model.model.layers.0.self_attn.q_proj."
        "lora_other.weight, lm_head.weight.",
    )


def test_a_file_of_peft_with_a_base_weight_that_modules_to_save_does_not_name(saved):
    edited(
        saved,
        lambda tensors: tensors.update(
            {f"base_model.model.model.layers.{i}.input_layernorm.weight": np.ones(6, np.float32) for i in range(2)}
        ),
    )
    load_refused(
        network(),
        saved,
        UnexpectedTensorsError,
        "PATH holds tensors that are neither LoRA's nor of modules_to_save: model.layers.{0..1}.attention_norm.weight.",
    )
