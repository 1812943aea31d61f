"""Choices that were measured on an NPU, here or on another machine of its kind, and replace estimates.

scripts/verify_npu.sh writes them into its report.json, and `mindlora doctor --adopt` keeps them beside the operator
package.
"""

import dataclasses
import os
from typing import Any, Dict, Optional

from mindlora import __version__
from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.json_files import parse_object, write_json

# The operators whose kernel can be left out.
OPERATORS = ("lora_delta", "lora_linear", "nf4_linear", "multi_lora_delta", "multi_lora_slot_write")
# The variables that the kernels' host sides read (ops/ascendc_common/host.h), and their fields here.
VARIABLES = {"MINDLORA_ASCEND_DRAW": "draw_tenths", "MINDLORA_ASCEND_MIX_LAUNCH": "mix_launch"}
# The measured numbers, which a report may lack, and the least value of each.
NUMBERS = {"one_pass_tokens": 0, "draw_tenths": 10, "mix_launch": 0}
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "ascend", "measured.json")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Adopted measurements.

    Attributes:
        machine (str): The name of the machine.
        mindlora (str): The version of mindlora that was measured. Other versions do not use them.
        composed (dict): Operator -> why its kernel is not used.
        one_pass_tokens (int or None): The largest number of tokens for which lora_linear is faster than MatMul and
            lora_delta.
        draw_tenths (int or None): The bandwidth that a core draws, in tenths of its even share; at least 10.
        mix_launch (int or None): Nanoseconds by which launching cube and vector cores takes longer than launching
            vector cores alone.
    """

    machine: str
    mindlora: str
    composed: Dict[str, str]
    one_pass_tokens: Optional[int]
    draw_tenths: Optional[int] = None
    mix_launch: Optional[int] = None

    def __str__(self):
        parts = [f"{op} composed, because {why}" for op, why in self.composed.items()]
        if self.one_pass_tokens is not None:
            parts.append(f"lora_linear up to {self.one_pass_tokens} tokens")
        if self.draw_tenths is not None:
            parts.append(f"a core draws {self.draw_tenths / 10:g} shares of the bandwidth")
        if self.mix_launch is not None:
            parts.append(f"a launch of cube cores costs {self.mix_launch} ns more")
        return "; ".join(parts) or "all kernels hold"


def measured() -> Optional[Measured]:
    """Returns the adopted measurements for this version of mindlora, or None."""
    kept = read_adopted()
    return kept if kept is not None and kept.mindlora == __version__ else None


def read_adopted() -> Optional[Measured]:
    """Returns the adopted measurements of any version, or None.

    Raises:
        ConfigError: The file was not written by adopt.
    """
    try:
        with open(FILE, "rb") as file:
            content = parse_object(file.read(), FILE, ConfigError)
    except FileNotFoundError:
        return None
    return _checked(content, FILE)


def tell_plans() -> None:
    """Passes adopted figures to the kernels' host sides. Variables that are already set in the environment stay."""
    adopted = measured()
    for variable, field in VARIABLES.items():
        figure = getattr(adopted, field, None)
        if figure is not None:
            os.environ.setdefault(variable, str(figure))


def adopt(path: str) -> Measured:
    """Keeps the choices of a report of scripts/verify_npu.sh for this installation, replacing earlier ones.

    Args:
        path (str): Its report.json, or the folder that holds it.

    Raises:
        ConfigError: It is not such a report, measured no NPU, or is from another version of mindlora; or nothing can be
            written.
    """
    path = os.path.join(path, "report.json") if os.path.isdir(path) else path
    try:
        with open(path, "rb") as file:
            report = parse_object(file.read(), path, ConfigError)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): name the report.json that scripts/verify_npu.sh wrote."
        ) from error
    machine, choices = report.get("machine"), report.get("choices")
    if not isinstance(machine, dict) or "choices" not in report:
        raise ConfigError(f"{path} is not a report of scripts/verify_npu.sh: name the report.json that it wrote.")
    if choices is None:
        raise ConfigError(f"{path} compared no operator on an NPU, so it has no choices: run it on a machine with one.")
    if machine.get("mindlora") != __version__:
        raise ConfigError(
            f"{path} measured mindlora {machine.get('mindlora')}, but this is {__version__}: run "
            "scripts/verify_npu.sh of this version there."
        )
    kept = _checked({"machine": machine.get("name"), "mindlora": __version__, **choices}, path)
    try:
        with atomic.replace_file(FILE) as new:
            write_json(new, dataclasses.asdict(kept))
    except OSError as error:
        raise ConfigError(
            f"{FILE} cannot be written ({error.strerror}): install mindlora where you may write."
        ) from error
    return kept


def _checked(content, source) -> Measured:
    composed = content.get("composed")
    numbers = {field: content.get(field) for field in NUMBERS}
    right = isinstance(composed, dict) and set(composed) <= set(OPERATORS)
    right = right and all(isinstance(why, str) for why in composed.values())
    right = right and all(_is_number(numbers[field], least) for field, least in NUMBERS.items())
    if not right or not all(isinstance(content.get(key), str) for key in ("machine", "mindlora")):
        raise ConfigError(
            f"{source} has measured choices that cannot be read: remove it, or adopt the report.json of "
            "scripts/verify_npu.sh again."
        )
    return Measured(content["machine"], content["mindlora"], composed, **numbers)


def _is_number(value: Any, least: int) -> bool:
    """Returns whether a value was not measured, or is a whole number of at least ``least``."""
    return value is None or (type(value) is int and value >= least)
