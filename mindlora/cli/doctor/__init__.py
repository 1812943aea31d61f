"""mindlora doctor: the installation on this machine, and faults in the YAMLs of a run."""

from mindlora.cli.doctor.examination import examine
from mindlora.cli.doctor.installation import adopt_choices
from mindlora.cli.doctor.report import DoctorReport, Item, YamlReport
from mindlora.run.checks.finding import Finding

__all__ = ["DoctorReport", "Finding", "Item", "YamlReport", "adopt_choices", "examine"]
