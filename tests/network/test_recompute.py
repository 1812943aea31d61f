"""Adapters in layers that MindFormers recomputes get the gradients of layers that it does not."""

import mindspore as ms
import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora, freeze_base
from tests.support.networks import adapters, randomize

TOKENS = np.random.default_rng(1).integers(3, 64, (1, 17)).astype(np.int32)


@pytest.mark.parametrize("freeze_lora_a", [False, True])
def test_recomputation_changes_no_gradient(make_llama, pynative_mode, freeze_lora_a):
    """In PyNative mode. MindSpore gives parameters that come after recompute() a gradient of zero."""
    from mindformers.modules.transformer import transformer

    found = []
    for recomputed in (False, True):
        recompute = transformer.TransformerRecomputeConfig(recompute=recomputed)
        ms.set_seed(1)
        network = make_llama(parallel_config=transformer.TransformerOpParallelConfig(recompute=recompute))
        assert any(getattr(cell, "_recompute_cell", None) for _, cell in network.cells_and_names()) == recomputed
        apply_lora(network, LoraConfig(lora_rank=2, target_modules=["wq", "w2"], freeze_lora_a=freeze_lora_a))
        freeze_base(network)
        randomize([p for p in network.get_parameters() if p.name.endswith("weight")], 2)
        randomize(adapters(network).values(), 1)
        network.set_train()
        parameters = network.trainable_params()
        _, gradients = ms.value_and_grad(network, None, parameters)(ms.Tensor(TOKENS))
        found.append({p.name: slope.asnumpy() for p, slope in zip(parameters, gradients)})
    assert found[0].keys() == found[1].keys() and len(found[0]) == (4 if freeze_lora_a else 8)
    for name, slope in found[0].items():
        assert slope.any()
        np.testing.assert_allclose(found[1][name], slope, rtol=0, atol=1e-6 * np.abs(slope).max())
