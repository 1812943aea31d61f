"""The command mindlora doctor: its report, its exit code, and that it needs neither MindSpore nor MindFormers."""

import json
import os
import pathlib
import subprocess
import sys

import yaml

from mindlora import cli
from mindlora.core.text import WIDTH
from mindlora.core.yaml_file import PET
from tests.conftest import ROOT
from tests.support.doctor_findings import DATA


def test_the_command_line(write, capsys):
    good, bad = write(name="good.yaml"), write({f"{PET}.lora_rank": 0, DATA: ""}, name="bad.yaml")
    assert cli.main(["doctor"]) == 0
    assert "LoRADense" in capsys.readouterr().out
    assert cli.main(["doctor", good]) == 0
    assert f"{good}: 2 notes" in capsys.readouterr().out
    assert cli.main(["doctor", good, bad]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: 1 error, 1 note" in out and max(map(len, out.splitlines())) <= max(WIDTH, len(bad) + 20)
    assert out.index("error    model.model_config.pet_config.lora_rank") < out.index("note     train_dataset")
    assert cli.main(["doctor", bad, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["yamls"][0]["findings"][0]["key"] == f"{PET}.lora_rank"
    assert [item["name"] for item in report["machine"]][:2] == ["Python", "mindlora"]


def test_it_works_where_nothing_is_installed(write):
    code = (
        "import importlib.metadata, sys\n"
        "def version(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = version\n"
        "sys.modules.update(mindspore=None, mindformers=None)\n"
        "from mindlora import cli\n"
        "sys.exit(cli.main(['doctor', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, write({f"{PET}.target_modules": ".*query"})],
        check=False,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr == ""
    assert "MindFormers  not installed" in done.stdout and "matches no linear cell" in done.stdout


def test_a_run_on_npus_is_told_how_it_makes_no_logits_of_all_tokens_where_it_can(tmp_path, capsys):
    shipped = os.path.join(ROOT, "configs", "llama3", "lora_llama3_8b.yaml")
    paths = {name: str(tmp_path / f"{name}.yaml") for name in ("semi", "off", "other")}
    config = yaml.safe_load(pathlib.Path(shipped).read_text(encoding="utf-8"))
    config["parallel"].update(parallel_mode=1, full_batch=True)
    pathlib.Path(paths["semi"]).write_text(yaml.safe_dump(config), encoding="utf-8")
    config["runner_wrapper"]["loss_in_pieces"] = False
    pathlib.Path(paths["off"]).write_text(yaml.safe_dump(config), encoding="utf-8")
    config["runner_wrapper"] = {"type": "MFTrainOneStepCell", "scale_sense": 1.0}
    pathlib.Path(paths["other"]).write_text(yaml.safe_dump(config), encoding="utf-8")
    cli.main(["doctor", shipped, *paths.values(), "--json"])
    alone, semi, off, whole = (
        [finding for finding in one["findings"] if finding["key"] == "runner_wrapper.loss_in_pieces"]
        for one in json.loads(capsys.readouterr().out)["yamls"]
    )
    assert "as the train step is MindFormers' own" in whole[0]["found"] and "parallel_mode: 0" in whole[0]["advice"]
    for pieces in (alone, semi):
        assert "some tokens at a time" in pieces[0]["found"] and not pieces[0]["advice"]
    assert "loss_in_pieces is False" in off[0]["found"] and not off[0]["advice"]
