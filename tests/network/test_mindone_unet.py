"""LoRA on mindone's UNet2DConditionModel, made of mint.nn.Linear and mint.nn.Conv2d; run where mindone is installed."""

import importlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.network.merge import merge_lora
from mindlora.network.tree import lora_cells
from tests.support import mindone_cpu
from tests.support.networks import as_array
from tests.support.small_unet import recompute_norm_activation

SIZES = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


class Loss(nn.Cell):
    def __init__(self, unet):
        super().__init__(auto_prefix=False)
        self.unet = unet

    def construct(self, latents, time, words):
        return (self.unet(latents, time, words, return_dict=False)[0] ** 2).mean()


@pytest.fixture
def unet(monkeypatch, graph_mode):
    module = pytest.importorskip("mindone.diffusers.models.unets.unet_2d_condition", reason="mindone is not installed")
    mindone_cpu.stand_in(monkeypatch, importlib.import_module("mindone.diffusers.models.activations"))
    ms.set_seed(1)
    return module.UNet2DConditionModel(**SIZES)


def test_it_is_adapted_recomputed_and_merged(unet):
    rng = np.random.default_rng(0)
    inputs = [Tensor(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 4, 8, 8), (1,), (1, 3, 6))]
    inputs[1] = Tensor([7], ms.int32)
    assert "down_blocks.0.resnets.0.norm1" in recompute_norm_activation(unet)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in", "conv_in", "linear_1"]
    apply_lora(unet, LoraConfig(lora_rank=2, target_modules=targets))
    freeze_base(unet)
    cells = dict(lora_cells(unet))
    kinds = {type(cell).__name__ for cell in cells.values()}
    assert kinds == {"LoRADense", "LoRAMintConv2d"}
    assert "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0" in cells
    for cell in cells.values():
        for parameter in cell.lora_parameters():
            parameter.set_data(Tensor((0.1 * rng.normal(size=parameter.shape)).astype(np.float32)))
    parameters = unet.trainable_params()
    loss, slopes = ms.value_and_grad(Loss(unet.set_train()), None, parameters)(*inputs)
    assert len(slopes) == 2 * len(cells)
    assert not [p.name for p, slope in zip(parameters, slopes) if not slope.asnumpy().any()]
    evaluate = Loss(unet.set_train(False))
    before = as_array(evaluate(*inputs))
    np.testing.assert_allclose(before, as_array(loss), rtol=1e-4)
    merge_lora(unet)
    np.testing.assert_allclose(as_array(evaluate(*inputs)), before, rtol=1e-3)
