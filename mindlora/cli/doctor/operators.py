"""Which operators LoRA would use on this machine."""

import contextlib
from typing import Iterator, List, Tuple

from mindlora.cli.doctor.report import Item
from mindlora.core.errors import BackendError, ConfigError, InstallationError
from mindlora.run.checks.finding import Finding

# What LoRADense does with the operators of each path (see mindlora.network.cells.dense).
_LORA_DENSE = {
    "ascend": "fused operators of mindlora.ops, in training and in evaluation",
    "cpu": (
        "fused operators of mindlora.ops in evaluation; in training plain MindSpore operators, which measured faster"
    ),
    "composed": "plain MindSpore operators, in training and in evaluation",
}


def examine_operators() -> Tuple[List[Item], List[Finding]]:
    """Returns the path that LoRADense and each operator of mindlora.ops take in graph mode, or why none can be chosen.

    MindSpore must be installed.
    """
    try:
        # Imports MindSpore, which takes seconds.
        from mindlora.ops import backend_report, measured

        adopted = measured.read_adopted()
        with _graph_mode():
            choices = backend_report().choices
    except BackendError as error:
        return [], [Finding("error", "MINDLORA_BACKEND", str(error))]
    except ConfigError as error:
        return [], [Finding("error", "", str(error))]
    except ImportError as error:
        return [], [Finding("error", "", f"MindSpore cannot be imported: {error}.", "Reinstall it.")]
    (path,) = (choice.path for choice in choices if choice.op == "lora_delta")
    items = [Item(choice.op, choice.path, choice.reason) for choice in choices]
    measurements = [] if adopted is None else [_describe(adopted, measured.measured() is not None)]
    return [Item("LoRADense", path, _LORA_DENSE[path]), *items, *measurements], []


def _describe(adopted, used) -> Item:
    """Returns the item of choices that were adopted."""
    from mindlora.ops.measured import FILE

    use = "on an NPU" if used else f"not used: they are of mindlora {adopted.mindlora}"
    return Item("measured", adopted.machine, f"{adopted}; {use} ({FILE}; remove it to have mindlora choose)")


def adopt_choices(path: str) -> None:
    """Keeps the measured choices of a report of scripts/verify_npu.sh, a path, for this installation.

    Raises InstallationError without MindSpore, and ConfigError if it is not such a report.
    """
    try:
        from mindlora.ops import measured
    except ImportError as error:
        raise InstallationError(f"--adopt needs MindSpore, which cannot be imported: {error}. Install it.") from error
    measured.adopt(path)


@contextlib.contextmanager
def _graph_mode() -> Iterator[None]:
    """Switches to graph mode for a while: MindFormers trains in it, but it is not MindSpore's default."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=before)
