"""mindlora configs: lists the YAMLs that come with mindlora, copies one, writes one for a model's folder."""

import json
import pathlib

import pytest

from mindlora import cli
from mindlora.core.yaml_file import read_yaml
from tests.conftest import ROOT
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import HUGGING_FACE, VOCAB, llama, save_base
from tests.support.served_llama import write_llama


@pytest.fixture
def model(tmp_path):
    """A Llama's folder."""
    save_base(tmp_path / "tiny", llama(), **HUGGING_FACE, vocab_size=VOCAB, max_position_embeddings=64)
    chat_tokenizer(CHATML).save_pretrained(tmp_path / "tiny")
    return "tiny"


def test_it_lists_every_configuration_with_what_it_does(capsys):
    assert cli.main(["configs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["summaries"]
    folder = pathlib.Path(ROOT) / "configs"
    assert listed.keys() == {path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml")}
    assert "Llama" in listed["tiny/lora_llama_tiny_cpu"]
    assert cli.main(["configs"]) == 0
    printed = capsys.readouterr().out
    assert "mindlora configs NAME --output my.yaml" in printed and "mindlora configs --from FOLDER" in printed


def test_it_copies_one_and_replaces_nothing_unasked(tmp_path, capsys):
    name, output = "tiny/lora_llama_tiny_cpu", tmp_path / "my.yaml"
    original = (pathlib.Path(ROOT) / "configs" / f"{name}.yaml").read_bytes()
    assert cli.main(["configs", f"{name}.yaml", "--output", str(output)]) == 0
    assert output.read_bytes() == original
    output.write_text("mine")
    assert cli.main(["configs", name, "--output", str(output)]) == 1 and output.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["configs", name, "--output", str(output), "--overwrite"]) == 0
    assert output.read_bytes() == original


def test_a_wrong_name_gets_the_nearest_one(capsys):
    assert cli.main(["configs", "tiny/lora_llama_tiny_gpu", "--output", "x.yaml"]) == 1
    assert "Did you mean 'tiny/lora_llama_tiny_cpu'?" in capsys.readouterr().err
    assert cli.main(["configs", "tiny/lora_llama_tiny_cpu"]) == 1
    assert "--output my.yaml" in capsys.readouterr().err


def test_a_copy_names_the_installed_base_config(tmp_path, capsys):
    path = tmp_path / "my.yaml"
    assert cli.main(["configs", "tiny/lora_llama_tiny_cpu_preset", "--output", str(path)]) == 0
    assert read_yaml(str(path))["model"]["model_config"]["hidden_size"] == 128


def test_an_output_without_a_name_is_refused(tmp_path, capsys):
    assert cli.main(["configs", "--output", str(tmp_path / "my.yaml")]) == 1
    assert "needs the NAME of a configuration" in capsys.readouterr().err


def test_it_writes_the_yaml_of_a_models_folder(model, capsys):
    words = ["configs", "--from", model, "--device", "cpu", "--output", "run.yaml"]
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("run.yaml: Llama and Qwen2, 14,848 of 34,464 ") and "  mindlora-run --config run.yaml" in told
    )
    config = read_yaml("run.yaml")
    assert config["load_checkpoint"] == "tiny" and config["model"]["model_config"]["seq_length"] == 64
    assert cli.main(words) == 1 and "exists already" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained"] == 14848


def test_the_yaml_of_a_run_with_a_teacher_is_without_faults(tmp_path, capsys):
    write_llama(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(8 * (json.dumps({"prompt": "a b"}) + "\n"), encoding="utf-8")
    words = ["configs", "--from", "base", "--device", "cpu", "--output", "taught.yaml", "--prompts", "prompts.jsonl"]
    assert cli.main([*words, "--teacher", "{url: 'http://localhost:8000', model: large}"]) == 0
    assert "mindlora rl taught.yaml" in capsys.readouterr().out
    rl = read_yaml("taught.yaml")["runner_wrapper"]["rl"]
    assert rl["teacher"] == {"url": "http://localhost:8000", "model": "large"} and "reward_funcs" not in rl
    assert cli.main(["doctor", "taught.yaml", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["yamls"]
    assert [found["found"] for found in report["findings"] if found["severity"] != "note"] == []


@pytest.mark.parametrize("judged, loss", [(False, "dpo"), (True, "kto")])
def test_the_yaml_of_preferences_is_without_faults(tmp_path, judged, loss, capsys):
    write_llama(tmp_path)
    pair = {"prompt": "a b", "chosen": " c", "rejected": " d"}
    answers = [{"prompt": f"a {word}", "completion": " c", "label": word == "b"} for word in "abcd"]
    rows = "\n".join(map(json.dumps, answers if judged else [pair, pair]))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    converted = ["--input", "rows.jsonl", "--output", "rows.mindrecord", "--tokenizer", "base", "--seq-length", "96"]
    assert cli.main(["data", "preference", *converted]) == 0
    asked = ["--from", "base", "--data", "rows.mindrecord", "--device", "cpu", "--output", "drafted.yaml"]
    assert cli.main(["configs", *asked]) == 0
    assert f"with the loss {loss}" in capsys.readouterr().out
    assert cli.main(["doctor", "drafted.yaml", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["yamls"]
    assert [found["found"] for found in report["findings"] if found["severity"] != "note"] == []


@pytest.mark.parametrize(
    "words, said",
    [
        (["--from", "tiny"], "Say where the YAML for tiny goes"),
        (["--from", "tiny", "tiny/lora_llama_tiny_cpu", "--output", "x"], "Give one of them"),
        (["--from", "tiny", "--teacher", "{url", "--output", "x"], "--teacher is '{url', which is not YAML"),
        (["--from", "tiny", "--teacher", "http://h", "--output", "x"], "rl.teacher is 'http://h', without a model"),
        (["--device", "cpu"], "--device is about a model's own YAML"),
        (["--from", "tiny", "--data", "rows.jsonl", "--output", "x"], "--data rows.jsonl is neither a MindRecord"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, said, model, capsys):
    assert cli.main(["configs", *words]) == 1
    assert said in capsys.readouterr().err
