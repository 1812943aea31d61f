"""A and B as PEFT initializes them on the same weights; and adapters trained from there, in both directions."""

import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora, freeze_base, initialize_adapters, load_lora, save_lora
from mindlora.core.errors import MissingTensorsError
from mindlora.models import names
from mindlora.network import tree
from tests.support import networks
from tests.support.peers.peer import arrays, read_json

MODEL = "grouped"
INITIALIZERS = ["pissa", "olora", "pissa_niter_16"]
# PEFT's keys and mindlora's.
CONFIGS = {
    "plain": ({"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}, {}),
    "rslora": (
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
        {"use_rslora": True},
    ),
    "patterns": (
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 8},
            "alpha_pattern": {"q_proj": 3},
        },
        {"rank_pattern": {"wv": 8}, "alpha_pattern": {"wq": 3}},
    ),
}


def initialized(make_network, initializer, kind):
    """Returns MindFormers' network with initialized adapters."""
    network = make_network(MODEL)
    apply_lora(
        network,
        LoraConfig(
            lora_rank=4, lora_alpha=6, target_modules=["wq", "wv", "w2"], lora_init=initializer, **CONFIGS[kind][1]
        ),
    )
    freeze_base(network)
    initialize_adapters(network)
    return network


def layers(network):
    """Returns Hugging Face name -> (A, B, W, scale)."""
    return {
        names.to_hugging_face(path): (*(p.asnumpy() for p in (*cell.lora_parameters(), cell.weight)), cell.scale)
        for path, cell in tree.lora_cells(network)
    }


@pytest.fixture
def peft_layers(peer, made, tmp_path):
    """Returns a function that returns the layers as PEFT initializes them."""

    def make(initializer, kind="plain"):
        peer.initial_layers(
            model=made.models[MODEL],
            config={**CONFIGS[kind][0], "init_lora_weights": initializer},
            path=tmp_path / "layers.safetensors",
        )
        found = arrays(tmp_path / "layers.safetensors")
        return {
            key[:-2]: (
                found[key],
                *(found[f"{key[:-2]}.{part}"] for part in ("B", "W")),
                float(found[f"{key[:-2]}.scale"][0]),
            )
            for key in found
            if key.endswith(".A")
        }

    return make


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("initializer", ["pissa", "olora"])
def test_the_same_pairs_and_bases(initializer, kind, make_network, peft_layers):
    ours, theirs = layers(initialized(make_network, initializer, kind)), peft_layers(initializer, kind)
    assert set(ours) == set(theirs) and len(ours) == 6
    for name, (a, b, weight, scale) in theirs.items():
        our_a, our_b, our_weight, our_scale = ours[name]
        assert our_scale == pytest.approx(scale, rel=1e-6)
        assert our_a.shape == a.shape and our_b.shape == b.shape
        np.testing.assert_allclose(our_scale * our_b @ our_a, scale * b @ a, rtol=0, atol=1e-5)
        np.testing.assert_allclose(our_weight, weight, rtol=0, atol=1e-5)
        # A direction of PiSSA may have the opposite sign in A and B together.
        signs = np.sign((our_a * a).sum(axis=1))
        np.testing.assert_allclose(our_a * signs[:, None], a, rtol=0, atol=1e-4)
        np.testing.assert_allclose(our_b * signs, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_minor_directions(kind, make_network, peft_layers):
    """MiCA: A is zero, and each column of B may have the opposite sign."""
    ours, theirs = layers(initialized(make_network, "mica", kind)), peft_layers("mica", kind)
    assert set(ours) == set(theirs) and len(ours) == 6
    for name, (a, b, weight, scale) in theirs.items():
        our_a, our_b, our_weight, our_scale = ours[name]
        assert our_scale == pytest.approx(scale, rel=1e-6)
        np.testing.assert_array_equal(our_a, a)
        np.testing.assert_array_equal(our_weight, weight)
        np.testing.assert_allclose(our_b * np.sign((our_b * b).sum(axis=0)), b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("iterations", [0, 2, 16])
def test_the_randomized_decomposition_takes_as_much_of_the_base(iterations, make_network, peft_layers):
    """Both use random directions, ours a few more; the exact decomposition takes as much as is possible."""
    ours, theirs, exact = (
        layers(initialized(make_network, f"pissa_niter_{iterations}", "plain")),
        peft_layers(f"pissa_niter_{iterations}"),
        peft_layers("pissa"),
    )
    for name in theirs:
        left, their_left, least = (np.linalg.norm(found[name][2]) for found in (ours, theirs, exact))
        assert least * 0.9999 < left < their_left * 1.01


@pytest.mark.parametrize("initializer", ["gaussian", "orthogonal"])
def test_the_same_statistics(initializer, make_network, peft_layers):
    ours, theirs = (
        list(found.values())
        for found in (layers(initialized(make_network, initializer, "plain")), peft_layers(initializer))
    )
    for half in range(2):
        deviations = [np.concatenate([layer[half].ravel() for layer in found]).std() for found in (ours, theirs)]
        assert deviations[0] == pytest.approx(deviations[1], rel=0.25)
    for a, b, weight, _ in ours + theirs:
        np.testing.assert_allclose(b @ a, 0, atol=1e-6)
        assert any(np.array_equal(weight, layer[2]) for layer in theirs)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("initializer", [*INITIALIZERS, "gaussian", "orthogonal", "mica"])
def test_peft_loads_what_was_trained_here_on_the_unchanged_base(
    initializer, kind, make_network, logits_of, peft_logits, tmp_path
):
    network = initialized(make_network, initializer, kind)
    np.testing.assert_allclose(logits_of(network), peft_logits(MODEL), rtol=0, atol=2e-5)
    rng = np.random.default_rng(3)
    for parameter in network.trainable_params():
        moved = networks.as_array(parameter) + 0.1 * rng.normal(size=parameter.shape)
        parameter.set_data(type(parameter)(moved.astype(np.float32)))
    save_lora(network, str(tmp_path / "adapter"))
    ours = logits_of(network)
    assert np.abs(ours - peft_logits(MODEL)).max() > 0.1
    np.testing.assert_allclose(ours, peft_logits(MODEL, tmp_path / "adapter"), rtol=0, atol=2e-5)
    assert read_json(tmp_path / "adapter", "adapter_config.json")["init_lora_weights"] is True


# Without "patterns": PEFT doubles a rank_pattern although it has already doubled lora_alpha for it.
@pytest.mark.parametrize("kind", ["plain", "rslora"])
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_what_peft_converts_gives_the_same_here(initializer, kind, peer, made, make_network, logits_of, tmp_path):
    peer.train_initialized(
        model=made.models[MODEL],
        config={**CONFIGS[kind][0], "init_lora_weights": initializer},
        folder=str(tmp_path / "theirs"),
        ids=made.ids.tolist(),
        path=str(tmp_path / "logits.npy"),
    )
    network = make_network(MODEL)
    load_lora(network, str(tmp_path / "theirs"))
    np.testing.assert_allclose(logits_of(network), np.load(tmp_path / "logits.npy"), rtol=0, atol=2e-5)


DORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True}


@pytest.mark.parametrize("initializer", [*INITIALIZERS[:2], "gaussian", "orthogonal"])
def test_dora_with_another_initializer(initializer, peer, made, make_network, logits_of, peft_logits, tmp_path):
    """The magnitudes are the norms of the original base, and the trained adapter is a DoRA on that base."""
    network = make_network(MODEL)
    apply_lora(
        network,
        LoraConfig(lora_rank=4, lora_alpha=6, target_modules=["wq", "wv", "w2"], lora_init=initializer, use_dora=True),
    )
    freeze_base(network)
    initialize_adapters(network)
    network.set_train()
    peer.initial_layers(
        model=made.models[MODEL],
        config={**DORA, "init_lora_weights": initializer},
        path=tmp_path / "layers.safetensors",
    )
    theirs = arrays(tmp_path / "layers.safetensors")
    for path, cell in tree.lora_cells(network):
        name = names.to_hugging_face(path)
        np.testing.assert_allclose(
            cell.mindpet_delta_lora_magnitude.asnumpy(), theirs[f"{name}.magnitude"], rtol=0, atol=2e-5
        )
        if initializer in INITIALIZERS:
            np.testing.assert_allclose(cell.weight.asnumpy(), theirs[f"{name}.W"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits_of(network), peft_logits(MODEL), rtol=0, atol=2e-5)
    rng = np.random.default_rng(3)
    for parameter in network.trainable_params():
        moved = networks.as_array(parameter) + 0.1 * rng.normal(size=parameter.shape)
        parameter.set_data(type(parameter)(moved.astype(np.float32)))
    save_lora(network, str(tmp_path / "adapter"))
    ours = logits_of(network)
    assert np.abs(ours - peft_logits(MODEL)).max() > 0.1
    np.testing.assert_allclose(ours, peft_logits(MODEL, tmp_path / "adapter"), rtol=0, atol=2e-5)
    again = make_network(MODEL)
    load_lora(again, str(tmp_path / "adapter"), on_base_mismatch="error")
    np.testing.assert_allclose(logits_of(again), ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_a_dora_that_peft_converted_lacks_its_magnitudes(initializer, peer, made, make_network, tmp_path):
    """PEFT's conversion drops them, so no reader can know the norms of the rows: this must be an error, not a guess."""
    peer.train_initialized(
        model=made.models[MODEL],
        config={**DORA, "init_lora_weights": initializer},
        folder=str(tmp_path / "theirs"),
        ids=made.ids.tolist(),
        path=str(tmp_path / "logits.npy"),
    )
    with pytest.raises(MissingTensorsError, match="magnitude"):
        load_lora(make_network(MODEL), str(tmp_path / "theirs"))
