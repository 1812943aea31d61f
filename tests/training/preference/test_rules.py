"""runner_wrapper.preference in a YAML: what it needs from the rest of it, and from the data."""

import re

import numpy as np
import pytest

from mindlora.core.yaml_file import PET
from mindlora.run.yaml_run import YamlRun
from mindlora.training.preference.rules import KEY, check_preference, check_preference_rows

PAIRS = ["input_ids", "labels", "answers", "pairs"]
JUDGED = [*PAIRS[:3], "judgments"]


def config(preference, **changes):
    """A YAML that learns from preferences."""
    return {
        "run_mode": "finetune",
        "use_parallel": False,
        "runner_wrapper": {"type": "LoraTrainOneStepCell", "preference": preference},
        "train_dataset": {"input_columns": PAIRS},
        "model": {"model_config": {"type": "LlamaConfig", "pet_config": {"pet_type": "lora"}}},
        **changes,
    }


def mcore(**keys):
    """Changes that make the model an mcore one."""
    return {"use_legacy": False, "model": {"model_config": {"model_type": "qwen3", "pet_config": {}, **keys}}}


def found(yaml):
    return [(finding.severity, finding.key, str(finding)) for finding in check_preference(YamlRun(yaml))]


def test_a_yaml_without_faults():
    assert found(config({"loss": "dpo"})) == [] and found(config({})) == []
    assert found(config({"loss": "kto"}, train_dataset={"input_columns": JUDGED})) == []
    assert found({"run_mode": "finetune", "runner_wrapper": {}}) == []
    assert found(config({"loss": "nothing"}, run_mode="predict")) == []
    assert found(config({}, **mcore())) == []
    assert found(config({"loss": "simpo"}, **mcore(hidden_dropout=0.1))) == []


@pytest.mark.parametrize(
    "changes, key, message",
    [
        ({"preference": {"loss": "dpoo"}}, KEY, "loss is 'dpoo'"),
        ({"runner_wrapper": {"type": "MFTrainOneStepCell", "preference": {}}}, KEY, "type is MFTrainOneStepCell"),
        ({"use_parallel": True, "parallel": {"parallel_mode": 1}}, KEY, "parallel.parallel_mode: 0"),
        (mcore(num_nextn_predict_layers=1), KEY, "has 1 layers that predict further tokens"),
        (mcore(hidden_dropout=0.1), "model.model_config.hidden_dropout", "the reference, .* would be dropped out too"),
        (mcore(attention_dropout=0.1), "model.model_config.attention_dropout", "precomputed_reference: True"),
        (
            {"train_dataset": {"input_columns": ["input_ids", "labels"]}},
            "train_dataset.input_columns",
            r"Write input_columns: \['input_ids', 'labels', 'answers', 'pairs'\]",
        ),
        ({"preference": {"loss": "kto"}}, "train_dataset.input_columns", "'judgments'"),
        (
            {"model": {"model_config": {"pet_config": {"pet_type": "lora", "lora_init": "pissa"}}}},
            f"{PET}.lora_init",
            "compares with the base.* simpo, orpo or cpo",
        ),
        ({"preference": {"precomputed_reference": True}}, "train_dataset.input_columns", "'pairs', 'reference'"),
        ({"preference": {"loss": "orpo", "precomputed_reference": True}}, KEY, "the loss orpo has no reference"),
        (
            {"model": {"model_config": {"input_sliced_sig": True}}},
            "model.model_config.input_sliced_sig",
            "one token more than seq_length",
        ),
    ],
)
def test_what_is_refused(changes, key, message):
    preference = changes.pop("preference", {})
    ((severity, where, text),) = found(config(preference, **changes))
    assert (severity, where) == ("error", key)
    assert re.search(message, text)


def test_an_initialization_that_changes_the_base_goes_with_a_loss_without_reference():
    model = {"model_config": {"pet_config": {"pet_type": "lora", "lora_init": "pissa"}}}
    assert found(config({"loss": "orpo"}, model=model)) == []
    model["model_config"]["pet_config"]["adapter_path"] = "adapter"
    assert found(config({"loss": "dpo"}, model=model)) == []


@pytest.mark.parametrize(
    "preference, columns, message",
    [
        (None, PAIRS, "holds preferences, but the run learns labels"),
        ({"loss": "dpo"}, JUDGED, "holds answers with labels, and the loss dpo learns from pairs"),
        ({"loss": "kto"}, PAIRS, "holds pairs, and the loss kto learns from answers with labels"),
        ({"loss": "dpo"}, PAIRS[:2], "lacks the columns answers, pairs"),
        ({"loss": "dpo"}, PAIRS, None),
        ({"precomputed_reference": True}, PAIRS, "lacks the column reference. Run mindlora reference"),
        ({"precomputed_reference": True}, [*PAIRS, "reference"], None),
        ({"loss": "kto"}, JUDGED, None),
        (None, PAIRS[:2], None),
    ],
)
def test_the_kind_of_the_data(tmp_path, preference, columns, message):
    path = tmp_path / "x.mindrecord"
    path.write_text("")
    yaml = config(preference)
    yaml["train_dataset"]["data_loader"] = {"type": "MindDataset", "dataset_dir": str(path)}
    yaml["callbacks"] = [{"type": "HeldOutLoss", "dataset_dir": str(path)}]
    row = {name: np.zeros(4, np.int32) for name in columns}
    findings = list(check_preference_rows(YamlRun(yaml), lambda file, count: iter([row])))
    assert [finding.key for finding in findings] == (["train_dataset", "callbacks.HeldOutLoss"] if message else [])
    assert all(message in str(finding) for finding in findings)
