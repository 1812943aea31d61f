"""convert_adapter and `mindlora adapter convert`: every form into every other, and what is refused."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import AdapterError, LoraError, ScaleMismatchError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter

FORMS = {"peft": "peft", "mindformers": "a.safetensors", "ckpt": "a.ckpt", "slora": "slora"}
SIZES = {"attention.wq": 8, "attention.wk": 4, "attention.wv": 4, "feed_forward.w1": 5, "feed_forward.w3": 5}


def make_adapter(leaves=tuple(SIZES), **fields):
    rng, adapter = np.random.default_rng(0), Adapter({}, **fields)
    for layer, leaf in itertools.product(range(2), leaves):
        path = f"model.layers.{layer}.{leaf}"
        adapter.tensors[path, "A"] = rng.normal(size=(2, 6)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(SIZES[leaf], 2)).astype(np.float32)
        adapter.alphas[path] = 4.0
    return adapter


def written(tmp_path, form, **fields):
    path = str(tmp_path / "in" / FORMS[form])
    adapter_files.write(make_adapter(**fields), path, form)
    return path


def base_folder(tmp_path):
    """A folder with the config.json of the model under make_adapter's."""
    (tmp_path / "base").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path / "base")


def assert_same(path, expected, **heads):
    found = adapter_files.read(path)
    assert found.alphas == expected.alphas and set(found.tensors) == set(expected.tensors)
    for key, array in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[key], array)


@pytest.mark.parametrize("source, to", itertools.product(FORMS, FORMS))
def test_every_form_becomes_every_other_bit_for_bit(tmp_path, source, to):
    output = str(tmp_path / "out" / FORMS[to])
    report = convert_adapter(written(tmp_path, source), output, to)
    assert_same(output, make_adapter())
    assert (report.pairs, report.ranks, report.alphas, report.form, report.saved_modules) == (10, (2,), (4.0,), to, 0)
    assert str(report).endswith(f"-> {output} ({to}): 10 pairs of rank 2, lora_alpha 4.")


@pytest.mark.parametrize("to", ["mindformers", "ckpt", "slora"])
def test_pairs_are_joined_for_qkv_concat_and_split_again_for_peft(tmp_path, to):
    joined, back = str(tmp_path / "joined" / FORMS[to]), str(tmp_path / "back")
    report = convert_adapter(written(tmp_path, "peft"), joined, to, heads=Heads(kv_heads=2), concatenate=True)
    found = adapter_files.read(joined)
    assert report.pairs == 4 and set(found.paths) == {
        f"model.layers.{layer}.{leaf}"
        for layer in range(2)
        for leaf in ("attention.w_qkv", "feed_forward.w_gate_hidden")
    }
    # By hand: two heads of q, then one of k and one of v, for each of the two key-value heads; w1 and w3 alternate.
    order = [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    separate = np.concatenate([make_adapter().delta(f"model.layers.1.attention.{leaf}") for leaf in ("wq", "wk", "wv")])
    np.testing.assert_allclose(found.delta("model.layers.1.attention.w_qkv"), separate[order], rtol=1e-5, atol=1e-6)
    convert_adapter(joined, back, "peft", heads=Heads(kv_heads=2, head_dim=2))
    assert_same(back, make_adapter())


def test_the_sizes_of_missing_parts_follow_from_the_heads(tmp_path):
    joined = str(tmp_path / "joined.ckpt")
    source = written(tmp_path, "peft", leaves=("attention.wq",))
    with pytest.raises(AdapterError) as error:
        convert_adapter(source, joined, "ckpt", heads=Heads(kv_heads=2), concatenate=True)
    assert "but the adapter has only model.layers.0.attention.wq" in str(error.value)
    convert_adapter(source, joined, "ckpt", heads=Heads(kv_heads=2, head_dim=2), concatenate=True)
    assert adapter_files.read(joined).tensors["model.layers.0.attention.w_qkv", "B"].shape == (16, 2)


def test_an_alpha_that_the_source_does_not_say_must_be_given(tmp_path):
    from safetensors.numpy import save_file

    source, output = str(tmp_path / "lora.safetensors"), str(tmp_path / "out")
    save_file(
        {f"decoder.layers.0.mlp.linear_fc2.lora_{half}.weight": np.ones((2, 2), np.float32) for half in "AB"}, source
    )
    with pytest.raises(ScaleMismatchError) as error:
        convert_adapter(source, output, "peft")
    assert str(error.value) == (
        "The adapter (MindFormers' mcore LoRA) does not state lora_alpha, so the scale of "
        "model.layers.0.feed_forward.w2 is not known. Give the lora_alpha that it was trained with."
    )
    assert not os.path.exists(output)
    convert_adapter(source, output, "peft", lora_alpha=3)
    assert adapter_files.read(output).alphas == {"model.layers.0.feed_forward.w2": 3.0}
    with pytest.raises(ScaleMismatchError) as error:
        convert_adapter(output, str(tmp_path / "a.ckpt"), "ckpt", lora_alpha=5)
    assert str(error.value) == "lora_alpha is 5, but the adapter has its own: 3. Leave it out."


def test_an_existing_output_is_kept_unless_it_may_be_replaced(tmp_path):
    source, output = written(tmp_path, "peft"), str(tmp_path / "a.ckpt")
    convert_adapter(source, output, "ckpt")
    before = pathlib.Path(output).read_bytes()
    with pytest.raises(LoraError, match="exists already"):
        convert_adapter(written(tmp_path, "slora", leaves=("attention.wq",)), output, "ckpt")
    assert pathlib.Path(output).read_bytes() == before
    convert_adapter(written(tmp_path, "slora", leaves=("attention.wq",)), output, "ckpt", overwrite=True)
    assert_same(output, make_adapter(("attention.wq",)))
    with pytest.raises(LoraError, match="both the input and the output"):
        convert_adapter(source, source + "/.", "peft", overwrite=True)
    with pytest.raises(LoraError, match="holds the input .*peft, which would be replaced with it"):
        convert_adapter(source, str(tmp_path), "peft", overwrite=True)


@pytest.mark.parametrize(
    "to, name, keys, message",
    [
        ("peft", "out", {"concatenate": True}, "PEFT has no joined modules"),
        ("ckpt", "out", {}, "path is 'out': format 'ckpt' writes a file that ends in .ckpt."),
        ("onnx", "out", {}, "format is 'onnx', which is not known."),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, to, name, keys, message):
    with pytest.raises(LoraError) as error:
        convert_adapter(written(tmp_path, "peft"), name, to, **keys)
    assert str(error.value).startswith(message) and os.listdir(tmp_path) == ["in"]


def test_a_joint_pair_needs_the_heads_to_become_peft_s(tmp_path):
    adapter = Adapter(
        {
            ("model.layers.0.attention.w_qkv", half): np.ones(shape, np.float32)
            for half, shape in (("A", (2, 6)), ("B", (16, 2)))
        },
        {"model.layers.0.attention.w_qkv": 2.0},
    )
    source = str(tmp_path / "a.ckpt")
    adapter_files.write(adapter, source, "ckpt")
    with pytest.raises(AdapterError, match="which do not match an unknown number of key-value heads of unknown size"):
        convert_adapter(source, str(tmp_path / "out"), "peft")
    convert_adapter(source, str(tmp_path / "out"), "peft", heads=Heads(kv_heads=2, head_dim=2))
    found = adapter_files.read(str(tmp_path / "out"))
    assert {path: found.scale(path) for path in found.paths} == {
        f"model.layers.0.attention.{leaf}": 1.0 for leaf in ("wq", "wk", "wv")
    }


# The command ----------------------------------------------------------------------------------------------------


def test_the_command_converts_and_reports(tmp_path, capsys):
    source, output = written(tmp_path, "peft"), str(tmp_path / "a.ckpt")
    assert cli.main(["adapter", "convert", source, output, "--to", "ckpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "source": source,
        "dialect": "PEFT",
        "output": output,
        "form": "ckpt",
        "pairs": 10,
        "saved_modules": 0,
        "ranks": [2],
        "alphas": [4.0],
        "left_out": [],
    }
    base, joined = base_folder(tmp_path), str(tmp_path / "j.ckpt")
    assert cli.main(["adapter", "convert", output, joined, "--to", "ckpt", "--concat", "--base", base]) == 0
    assert cli.main(["adapter", "convert", joined, str(tmp_path / "p"), "--to", "peft", "--base", base]) == 0
    assert_same(str(tmp_path / "p"), make_adapter())
    capsys.readouterr()
    assert cli.main(["adapter", "convert", source, output, "--to", "ckpt"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"mindlora: error: {output} exists already.") and not printed.out


def test_between_safetensors_forms_mindspore_is_not_imported(tmp_path):
    program = (
        "import sys\nfrom mindlora import cli\n"
        "assert cli.main(['adapter', 'convert', sys.argv[1], sys.argv[2], '--to', 'mindformers']) == 0\n"
        "assert not any(name.partition('.')[0] in ('mindspore', 'mindformers') for name in sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, written(tmp_path, "peft"), str(tmp_path / "a.safetensors")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("through", ["peft", "ckpt", "mindformers"])
@pytest.mark.parametrize("task", ["SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", None, "CAUSAL_LM"])
def test_what_a_configuration_says_besides_comes_back_from_every_form(tmp_path, through, task):
    """PEFT -> another form -> PEFT: the task, and each field that changes nothing, known or not."""
    fields = {
        "task_type": task,
        "revision": "main",
        "auto_mapping": {"base_model_class": "LlamaModel", "parent_library": "transformers"},
        "inference_mode": False,
        "peft_version": "0.15.2",
        "modules_to_save": None,
        "unsloth_fixed": True,
        "base_model_name_or_path": "some/base",
    }
    source = written(tmp_path, "peft")
    config = pathlib.Path(source, "adapter_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields, "eva_config": {"rho": 2.0}}))
    convert_adapter(source, str(tmp_path / FORMS[through]), through)
    convert_adapter(str(tmp_path / FORMS[through]), str(tmp_path / "back"), "peft")
    found = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert {field: found[field] for field in fields} == fields
    # It belongs to an init_lora_weights that is over.
    assert "eva_config" not in found
