"""PreferenceLoss against NumPy: every loss, its gradients, and what is reported of a batch."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindlora.training.preference.loss import PAIR_LOSSES, SUMS, PreferenceLoss, answer_tokens, preference_measures
from mindlora.training.preference.settings import LOSSES, preference_settings
from tests.support import preference_oracle

WIDTH, EXAMPLES = 13, 3
# Answers of each row of the data: example -> lengths of its two answers; the second row has one example less.
LENGTHS = [[(2, 3), (1, 2), (3, 1)], [(4, 2), (1, 3)]]


class Table(nn.Cell):
    """A network that has one log-probability for each label."""

    def __init__(self, values):
        super().__init__()
        self.values = Parameter(Tensor(values))

    def construct(self, tokens, labels):
        return (self.values * (labels[:, 1:] >= 0)).reshape(-1)


def batch():
    """The columns of two rows."""
    answers = np.full((2, WIDTH), -1, np.int32)
    judgments = np.zeros((2, EXAMPLES), np.int32)
    for row, examples in enumerate(LENGTHS):
        position = 1
        for number, lengths in enumerate(examples):
            judgments[row, number] = 1
            for side, length in enumerate(lengths):
                answers[row, position : position + length] = 2 * number + side
                position += length
    labels = np.where(answers >= 0, 7, -100).astype(np.int32)
    return np.full((2, WIDTH), 7, np.int32), labels, answers, judgments


def log_probabilities(seed):
    return -np.random.default_rng(seed).uniform(0.2, 3, (2, WIDTH - 1)).astype(np.float32)


def of_answers(values, answers):
    """{(row, example): (log-probability of each of its two answers)}."""
    found = {}
    for row, examples in enumerate(LENGTHS):
        for number in range(len(examples)):
            sides = [values[row][answers[row, 1:] == 2 * number + side].sum(dtype=np.float64) for side in (0, 1)]
            found[row, number] = np.array(sides)
    return found


def expected_losses(settings, policy, reference, judgments):
    """The loss of each example, in the order of rows and examples."""
    if settings.loss == "kto":
        keys = list(policy)
        pairs = (np.array([table[key] for key in keys]) for table in (policy, reference))
        return preference_oracle.kto_losses(settings, *pairs, [judgments[key] for key in keys])
    losses = []
    for row, number in policy:
        compared = reference[row, number] if settings.kind.uses_reference else None
        losses.append(preference_oracle.pair_loss(settings, policy[row, number], compared, LENGTHS[row][number]))
    return np.array(losses)


CASES = [
    *({"loss": loss} for loss, kind in LOSSES.items() if not kind.scores),
    {"loss": "dpo", "label_smoothing": 0.2, "sft_weight": 0.7},
    {"loss": "dpo", "length_normalization": True, "beta": 1.5},
    {"loss": "simpo", "margin": 1.5, "label_smoothing": 0.1},
    {"loss": "cpo", "sft_weight": 0.0},
    {"loss": "kto", "desirable_weight": 1.4, "undesirable_weight": 0.6, "beta": 0.5},
]


@pytest.mark.parametrize("node", CASES, ids=lambda node: "-".join(map(str, node.values())))
def test_losses_and_gradients(pynative_mode, node):
    settings = preference_settings(node)
    tokens, labels, answers, judgments = batch()
    if settings.loss == "kto":
        judgments[0, 1] = judgments[1, 0] = -1
    values, reference_values = log_probabilities(0), log_probabilities(1)
    network, reference = Table(values), Table(reference_values) if settings.kind.uses_reference else None
    loss = PreferenceLoss(network, reference, settings)
    inputs = [Tensor(array) for array in (tokens, labels, answers, judgments)]
    gradient = ms.value_and_grad(loss, None, network.trainable_params(), has_aux=True)
    (total, sums), (found,) = gradient(*inputs)
    policy, compared = of_answers(values, answers), of_answers(reference_values, answers)
    expected = expected_losses(settings, policy, compared, judgments)
    np.testing.assert_allclose(total.asnumpy(), expected.sum(), rtol=1e-6)
    assert sums.asnumpy()[0] == len(expected)

    def at(changed):
        return expected_losses(settings, of_answers(changed, answers), compared, judgments).sum()

    np.testing.assert_allclose(found.asnumpy(), slopes(settings, at, values, answers), rtol=1e-5, atol=1e-6)


def slopes(settings, loss, values, answers):
    """Central differences of a function of the log-probabilities, in float64."""
    step, values = 1e-5, values.astype(np.float64)
    result = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        # The estimate of KTO's distance has no gradient.
        if settings.loss == "kto" and answers[:, 1:][index] % 2:
            continue
        above, below = values.copy(), values.copy()
        above[index] += step
        below[index] -= step
        result[index] = (loss(above) - loss(below)) / (2 * step)
    return result


@pytest.mark.parametrize("loss", ["dpo", "hinge", "ipo"])
@pytest.mark.parametrize("far", [1.0, 87.0, 89.0, 500.0])
def test_a_token_that_moved_far_leaves_the_distances_of_other_answers_alone(pynative_mode, loss, far):
    """e^89 is infinite in float32, and times 0 no number."""
    settings = preference_settings({"loss": loss})
    tokens, labels, answers, judgments = batch()
    policy, moved = log_probabilities(0), log_probabilities(1)
    moved[0, 0] = policy[0, 0] - far
    cell = PreferenceLoss(Table(policy), Table(moved), settings)
    _, sums = cell(*(Tensor(array) for array in (tokens, labels, answers, judgments)))
    kl = float(sums.asnumpy()[SUMS.index("kl")])
    distances = (policy - moved).astype(np.float64)[answers[:, 1:] >= 0]
    expected = (np.expm1(np.minimum(distances, 88)) - distances).sum()
    np.testing.assert_allclose(kl, expected, rtol=1e-5)


@pytest.mark.parametrize("certain", [(0, 1), (1, 0), (0, 0)])
def test_the_odds_of_a_certain_answer_are_bounded(pynative_mode, certain):
    """log p = 0, as in a model that has learned its answers by heart: TRL's loss is 0 where it is the chosen one."""
    scores = [Parameter(Tensor(np.float32([-0.5 * side]))) for side in certain]
    gradient = ms.value_and_grad(lambda: PAIR_LOSSES["orpo"](*scores, 1.0, 0.0, 0.0).sum(), None, scores)
    loss, gradients = gradient()
    odds = [np.log(np.exp(s) / -np.expm1(s)) for s in (min(-0.5 * side, -(2.0**-24)) for side in certain)]
    expected = np.log1p(np.exp(odds[1] - odds[0]))
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5, atol=1e-7)
    assert all(np.isfinite(each.asnumpy()).all() for each in gradients)


class Scores(nn.Cell):
    """A network that has one score for each token but the last."""

    def __init__(self, values):
        super().__init__()
        self.values = Parameter(Tensor(values))

    def construct(self, tokens, labels):
        return self.values.reshape(-1)


def test_a_reward_counts_at_the_last_token_of_an_answer(pynative_mode):
    settings = preference_settings({"loss": "reward"})
    columns = batch()
    answers = columns[2]
    columns[3][:] = [[1, 1, 0], [1, 0, 0]]
    answers[0, answers[0] > 3] = answers[1, answers[1] > 0] = -1
    # An answer that ends with the row is read one token before.
    answers[1, -1] = 1
    scores = log_probabilities(0)
    ends = {}
    for (row, place), answer in np.ndenumerate(answers[:, :-1]):
        if answer >= 0:
            ends[row, int(answer)] = place
    ends[1, 1] = WIDTH - 2
    network = Scores(scores)
    loss = PreferenceLoss(network, None, settings)
    (total, sums), (gradient,) = ms.value_and_grad(loss, None, network.trainable_params(), has_aux=True)(
        *map(Tensor, columns)
    )
    differences, expected = [], np.zeros_like(scores)
    for row, example in ((0, 0), (0, 1), (1, 0)):
        chosen, rejected = ends[row, 2 * example], ends[row, 2 * example + 1]
        difference = float(scores[row, chosen]) - float(scores[row, rejected])
        differences.append(difference)
        expected[row, chosen] -= 1 / (1 + np.exp(difference))
        expected[row, rejected] += 1 / (1 + np.exp(difference))
    np.testing.assert_allclose(total.asnumpy(), np.logaddexp(0, -np.array(differences)).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-5, atol=1e-7)
    found = preference_measures(sums.asnumpy(), settings)
    assert found.keys() == {"reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"}
    assert found["reward_margin"] == pytest.approx(np.mean(differences), rel=1e-5)


def test_the_gradient_where_dpo_begins(pynative_mode):
    values, network = log_probabilities(0), None
    network, reference = Table(values), Table(values)
    loss = PreferenceLoss(network, reference, preference_settings({"beta": 0.4}))
    columns = batch()
    _, (gradient,) = ms.value_and_grad(loss, None, network.trainable_params(), has_aux=True)(*map(Tensor, columns))
    signs = np.where(columns[2][:, 1:] < 0, 0, np.where(columns[2][:, 1:] % 2, 0.2, -0.2))
    np.testing.assert_allclose(gradient.asnumpy(), signs, rtol=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "kto", "cpo"])
def test_what_is_reported(pynative_mode, loss):
    settings = preference_settings({"loss": loss, "beta": 0.3})
    columns = batch()
    answers, judgments = columns[2:]
    if loss == "kto":
        judgments[0, 1] = judgments[1, 0] = -1
    values, reference_values = log_probabilities(0), log_probabilities(1)
    reference = Table(reference_values) if settings.kind.uses_reference else None
    sums = PreferenceLoss(Table(values), reference, settings)(*map(Tensor, columns))[1].asnumpy()
    found = preference_measures(sums, settings)
    policy, compared = of_answers(values, answers), of_answers(reference_values, answers)
    scores = {key: policy[key] - (compared[key] if reference else 0) for key in policy}
    if loss == "kto":
        chosen = [key for key in policy if judgments[key] > 0]
        rejected = [key for key in policy if judgments[key] < 0]
        kl = np.mean([score[1] for score in scores.values()])
        right = [judgments[key] * (scores[key][0] - max(kl, 0)) > 0 for key in policy]
        assert found.pop("kl") == pytest.approx(kl, rel=1e-5)
    else:
        chosen = rejected = list(policy)
        right = [scores[key][0] > scores[key][1] for key in policy]
        if reference:
            assert found.pop("kl") == pytest.approx(estimated_kl(values - reference_values, answers), rel=1e-5)
    second = 0 if loss == "kto" else 1
    expected = {
        "reward_chosen": 0.3 * np.mean([scores[key][0] for key in chosen]),
        "reward_rejected": 0.3 * np.mean([scores[key][second] for key in rejected]),
        "log_probability_chosen": np.mean([policy[key][0] for key in chosen]),
        "log_probability_rejected": np.mean([policy[key][second] for key in rejected]),
        "tokens_chosen": np.mean([LENGTHS[row][number][0] for row, number in chosen]),
        "tokens_rejected": np.mean([LENGTHS[row][number][second] for row, number in rejected]),
        "reward_accuracy": np.mean(right),
    }
    expected["reward_margin"] = expected["reward_chosen"] - expected["reward_rejected"]
    assert found == pytest.approx(expected, rel=1e-5)
    counted = [length for row, number in policy for length in LENGTHS[row][number][: 1 if loss == "kto" else 2]]
    assert answer_tokens(sums) == sum(counted)


def estimated_kl(distances, answers):
    """The mean over answers of the sum of e^s - 1 - s over their tokens."""
    of_tokens = np.exp(distances.astype(np.float64)) - 1 - distances
    return of_tokens[answers[:, 1:] >= 0].sum() / sum(2 * len(examples) for examples in LENGTHS)


def test_what_no_example_tells_is_left_out():
    sums = np.zeros(len(SUMS), np.float32)
    assert preference_measures(sums, preference_settings({})) == {}
    sums[[SUMS.index("examples"), SUMS.index("chosen"), SUMS.index("reward_chosen")]] = 2
    found = preference_measures(sums, preference_settings({"loss": "kto"}))
    assert found["reward_chosen"] == 1 and "reward_rejected" not in found and "reward_margin" not in found
