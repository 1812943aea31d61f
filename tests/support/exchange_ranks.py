"""One rank of the tests of gradient exchange: runs every scenario, in both modes, and writes what came out.

Started by msrun; the first argument is the folder for rank_R_MODE.npz, the others are scenarios, SCENARIO@MODE for one
mode. The tests import what all ranks and the oracle share.
"""

import os
import sys
import time

import numpy as np

MODES = ("graph", "pynative")
STEPS, SKIPPED = 7, 3
# All receipts have been sent when nothing more than heartbeats has gone out for so many seconds. TCP tries again after
# 0.2 where a reader was slow, and a busy machine makes slow readers.
QUIET, HEARTBEATS, PATIENCE = 0.6, 2000, 20
# Like the adapters of four layers, one of them wider; with a module of modules_to_save.
SHAPES = {
    **{
        f"model.layers.{layer}.attention.wq.mindpet_delta_lora_{part}": shape
        for layer in range(4)
        for part, shape in (("a", (8, 1200 + layer)), ("b", (1100, 7)))
    },
    "lm_head.weight": (33, 21),
}
SCENARIOS = {
    "dense": {"type": "dense", "local_size": 1},
    "float16": {"type": "float16", "local_size": 1},
    "quantized": {"type": "quantized", "bits": 6, "local_size": 1},
    "quantized 4": {"type": "quantized", "bits": 4, "local_size": 1},
    "quantized 8": {"type": "quantized", "bits": 8, "local_size": 1},
    "machines dense": {"type": "dense", "local_size": 2},
    "machines float16": {"type": "float16", "local_size": 2},
    "machines quantized": {"type": "quantized", "bits": 6, "local_size": 2},
}


def gradient(rank, step):
    """Returns a rank's gradients in a step, of sizes as after the division by the tokens; some are -0.0."""
    rng = np.random.default_rng(1000 * step + rank)
    flat = (rng.normal(size=sum(map(np.prod, SHAPES.values()))) * 1e-6).astype(np.float32)
    flat[rng.random(flat.size) < 0.01] = -0.0
    # All ranks have a zero here, of which only dense keeps the sign.
    flat[100:110] = -0.0
    if step == SKIPPED and rank == 0:
        flat[5] = np.nan
    return flat


def main():
    import mindspore as ms
    from mindspore.communication import get_group_size, get_rank, init

    ms.set_context(device_target="CPU")
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False, device_num=get_group_size())
    for number, mode in enumerate(MODES):
        ms.set_context(mode=number)
        found = {}
        for name in (word.partition("@")[0] for word in sys.argv[2:] if word.partition("@")[2] in ("", mode)):
            found.update({f"{name}/{key}": value for key, value in run(SCENARIOS[name]).items()})
        found["agreement"] = disagree()
        np.savez(os.path.join(sys.argv[1], f"rank_{get_rank()}_{mode}.npz"), **found)
    # Past MindSpore's own end, in which one of four ranks has crashed (SIGSEGV) in one of some thirty runs, after all
    # was written: perhaps its communicator hears that other ranks have gone while it is taken apart.
    sys.stdout.flush()
    os._exit(0)


def run(setting):
    """Returns what the steps of an exchange gave, and the bytes that it counted and that were sent."""
    import mindspore as ms
    from mindspore.communication import get_group_size, get_local_rank_size, get_rank

    from mindlora.training.exchange.exchange import FlatLayout, Ranks, make_exchange
    from mindlora.training.exchange.settings import exchange_settings
    from tests.support.exchange_step import Step

    parameters = [ms.Parameter(ms.Tensor(np.zeros(shape, np.float32)), name=name) for name, shape in SHAPES.items()]
    ranks = Ranks(get_rank(), get_group_size())
    exchange = make_exchange(exchange_settings(setting), FlatLayout(parameters), ranks, get_local_rank_size())
    step_cell = Step(exchange)
    totals, residuals, unsent, counted, between = [], [], [], [], []
    before = sent_bytes()
    for step in range(STEPS):
        counted.append(exchange.bytes_per_step)
        between.append(exchange.bytes_between_machines)
        total, residual = step_cell(ms.Tensor(gradient(get_rank(), step)), ms.Tensor(float(step == SKIPPED)))
        totals.append(total.asnumpy())
        residuals.append(residual.asnumpy())
        kept = exchange.unsent()
        unsent.append(np.zeros(1, np.float32) if kept is None else kept.asnumpy().copy())
    after = settled()
    # No rank begins to send again while another one still reads.
    ms.ops.AllReduce()(ms.Tensor([1.0], ms.float32)).asnumpy()
    return {
        "totals": np.stack(totals),
        "residuals": np.stack(residuals),
        "unsent": np.stack(unsent),
        "counted": np.array(counted),
        "between": np.array(between),
        "sent": np.array([before, after]),
    }


def disagree():
    """Returns what check_agreement raises: at first nothing, and then with one bit changed on rank 1."""
    import mindspore as ms
    from mindspore.communication import get_rank

    from mindlora.core.errors import LoraError
    from mindlora.training.exchange.exchange import check_agreement

    values = np.arange(6, dtype=np.float32)
    parameter = ms.Parameter(ms.Tensor(values), name="a")
    check_agreement([parameter], 100)
    if get_rank() == 1:
        values[3] = np.nextafter(values[3], np.float32(9))
        parameter.set_data(ms.Tensor(values))
    try:
        check_agreement([parameter], 200)
    except LoraError as error:
        return np.array(str(error))
    return np.array("")


def settled():
    """Returns what sent_bytes does once it hardly changes any more."""
    now, end = sent_bytes(), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        before = now
        time.sleep(QUIET)
        now = sent_bytes()
        if now[1] - before[1] < HEARTBEATS:
            break
    return now


def sent_bytes():
    """Returns how many bytes this process has written so far, and how many the loopback device has sent.

    What a process writes is hardly more than what it sends; the device counts for all ranks.
    """
    with open("/proc/self/io", encoding="utf-8") as file:
        written = next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    with open("/proc/net/dev", encoding="utf-8") as file:
        return written, next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))


if __name__ == "__main__":
    main()
