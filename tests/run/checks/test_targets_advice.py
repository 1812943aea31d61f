"""What the doctor and the plan advise of settings that published experience would choose otherwise."""

import pytest

from mindlora.run.checks.targets import advise
from mindlora.run.yaml_run import YamlRun

ATTENTION, FEED_FORWARD = "model.layers.0.attention.wq", "model.layers.0.feed_forward.w1"
LINEAR = [ATTENTION, FEED_FORWARD, "lm_head"]


def advice(adapted=(ATTENTION, FEED_FORWARD), linear=LINEAR, rate=1e-4, run_mode="finetune"):
    config = {"run_mode": run_mode, "lr_schedule": {"learning_rate": rate}}
    found = list(advise(YamlRun(config), adapted, linear))
    assert all(finding.severity == "note" for finding in found)
    return [(finding.key.rpartition(".")[2], finding.advice) for finding in found]


def test_nothing_is_said_of_what_is_usual():
    assert advice() == []


def test_attention_alone_learns_less_where_the_model_has_feed_forward_cells():
    (found,) = advice(adapted=[ATTENTION])
    assert found[0] == "target_modules" and "all-linear" in found[1] and "Schulman" in found[1]
    assert advice(adapted=[ATTENTION], linear=[ATTENTION]) == []


@pytest.mark.parametrize("rate, told", [(2e-5, 1), (5e-5, 0), (0.0, 0)])
def test_a_rate_of_full_fine_tuning_is_too_low(rate, told):
    found = advice(rate=rate)
    assert [key for key, _ in found] == ["learning_rate"] * told
    assert all("ten times" in text for _, text in found)


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"lora_rank": 64, "lora_alpha": 32}, 1),
        ({"lora_rank": 64, "lora_alpha": 32, "use_rslora": True}, 0),
        ({"lora_rank": 64, "lora_alpha": 32, "use_adalora": True}, 0),
        ({"lora_rank": 64, "lora_alpha": 128}, 0),
        ({"lora_rank": 32, "lora_alpha": 16}, 0),
        ({"lora_rank": "64", "lora_alpha": 32}, 0),
        ({"lora_rank": 64}, 0),
    ],
)
def test_a_large_rank_whose_scale_does_not_keep_up_is_for_rslora(keys, told):
    config = {"run_mode": "finetune", "model": {"model_config": {"pet_config": keys}}}
    found = list(advise(YamlRun(config), [FEED_FORWARD], LINEAR))
    assert [finding.key.rpartition(".")[2] for finding in found] == ["lora_rank"] * told
    assert all("the scale, is 0.5" in finding.found and "Kalajdzievski" in finding.advice for finding in found)


def test_a_run_that_does_not_train_an_adapter_gets_no_advice():
    assert advice(adapted=[ATTENTION], rate=1e-6, run_mode="predict") == []
    assert advice(adapted=[], rate=1e-6) == []
