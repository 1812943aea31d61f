"""mindlora doctor on options that save memory."""

import pytest

from mindlora.cli.doctor.examination import check_yaml

RECOMPUTE, SWAP = "recompute_config.recompute", "swap_config.swap"
LAYERS = [{"backward_prefetch": 1, "layers": [0]}]
SLICES = "recompute_config.recompute_slice_activation"
SHARDED = {"use_parallel": True, "parallel.parallel_mode": 1}


@pytest.mark.parametrize(
    "changes, severity, key, found",
    [
        ({SLICES: True}, "warning", SLICES, "recompute_slice_activation has no effect without recompute."),
        ({SLICES: True, RECOMPUTE: True}, "note", SLICES, "only with use_parallel: True and parallel.parallel_mode 1"),
        (
            {"recompute_config.mp_comm_recompute": False},
            "warning",
            "recompute_config.mp_comm_recompute",
            "mp_comm_recompute has no effect without recompute.",
        ),
        ({"swap_config.layer_swap": LAYERS}, "warning", SWAP, "swap is off, so layer_swap have no effect."),
        ({SWAP: True}, "warning", SWAP, "neither layer_swap nor op_swap says what to swap"),
        (
            {SWAP: True, "swap_config.layer_swap": LAYERS, "context.device_target": "CPU"},
            "warning",
            SWAP,
            "no effect on a CPU",
        ),
        (
            {SWAP: True, "swap_config.layer_swap": LAYERS, RECOMPUTE: True},
            "warning",
            SWAP,
            "no effect on layers that are recomputed",
        ),
        ({"optimizer.swap": True}, "note", "optimizer.swap", "eight bytes for each element of A and B"),
        (
            {"optimizer.swap": True, "context.device_target": "CPU"},
            "note",
            "optimizer.swap",
            "it has no effect on a CPU",
        ),
    ],
)
def test_what_an_option_does_not_do(write, changes, severity, key, found):
    (finding,) = (finding for finding in check_yaml(write(changes)) if finding.key == key)
    assert finding.severity == severity and found in finding.found


@pytest.mark.parametrize(
    "changes",
    [
        {RECOMPUTE: True, "context.mode": 0},
        {RECOMPUTE: True, "context.mode": 1},
        {SLICES: True, "run_mode": "predict"},
        {RECOMPUTE: True, SLICES: True, **SHARDED},
        {RECOMPUTE: True, SLICES: True, **SHARDED, "parallel.parallel_mode": "SEMI_AUTO_PARALLEL"},
        {"recompute_config.mp_comm_recompute": True, SWAP: False},
        {SWAP: True, "swap_config.layer_swap": LAYERS, RECOMPUTE: [1]},
    ],
)
def test_what_works_is_not_mentioned(write, changes):
    keys = [finding.key for finding in check_yaml(write(changes))]
    assert not [key for key in keys if key.startswith(("recompute_config", "swap_config", "optimizer"))]
