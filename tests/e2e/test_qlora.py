"""QLoRA from a YAML: the base quantized by the command, fine-tuning on it, and what is refused before training."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import load_file

from mindlora import load_lora
from tests.e2e.conftest import TRAINING
from tests.support.runs import evaluated, launch, launch_refused, loss_of, python, step_losses, succeeded, write_rows
from tests.support.what_runs import shows

QLORA = ("--model.model_config.pet_config.quantize_base", "nf4")
# The same as a pet_type.
SHORT = ("--model.model_config.pet_config.pet_type", "qlora")


@pytest.fixture(scope="module")
def quantized(base, tmp_path_factory):
    """The tiny base in 4 bits, quantized by the command."""
    folder = tmp_path_factory.mktemp("quantized")
    stdout = succeeded(python(["-m", "mindlora.cli", "base", "quantize", base, folder / "base.safetensors"], folder))
    assert "weights in NF4: 7, model.layers.0.attention.wq" in stdout and "training's and not the model" in stdout
    return folder / "base.safetensors"


@pytest.fixture(scope="module")
def run(data, quantized, tmp_path_factory):
    """A fine-tuning run on it: the folder of its adapter, and what it printed."""
    folder = tmp_path_factory.mktemp("qlora")
    return folder / "output" / "lora_checkpoint" / "best", succeeded(
        launch(folder, "--train_dataset_dir", data.train, "--load_checkpoint", quantized, *SHORT, *TRAINING)
    )


@shows("nf4", "llama")
def test_the_loss_falls_as_on_the_float_base(run, trained):
    losses, in_float = step_losses(run[1]), step_losses(trained.stdout)
    assert losses[-1] < losses[0] - 0.3
    assert abs(losses[0] - in_float[0]) < 0.1 * in_float[0]  # the base was loaded
    assert losses[-1] < 1.1 * in_float[-1]


TRAINING_STEPS, BATCH = 160, 16


def test_it_ends_at_the_loss_of_lora_on_the_float_base(data, fresh_network, tmp_path, graph_mode):
    """Within 3 % on held-out rows, with the same initial A and the same order of rows."""
    rows, ended = write_rows(tmp_path / "rows", rows=512, step=5, seed=7), {}
    for name, keys in (("lora", {}), ("qlora", {"quantize_base": "nf4"})):
        ms.set_seed(1)
        network = fresh_network(**keys)
        # At the YAML's learning rate of 1e-2, the outcome depends on the last bit of every number.
        rates = np.linspace(3e-3, 0, TRAINING_STEPS, endpoint=False).tolist()
        step = nn.TrainOneStepCell(network, nn.AdamWeightDecay(network.trainable_params(), rates))
        started = loss_of(network, data.eval_rows)
        order = np.random.default_rng(1)
        step.set_train()
        for _ in range(TRAINING_STEPS):
            step(ms.Tensor(order.permutation(rows)[:BATCH]))
        ended[name] = loss_of(network, data.eval_rows)
        assert ended[name] < 0.4 * started
    assert ended["qlora"] < 1.03 * ended["lora"]


def test_the_adapter_is_of_the_quantized_base(run, base, data, fresh_network, quantized, tmp_path):
    network = fresh_network(quantize_base="nf4")
    stored = load_file(str(quantized))
    parameters = {p.name: p for p in network.get_parameters()}
    for name, array in stored.items():  # the command and quantize_base give the same bytes
        np.testing.assert_array_equal(parameters[name].asnumpy(), array)
    load_lora(network, str(run[0]), on_base_mismatch="error")
    found = evaluated(tmp_path, data.eval, quantized, run[0], *QLORA)
    assert abs(found - loss_of(network, data.eval_rows)) < 1e-4


REFUSED = [
    (
        SHORT,
        "base",
        "is not a .safetensors file, but pet_config has quantize_base. Write a quantized base once: mindlora "
        "base quantize ",
    ),
    ((), "quantized", "is quantized, but pet_config has no quantize_base."),
    (
        (*QLORA, "--model.model_config.pet_config.quantize_exclude", "wq"),
        "quantized",
        "was quantized with another quantize_exclude: the file and this run differ at model.layers.0.attention.wq.",
    ),
]


@pytest.fixture(scope="module")
def refused(data, base, quantized, tmp_path_factory):
    """The checkpoint, exit code and stderr of each of REFUSED."""
    checkpoints = [{"base": base, "quantized": quantized}[given] for _, given, _ in REFUSED]
    launches = [
        ["--train_dataset_dir", data.train, "--load_checkpoint", checkpoint, *flags, *TRAINING]
        for checkpoint, (flags, _, _) in zip(checkpoints, REFUSED)
    ]
    ended, _ = launch_refused(tmp_path_factory.mktemp("refused"), *launches)
    return [(checkpoint, *end) for checkpoint, end in zip(checkpoints, ended)]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_another_base_is_refused_before_training(number, refused):
    (checkpoint, code, stderr), message = refused[number], REFUSED[number][2]
    assert code == 1 and f"mindlora-run: error: load_checkpoint: {checkpoint} {message}" in stderr
