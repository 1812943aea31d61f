"""mindlora adapter gather and scatter, as a user calls them."""

import json

import numpy as np
import pytest

from mindlora.cli import main
from mindlora.files.adapters import files
from tests.support import sharded_runs
from tests.support.sharded_runs import Scheme

YAML = """
model:
  model_config:
    num_heads: 4
    n_kv_heads: 2
    hidden_size: 16
    pet_config:
      pet_type: lora
      lora_rank: 4
      lora_alpha: 6
      target_modules: '.*w_qkv'
      adapter_path: some/where
"""


@pytest.fixture
def joined_run(tmp_path):
    """A run of a model with qkv_concat: True; returns its whole tensors."""
    scheme, rng = Scheme(dp=2, mp=2, opt=2), np.random.default_rng(0)
    shapes = {sharded_runs.cell(0, "w_qkv", "a"): (4, 16), sharded_runs.cell(0, "w_qkv", "b"): (32, 4)}
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    sharded_runs.write_strategy(tmp_path / "run" / "strategy", scheme, whole)
    sharded_runs.write_ranks(tmp_path / "run" / "checkpoint_trainable", scheme, whole)
    (tmp_path / "run.yaml").write_text(YAML)
    return whole


def call(capsys, *words):
    """Returns the exit code and what was printed."""
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_from_the_ranks_to_peft_and_back(joined_run, tmp_path, capsys):
    run, yaml = tmp_path / "run", ("--config", tmp_path / "run.yaml")
    code, printed = call(capsys, "adapter", "gather", run / "checkpoint_trainable", *yaml)
    assert code == 0 and "3 pairs of rank 4, lora_alpha 6" in printed and "step 1_4 of 4 ranks" in printed
    adapter = files.read(str(run / "adapter"))
    assert {path.rpartition(".")[2] for path in adapter.paths} == {"wq", "wk", "wv"}
    # The pair of w_qkv is made of three.
    words = ("adapter", "scatter", run / "adapter", "--strategy", run / "strategy", "--output", tmp_path / "ranks")
    words = (*words, "--base", tmp_path / "run.yaml")
    code, printed = call(capsys, *words, "--json")
    assert code == 0 and json.loads(printed.strip().splitlines()[-1])["ranks"] == 4
    code, _ = call(
        capsys,
        "adapter",
        "gather",
        tmp_path / "ranks",
        "--strategy",
        run / "strategy",
        "--to",
        "ckpt",
        "--output",
        "back.ckpt",
    )
    assert code == 0
    back = files.read("back.ckpt")
    for name, array in joined_run.items():
        assert back.tensors[name.partition(".mindpet")[0], name[-1].upper()].tobytes() == array.tobytes()


def test_an_error_is_one_line(joined_run, tmp_path, capsys):
    code, printed = call(capsys, "adapter", "gather", tmp_path / "run" / "checkpoint_trainable", "--to", "ckpt")
    assert code == 1
    assert (
        printed.startswith("mindlora: error:") and "does not state lora_alpha" in printed and printed.count("\n") == 1
    )
