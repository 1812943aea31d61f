"""combine_adapters against PEFT's add_weighted_adapter, on adapters that PEFT made."""

import numpy as np
import pytest

from mindlora import load_lora
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.combine import combine_adapters
from mindlora.files.adapters.dialects import peft
from tests.support.peers.peer import arrays

# Two with equal ranks but different alphas and targets; then one of another rank.
SAME_RANK = ["combine-1", "combine-2"]
ANY_RANK = [*SAME_RANK, "combine-3"]

FACTORS = [
    *((SAME_RANK, weights, {"method": "linear"}) for weights in ([0.7, 0.3], [1.5, -0.5], [-1.0, -0.25])),
    (["combine-2", "rslora"], [0.4, 1.1], {"method": "linear"}),
    *(
        (SAME_RANK, weights, {"method": "ties", "density": density, "majority_sign": sign})
        for weights, density, sign in (
            ([0.7, 0.3], 0.5, "total"),
            ([0.7, 0.3], 0.5, "frequency"),
            ([1.2, -0.4], 0.3, "total"),
            ([1.2, -0.4], 1.0, "frequency"),
        )
    ),
    (SAME_RANK, [0.6, -0.9], {"method": "magnitude_prune", "density": 0.4}),
    (SAME_RANK, [0.6, -0.9], {"method": "dare_linear", "density": 1.0}),
    (SAME_RANK, [0.6, 0.9], {"method": "dare_ties", "density": 1.0}),
    (ANY_RANK, [0.5, -0.8, 2.0], {"method": "cat"}),
    (["combine-3", "rslora"], [0.5, 1.0], {"method": "cat"}),
]
PRODUCTS = [
    (ANY_RANK, [0.5, -0.8, 2.0], {"method": "svd"}),
    (ANY_RANK, [0.5, -0.8, 2.0], {"method": "svd", "svd_rank": 3}),
    (ANY_RANK, [0.5, 0.8, 1.0], {"method": "svd", "svd_rank": 20}),
    (["rslora", "combine-3"], [1.0, 0.5], {"method": "svd", "svd_rank": 5}),
    (ANY_RANK, [0.5, 0.8, 1.0], {"method": "ties_svd", "density": 0.5, "svd_rank": 5}),
    (ANY_RANK, [0.5, -0.8, 1.0], {"method": "ties_svd", "density": 0.5, "majority_sign": "frequency"}),
    (ANY_RANK, [0.5, -0.8, 1.0], {"method": "magnitude_prune_svd", "density": 0.4}),
    (ANY_RANK, [0.5, -0.8, 1.0], {"method": "dare_linear_svd", "density": 1.0}),
    (ANY_RANK, [0.5, 0.8, 1.0], {"method": "dare_ties_svd", "density": 1.0, "svd_rank": 4}),
]


def label(value):
    if isinstance(value, dict):
        return ",".join(str(part) for part in value.values())
    return "+".join(map(str, value))


@pytest.fixture
def both(peer, made, tmp_path):
    """Returns a function that returns mindlora's combination and PEFT's, each as key -> tensor."""

    def combine(adapters, weights, options):
        combined = combine_adapters(
            [adapter_files.read(str(made.adapters[name])) for name in adapters], weights, **options
        )
        # mindlora's combination has scale 1 everywhere.
        assert all(combined.scale(path) == 1 for path in combined.paths)
        renamed = {"method": "combination_type", "majority_sign": "majority_sign_method"}
        scalings = peer.combine(
            model=made.models["plain"],
            adapters=[str(made.adapters[name]) for name in adapters],
            folder=tmp_path / "combined",
            weights=weights,
            **{renamed.get(key, key): value for key, value in options.items()},
        )
        theirs = arrays(tmp_path / "combined" / "tensors.safetensors")
        # If the first adapter is rsLoRA, PEFT scales its result by sqrt(r), which the combined adapters do not justify:
        # a bug that mindlora does not repeat. The tensors are compared without that factor.
        rank = max(tensor.shape[0] for key, tensor in theirs.items() if "lora_A" in key)
        assert scalings == [pytest.approx(rank**0.5 if adapters[0] == "rslora" else 1)]
        ours = {peft.tensor_key(*place): tensor for place, tensor in combined.tensors.items()}
        assert set(ours) == set(theirs)
        assert all(tensor.dtype == np.float32 for tensor in ours.values())
        return ours, theirs

    return combine


@pytest.mark.parametrize("adapters, weights, options", FACTORS, ids=label)
def test_same_tensors(adapters, weights, options, both):
    ours, theirs = both(adapters, weights, options)
    for key, tensor in theirs.items():
        np.testing.assert_allclose(ours[key], tensor, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("adapters, weights, options", PRODUCTS, ids=label)
def test_same_products(adapters, weights, options, both):
    """The signs of singular vectors are arbitrary, so B A is compared."""
    ours, theirs = both(adapters, weights, options)
    for key in theirs:
        if "lora_A" in key:
            other = key.replace("lora_A", "lora_B")
            expected = theirs[other] @ theirs[key]
            assert np.abs(expected).max() > 0.01
            np.testing.assert_allclose(ours[other] @ ours[key], expected, rtol=0, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("method", ["cat", "svd"])
def test_peft_loads_the_combination(method, made, make_network, logits_of, peft_logits, tmp_path):
    """Written in PEFT's format, it gives the same logits there and here: those of the three adapters together."""
    adapters = [adapter_files.read(str(made.adapters[name])) for name in ANY_RANK]
    # The ranks are 4, 4 and 6, so svd loses nothing at rank 14.
    rank = {"svd_rank": 14} if method == "svd" else {}
    combined = combine_adapters(adapters, [0.5, -0.8, 2.0], method, **rank)
    adapter_files.write(combined, str(tmp_path / "combined"), to="peft")
    network = make_network("plain")
    load_lora(network, str(tmp_path / "combined"))
    theirs = peft_logits("plain", tmp_path / "combined")
    assert np.abs(theirs - peft_logits("plain")).max() > 0.1
    np.testing.assert_allclose(logits_of(network), theirs, rtol=0, atol=2e-5)
    for path in combined.paths:
        expected = sum(
            weight * adapter.delta(path) for weight, adapter in zip([0.5, -0.8, 2.0], adapters) if path in adapter.paths
        )
        np.testing.assert_allclose(combined.delta(path), expected, rtol=0, atol=2e-6, err_msg=path)
