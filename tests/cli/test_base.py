"""mindlora base convert and merge: arguments, reports, exit codes, and that neither imports MindSpore."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from tests.conftest import ROOT

Q, WQ = "model.layers.0.self_attn.q_proj", "model.layers.0.attention.wq"


@pytest.fixture
def base(tmp_path):
    """A base of one linear cell, its embedding and its head."""
    (tmp_path / "base").mkdir()
    write_arrays(
        str(tmp_path / "base" / "model.safetensors"),
        {
            f"{Q}.weight": np.eye(4, dtype=np.float32),
            "lm_head.weight": np.ones((6, 4), np.float32),
            "model.embed_tokens.weight": np.ones((6, 4), np.float32),
        },
        {"format": "pt"},
    )
    return str(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path):
    """A pair for that cell, in a file without lora_alpha."""
    path = str(tmp_path / "adapter.safetensors")
    write_arrays(
        path,
        {
            f"{WQ}.mindpet_delta_lora_a": np.ones((2, 4), np.float32),
            f"{WQ}.mindpet_delta_lora_b": np.ones((4, 2), np.float32),
        },
    )
    return path


def test_convert_base(base, tmp_path, capsys):
    out = str(tmp_path / "out.safetensors")
    assert cli.main(["base", "convert", base, out, "--from", "hf", "--to", "mindformers", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["from_"], report["to"], report["tensors"], report["files"]) == ("hf", "mindformers", 3, [out])
    with TensorFile(out) as file:
        assert set(file.tensors) == {f"{WQ}.weight", "lm_head.weight", "model.tok_embeddings.embedding_weight"}
    assert cli.main(["base", "convert", out, str(tmp_path / "back"), "--to", "hf", "--tied"]) == 0
    assert "tensors: 2," in capsys.readouterr().out
    assert cli.main(["base", "convert", base, out, "--to", "mindformers"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main(["base", "convert", base, out, "--to", "mindformers", "--overwrite"]) == 0
    assert cli.main(["base", "convert", base, str(tmp_path / "new"), "--from", "mindformers", "--to", "hf"]) == 1
    assert not (tmp_path / "new").exists()


def test_convert_base_joins_and_splits(tmp_path, capsys):
    parts = {
        f"model.layers.0.self_attn.{part}.weight": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        for part, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))
    }
    write_arrays(str(tmp_path / "hf.safetensors"), {**parts, "lm_head.weight": np.ones((2, 2), np.float32)})
    joined, back = str(tmp_path / "mf"), str(tmp_path / "back.safetensors")
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = ["--config", str(tmp_path / "model")]
    source = str(tmp_path / "hf.safetensors")
    assert cli.main(["base", "convert", source, joined, "--to", "mindformers", "--concat", *model]) == 0
    assert cli.main(["base", "convert", joined, back, "--to", "hf"]) == 1
    assert "name its folder or YAML (--config" in capsys.readouterr().err
    assert cli.main(["base", "convert", joined, back, "--to", "hf", *model]) == 0
    assert cli.main(["base", "convert", joined, str(tmp_path / "folder"), "--to", "hf", *model]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text(encoding="utf-8")) == config
    with TensorFile(back) as file:
        assert all(np.array_equal(file.read(name), array) for name, array in parts.items())


def test_merge(base, adapter, tmp_path, capsys):
    words = ["base", "merge", "--base", base, "--adapter", adapter, "--output", str(tmp_path / "out")]
    assert cli.main(words) == 1
    assert "lora_alpha" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main([*words, "--alpha", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["merged"], report["replaced"], report["unchanged"]) == (1, 0, 2)
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        np.testing.assert_array_equal(file.read(f"{Q}.weight"), np.eye(4) + 3 / 2 * 2)
    assert cli.main([*words, "--alpha", "3"]) == 1
    assert cli.main([*words, "--alpha", "3", "--overwrite"]) == 0
    assert "tensors merged: 1," in capsys.readouterr().out


def test_neither_imports_mindspore(base, adapter, tmp_path):
    code = (
        "import sys; from mindlora import cli; "
        f"assert cli.main(['base', 'convert', {base!r}, {str(tmp_path / 'a')!r}, '--to', 'mindformers']) == 0; "
        f"assert cli.main(['base', 'merge', '--base', {base!r}, '--adapter', {adapter!r}, '--output', "
        f"{str(tmp_path / 'b')!r}, '--alpha', '1']) == 0; "
        "sys.exit(any(name in sys.modules for name in ('mindspore', 'mindformers')))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_bar_after_more_than_a_second(base, tmp_path, monkeypatch, capsys):
    from mindlora.cli import base as verbs

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with verbs._Bar("base convert") as bar:
        bar(1, 10)
        assert "base convert" not in capsys.readouterr().err
        bar._bar.start_t -= 2
        monkeypatch.setattr(bar._bar, "mininterval", 0)
        bar(4, 10)
        bar._bar.refresh()
    assert "base convert:  50%" in capsys.readouterr().err
    assert cli.main(["base", "convert", base, str(tmp_path / "out"), "--to", "mindformers"]) == 0
    assert "base convert" not in capsys.readouterr().err


def test_no_bar_in_a_file(capsys):
    from mindlora.cli import base as verbs

    with verbs._Bar("base convert") as bar:
        bar(1, 10)
        bar._bar.start_t = 0
        bar(9, 10)
    assert capsys.readouterr().err == ""
