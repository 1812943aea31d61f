"""The findings of one YAML, for the tests of the doctor."""

from mindlora.cli.doctor.examination import check_yaml

DATA = "train_dataset.data_loader.dataset_dir"


def severities_and_keys(path, severity=None):
    """Returns (severity, key) of the findings, notes left out unless asked for."""
    return [
        (finding.severity, finding.key)
        for finding in check_yaml(path)
        if (finding.severity != "note" if severity is None else finding.severity == severity)
    ]


def finding_at(path, key):
    (found,) = (finding for finding in check_yaml(path) if finding.key == key and finding.severity != "note")
    return found
