"""What a residual block of a UNet keeps for its backward, with and without recompute_norm_activation.

It prints feature maps: tensors of the size of the block's input. They are counted in MindSpore's optimized graph (see
tests/support/saved_tensors.py), so the result does not depend on the machine; memory in use on a CPU in graph mode
does not tell what a backward keeps. The time depends on it.
"""

import argparse
import os
import sys
import tempfile
import time
from typing import Any, Dict

from bench import ROOT
from bench.common import add_number

sys.path.insert(0, os.path.join(ROOT, "examples", "text_to_image"))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms
import numpy as np
import pytest
from blocks import ResnetBlock2D
from mindspore import nn
from norm_recompute import recompute_norm_activation

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.common.tables import columns
from tests.support.saved_tensors import compiled_graph, saved_tensors


class Blocks(nn.Cell):
    """A stack of residual blocks with a mean square as the loss."""

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        self.resnets = nn.CellList([ResnetBlock2D(channels, channels, channels, 8) for _ in range(count)])

    def construct(self, x: ms.Tensor, time: ms.Tensor) -> ms.Tensor:
        for block in self.resnets:
            x = block(x, time)
        return (x**2).mean()


def kept_bytes(count: int, targets: list, recomputed: bool, args: argparse.Namespace) -> tuple:
    """Returns the bytes that ``count`` blocks keep, and the seconds that a step takes."""
    ms.set_seed(0)
    network = Blocks(count, args.channels)
    if recomputed:
        recompute_norm_activation(network)
    apply_lora(network, LoraConfig(lora_rank=4, target_modules=targets))
    freeze_base(network)
    step = ms.value_and_grad(network.set_train(), None, network.trainable_params())
    rng = np.random.default_rng(0)
    shape = (args.batch_size, args.channels, args.size, args.size)
    inputs = [ms.Tensor(rng.standard_normal(size).astype(np.float32)) for size in (shape, shape[:2])]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        size = sum(tensor.size for tensor in saved_tensors(compiled_graph(step, inputs, folder, patch)))
    begin = time.perf_counter()
    for _ in range(args.repeats):
        step(*inputs)[0].asnumpy()
    return size, (time.perf_counter() - begin) / args.repeats


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=16, help="height and width of a feature map (default: 16)")
    add_number(parser, "--repeats", 5, 1, "steps that are timed")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints one row for each selection of cells and returns the figures."""
    ms.set_context(mode=ms.GRAPH_MODE)
    feature_map = 4 * args.batch_size * args.channels * args.size**2
    rows = []
    figures = {}
    for targets in (["time_emb_proj"], ["conv1", "conv2"]):
        kept = []
        seconds = []
        for recomputed in (False, True):
            two, _ = kept_bytes(2, targets, recomputed, args)
            three, taken = kept_bytes(3, targets, recomputed, args)
            # What a third block adds to two: ends of the network do not count.
            kept.append((three - two) / feature_map)
            seconds.append(taken)
        saved = 1 - kept[1] / kept[0]
        slower = seconds[1] / seconds[0]
        maps = [f"{count:.2f} feature maps" for count in kept]
        rows.append((", ".join(targets), *maps, f"{100 * saved:.0f} %", f"x {slower:.2f}"))
        figures[", ".join(targets)] = {"feature_maps": kept, "saved": saved, "time": slower}
    print(columns(("LoRA on", "kept per block", "recomputed", "saved", "time"), rows))
    return {"targets": figures}
