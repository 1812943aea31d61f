"""MindFormers' own names of LoRA tensors, in checkpoints with and without the rest of the training."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.dialects import mindformers


@pytest.mark.parametrize("path, half, key", [
    ("model.layers.3.attention.wq", "A", "model.layers.3.attention.wq.mindpet_delta_lora_a"),
    ("lm_head", "B", "lm_head.mindpet_delta_lora_b"),
    ("", "A", "mindpet_delta_lora_a"), ("", "B", "mindpet_delta_lora_b")])
def test_keys_are_those_of_mindformers(path, half, key):
    assert mindformers.tensor_key(path, half) == key
    assert mindformers.parse_key(key) == (path, half)


@pytest.mark.parametrize("key, place", [
    ("mindpet_delta_lora_A", ("", "A")), ("mindpet_delta_lora_B", ("", "B")),
    ("dense.mindpet_delta_lora_A", ("dense", "A"))])
def test_capital_letters_mean_the_same(key, place):
    assert mindformers.parse_key(key) == place


@pytest.mark.parametrize("prefix", ["adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "accu_grads."])
def test_the_optimizer_s_tensors_are_none_of_it(prefix):
    assert mindformers.parse_key(prefix + "model.layers.0.attention.wq.mindpet_delta_lora_a") is None
    assert mindformers.parse_key(prefix + "mindpet_delta_lora_b") is None


@pytest.mark.parametrize("key", [
    "model.layers.0.attention.wq.weight", "lm_head.weight", "global_step", "epoch_num", "loss_scale", "",
    "wq.mindpet_delta_lora_alpha", "wq.mindpet_delta_lora_a.weight", "wq.lora_a",
    "base_model.model.lm_head.lora_A.weight"])
def test_the_base_and_other_facts_are_none_of_it(key):
    assert mindformers.parse_key(key) is None


@given(st.lists(st.sampled_from(["model", "layers", "0", "wq", "adamant", "momentum"]), max_size=4).map(".".join),
       st.sampled_from("AB"))
def test_keys_make_the_round_trip(path, half):
    assert mindformers.parse_key(mindformers.tensor_key(path, half)) == (path, half)
