"""mindlora rl: what it gives to mindlora-run, and what it refuses before anything runs."""

import pytest
import yaml

from mindlora.cli import main
from mindlora.training.launch import launcher


def write(folder, **wrapper):
    (folder / "run.yaml").write_text(yaml.safe_dump({"run_mode": "finetune", "runner_wrapper": wrapper}))
    return str(folder / "run.yaml")


def test_a_yaml_without_rewards_is_refused(tmp_path, capsys):
    assert main(["rl", write(tmp_path, type="LoraTrainOneStepCell")]) == 1
    assert "has no runner_wrapper.rl, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, given",
    [
        ([], []),
        (["--resume"], ["--resume"]),
        (["--resume", "output/lora_checkpoint/step_4"], ["--resume", "output/lora_checkpoint/step_4"]),
        (["--runner_wrapper.rl.beta", "0.1"], ["--runner_wrapper.rl.beta", "0.1"]),
    ],
)
def test_words_go_to_mindlora_run(words, given, tmp_path, monkeypatch, capsys):
    launched = []
    monkeypatch.setattr(launcher, "main", lambda words: launched.append(words) or 0)
    path = write(tmp_path, rl={"prompts": "prompts.jsonl"})
    assert main(["rl", path, *words]) == 0
    assert launched == [["--config", path, *given]]
    assert "the run has ended." in capsys.readouterr().out
