"""mindlora doctor: what is installed on this machine, and what is wrong in the YAMLs of a run."""

from mindlora.checks.finding import Finding
from mindlora.doctor.examination import examine
from mindlora.doctor.operators import adopt_choices
from mindlora.doctor.report import DoctorReport, Item, YamlReport

__all__ = ["DoctorReport", "Finding", "Item", "YamlReport", "adopt_choices", "examine"]
