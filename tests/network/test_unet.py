"""LoRA on a UNet under diffusers' module names: linear cells and convolutions of one network, in both modes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.core.errors import TargetError
from mindlora.network.cells.conv import LoRAConv2d
from mindlora.network.cells.dense import LoRADense
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from tests.support.networks import as_array, assert_close, randomize, snapshot
from tests.support.small_unet import MeanSquare, small_unet, unet_inputs

# As users of diffusers write them.
LINEAR = ["to_q", "to_k", "to_v", "to_out.0"]
TARGETS = [*LINEAR, "conv1", "proj_in", "conv_in", "time_embedding.linear_1", "ff.net.2", "downsamplers.0.conv"]


def adapted(targets=TARGETS, seed=2):
    network = small_unet()
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=4, target_modules=targets))
    if seed:
        randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed)
    return network.set_train(False)


def test_targets_are_found_under_diffusers_names():
    kinds = {path: type(cell) for path, cell in lora_cells(adapted())}
    blocks = ("down_blocks.0.attentions.0", "mid_block.attentions.0", *(f"up_blocks.1.attentions.{i}" for i in (0, 1)))
    for block in blocks:
        assert kinds[f"{block}.proj_in"] is LoRAConv2d
        for attention in ("attn1", "attn2"):
            assert all(kinds[f"{block}.transformer_blocks.0.{attention}.{leaf}"] is LoRADense for leaf in LINEAR)
    assert kinds["down_blocks.0.downsamplers.0.conv"] is LoRAConv2d and kinds["conv_in"] is LoRAConv2d
    assert sum(path.endswith(".conv1") for path in kinds) == 8 and "conv_out" not in kinds


def test_it_trains_and_the_adapter_does_the_same_in_a_fresh_unet(graph_mode, tmp_path):
    """In graph mode; the program of examples/text_to_image trains one in PyNative."""
    network, inputs = adapted(seed=None), unet_inputs(batch=2)
    freeze_base(network)
    parameters, before = network.trainable_params(), snapshot(network)
    assert len(parameters) == 2 * len(dict(lora_cells(network)))
    gradient = ms.value_and_grad(MeanSquare(network.set_train()), None, parameters)
    optimizer, losses = nn.Adam(parameters, 1e-2), []
    for _ in range(2):
        loss, gradients = gradient(*inputs)
        optimizer(gradients)
        losses.append(float(loss.asnumpy()))
    assert losses[-1] < losses[0]
    # B, which was zero, has a gradient from the first step on, and A from the second.
    changed = {name for name, content in snapshot(network).items() if content != before[name]}
    assert changed == {p.name for p in parameters}
    network.set_train(False)
    save_lora(network, str(tmp_path / "adapter"))
    fresh = small_unet().set_train(False)
    load_lora(fresh, str(tmp_path / "adapter"))
    ms.set_context(mode=ms.PYNATIVE_MODE)  # Two graphs of a forward would take most of the test's time.
    assert_close(fresh(*inputs), as_array(network(*inputs)))


def test_a_graph_compiled_before_the_merge_is_right_after_it(graph_mode):
    """With a reused graph, an adapter that is in the weights would count a second time."""
    network, inputs = adapted(LINEAR + ["conv1", "proj_in"]), unet_inputs()
    y = as_array(network(*inputs))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    plain = as_array(small_unet()(*inputs))
    ms.set_context(mode=ms.GRAPH_MODE)
    assert np.abs(y - plain).max() > 0.1 * np.abs(plain).max()
    for change in (merge_lora, unmerge_lora, merge_and_unload):
        change(network)
        np.testing.assert_allclose(as_array(network(*inputs)), y, rtol=0, atol=1e-4 * np.abs(y).max())
    assert not list(lora_cells(network))


class Pipeline(nn.Cell):
    """The parts of a text-to-image pipeline in one cell."""

    def __init__(self):
        super().__init__()
        self.unet = small_unet()
        self.text_encoder = nn.SequentialCell(nn.Dense(4, 6))
        self.vae = nn.CellDict({"to_q": nn.Dense(3, 3), "conv_in": nn.Conv2d(3, 3, 1)})


def test_a_pattern_that_would_adapt_the_vae_is_an_error():
    network = Pipeline()
    with pytest.raises(TargetError, match=r"'conv_in'\] selects cells of vae, .*: vae.to_q, vae.conv_in. Begin"):
        apply_lora(network, LoraConfig(target_modules=["to_q", "conv_in"]))
    with pytest.raises(TargetError, match="'all-linear' selects cells of text_encoder"):
        apply_lora(network, LoraConfig(target_modules="all-linear", exclude_modules=r"vae\..*"))
    with pytest.raises(TargetError, match="modules_to_save .* selects cells of vae"):
        apply_lora(network, LoraConfig(target_modules=r"unet\..*to_q", modules_to_save=["conv_in"]))
    assert not list(lora_cells(network))
    config = LoraConfig(target_modules=r"unet\..*to_q|text_encoder\.0", freeze_exclude=["*conv_in.bias", "vae.*"])
    apply_lora(network, config)
    with pytest.raises(TargetError, match="freeze_exclude .* selects cells of vae"):
        freeze_base(network, config)
    freeze_base(network)
    assert {p.name.split(".")[0] for p in network.trainable_params()} == {"unet", "text_encoder"}
    assert all("lora" in p.name for p in network.trainable_params())
