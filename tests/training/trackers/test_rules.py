"""What the callback Trackers refuses, in a YAML of either Trainer and as an option of mindlora sweep."""

import re

import pytest

from mindlora.cli import main
from mindlora.core.errors import ConfigError
from mindlora.run.checks.examine import check_settings as check_settings_of_run
from mindlora.run.yaml_run import YamlRun
from mindlora.training.trackers.rules import NAMES, check_pynative_trackers, check_settings, tracker_names
from mindlora.training.trackers.tracker import TRACKERS

REFUSED = [
    ({"report_to": "tensorbord"}, "'tensorbord'.* Did you mean 'tensorboard'.* mlflow, swanlab, tensorboard, wandb"),
    ({"report_to": ["wandb", 1]}, "report_to has 1, which is not a tracker"),
    ({"report_to": []}, "it must name trackers, some of tensorboard, swanlab, wandb, mlflow"),
    ({"report_to": None}, "it must name trackers"),
    ({"report_to": "wandb", "name": 7}, "name is 7, but it must be a text"),
    ({"report_to": "wandb", "project": ""}, "project is '', but it must be a text"),
    ({"report_to": "wandb", "tags": "first"}, "tags is 'first', but it must be a list of texts"),
]


def test_one_name_and_a_list():
    assert tracker_names("wandb") == ("wandb",)
    assert tracker_names(["mlflow", "wandb", "mlflow"]) == ("mlflow", "wandb")
    assert check_settings(["tensorboard"], "p", "n", ["t"], None) == ("tensorboard",)


def test_each_name_has_a_tracker():
    assert tuple(TRACKERS) == NAMES


@pytest.mark.parametrize("settings, message", REFUSED)
def test_refusals(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_settings(**settings)
    (finding,) = check_pynative_trackers({"callbacks": [{"type": "RunReport"}, {"type": "Trackers", **settings}]})
    assert finding.key == "callbacks.Trackers" and re.search(message, str(finding))
    yaml = {"run_mode": "finetune", "callbacks": [{"type": "RunReport"}, {"type": "Trackers", **settings}]}
    assert check_settings_of_run(YamlRun(yaml)).count(finding) == 1


def test_an_unknown_key_in_a_yaml():
    (finding,) = check_pynative_trackers({"callbacks": [{"type": "Trackers", "report_to": "wandb", "tag": ["a"]}]})
    assert "has no argument 'tag'" in str(finding) and "tags" in str(finding)
    assert not list(check_pynative_trackers({"callbacks": [{"type": "Trackers", "report_to": "wandb"}]}))


def test_a_sweep_refuses_an_unknown_tracker(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_config: {type: LlamaConfig, pet_config: {pet_type: lora}}}\n", encoding="utf-8")
    assert main(["sweep", str(path), "--lr", "1e-4", "--report-to", "wandb,tensorflow"]) == 1
    assert "--report-to has 'tensorflow', which is not a tracker" in capsys.readouterr().err
