"""Whether head and loss go through the tokens in pieces in a YAML of the PyNative Trainer, by plan and doctor."""

import pytest
import yaml

from mindlora.cli.doctor import examination
from mindlora.run.plan.pynative import head_of_pynative
from tests.support.mcore_networks import TINY

QWEN3 = {**TINY, "model_type": "qwen3", "architectures": "Qwen3ForCausalLM", "num_hidden_layers": 2}
IN_PIECES = "at a time, so that no logits of all tokens are made."
AT_ONCE = "the logits of all tokens are made at once, as "


def config_of(**nodes):
    lora = {"target_modules": "linear_qkv", "lora_rank": 2, "lora_alpha": 4}
    return {"training": {"steps": 2}, "optimizer": {"weight_decay": 0.0}, "model": QWEN3, "lora_config": lora, **nodes}


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ({}, f"some tokens {IN_PIECES}"),
        ({"pet_config": {"loss_in_pieces": 7}}, f"7 tokens {IN_PIECES}"),
        ({"pet_config": {"loss_in_pieces": False}}, f"{AT_ONCE}pet_config.loss_in_pieces is False."),
        ({"parallelism": {"tensor_parallel": 2}}, f"{AT_ONCE}parallelism.tensor_parallel is 2."),
        ({"lora_config": {"target_modules": "output_layer"}}, f"some tokens {IN_PIECES}"),
        (
            {"lora_config": {"target_modules": "output_layer"}, "pet_config": {"use_dora": True}},
            f"{AT_ONCE}the output head has an adapter of DoRA.",
        ),
        (
            {"model": {**QWEN3, "architectures": "Qwen3ForTokenClassification", "num_labels": 3}},
            f"{AT_ONCE}the output head gives scores of labels.",
        ),
    ],
)
def test_which_of_the_two_it_is(nodes, expected):
    assert str(head_of_pynative(config_of(**nodes))) == f"Head and loss: {expected}"


@pytest.mark.parametrize("setting, said", [(7, f"7 tokens {IN_PIECES}"), (0, "loss_in_pieces is 0: it must be True")])
def test_the_doctor_says_it_or_refuses_the_setting(setting, said, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(pet_config={"loss_in_pieces": setting})), encoding="utf-8")
    (found,) = [finding for finding in examination.check_yaml(str(path)) if "pet_config" in finding.key]
    assert said in str(found) and found.severity == ("note" if setting else "error")
