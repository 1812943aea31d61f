"""LoraTrainOneStepCell with AdaLoRA against numpy: the whole step, masks without compiling, saving and resuming."""

import types

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError
from mindlora.training.adalora.callback import RankBudget
from mindlora.training.resume import training_state
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.conftest import in_mode
from tests.support.compilations import compilations
from tests.support.networks import as_array, randomize

RATE, STEPS, RANK = 0.1, 9, 3
BUDGET = {"init_r": RANK, "target_r": 1, "tinit": 1, "tfinal": 3, "orth_reg_weight": 0.2, "beta1": 0.8, "beta2": 0.7}
LAMBDA = "mindpet_delta_lora_lambda"


class Loss(nn.Cell):
    """mean((c x - target)^2) for two linear cells c side by side."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace()
        self.wq, self.wv = nn.Dense(5, 4, has_bias=False), nn.Dense(5, 4, has_bias=False)
        randomize(self.get_parameters(), seed=1)
        apply_lora(self, LoraConfig(use_adalora=True, lora_alpha=2, target_modules=["wq", "wv"], **BUDGET))
        randomize([p for p in self.get_parameters() if "mindpet" in p.name], seed=2)
        freeze_base(self)

    def construct(self, x, target):
        return ((self.wq(x) + self.wv(x) - target) ** 2).mean()


class Oracle:
    """The step in float64: gradients with the orthogonality term, clipped; the update; importance; masks."""

    def __init__(self, network):
        self.w = {p.name: as_array(p).copy() for p in network.get_parameters()}
        self.trained = [name for name in self.w if "mindpet" in name]
        self.mean, self.spread = ({name: 0 * self.w[name] for name in self.trained} for _ in range(2))

    def gradients(self, x, target):
        """Returns the gradients of the mean loss."""
        scale, found = 2 / (RANK + 1e-5), {}
        parts = {c: [self.w[f"{c}.mindpet_delta_lora_{part}"] for part in ("a", "b", "lambda")] for c in ("wq", "wv")}
        y = sum(x @ (self.w[f"{c}.weight"] + scale * (b * v) @ a).T for c, (a, b, v) in parts.items())
        back = 2 * (y - target) / y.size
        for c, (a, b, v) in parts.items():
            low, high = x @ a.T, back @ b
            found.update({f"{c}.mindpet_delta_lora_a": scale * v[:, None] * (high.T @ x)})
            found.update({f"{c}.mindpet_delta_lora_b": scale * back.T @ (low * v)})
            found.update({f"{c}.{LAMBDA}": scale * (low * high).sum(0)})
        return found

    def regularize(self, found):
        """Adds the gradient of 0.2 times the mean of |A A^T - I| and |B^T B - I|; returns the mean."""
        norms = []
        for name in found:
            if name.endswith(("_a", "_b")):
                rows = self.w[name] if name.endswith("_a") else self.w[name].T
                difference = rows @ rows.T - np.eye(RANK)
                norms.append(np.linalg.norm(difference))
                change = 0.2 / 4 * 2 * difference @ rows / norms[-1]
                found[name] = found[name] + (change if name.endswith("_a") else change.T)
        return np.mean(norms)

    def step(self, found, limit, learns, masked):
        factor = min(1.0, limit / (np.sqrt(sum((array**2).sum() for array in found.values())) + 1e-6))
        scores = {}
        for name, gradient in found.items():
            self.w[name] = self.w[name] - RATE * factor * gradient
            if learns:
                importance = np.abs(self.w[name] * factor * gradient)
                self.mean[name] = 0.8 * self.mean[name] + 0.2 * importance
                self.spread[name] = 0.7 * self.spread[name] + 0.3 * np.abs(importance - self.mean[name])
            scores[name] = self.mean[name] * self.spread[name]
        of_triplets = {
            c: scores[f"{c}.{LAMBDA}"]
            + scores[f"{c}.mindpet_delta_lora_a"].mean(1)
            + scores[f"{c}.mindpet_delta_lora_b"].mean(0)
            for c in ("wq", "wv")
        }
        ordered = np.sort(np.concatenate(list(of_triplets.values())))
        for c, score in of_triplets.items():
            self.w[f"{c}.{LAMBDA}"] = self.w[f"{c}.{LAMBDA}"] * (score > (ordered[masked - 1] if masked else -1))


@pytest.fixture
def data():
    return batches()


def batches():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(4, 5)), rng.normal(size=(4, 4))) for _ in range(STEPS)]


def train_step(**wrapper):
    network = Loss()
    optimizer = nn.SGD(network.trainable_params(), RATE)
    cell = LoraTrainOneStepCell(network, optimizer, rank_budget=True, use_clip_grad=True, max_grad_norm=0.5, **wrapper)
    return cell.set_train()


def run(cell, data, first=1):
    """Trains on the rest of the data, and yields after each step."""
    schedule = cell.rank_budget.schedule(STEPS)
    for number, batch in list(enumerate(data, 1))[first - 1 :]:
        cell.rank_budget.set_plan(schedule, number)
        cell(*(Tensor(array.astype(np.float32)) for array in batch))
        yield number, schedule


def test_every_step_is_the_oracle_s(mode, data, monkeypatch):
    """In graph mode with two micro-batches."""
    micro_batches = 1 if mode else 2
    cell, compiled = train_step(micro_batches=micro_batches), compilations(monkeypatch)
    oracle, left, distances = Oracle(cell.network), [], []
    for number, schedule in run(cell, data):
        x, target = data[number - 1]
        halves = np.split(x, micro_batches), np.split(target, micro_batches)
        parts = [oracle.gradients(*half) for half in zip(*halves)]
        found = {name: sum(part[name] for part in parts) / micro_batches for name in oracle.trained}
        distances.append(oracle.regularize(found))
        assert cell.rank_budget.orthogonality() == pytest.approx(distances[-1], rel=1e-4)
        oracle.step(found, 0.5, schedule.learns(number), schedule.masked(number))
        for parameter in cell.network.get_parameters():
            np.testing.assert_allclose(as_array(parameter), oracle.w[parameter.name], rtol=1e-4, atol=1e-5)
        state = {p.name: p.asnumpy() for p in training_state.state_parameters(cell)}
        for name in oracle.trained:
            for kind, expected in (("sensitivity", oracle.mean), ("uncertainty", oracle.spread)):
                np.testing.assert_allclose(state[f"rank_budget.{name}.{kind}"], expected[name], rtol=1e-3, atol=1e-6)
        left.append(sum(cell.rank_budget.ranks().values()))
    assert left[0] == 6 and left[2] < 6 and left[-4:] == [2] * 4
    assert distances[-1] < distances[0]
    # One graph for all steps, whatever they mask.
    assert len(compiled) <= 1


def test_a_step_that_is_skipped_changes_nothing_of_it(pynative_mode, data):
    cell = train_step()
    for number, _ in run(cell, data[:3]):
        if number == 2:
            before = {p.name: p.asnumpy().copy() for p in training_state.state_parameters(cell)}
            cell.set_limits(0.0, 0.0)
    after = {p.name: p.asnumpy() for p in training_state.state_parameters(cell)}
    assert cell.last_record().skipped and any("sensitivity" in name for name in after)
    assert not [name for name in after if not np.array_equal(before[name], after[name])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that is saved at two steps: the folder, and its last state."""
    folder = tmp_path_factory.mktemp("whole")
    with in_mode(1):
        cell = train_step()
        for number, _ in run(cell, batches()):
            if number in (4, 7):
                training_state.save(str(folder / str(number)), params(cell, number))
        expected = {p.name: p.asnumpy() for p in training_state.state_parameters(cell)}
    return types.SimpleNamespace(folder=folder, expected=expected)


def params(cell, step):
    dataset = types.SimpleNamespace(get_init_step=lambda: step)
    return InternalCallbackParam(
        train_network=cell, cur_step_num=step, batch_num=STEPS, epoch_num=1, list_callback=[], train_dataset=dataset
    )


@pytest.mark.parametrize("stopped", [4, 7], ids=["while it falls", "at its end"])
def test_a_resumed_run_is_the_same_run(pynative_mode, whole, data, stopped):
    resumed = train_step()
    randomize(resumed.network.trainable_params(), seed=7)
    training_state.restore(str(whole.folder / str(stopped)), params(resumed, stopped))
    for _ in run(resumed, data, stopped + 1):
        pass
    assert any(name.endswith(LAMBDA) for name in whole.expected)
    for parameter in training_state.state_parameters(resumed):
        np.testing.assert_array_equal(parameter.asnumpy(), whole.expected[parameter.name])


def test_a_base_that_is_another_one_is_refused(pynative_mode, tmp_path):
    cell = train_step()
    training_state.save(str(tmp_path / "step"), params(cell, 4))
    randomize([cell.network.wq.weight], seed=9)
    with pytest.raises(Exception, match="was trained on another base"):
        training_state.restore(str(tmp_path / "step"), params(cell, 4))


def test_a_train_step_that_would_allocate_nothing_is_refused():
    network = Loss()
    with pytest.raises(ConfigError, match="whose ranks this train step would not allocate. Start the run with"):
        LoraTrainOneStepCell(network, nn.SGD(network.trainable_params(), RATE))


def test_a_part_that_does_not_train_is_refused():
    network = Loss()
    network.wv.mindpet_delta_lora_b.requires_grad = False
    with pytest.raises(ConfigError, match="these do not train: wv.mindpet_delta_lora_b. Remove them from freeze_incl"):
        LoraTrainOneStepCell(network, nn.SGD(network.trainable_params(), RATE), rank_budget=True)


def test_a_network_without_it_is_refused():
    dense = nn.Dense(2, 2)
    with pytest.raises(ConfigError, match="has no cell of AdaLoRA: set pet_config.use_adalora: True."):
        LoraTrainOneStepCell(dense, nn.SGD(dense.trainable_params(), RATE), rank_budget=True)


def test_the_callback_plans_each_step_and_says_what_is_left_and_where_nothing_is(pynative_mode):
    cell, callback, plans = train_step(), RankBudget(), []
    found = CallbackParams(train_network=cell, batch_num=STEPS, epoch_num=1, cur_step_num=0)
    context = types.SimpleNamespace(original_args=lambda: found)
    callback.on_train_begin(context)
    cell.network.wv.mindpet_delta_lora_lambda.set_data(Tensor(np.zeros(RANK, np.float32)))
    for step in range(1, STEPS + 1):
        found.cur_step_num = step
        callback.on_train_step_begin(context)
        plans.append(cell.rank_budget.plan.asnumpy().tolist())
        callback.on_train_step_end(context)
    schedule = callback.schedule
    assert plans == [[schedule.learns(step), schedule.masked(step)] for step in range(1, STEPS + 1)]
    (event,) = found["training_events"]
    assert (event["step"], event["kind"]) == (6, "rank_budget")
    assert event["message"].startswith(
        "AdaLoRA has allocated 3 ranks: 3 at wq. None at wv, which an adapter file leaves out. P and Q are "
    )


class CallbackParams(dict):
    """MindSpore's callback parameters: a dict whose items are attributes."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"epoch_num": 0.4}, "pet_config has tinit 1 and tfinal 3, which leave none of the run's"),
        ({"dataset_sink_mode": True}, "RankBudget plans each step, but data sinking does several at once."),
    ],
    ids=["too short", "data sinking"],
)
def test_a_run_that_it_cannot_plan_is_refused(changes, message):
    found = CallbackParams(**{"train_network": train_step(), "batch_num": STEPS, "epoch_num": 1, **changes})
    with pytest.raises(ConfigError) as error:
        RankBudget().on_train_begin(types.SimpleNamespace(original_args=lambda: found))
    assert str(error.value).startswith(message)


def test_a_train_step_without_it_is_refused_by_the_callback():
    dense = nn.Dense(2, 2)
    cell = LoraTrainOneStepCell(dense, nn.SGD(dense.trainable_params(), RATE))
    with pytest.raises(ConfigError, match="RankBudget: the train step allocates no ranks. Set pet_config.use_adalora"):
        RankBudget().on_train_begin(types.SimpleNamespace(original_args=lambda: CallbackParams(train_network=cell)))
