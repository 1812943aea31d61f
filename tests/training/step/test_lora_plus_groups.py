"""LoRA+ for plain MindSpore: how far B moves, with every kind of learning rate."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, lora_plus_groups
from mindlora.core.errors import ConfigError, LoraError
from tests.support import networks

RATE, RATIO, STEPS = 0.01, 16, 3
GROWING = [RATE * (step + 1) for step in range(STEPS)]
RATES = {
    "number": RATE,
    "list": GROWING,
    "tuple": tuple(GROWING),
    "tensor": Tensor(np.array(GROWING, np.float32)),
    "schedule": nn.PolynomialDecayLR(0.01, 0.001, 4, 1.0),
    "scalar tensor": Tensor(RATE, ms.float32),
}
OPTIMIZERS = {"SGD": nn.SGD, "AdamWeightDecay": nn.AdamWeightDecay}


def network(**fields):
    model = networks.TinyModel(1)
    networks.randomize(model.get_parameters())
    apply_lora(model, LoraConfig(lora_rank=2, target_modules=["wq", "w2"], modules_to_save=["lm_head"], **fields))
    freeze_base(model)
    networks.randomize(model.trainable_params(), 1)
    return model


def moved(optimizer, parameters):
    """Returns, after each of STEPS steps with the same known gradients, {name: how far the parameter has moved}."""
    rng = np.random.default_rng(2)
    gradients = tuple(Tensor(rng.normal(size=p.shape).astype(np.float32)) for p in optimizer.parameters)
    before = {p.name: p.asnumpy().copy() for p in parameters}
    track = []
    for _ in range(STEPS):
        optimizer(gradients)
        track.append({p.name: p.asnumpy() - before[p.name] for p in parameters})
    return track


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_b_moves_ratio_times_as_far(optimizer, kind, pynative_mode):
    check_moves(optimizer, kind)


@pytest.mark.parametrize("optimizer, kind", [("AdamWeightDecay", "schedule"), ("SGD", "list")])
def test_b_moves_ratio_times_as_far_in_graph_mode(optimizer, kind, graph_mode):
    """A rate is a number, a list that MindSpore reads by the step, or a cell that computes it; a tensor is a list."""
    check_moves(optimizer, kind)


def check_moves(optimizer, kind):
    tracks = []
    for ratio in (1, RATIO):
        model = network()
        groups = lora_plus_groups(model, RATES[kind], ratio)
        tracks.append(moved(OPTIMIZERS[optimizer](groups, learning_rate=0.5), model.trainable_params()))
    for plain, faster in zip(*tracks):
        assert len(plain) == 5
        for name, distance in plain.items():
            assert np.abs(distance).max() > 1e-3
            factor = RATIO if name.endswith("lora_b") else 1
            # The distances are differences of numbers of about 1.
            np.testing.assert_allclose(faster[name], factor * distance, rtol=2e-5, atol=4e-6)


def test_everything_that_trains_is_in_one_group():
    model = network(use_dora=True)
    slow, fast = lora_plus_groups(model, RATE, 4, weight_decay=0.1)
    assert {p.name for p in fast["params"]} == {
        p.name for p in model.trainable_params() if p.name.endswith(("lora_b", "magnitude"))
    }
    assert {id(p) for group in (slow, fast) for p in group["params"]} == {id(p) for p in model.trainable_params()}
    assert (slow["lr"], fast["lr"]) == (RATE, 4 * RATE) and slow["weight_decay"] == fast["weight_decay"] == 0.1


def test_where_a_is_frozen_one_group_is_left():
    model = networks.TinyModel(1)
    apply_lora(model, LoraConfig(target_modules=["wq"], freeze_lora_a=True))
    freeze_base(model)
    (group,) = lora_plus_groups(model, RATE)
    assert [p.name for p in group["params"]] == ["model.layers.0.attention.wq.mindpet_delta_lora_b"]
    assert group["lr"] == 16 * RATE


@pytest.mark.parametrize("ratio", [0, 0.5, -16, "16", True, None, float("nan"), float("inf")])
def test_a_wrong_ratio(ratio):
    with pytest.raises(ConfigError, match=f"^ratio is {ratio!r}: it must be a number of at least 1."):
        lora_plus_groups(network(), RATE, ratio)


@pytest.mark.parametrize("rate", ["1e-4", True, None, {"type": "CosineDecayLR"}])
def test_a_wrong_learning_rate(rate):
    with pytest.raises(ConfigError, match="^learning_rate is .*: it must be a number, a list, a Tensor or a schedule."):
        lora_plus_groups(network(), rate)


def test_a_network_without_b():
    with pytest.raises(LoraError, match="^The network has no B that is trained"):
        lora_plus_groups(networks.TinyModel(1), RATE)
