"""What is recognized and not read is named with a way out; "no LoRA tensor" is said only where that is so."""

import os

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterFormatError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.dialects.foreign import FOREIGN
from tests.support.adapter_samples import folder, make, peft_tensors
from tests.support.diffusion_adapters import saved

# What it is -> a key of such a file.
KEYS = {
    "a Flux adapter": "transformer.single_transformer_blocks.3.attn.to_q.lora_A.weight",
    "a Flux adapter ": "lora_unet_double_blocks_0_img_attn_proj.lora_down.weight",
    "a Wan adapter": "diffusion_model.blocks.0.self_attn.q.lora_A.weight",
    "a Wan adapter ": "lora_unet_blocks_0_cross_attn_k.lora_up.weight",
    "Stable Diffusion 3": "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight",
    "a Control-LoRA": "lora_controlnet",
    "a diffusion model other than Stable Diffusion": "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
    "several adapters that train in one run": "decoder.layers.0.self_attention.linear_qkv.stacked_lora_a",
    "torchtune's checkpoint": "layers.0.attn.q_proj.lora_a.weight",
    "lit-gpt's adapter": "transformer.h.0.attn.attn.lora_A",
    "NeMo's adapter": "model.decoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight",
    "Megatron-Bridge's or NeMo 2's adapter": "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight",
}
# What it is -> a file in its folder.
FILES = {
    "a GGUF file": "lora-f16.gguf",
    "torchtune's checkpoint": "adapter_0.pt",
    "lit-gpt's adapter": "lit_model.pth.lora",
    "NeMo's adapter": "megatron_gpt_peft_lora_tuning.nemo",
    "Megatron-Bridge's or NeMo 2's adapter": "__0_0.distcp",
    "MindSpeed-LLM's or Megatron's checkpoint": "latest_checkpointed_iteration.txt",
    "an old mlx-lm": "adapters.npz",
    "several ranks": "rank_1",
}


def refused(path):
    with pytest.raises(AdapterFormatError) as caught:
        adapter_files.read(str(path))
    return str(caught.value)


@pytest.mark.parametrize("name, key", KEYS.items())
def test_keys_of_other_programs_are_named(tmp_path, name, key):
    message = refused(saved(tmp_path / "a.safetensors", {key: np.ones((2, 2), np.float32)}))
    assert f"{name.strip()}" in message and "which mindlora cannot read. " in message and message.endswith(".")


@pytest.mark.parametrize("name, file", FILES.items())
def test_files_of_other_programs_are_named_by_themselves_and_in_their_folder(tmp_path, name, file):
    (tmp_path / file).write_bytes(b"\x00" * 64)
    for path in (tmp_path, tmp_path / file):
        assert f"{name}, which mindlora cannot read. " in refused(path)


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"GGUF" + b"\x00" * 60)
    assert "is a GGUF file" in refused(tmp_path / "a.bin")


def test_each_advice_is_a_sentence_about_a_form_that_has_a_test():
    tested = {name.strip() for name in (*KEYS, *FILES)} | {"LyCORIS", "kohya", "textual inversion"}
    for form in FOREIGN:
        assert form.keys or form.files
        assert form.advice[0].isupper() and form.advice.endswith("."), form.name
        assert any(name in form.name for name in tested), form.name


def test_lora_under_unknown_names_is_not_no_lora(tmp_path):
    tensors = {"blk.0.q.lora_left": np.ones((2, 2), np.float32), "blk.0.q.weight": np.ones((2, 2), np.float32)}
    message = refused(saved(tmp_path / "a.safetensors", tensors))
    assert "holds LoRA tensors under names that mindlora does not know: blk.0.q.lora_left. " in message
    del tensors["blk.0.q.lora_left"]
    assert "holds no LoRA tensor. It holds: blk.0.q.weight." in refused(saved(tmp_path / "b.safetensors", tensors))


@pytest.mark.parametrize("place", ["adapter_model.safetensors", "other.safetensors"])
def test_a_pointer_of_git_lfs_says_what_it_is(tmp_path, place):
    path = folder(tmp_path / "a", peft_tensors(make()))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n"
    with open(os.path.join(path, place), "wb") as file:
        file.write(pointer)
    assert "is a pointer of Git LFS, not the file itself. Run `git lfs pull`" in refused(os.path.join(path, place))
    if place.startswith("adapter_model"):
        assert "is a pointer of Git LFS" in refused(path)


def test_a_folder_above_the_adapter_names_it(tmp_path):
    one = folder(tmp_path / "run" / "checkpoint-500" / "adapter", peft_tensors(make()))
    above = tmp_path / "run"
    assert refused(above) == f"{above} holds no adapter itself, but there is one below it: give {one}."
    folder(tmp_path / "run" / "checkpoint-1000", peft_tensors(make()))
    assert "but there are 2 below it. Give one of them: " in refused(above)
    # Too deep to be meant.
    assert "holds no adapter_model.safetensors. It holds: run." in refused_above(tmp_path / "far", one)


def refused_above(top, adapter):
    deep = top / "run" / "a" / "b" / "c" / "d"
    deep.parent.mkdir(parents=True)
    os.rename(adapter, deep)
    return refused(top)


def test_the_command_ends_with_one_line(tmp_path, capsys):
    path = saved(tmp_path / "a.safetensors", {KEYS["a Flux adapter"]: np.ones((2, 2), np.float32)})
    assert cli.main(["adapter", "inspect", path]) == 1
    error = capsys.readouterr().err
    assert "is a Flux adapter, which mindlora cannot read. Load it with diffusers; " in error and error.count("\n") == 1
