"""Choices that were measured on an NPU, here or on another machine of its kind, and take the place of estimates.

scripts/verify_npu.sh writes them into its report.json, and `mindlora doctor --adopt` keeps them beside the operator
package.
"""

import dataclasses
import os
from typing import Dict, Optional

from mindlora import __version__
from mindlora.common import atomic
from mindlora.common.json_files import parse_object, write_json
from mindlora.errors import ConfigError

# The operators whose kernel can be left out.
OPERATORS = ("lora_delta", "lora_linear", "nf4_linear", "multi_lora_delta", "multi_lora_slot_write")
FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "ascend", "measured.json")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        machine (str): The name of the machine.
        mindlora (str): The version of mindlora that was measured. Another one does not use it.
        composed (dict): Operator -> why its kernel is not to be taken.
        one_pass_tokens (int or None): The most tokens for which lora_linear is faster than MatMul and lora_delta.
    """

    machine: str
    mindlora: str
    composed: Dict[str, str]
    one_pass_tokens: Optional[int]

    def __str__(self):
        parts = [f"{op} composed, because {why}" for op, why in self.composed.items()]
        if self.one_pass_tokens is not None:
            parts.append(f"lora_linear up to {self.one_pass_tokens} tokens")
        return "; ".join(parts) or "all kernels hold"


def measured() -> Optional[Measured]:
    """Returns what was adopted for this version of mindlora, or None."""
    kept = read_adopted()
    return kept if kept is not None and kept.mindlora == __version__ else None


def read_adopted() -> Optional[Measured]:
    """Returns what was adopted, of whatever version, or None.

    Raises:
        ConfigError: The file is not what adopt writes.
    """
    try:
        with open(FILE, "rb") as file:
            content = parse_object(file.read(), FILE, ConfigError)
    except FileNotFoundError:
        return None
    return _checked(content, FILE)


def adopt(path: str) -> Measured:
    """Keeps the choices of a report of scripts/verify_npu.sh for this installation, instead of any before.

    Args:
        path (str): Its report.json, or the folder that holds it.

    Raises:
        ConfigError: It is no such report, measured no NPU, or is of another version of mindlora; or nothing can be
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
        raise ConfigError(f"{path} is no report of scripts/verify_npu.sh: name the report.json that it wrote.")
    if choices is None:
        raise ConfigError(f"{path} compared no operator on an NPU, so it has no choices: run it on a machine with one.")
    if machine.get("mindlora") != __version__:
        raise ConfigError(
            f"{path} measured mindlora {machine.get('mindlora')}, and this is {__version__}: run "
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
    composed, tokens = content.get("composed"), content.get("one_pass_tokens")
    right = isinstance(composed, dict) and set(composed) <= set(OPERATORS)
    right = right and all(isinstance(why, str) for why in composed.values())
    right = right and (tokens is None or (type(tokens) is int and tokens >= 0))
    if not right or not all(isinstance(content.get(key), str) for key in ("machine", "mindlora")):
        raise ConfigError(
            f"{source} has measured choices that cannot be read: remove it, or adopt the report.json of "
            "scripts/verify_npu.sh again."
        )
    return Measured(content["machine"], content["mindlora"], composed, tokens)
