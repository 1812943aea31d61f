"""What mindlora-run checks before MindFormers is set up: the machine, msrun, and what predicting needs."""

import pytest

from mindlora.core.errors import ConfigError
from mindlora.run.checks.examine import check_settings
from mindlora.run.checks.finding import refuse
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import launcher
from mindlora.training.launch.launch_checks import check_launch
from mindlora.training.launch.preflight import refuse_missing_files
from tests.support.runs import LORA_YAML, read_yaml, write_yaml

TOKENIZER = "--processor.tokenizer.tokenizer_file"


def check(*words):
    config = launcher.build_config(["--config", LORA_YAML, *words])
    check_launch(config, config.pop("random_base", False))
    refuse(check_settings(YamlRun(config)))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("MS_ROLE", "RANK_TABLE_FILE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_run_that_can_start_passes(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    check()
    predict = ["--run_mode", "predict", "--predict_data", "one", TOKENIZER, str(tmp_path / "tokenizer.json")]
    check(*predict, "--load_checkpoint", "base.ckpt")
    check(*predict, "--random_base")
    check("--run_mode", "eval", "--random_base")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--device_target", "Ascend"], "MindSpore finds no Ascend device here.*lora_llama_tiny_cpu.yaml"),
        (["--use_parallel", "True"], "this process is alone.*msrun --worker_num=8"),
        (["--resume_training", "True"], "this run saves with LoraCheckpoint. Use --resume"),
        (["--run_mode", "eval"], "load_checkpoint is empty, so the base would have random weights.*--random_base"),
        (["--run_mode", "predict", "--predict_data", "one"], "load_checkpoint is empty"),
        (["--run_mode", "predict", "--random_base"], "give texts with --predict_data"),
        (
            ["--run_mode", "predict", "--random_base", "--predict_data", "one"],
            "an empty tokenizer_file and vocab_file.*--processor.tokenizer.tokenizer_file tokenizer.json",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        check(*words)


def test_a_tokenizer_that_is_not_there_is_named():
    words = ["--run_mode", "predict", "--random_base", "--predict_data", "one", TOKENIZER, "nowhere.json"]
    check(*words)
    with pytest.raises(ConfigError, match="processor.tokenizer.tokenizer_file: nowhere.json does not exist"):
        refuse_missing_files(launcher.build_config(["--config", LORA_YAML, *words]))


def test_the_folder_of_the_model_is_the_base_where_load_checkpoint_is_empty(tmp_path):
    """As MindFormers' own predict_qwen3.yaml has it."""
    words = ("--config", LORA_YAML, "--run_mode", "eval", "--pretrained_model_dir", str(tmp_path))
    with pytest.raises(ConfigError, match="load_checkpoint is empty"):
        check_launch(launcher.build_config(words))
    (tmp_path / "model.safetensors").touch()
    config = launcher.build_config(words)
    check_launch(config)
    assert config.load_checkpoint == str(tmp_path)
    config = launcher.build_config([*words, "--load_checkpoint", "base.ckpt"])
    check_launch(config)
    assert config.load_checkpoint == "base.ckpt"


def test_the_base_may_be_named_in_the_node_checkpoint(tmp_path):
    """The newer form of MindFormers 1.9, which reads .safetensors files whatever load_ckpt_format says."""
    base = tmp_path / "model.safetensors"
    base.touch()
    node = {"run_mode": "finetune", "load_checkpoint": "", "checkpoint": {"load_path": str(base)}}
    config = launcher.build_config(["--config", write_yaml(tmp_path, {**read_yaml(LORA_YAML), **node})])
    check_launch(config)
    assert config.load_checkpoint == str(base)
    with pytest.raises(ConfigError, match="dataset_dir is empty"):
        refuse_missing_files(config)
    config.checkpoint = None
    with pytest.raises(ConfigError, match="is safetensors, but load_ckpt_format is 'ckpt'"):
        refuse_missing_files(config)
    config.use_legacy_format = False
    with pytest.raises(ConfigError, match="dataset_dir is empty"):
        refuse_missing_files(config)


def test_under_msrun_several_processes_are_at_hand(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    check("--use_parallel", "True")
