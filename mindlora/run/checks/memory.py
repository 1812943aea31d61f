"""Checks of MindFormers' options that save memory: whether they do anything in this run.

The statements about MindFormers and MindSpore were read in their code (1.9.0 and 2.9.0).
"""

from typing import Iterator

from mindlora.run.checks.finding import Finding, note, warning
from mindlora.run.yaml_run import YamlRun

_RECOMPUTE = "recompute_config"
_SWAP = "swap_config"
# Keys that say how to recompute, with the value that leaves them off.
_HOW = {"parallel_optimizer_comm_recompute": False, "recompute_slice_activation": False, "mp_comm_recompute": True}


def check_memory_options(run: YamlRun) -> Iterator[Finding]:
    """Yields a finding for each option of recomputation, swapping or offloading that does not do what it says.

    There are none for a run that does not train.
    """
    if run.trains:
        yield from _check_recomputation(run)
        yield from _check_swapping(run)
        yield from _check_optimizer(run)


def _check_recomputation(run: YamlRun) -> Iterator[Finding]:
    recomputes = bool(run.at(f"{_RECOMPUTE}.recompute"))
    for key, off in _HOW.items():
        value = run.at(f"{_RECOMPUTE}.{key}")
        if value is None or value == off:
            continue
        if not recomputes:
            yield warning(
                f"{_RECOMPUTE}.{key}",
                f"{key} has no effect without recompute.",
                f"Set recompute: True, or remove {key}.",
            )
        elif not run.is_sharded:
            yield note(
                f"{_RECOMPUTE}.{key}",
                f"{key} has an effect only with use_parallel: True and parallel.parallel_mode 1 or 2.",
            )


def _check_swapping(run: YamlRun) -> Iterator[Finding]:
    key = f"{_SWAP}.swap"
    node = run.at(_SWAP) or {}
    named = [name for name in ("layer_swap", "op_swap") if node.get(name)]
    if not node.get("swap"):
        if named:
            yield warning(key, f"swap is off, so {' and '.join(named)} have no effect.", "Set swap: True.")
    elif not named:
        yield warning(key, "swap is on, and neither layer_swap nor op_swap says what to swap.")
    elif run.on_cpu:
        yield warning(key, "swap moves activations from an NPU to the host: it has no effect on a CPU.")
    elif run.at(f"{_RECOMPUTE}.recompute") is True:
        yield warning(
            key,
            "swap has no effect on layers that are recomputed, and recompute is True for all of them.",
            "Give recompute a list of the other layers.",
        )


def _check_optimizer(run: YamlRun) -> Iterator[Finding]:
    if not run.at("optimizer.swap"):
        return
    if run.on_cpu:
        fault = "optimizer.swap keeps the optimizer's state on the host: it has no effect on a CPU."
    else:
        fault = (
            "optimizer.swap moves the optimizer's state to the host. With LoRA that is eight bytes for each element of "
            "A and B, so it saves little and slows each step."
        )
    yield note("optimizer.swap", fault)
