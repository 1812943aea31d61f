"""The divergence from a teacher in the process: against NumPy on the logits of both, and by finite differences."""

import numpy as np
import pytest
from mindformers.models.build_model import build_network
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.network.save_load import save_lora
from mindlora.network.tree import lora_cells
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.rl.gkd import row_divergences, teacher_network
from mindlora.training.rl.policy_graphs import PolicyGradients
from mindlora.training.rl.settings import rl_settings
from tests.conftest import in_mode
from tests.support import tiny_runs
from tests.support.divergences import divergences
from tests.support.mcore_networks import scaled, tiny_qwen3, with_adapters

ROWS, LENGTH, VOCABULARY = 4, 16, 64
TEMPERATURE = 1.3


def qwen3(tied=False, **pet):
    """A tiny Qwen3 with adapters, with the same base at each call."""
    network = tiny_qwen3(tie_word_embeddings=tied)
    return with_adapters(scaled(network, 0.5), lora_dropout=0.0, **pet)


def tied_qwen3(**pet):
    """The same whose head has the embedding's table."""
    return qwen3(tied=True, **pet)


def llama(**pet):
    """The same of a Llama of the legacy models, whose base is in 16 bits."""
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    config.model.model_config.update({**tiny_runs.MODEL, "pad_token_id": tiny_runs.PAD})
    # As a base in 16 bits is held on a CPU.
    config.model.model_config.update({"param_init_type": "bfloat16", "embedding_init_type": "bfloat16"})
    config.model.model_config.pet_config.update({"lora_dropout": 0.0, **pet})
    network = build_network(config.model)
    for parameter in network.get_parameters():
        if "norm" not in parameter.name:
            rng = np.random.default_rng([*parameter.name.encode()])
            parameter.set_data(Tensor(rng.normal(0, 0.2, parameter.shape).astype(np.float32), parameter.dtype))
    return network


# Model, what its policy adapts, what its teacher does where it is not the same, beta of each part of the rows, and the
# mode of the logits: mcore models have no other. The heads of the last one have adapters.
CASES = {
    "qwen3": (tied_qwen3, ".*qkv|.*fc2", None, (0.4, 1), 0),
    "llama-heads": (llama, ".*wq|.*lm_head", ".*w2|.*lm_head", (0,), 1),
}


def filled(network, seed):
    rng = np.random.default_rng(seed)
    for parameter in network.trainable_params():
        parameter.init_data()
        parameter.set_data(Tensor(rng.normal(0, 0.3, parameter.shape).astype(np.float32)))
    return network


class Logits(nn.Cell):
    """The logits of all tokens, as a network has them in evaluation."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, tokens, labels):
        return self.network(tokens[:, :-1], labels[:, 1:])[0]


def logits_of(cell, seed, tokens, labels):
    """The logits of Logits after its network has got other adapters."""
    filled(cell.network, seed)
    cell.set_train(False)
    found = cell(Tensor(tokens), Tensor(labels)).asnumpy()
    cell.set_train(True)
    return found.reshape(ROWS, LENGTH, VOCABULARY) / TEMPERATURE


@pytest.mark.parametrize("case", CASES)
def test_divergences_are_those_of_the_logits_and_gradients_theirs(case, graph_mode, tmp_path):
    make, of_policy, of_teacher, betas, mode = CASES[case]
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.6, tokens, -100).astype(np.int32)
    policy = make(lora_rank=2, lora_alpha=4, target_modules=of_policy)
    teacher = policy if of_teacher is None else make(lora_rank=3, lora_alpha=6, target_modules=of_teacher)
    of_both = Logits(policy)
    with in_mode(mode):
        taught = logits_of(of_both if teacher is policy else Logits(teacher), 2, tokens, labels)
        save_lora(teacher, str(tmp_path / "teacher"))
        logits = logits_of(of_both, 1, tokens, labels), taught
    parts = zip(*(np.split(each, len(betas)) for each in logits), betas)
    expected = np.concatenate([divergences(*part)[0] for part in parts])

    assert put_loss_in_pieces(policy, 5, True)
    keys = {"teacher": str(tmp_path / "teacher"), "temperature": TEMPERATURE}
    rows = row_divergences(policy, [rl_settings({**keys, "gkd": {"beta": beta}}) for beta in betas])
    rows.set_train(True)
    graph = PolicyGradients(rows, tuple(policy.trainable_params()))
    counted = labels[:, 1:] != -100
    coefficients = rng.normal(0, 1, counted.shape).astype(np.float32)
    batch = [Tensor(array) for array in (tokens, labels, coefficients)]

    def computed():
        return graph(*batch, Tensor(0.0, mstype.float32)).asnumpy().astype(np.float64)

    found = computed()
    gradients = [gradient.asnumpy().copy() for gradient in graph.gradients]
    assert expected[counted].mean() > 0.05
    np.testing.assert_allclose(found, np.where(counted, expected, 0), rtol=1e-4, atol=5e-6)
    for weight, gradient in zip(policy.trainable_params(), gradients):
        direction = rng.normal(0, 1, weight.shape).astype(np.float32)
        before, sums = weight.asnumpy().copy(), []
        for step in (2e-3, -2e-3):
            weight.set_data(Tensor(before + step * direction))
            sums.append((computed() * coefficients).sum())
        weight.set_data(Tensor(before))
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / 4e-3, rel=2e-2, abs=2e-2)


def test_the_base_stays_one_and_the_teachers_parameters_do_not_train(graph_mode, tmp_path):
    save_lora(filled(qwen3(lora_rank=3, lora_alpha=6, target_modules=".*fc2"), 2), str(tmp_path / "teacher"))
    policy = filled(qwen3(lora_rank=2, lora_alpha=4, target_modules=".*qkv"), 1)
    assert put_loss_in_pieces(policy, True, True)
    teacher = teacher_network(policy, str(tmp_path / "teacher"))
    policys = {id(parameter) for parameter in policy.get_parameters()}
    own = [parameter for parameter in teacher.get_parameters() if id(parameter) not in policys]
    assert own and all("mindpet_delta_lora" in parameter.name for parameter in own)
    assert not any(parameter.requires_grad for parameter in own)
    assert not {parameter.name for parameter in own} & {parameter.name for parameter in policy.get_parameters()}
    # The base as a teacher is the policy without its adapter.
    base = teacher_network(policy, None)
    assert not list(lora_cells(base))
    frozen = [parameter for parameter in policy.get_parameters() if not parameter.requires_grad]
    assert list(map(id, base.get_parameters())) == list(map(id, frozen))


def test_logits_that_are_made_at_once_are_refused(graph_mode):
    network = filled(qwen3(lora_rank=2, lora_alpha=4, target_modules=".*qkv"), 1)
    with pytest.raises(ConfigError, match="rl.gkd compares the whole vocabulary for some tokens at a time, and"):
        row_divergences(network, [rl_settings({"teacher": "base", "gkd": {}})])
