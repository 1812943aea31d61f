"""Times lora_delta on the shapes near its plan's decisions.

    MINDLORA_ASCEND_KIND=cube msprof --output=times python scripts/verify_npu_ways.py kinds
    MINDLORA_ASCEND_CORES=8 msprof --output=times python scripts/verify_npu_ways.py cores

kinds: 4 to 16 tokens, where the plan switches from the vector to the cube cores. cores: 512 tokens, where it decides
how many cores share the work. The kernel's host side reads the variables; one process has one setting, since CANN keeps
a plan. The printed times include the host's time, which is longer than the kernel's; msprof has the kernel's time.
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any, Iterator, List, Tuple

WIDTH, ROUNDS, CALLS = 4096, 5, 20
SHAPES = {
    "kinds": [(tokens, rank) for rank in (8, 16, 64) for tokens in (4, 6, 8, 10, 12, 14, 16)],
    "cores": [(512, 16), (512, 64)],
}


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(SHAPES))
    parser.add_argument("--device", choices=["Ascend", "CPU"], default="Ascend", help="default: Ascend")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"K and N (default: {WIDTH})")
    return parser.parse_args()


def title(tokens: int, rank: int) -> str:
    """Returns the name of a shape in the figures."""
    return f"{tokens} tokens, rank {rank}"


def main() -> None:
    """Times all shapes of a part."""
    given = arguments()
    os.environ["MINDLORA_BACKEND"] = "ascend" if given.device == "Ascend" else "cpu"
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for tokens, rank, microseconds in timed(given):
        print(f"{title(tokens, rank):<24}{microseconds:10.1f} us a call, with the host's time", flush=True)


def timed(given: argparse.Namespace) -> Iterator[Tuple[int, int, float]]:
    """Yields tokens, rank, and the median microseconds of a call."""
    import mindspore as ms
    import numpy as np

    from mindlora.ops import LoraDelta

    ms.set_context(mode=ms.PYNATIVE_MODE, device_target=given.device)
    cell, width = LoraDelta(), given.width
    for tokens, rank in SHAPES[given.part]:
        shapes = ((tokens, width), (tokens, width), (rank, width), (width, rank))
        inputs: List[Any] = [ms.Tensor(np.ones(shape, np.float16)) for shape in shapes]
        inputs.append(ms.Tensor(0.5, ms.float32))
        cell(*inputs).asnumpy()
        rounds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                y = cell(*inputs)
            y.asnumpy()
            rounds.append(time.perf_counter() - start)
        yield tokens, rank, 1e6 * statistics.median(rounds) / CALLS


if __name__ == "__main__":
    sys.exit(main())
