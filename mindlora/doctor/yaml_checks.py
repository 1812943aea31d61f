"""All checks of one MindFormers YAML, none of which builds the network."""

import re
from typing import Iterator, List

from mindlora.checks.dtypes import check_dtypes
from mindlora.checks.files import check_files
from mindlora.checks.finding import SEVERITIES, Finding
from mindlora.checks.keys import number_mistakes
from mindlora.checks.language_model import at, language_model
from mindlora.checks.mcore import check_mcore_model
from mindlora.checks.memory import check_memory_options
from mindlora.checks.shape import shape_mistakes
from mindlora.checks.targets import check_targets
from mindlora.common.run_modes import RUN_MODES, TRAINING_MODES
from mindlora.common.text import suggestion
from mindlora.common.yaml_file import read_yaml
from mindlora.doctor.launcher_check import check_with_launcher
from mindlora.doctor.pet_config_checks import check_pet_config
from mindlora.errors import ConfigError

# YAML 1.1 wants a decimal point and a signed exponent in such a number.
_NUMBER_AS_TEXT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_NUMBERS_REQUIRED = ("lr_schedule.", "optimizer.", "runner_wrapper.")


def check_yaml(path: str) -> List[Finding]:
    """Checks a MindFormers YAML without building its network, and mostly without MindFormers.

    Args:
        path (str): A complete MindFormers YAML.

    Returns:
        list of Finding, errors first.
    """
    try:
        config = read_yaml(path)
    except ConfigError as error:
        return [Finding("error", "", str(error))]
    misshapen = [_of_mistake(mistake) for mistake in shape_mistakes(config)]
    if misshapen:
        return misshapen
    texts = list(_check_texts(config))
    wrong = list(number_mistakes(config, config.get("run_mode") in TRAINING_MODES))
    numbers = [found for found in map(_of_mistake, wrong) if found.key not in {text.key for text in texts}]
    findings = [*texts, *numbers, *_check_run_mode(config)]
    model, key = language_model(config)
    lora, pet_findings = check_pet_config(model)
    unsupported = list(check_mcore_model(model))
    findings = [*unsupported, *findings, *at(key, pet_findings)]
    # mindlora-run's errors about a wrong pet_config would repeat these findings.
    ask_launcher = not unsupported and not any(
        finding.severity == "error" and finding.key.startswith(f"{key}.pet_config") for finding in findings
    )
    if lora is not None and not unsupported and not wrong:
        findings += at(key, [*check_targets(model, lora.for_network()), *check_dtypes(model, lora)])
    findings += check_memory_options(config)
    findings += check_files(config, lora)
    if ask_launcher:
        findings += [finding for finding in check_with_launcher(path) if finding.found not in wrong]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _of_mistake(mistake: str) -> Finding:
    """Returns the finding of a sentence that begins with the key that it is about."""
    return Finding("error", mistake.split(" ")[0].rstrip(":"), mistake)


def _check_run_mode(config) -> Iterator[Finding]:
    run_mode = config.get("run_mode")
    if not isinstance(run_mode, str) or run_mode not in RUN_MODES:
        known = suggestion(str(run_mode), list(RUN_MODES))
        yield Finding("error", "run_mode", f"run_mode is {run_mode!r}, which is not known.{known}")


def _check_texts(node, key="") -> Iterator[Finding]:
    """Yields the numbers that YAML reads as text."""
    if isinstance(node, (dict, list)):
        for part, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _check_texts(value, f"{key}.{part}".lstrip("."))
    elif isinstance(node, str) and _NUMBER_AS_TEXT.fullmatch(node):
        mantissa, exponent = re.split("[eE]", node)
        yield Finding(
            "error" if key.startswith(_NUMBERS_REQUIRED) else "warning",
            key,
            f"YAML reads {node} as text, because it lacks a decimal point or a sign in its exponent.",
            f"Write {float(mantissa)}e{int(exponent):+d}.",
        )
