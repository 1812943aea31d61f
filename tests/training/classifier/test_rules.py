"""Classifiers in a YAML: their labels, and what does not go with them."""

import pytest

from mindlora.core.yaml_file import PET
from mindlora.run.yaml_run import YamlRun
from mindlora.training.classifier.rules import CLASS, LABELS, check_classifier


def found(model_class="LlamaForSequenceClassification", num_labels=2, pet_config=None, **nodes):
    model = {"arch": {"type": model_class}, "model_config": {"num_labels": num_labels, "pet_config": pet_config or {}}}
    return list(check_classifier(YamlRun({"run_mode": "finetune", "model": model, **nodes})))


REWARD = {"preference": {"loss": "reward"}}


def test_a_yaml_without_faults():
    assert found(num_labels=1, runner_wrapper=REWARD) == []
    assert found() == [] and found("LlamaForTokenClassification", 9) == []
    assert found("LlamaForCausalLM", None) == []


@pytest.mark.parametrize(
    "nodes, key, message",
    [
        ({"num_labels": None}, LABELS, "needs the number of its labels"),
        ({"num_labels": 0}, LABELS, "needs the number of its labels"),
        ({"model_class": "LlamaForCausalLM"}, LABELS, "which has no labels"),
        ({"use_legacy": False}, CLASS, "are legacy models"),
        ({"pet_config": {"adapters": [{"name": "a"}]}}, f"{PET}.adapters", "a classifier has one head"),
        ({"run_mode": "predict"}, "run_mode", "writes no text"),
        ({"runner_wrapper": {"preference": {}}}, "runner_wrapper.preference", "the model is a classifier"),
        ({"runner_wrapper": REWARD}, "runner_wrapper.preference", "needs one score of a text"),
        (
            {"runner_wrapper": REWARD, "model_class": "LlamaForTokenClassification", "num_labels": 1},
            "runner_wrapper.preference",
            "needs one score of a text",
        ),
        (
            {"runner_wrapper": REWARD, "model_class": "LlamaForCausalLM", "num_labels": None},
            "runner_wrapper.preference",
            "the model is LlamaForCausalLM with num_labels None",
        ),
        ({"callbacks": [{"type": "SampleAnswers"}]}, "callbacks.SampleAnswers", "the model is a classifier"),
    ],
)
def test_what_is_refused(nodes, key, message):
    (finding,) = found(**nodes)
    assert (finding.severity, finding.key) == ("error", key) and message in str(finding)
