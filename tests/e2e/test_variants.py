"""Variants of LoRA by one more line in a YAML: the trained adapter is what the base and that line call for."""

import re

import mindspore as ms
import numpy as np

from mindlora import load_lora
from mindlora.files.adapters import files as adapter_files
from mindlora.models.variants.dora import DORA
from mindlora.training.held_out.held_out_loss import HeldOutLossCell, held_out_loss
from tests.e2e.conftest import PYNATIVE, TRAINING
from tests.support.runs import LORA_YAML, evaluated, launch, loss_of, read_yaml, step_losses, succeeded, write_yaml
from tests.support.what_runs import shows

Q, DOWN = ".attention.wq", ".feed_forward.w2"


def train(folder, data, base, flags=PYNATIVE, callbacks=(), num_layers=1, **pet_config):
    """Fine-tunes the base with these keys of pet_config; asserts that the loss falls.

    Returns what was printed, and the folder of the adapter after the last step.
    """
    config = read_yaml(LORA_YAML)
    config["model"]["model_config"]["pet_config"].update(pet_config)
    config["callbacks"] = [*callbacks, *config["callbacks"]]
    folder.mkdir()
    stdout = succeeded(
        launch(
            folder,
            "--train_dataset_dir",
            data.train,
            "--load_checkpoint",
            base,
            *TRAINING,
            *flags,
            "--model.model_config.num_layers",
            num_layers,
            config=write_yaml(folder, config),
        )
    )
    losses = step_losses(stdout)
    assert losses[-1] < losses[0] - 0.3
    return stdout, folder / "output" / "lora_checkpoint" / "step_16"


@shows("rslora", "llama")
@shows("embedding", "llama")
@shows("saved_modules", "llama")
def test_ranks_alphas_embeddings_and_saved_modules_together(data, base, fresh_network, tmp_path):
    keys = {
        "lora_rank": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["wq", "w2", "tok_embeddings"],
        "rank_pattern": {"w2": 6},
        "alpha_pattern": {"wq": 3},
        "modules_to_save": ["lm_head", "norm_out"],
    }
    _, folder = train(tmp_path / "train", data, base, flags=(), **keys)
    adapter, weights = adapter_files.read(str(folder)), ms.load_checkpoint(str(base))
    paths = {f"model.layers.0{leaf}" for leaf in (Q, DOWN)} | {"model.tok_embeddings"}
    assert adapter.use_rslora and set(adapter.paths) == paths and adapter.embeddings == {"model.tok_embeddings"}
    for path in paths:
        rank, alpha = 6 if path.endswith(DOWN) else 4, 3 if path.endswith(Q) else 8
        assert (adapter.rank(path), adapter.alphas[path]) == (rank, alpha)
        assert all(part.any() for part in adapter.parts(path).values())
    assert set(adapter.saved_modules) == {"lm_head.weight", "model.norm_out.weight"}
    for name, array in adapter.saved_modules.items():
        assert 0 < np.abs(array - weights[name].asnumpy()).max() < 0.3
    # The columns of an embedding's A start at zero, and stay zero for tokens that never occur.
    a = adapter.tensors["model.tok_embeddings", "A"]
    taken = np.unique((np.arange(60)[:, None] + 5 * np.arange(17)) % 60 + 4)
    assert not np.delete(a, taken, axis=1).any() and a[:, taken].any()
    network = fresh_network(**keys)
    load_lora(network, str(folder), on_base_mismatch="error")
    assert loss_of(network, data.eval_rows) < loss_of(fresh_network(**keys), data.eval_rows) - 0.3


def with_a_second_layer(base, folder):
    """Returns a checkpoint of the base with a second layer, which adds nothing before it is adapted."""
    weights = {name: parameter.asnumpy() for name, parameter in ms.load_checkpoint(str(base)).items()}
    for name in [name for name in weights if "layers.0." in name]:
        adds = name.endswith(("wo.weight", "w2.weight"))
        weights[name.replace("layers.0.", "layers.1.")] = np.zeros_like(weights[name]) if adds else weights[name]
    saved = [{"name": name, "data": ms.Tensor(array)} for name, array in weights.items()]
    ms.save_checkpoint(saved, str(folder / "two"))
    return folder / "two.ckpt"


@shows("lora_plus", "llama")
def test_lora_plus_with_a_gaussian_initialization_in_one_layer_alone(data, base, tmp_path):
    keys = {"lora_init": "gaussian", "loraplus_lr_ratio": 4, "layers_to_transform": 1}
    base = with_a_second_layer(base, tmp_path)
    stdout, folder = train(tmp_path / "train", data, base, flags=(), num_layers=2, **keys)
    adapter = adapter_files.read(str(folder))
    assert {path.split(".")[2] for path in adapter.paths} == {"1"} and len(adapter.paths) == 7
    assert "LoRA+: B learns at 4 times the rate of lr_schedule." in stdout
    # A began with a deviation of 1 / r. In each of 16 steps, Adam moves an element of A by about 0.01, of B by 0.04.
    deviations = [adapter.tensors[path, "A"].std() for path in adapter.paths]
    np.testing.assert_allclose(deviations, 1 / 16, rtol=0.5)
    assert 0.1 < max(np.abs(adapter.tensors[path, "B"]).max() for path in adapter.paths) < 0.64


@shows("lora_fa", "llama")
def test_b_alone_trains_from_an_orthogonal_initialization(data, base, tmp_path):
    stdout, folder = train(tmp_path / "train", data, base, lora_init="orthogonal", freeze_lora_a=True)
    adapter = adapter_files.read(str(folder))
    for path in adapter.paths:
        a, b = adapter.parts(path).values()
        # A still has its initial values, in half of the r-dimensional space; B has left its half.
        assert np.linalg.matrix_rank(a) == 8 and np.linalg.matrix_rank(b) > 8
        np.testing.assert_allclose(a.std(), 0.1 * np.sqrt(0.5), rtol=0.3)
        assert np.abs(b @ a).max() > 1e-3
    trainable = sum(adapter.tensors[path, "B"].size for path in adapter.paths)
    assert f"trainable params: {trainable:,} " in stdout


@shows("pissa", "llama")
def test_pissa_trains_on_a_corrected_base_and_is_saved_for_the_original_one(data, base, fresh_network, tmp_path):
    start = {"lora_init": "pissa_niter_4"}
    stdout, folder = train(
        tmp_path / "train",
        data,
        base,
        lora_rank=4,
        **start,
        callbacks=[{"type": "HeldOutLoss", "dataset_dir": str(data.base), "every_steps": 16}],
    )
    assert stdout.count("Adapters initialized from the base by lora_init: 7") == 1
    held_out = float(re.search(r"step 16: held_out_loss ([\d.]+)", stdout)[1])
    adapter = adapter_files.read(str(folder))
    assert adapter.initialization == "pissa_niter_4" and {adapter.rank(path) for path in adapter.paths} == {8}
    # Loaded as a plain LoRA, on the unchanged base.
    network = fresh_network(lora_rank=8, lora_alpha=64)
    cell = HeldOutLossCell(network, -100)
    assert abs(held_out_loss(cell, str(data.base), 8) - held_out) > 0.1
    load_lora(network, str(folder), on_base_mismatch="error")
    assert abs(held_out_loss(cell, str(data.base), 8) - held_out) < 1e-4
    # The same with a YAML.
    pet = "--model.model_config.pet_config"
    flags = (f"{pet}.lora_rank", "4", f"{pet}.lora_init", start["lora_init"])
    found = evaluated(tmp_path / "eval", data.eval, base, folder, *flags)
    assert abs(found - loss_of(network, data.eval_rows)) < 1e-4


def test_olora_trains_and_saves_its_initial_pair(data, base, tmp_path):
    _, folder = train(tmp_path / "train", data, base, lora_init="olora", lora_rank=4, target_modules=[Q[1:], DOWN[1:]])
    adapter, weights = adapter_files.read(str(folder)), ms.load_checkpoint(str(base))
    assert adapter.initialization == "olora" and len(adapter.paths) == 2
    for path in adapter.paths:
        q, r = np.linalg.qr(weights[f"{path}.weight"].asnumpy())
        np.testing.assert_allclose(adapter.tensors[path, "A"][4:], r[:4], atol=1e-5)
        np.testing.assert_allclose(adapter.tensors[path, "B"][:, 4:], -q[:, :4], atol=1e-5)
        assert np.abs(adapter.tensors[path, "A"][:4] - r[:4]).max() > 1e-3


@shows("dora", "llama")
def test_dora_starts_from_the_loaded_base_and_trains(data, base, fresh_network, tmp_path):
    variant, rows = ("--model.model_config.pet_config.use_dora", "True"), ("--train_dataset_dir", data.train)
    stdout = succeeded(launch(tmp_path / "train", *rows, "--load_checkpoint", base, *variant, *TRAINING))
    losses = step_losses(stdout)
    assert losses[-1] < losses[0] - 0.3
    folder = tmp_path / "train" / "output" / "lora_checkpoint" / "best"
    adapter, weights = adapter_files.read(str(folder)), ms.load_checkpoint(str(base))
    assert adapter.variant is DORA
    for path in adapter.paths:
        norms = np.linalg.norm(weights[f"{path}.weight"].asnumpy(), axis=1)
        moved = np.abs(adapter.tensors[path, "magnitude"] - norms)
        # Adam moves a number by about the learning rate in a step: the norms of another base would be far away.
        assert 0 < moved.max() < 0.1
    # Here the adapter is loaded first and then the base.
    found = evaluated(tmp_path / "eval", data.eval, base, folder, *variant)
    network = fresh_network(use_dora=True)
    load_lora(network, str(folder))
    assert abs(found - loss_of(network, data.eval_rows)) < 1e-4
