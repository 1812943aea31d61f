"""mindlora doctor --ascend: whether a YAML compiles for its devices, on a machine without any."""

import os

import yaml

from mindlora.cli import main
from mindlora.core.yaml_file import merged, read_yaml
from tests.conftest import ROOT
from tests.support.ascend_backend import on_request

LLAMA = os.path.join(ROOT, "configs/llama3/lora_llama3_8b.yaml")
SMALL = {"runner_config": {"batch_size": 1}, "model": {"model_config": {"num_layers": 1, "vocab_size": 4096}}}


def written(folder, *changes):
    """Returns the path of the Llama YAML with other values, in a folder of its own."""
    config = read_yaml(LLAMA)
    for change in (SMALL, *changes):
        config = merged(config, change)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


@on_request
def test_the_first_and_the_last_rank_of_eight_compile_and_nothing_is_left_behind(tmp_path, monkeypatch, capsys):
    path = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", path, "--ascend"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for rank in (0, 7):
        assert f"as rank {rank} of 8: the run compiles and reaches its second step, on made-up rows" in text
    assert text.count("cannot tell: what CANN's kernels compute") == 1
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_the_error_of_a_run_that_does_not_compile_is_told(tmp_path, capsys):
    path = written(tmp_path, {"context": {"mempool_block_size": "much"}})
    assert main(["doctor", path, "--ascend", "--devices", "1"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "as rank 0 of 1: the run ended after 0 of 2 steps. ValueError: " in text
    assert "'much'" in text
