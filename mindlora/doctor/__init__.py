"""mindlora doctor: what stands on this machine, and what is wrong in the YAMLs of a run."""

from mindlora.doctor.machine import DoctorReport, Item, YamlReport, examine

__all__ = ["DoctorReport", "Item", "YamlReport", "examine"]
