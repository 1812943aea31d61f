"""mindlora configs and report: the YAMLs that come with mindlora, and the page of a run."""

import json
import pathlib

from mindlora import cli
from mindlora.common.yaml_file import read_yaml
from tests.conftest import ROOT
from tests.support.histories import write_history


def test_it_lists_every_configuration_with_what_it_does(capsys):
    assert cli.main(["configs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["summaries"]
    folder = pathlib.Path(ROOT) / "configs"
    assert listed.keys() == {path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml")}
    assert "Llama" in listed["tiny/lora_llama_tiny_cpu"]
    assert cli.main(["configs"]) == 0 and "mindlora configs NAME --output my.yaml" in capsys.readouterr().out


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


def test_the_page_of_a_run_is_in_its_folder(tmp_path, capsys):
    write_history(tmp_path / "run", steps=20)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert capsys.readouterr().out == f"{page}: {tmp_path / 'run'}\n" and page.read_text("utf-8").endswith("</html>")


def test_several_runs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_history(tmp_path / name, steps=20, seed=len(name))
    assert cli.main(["report", "first", "second"]) == 0
    assert "Settings that differ" in (tmp_path / "comparison.html").read_text("utf-8")
    assert cli.main(["report", "first", "second", "--output", "pages/both.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "output": "pages/both.html",
        "runs": ["first", "second"],
    }
    assert (tmp_path / "pages" / "both.html").is_file()


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    write_history(tmp_path / "run", steps=2)
    assert cli.main(["report", str(tmp_path / "run"), str(tmp_path), "--output", str(tmp_path / "x.html")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"mindlora: error: {tmp_path} has no metrics.jsonl: name the output folder")
    assert not (tmp_path / "x.html").exists()
