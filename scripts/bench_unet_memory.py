"""Counts what a residual block of a UNet keeps for its backward, with and without recompute_norm_activation.

Run it with ``python scripts/bench_unet_memory.py``. It prints feature maps: tensors of the size of the block's input.
They are counted in MindSpore's optimized graph (see tests/support/saved_tensors.py), so the result does not depend on
the machine; memory in use on a CPU in graph mode does not tell what a backward keeps. The time does.
"""

import argparse
import os
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "examples", "text_to_image")]
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from blocks import ResnetBlock2D  # noqa: E402
from mindspore import nn  # noqa: E402

from mindlora import LoraConfig, apply_lora, freeze_base  # noqa: E402
from mindlora.common.tables import columns  # noqa: E402
from mindlora.training.norm_recompute import recompute_norm_activation  # noqa: E402
from tests.support.saved_tensors import compiled_graph, saved_tensors  # noqa: E402


class Blocks(nn.Cell):
    """A stack of residual blocks with a mean square as the loss."""

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        self.resnets = nn.CellList([ResnetBlock2D(channels, channels, channels, 8) for _ in range(count)])

    def construct(self, x: ms.Tensor, time: ms.Tensor) -> ms.Tensor:
        for block in self.resnets:
            x = block(x, time)
        return (x**2).mean()


def kept_bytes(count: int, targets: list, recomputed: bool, settings: argparse.Namespace) -> tuple:
    """Returns the bytes that ``count`` blocks keep, and the seconds that a step takes."""
    ms.set_seed(0)
    network = Blocks(count, settings.channels)
    if recomputed:
        recompute_norm_activation(network)
    apply_lora(network, LoraConfig(lora_rank=4, target_modules=targets))
    freeze_base(network)
    step = ms.value_and_grad(network.set_train(), None, network.trainable_params())
    rng, shape = np.random.default_rng(0), (settings.batch_size, settings.channels, settings.size, settings.size)
    inputs = [ms.Tensor(rng.standard_normal(size).astype(np.float32)) for size in (shape, shape[:2])]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        size = sum(tensor.size for tensor in saved_tensors(compiled_graph(step, inputs, folder, patch)))
    begin = time.perf_counter()
    for _ in range(settings.repeats):
        step(*inputs)[0].asnumpy()
    return size, (time.perf_counter() - begin) / settings.repeats


def main() -> None:
    """Prints one row for each selection of cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    feature_map = 4 * settings.batch_size * settings.channels * settings.size**2
    rows = [("LoRA on", "kept per block", "recomputed", "saved", "time")]
    for targets in (["time_emb_proj"], ["conv1", "conv2"]):
        # What a third block adds to two: ends of the network do not count.
        kept, seconds = [], []
        for recomputed in (False, True):
            (two, _), (three, taken) = (kept_bytes(count, targets, recomputed, settings) for count in (2, 3))
            kept.append((three - two) / feature_map)
            seconds.append(taken)
        saved = 100 * (1 - kept[1] / kept[0])
        maps = [f"{count:.2f} feature maps" for count in kept]
        rows.append((", ".join(targets), *maps, f"{saved:.0f} %", f"x {seconds[1] / seconds[0]:.2f}"))
    print(columns(rows[0], rows[1:]))


if __name__ == "__main__":
    main()
