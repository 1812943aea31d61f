"""AdaLoRA against PEFT: forward, orthogonality and allocation on the same gradients; its saved adapter in PEFT."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.network.tree import lora_cells
from mindlora.training.adalora.rank_budget import RankBudget
from tests.support.networks import randomize
from tests.support.what_runs import shows

SIZES = ((7, 5), (5, 6))
RATE, STEPS = 0.05, 12
BUDGET = {"init_r": 4, "target_r": 2, "tinit": 2, "tfinal": 3, "deltaT": 2, "orth_reg_weight": 0.3}
PARTS = {"lora_A": "mindpet_delta_lora_a", "lora_B": "mindpet_delta_lora_b", "lora_E": "mindpet_delta_lora_lambda"}


class Two(nn.Cell):
    """Two linear cells, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Dense(*size, has_bias=False) for size in SIZES)

    def construct(self, x):
        return self.second(self.first(x))


class GivenGradients(nn.Cell):
    """A train step on given gradients: the orthogonality term, an optimizer's update, and the budget."""

    def __init__(self, budget):
        super().__init__(auto_prefix=False)
        self.budget, self.optimizer = budget, nn.SGD(budget.weights, RATE)

    def construct(self, *gradients):
        gradients = self.budget.regularized(gradients)
        done = self.optimizer(gradients)
        return ops.depend(gradients, ops.depend(self.budget(gradients), done))


@pytest.fixture(scope="module")
def given():
    """Weights, initial parts, x and the gradients of each step, under PEFT's names."""
    rng = np.random.default_rng(0)
    shapes = {}
    for layer, (size, out) in zip(("first", "second"), SIZES):
        shapes[f"{layer}.weight"] = out, size
        shapes.update({f"{layer}.lora_A": (4, size), f"{layer}.lora_B": (out, 4), f"{layer}.lora_E": (4, 1)})
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    for step in range(1, STEPS + 1):
        drawn = {name: rng.normal(size=shape) for name, shape in shapes.items() if "lora" in name}
        arrays.update({f"{step}.{name}": array for name, array in drawn.items()})
    arrays["x"] = rng.normal(size=(3, SIZES[0][0]))
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def peft(peer, given, tmp_path_factory):
    """What PEFT makes of them."""
    folder = tmp_path_factory.mktemp("adalora")
    np.savez(folder / "given.npz", **given)
    config = {**BUDGET, "lora_alpha": 6, "total_step": STEPS, "beta1": 0.7, "beta2": 0.6}
    peer.adalora_steps(sizes=SIZES, tensors=folder / "given.npz", path=folder / "found.npz", rate=RATE, config=config)
    return dict(np.load(folder / "found.npz"))


@pytest.fixture
def network(given):
    """The same network here."""
    result = Two()
    config = LoraConfig(
        use_adalora=True, lora_alpha=6, target_modules=["first", "second"], beta1=0.7, beta2=0.6, **BUDGET
    )
    apply_lora(result, config)
    freeze_base(result)
    parameters = {p.name: p for p in result.get_parameters()}
    for layer in ("first", "second"):
        parameters[f"{layer}.weight"].set_data(Tensor(given[f"{layer}.weight"]))
        for part, name in PARTS.items():
            parameter = parameters[f"{layer}.{name}"]
            parameter.set_data(Tensor(given[f"{layer}.{part}"].reshape(parameter.shape)))
    return result


def under_peft_s_names(parameters):
    names = {f"{layer}.{name}": f"{layer}.{part}" for layer in ("first", "second") for part, name in PARTS.items()}
    return {names[p.name]: p for p in parameters}


def test_the_forward_is_pefts(mode, network, given, peft):
    np.testing.assert_allclose(network(Tensor(given["x"])).asnumpy(), peft["y"], rtol=1e-5, atol=1e-5)


def test_orthogonality_and_its_gradient_are_pefts(mode, network, peft):
    budget = RankBudget(network, network.trainable_params())
    zeros = tuple(ops.zeros_like(weight) for weight in budget.weights)
    gradients = dict(zip(under_peft_s_names(budget.weights), budget.regularized(zeros)))
    assert 0.3 * budget.orthogonality() == pytest.approx(peft["orthogonality"][0], rel=1e-5)
    for name, gradient in gradients.items():
        expected = peft.get(f"gradient.{name}", np.zeros(gradient.shape)).reshape(gradient.shape)
        np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-4, atol=1e-6)


def test_each_step_leaves_the_triplets_that_peft_leaves(pynative_mode, network, given, peft):
    budget = RankBudget(network, network.trainable_params())
    step, schedule, counts = GivenGradients(budget), budget.schedule(STEPS), []
    weights = under_peft_s_names(budget.weights)
    for number in range(1, STEPS + 1):
        budget.set_plan(schedule, number)
        step(*(Tensor(given[f"{number}.{name}"].reshape(weight.shape)) for name, weight in weights.items()))
        assert 0.3 * budget.orthogonality() == pytest.approx(peft["orthogonality"][number - 1], rel=1e-4)
        for name, weight in weights.items():
            expected = peft[f"{number}.{name}"].reshape(weight.shape)
            np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(weight.asnumpy() == 0, expected == 0)
        counts.append(sum(budget.ranks().values()))
    # Not before step 3, at even steps, at step 9, and at each step from then on.
    assert counts[:3] == [8, 8, 8] and counts[3] < 8 == counts[4] > counts[5] and counts[8:] == [4] * 4


@shows("adalora", "llama")
def test_a_saved_adapter_gives_the_same_outputs_in_peft(made, make_network, logits_of, peft_logits, tmp_path):
    network = make_network("plain")
    apply_lora(network, LoraConfig(use_adalora=True, init_r=4, target_r=2, target_modules=["wq", "w2"]))
    cells = dict(lora_cells(network))
    for number, cell in enumerate(cells.values()):
        randomize(cell.lora_parameters(), seed=number)
        weights = 0.1 * cell.mindpet_delta_lora_lambda.asnumpy()
        weights[: 4 - number] = 0
        cell.mindpet_delta_lora_lambda.set_data(Tensor(weights))
    expected = logits_of(network)
    save_lora(network, str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted({config["r"], *config["rank_pattern"].values()}) == list(range(1, len(cells)))
    # The first cell has no rank left, and PEFT knows no rank of 0.
    assert len(config["target_modules"]) == len(cells) - 1
    found = peft_logits("plain", tmp_path / "adapter")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5 * scale)
    assert np.abs(expected - peft_logits("plain").reshape(expected.shape)).max() > 1e-2 * scale
    fresh = make_network("plain")
    load_lora(fresh, str(tmp_path / "adapter"), on_base_mismatch="error")
    np.testing.assert_allclose(logits_of(fresh, ms.PYNATIVE_MODE), expected, atol=1e-5 * scale)
