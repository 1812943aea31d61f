"""The divergence of generalized knowledge distillation, and its gradient, against TRL's GKDTrainer."""

import json
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from mindlora.network.cells.divergences import HeadDivergences
from tests.support.divergences import divergences

SIDE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support", "peers", "trl_divergence_side.py")
BETAS = (0, 0.1, 0.5, 0.9, 1)
ROWS, TOKENS, VOCABULARY, TEMPERATURE = 2, 5, 50, 0.9


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(0, 2, (ROWS, TOKENS, VOCABULARY)) for _ in range(2))
    labels = rng.integers(0, VOCABULARY, (ROWS, TOKENS))
    labels[0, :2] = labels[1, 4] = -100
    return student, teacher, labels


@pytest.fixture(scope="module")
def trl(peer, given, tmp_path_factory):
    """What TRL computes: beta -> loss, gradient with respect to the student's logits."""
    folder = tmp_path_factory.mktemp("trl")
    names = ("student", "teacher", "labels")
    request = {name: array.tolist() for name, array in zip(names, given)}
    request.update(betas=BETAS, temperature=TEMPERATURE, results=str(folder / "results.json"))
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    peer.run(program=SIDE, arguments=[str(folder / "request.json")])
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {beta: (result["loss"], np.array(result["gradient"])) for beta, result in zip(BETAS, results)}


@pytest.mark.parametrize("beta", BETAS)
def test_the_oracle_of_the_tests_is_trls_loss(given, trl, beta):
    student, teacher, labels = given
    found, gradient = divergences(student / TEMPERATURE, teacher / TEMPERATURE, beta)
    counted = labels != -100
    loss, expected = trl[beta]
    assert found[counted].mean() == pytest.approx(loss, rel=1e-6)
    gradient = np.where(counted[..., None], gradient / TEMPERATURE / counted.sum(), 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("beta", BETAS)
def test_losses_and_gradients_are_trls(given, trl, pynative_mode, beta):
    """With a head of ones, so that what it takes are the logits; MindSpore's exponentials are off by up to 1e-5."""
    student, teacher, labels = (array.reshape((-1, *array.shape[2:])) for array in given)
    cell = HeadDivergences(ms.float32, beta, False, 4).set_train()
    nothing = [Tensor(np.zeros((size, 1), np.float32)) for size in (len(student), VOCABULARY)]
    weight = Parameter(Tensor(np.eye(VOCABULARY, dtype=np.float32)), name="weight", requires_grad=False)
    taught = (Tensor((teacher / TEMPERATURE).astype(np.float32)), *nothing)
    counted = Tensor(labels.astype(np.int32))

    def loss(logits):
        found = cell(logits / TEMPERATURE, nothing[0], weight, nothing[1], *taught, counted)
        return found.sum() / float((labels != -100).sum())

    found, gradient = ops.value_and_grad(loss)(Tensor(student.astype(np.float32)))
    expected, of_logits = trl[beta]
    assert float(found.asnumpy()) == pytest.approx(expected, rel=1e-5)
    of_logits = of_logits.reshape(student.shape)
    np.testing.assert_allclose(gradient.asnumpy(), of_logits, rtol=0, atol=2e-5 * np.abs(of_logits).max())
