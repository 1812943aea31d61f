"""Classifiers in a YAML: their labels, and what does not go with them."""

import pytest

from mindlora.core.yaml_file import PET
from mindlora.run.yaml_run import YamlRun
from mindlora.training.classifier.rules import LABELS, check_classifier, check_pynative_classifier


def found(model_class="LlamaForSequenceClassification", num_labels=2, pet_config=None, **nodes):
    model = {"arch": {"type": model_class}, "model_config": {"num_labels": num_labels, "pet_config": pet_config or {}}}
    return list(check_classifier(YamlRun({"run_mode": "finetune", "model": model, **nodes})))


def found_in_qwen3(model_class="Qwen3ForSequenceClassification", num_labels=2, **nodes):
    model = {"model_config": {"architectures": model_class, "num_labels": num_labels, "pet_config": {}}}
    return list(check_classifier(YamlRun({"run_mode": "finetune", "use_legacy": False, "model": model, **nodes})))


REWARD = {"preference": {"loss": "reward"}}


def test_a_yaml_without_faults():
    assert found(num_labels=1, runner_wrapper=REWARD) == []
    assert found() == [] and found("LlamaForTokenClassification", 9) == []
    assert found("LlamaForCausalLM", None) == []
    assert found_in_qwen3() == [] and found_in_qwen3("Qwen3ForTokenClassification", 9) == []
    assert found_in_qwen3(num_labels=1, runner_wrapper=REWARD) == []
    for model in ("Qwen3Moe", "DeepseekV3"):
        assert found_in_qwen3(f"{model}ForSequenceClassification", 1, runner_wrapper=REWARD) == []


def test_what_an_mcore_model_is_told_names_its_own_classes():
    (finding,) = found_in_qwen3("Qwen3ForCausalLM")
    assert finding.advice.startswith(
        "Set model.model_config.architectures: Qwen3ForSequenceClassification or Qwen3ForTokenClassification, or"
    )
    (finding,) = found_in_qwen3("DeepseekV3ForCausalLM")
    assert "DeepseekV3ForSequenceClassification or DeepseekV3ForTokenClassification, or" in finding.advice
    (finding,) = found_in_qwen3("UnknownForCausalLM")
    assert all(model in finding.advice for model in ("Qwen3ForS", "Qwen3MoeForS", "DeepseekV3ForS"))
    (finding,) = found_in_qwen3("Qwen3ForTokenClassification", 1, runner_wrapper=REWARD)
    assert "architectures: Qwen3ForSequenceClassification and model_config.num_labels: 1" in finding.advice


@pytest.mark.parametrize(
    "nodes, key, message",
    [
        ({"num_labels": None}, LABELS, "needs the number of its labels"),
        ({"num_labels": 0}, LABELS, "needs the number of its labels"),
        ({"model_class": "LlamaForCausalLM"}, LABELS, "which has no labels"),
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


def test_a_classifier_that_predicts_further_tokens_is_refused():
    model = {"architectures": "DeepseekV3ForTokenClassification", "num_labels": 2, "num_nextn_predict_layers": 1}
    yaml = {"run_mode": "finetune", "use_legacy": False, "model": {"model_config": {**model, "pet_config": {}}}}
    (finding,) = check_classifier(YamlRun(yaml))
    assert finding.key == "model.model_config.architectures" and "num_nextn_predict_layers: 0" in finding.advice


def test_a_yaml_of_the_pynative_trainer_is_told_its_own_keys():
    model = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 2}
    assert list(check_pynative_classifier({"model": model})) == []
    nodes = {
        "model.num_labels": {"model": {**model, "num_labels": 0}},
        "checkpoint.save_trainable_only": {"checkpoint": {"save_trainable_only": True}},
        "pet_config.adapters": {"pet_config": {"adapters": [{"name": "a"}]}},
        "callbacks.Forgetting": {"callbacks": [{"type": "Forgetting"}]},
        "model.architectures": {"model": {**model, "architectures": ["DeepseekV3ForSequenceClassification"]}},
        "preference": {"preference": {"loss": "reward"}},
    }
    for key, changed in nodes.items():
        (finding,) = check_pynative_classifier({"model": model, **changed})
        assert (finding.severity, finding.key) == ("error", key)
    assert finding.advice == "Set model.architectures: Qwen3ForSequenceClassification and num_labels: 1."
