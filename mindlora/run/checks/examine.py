"""All checks of a YAML for doctor, mindlora-run and plan: of its settings, and of the files that it names."""

import dataclasses
from typing import Iterable, Iterator, List, Optional

from mindlora.core.errors import ConfigError, LoraError
from mindlora.run.checks.base_weights import check_base_weights, check_slicing
from mindlora.run.checks.batches import check_batches
from mindlora.run.checks.cpu import check_cpu, check_held_base
from mindlora.run.checks.data_rows import FirstRows, check_labels, check_packing, check_rows
from mindlora.run.checks.files import check_quantized_base
from mindlora.run.checks.finding import Finding, error, errors
from mindlora.run.checks.invocation import check_invocation
from mindlora.run.checks.key_ranges import check_keys, check_run_mode, check_shape
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.checks.model import check_dtypes
from mindlora.run.checks.parallel import check_dataset_strategy, check_sharded, check_sizes
from mindlora.run.checks.training import check_memory_options, check_training
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import YamlRun
from mindlora.training.adalora.rules import check_rank_budget
from mindlora.training.classifier.rules import check_classifier
from mindlora.training.preference.rules import check_preference, check_preference_rows
from mindlora.training.rl.rules import check_rl
from mindlora.training.several.rules import check_adapters, check_cells
from mindlora.training.trackers.rules import check_trackers

# Checks of combined settings; each takes a run whose single values are right.
_CHECKS_OF_SETTINGS = (
    *(check_sizes, check_training, check_rank_budget, check_preference, check_rl, check_adapters, check_classifier),
    *(check_invocation, check_sharded, check_dataset_strategy, check_packing, check_trackers),
)


def check_settings(run: YamlRun) -> List[Finding]:
    """Returns faults in the settings of a YAML on any device; the only file it reads is a config.json.

    Keys that MindFormers fills in may be missing.
    """
    misshapen = list(check_shape(run))
    return misshapen or _check_settings(run, _check_values(run))


def check_run(run: YamlRun) -> List[Finding]:
    """Returns the findings of check_settings, and those on the device, the cells of the model and dtypes."""
    misshapen = list(check_shape(run))
    if misshapen:
        return misshapen
    try:
        values = _check_values(run)
        findings = _check_settings(run, values)
        model = run.language
        if model.lora is not None and not errors(values):
            findings += _at(run.language_key, [*check_cells(model, model.lora), *check_dtypes(model, model.lora)])
        return [*findings, *check_cpu(run), *check_held_base(run), *check_slicing(run), *check_memory_options(run)]
    except ConfigError as refusal:
        return [error("pretrained_model_dir", str(refusal))]


def _check_values(run: YamlRun) -> List[Finding]:
    """Returns faults in single values; only without any can combinations be checked."""
    return [*check_mcore(run.language), *check_keys(run)]


def _check_settings(run: YamlRun, of_values: List[Finding]) -> List[Finding]:
    """Returns ``of_values``, and faults in the values' combinations."""
    findings = list(of_values)
    if not errors(of_values):
        for check in _CHECKS_OF_SETTINGS:
            findings += check(run)
    return [*findings, *check_run_mode(run), *_at(run.language_key, run.language.pet_findings)]


def _at(key: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings about a language model whose configuration is at ``key``, with the YAML's own keys."""
    for finding in findings:
        if finding.key.startswith(MODEL):
            finding = dataclasses.replace(finding, key=key + finding.key[len(MODEL) :])
        yield finding


def check_contents(run: YamlRun, first_rows: Optional[FirstRows] = None) -> List[Finding]:
    """Returns faults in the base and the data, as far as they exist, of a YAML with right settings.

    ``first_rows`` reads the first rows of a MindRecord; without it, the data is not checked.
    """
    findings: List[Finding] = []
    checks: List[Iterator[Finding]] = [check_quantized_base(run), check_base_weights(run), check_batches(run)]
    if first_rows is not None:
        checks += [check_rows(run, first_rows), check_preference_rows(run, first_rows), check_labels(run, first_rows)]
    for check in checks:
        try:
            findings += check
        except LoraError as refusal:
            unreadable = error("", str(refusal))
            # Several checks read the same file.
            findings += [] if unreadable in findings else [unreadable]
    return findings
