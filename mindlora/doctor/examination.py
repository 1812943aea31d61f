"""The doctor's examination: this machine first, then each YAML."""

from typing import Sequence

from mindlora.doctor.machine import examine_machine, is_installed
from mindlora.doctor.operators import examine_operators
from mindlora.doctor.report import DoctorReport, YamlReport
from mindlora.doctor.yaml_checks import check_yaml


def examine(yaml_paths: Sequence[str] = ()) -> DoctorReport:
    """Examines this machine, and YAMLs, without building their networks.

    Args:
        yaml_paths (sequence of str): Complete MindFormers YAMLs. Default: none.

    Returns:
        DoctorReport; its ``exit_code`` is 1 if the machine or a YAML has an error.
    """
    items, findings = examine_machine()
    operators, problems = examine_operators() if is_installed("MindSpore") else ([], [])
    yamls = tuple(YamlReport(path, tuple(check_yaml(path))) for path in yaml_paths)
    return DoctorReport((*items, *operators), (*findings, *problems), yamls)
