"""All checks of a YAML, as doctor, mindlora-run and plan make them: of its settings, and of the files that it names."""

from typing import Any, Iterator, List, Mapping, Optional

from mindlora.core.errors import ConfigError, LoraError
from mindlora.run.checks.base_weights import check_base_weights, check_slicing
from mindlora.run.checks.batches import check_batches
from mindlora.run.checks.cpu import check_cpu
from mindlora.run.checks.data_rows import FirstRows, check_labels, check_packing, check_rows
from mindlora.run.checks.files import check_quantized_base
from mindlora.run.checks.finding import Finding, error, errors
from mindlora.run.checks.invocation import check_invocation
from mindlora.run.checks.key_ranges import check_keys, check_run_mode, check_shape
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.checks.memory import check_memory_options
from mindlora.run.checks.model import at, check_dtypes, language_model
from mindlora.run.checks.parallel import check_dataset_strategy, check_sharded, check_sizes
from mindlora.run.checks.pet_config import check_pet_config
from mindlora.run.checks.training import check_training
from mindlora.training.adalora.rules import check_rank_budget
from mindlora.training.classifier.rules import check_classifier
from mindlora.training.preference.rules import check_preference, check_preference_rows
from mindlora.training.several.rules import check_adapters, check_cells


def check_settings(config: Mapping[str, Any]) -> List[Finding]:
    """Returns what is wrong in the settings of a YAML, wherever it runs; no file is read but a config.json.

    Keys that MindFormers fills in may be missing.
    """
    misshapen = list(check_shape(config))
    if misshapen:
        return misshapen
    model, key = language_model(config)
    findings = [*check_mcore(model), *check_keys(config)]
    if not errors(findings):
        findings += [
            *check_sizes(config),
            *check_training(config),
            *check_rank_budget(config),
            *check_preference(config),
        ]
        findings += check_adapters(config)
        findings += check_classifier(config)
        findings += check_invocation(config)
        findings += [*check_sharded(config), *check_dataset_strategy(config), *check_packing(config)]
    return [*findings, *check_run_mode(config), *at(key, check_pet_config(model)[1])]


def check_run(config: Mapping[str, Any]) -> List[Finding]:
    """Returns what check_settings does, and what the device, the cells of the model and dtypes tell."""
    try:
        findings = check_settings(config)
        if list(check_shape(config)):
            return findings
        model, key = language_model(config)
        lora = check_pet_config(model)[0]
        if lora is not None and not errors([*check_mcore(model), *check_keys(config)]):
            findings += at(key, [*check_cells(model, lora), *check_dtypes(model, lora)])
        return [*findings, *check_cpu(config), *check_slicing(config), *check_memory_options(config)]
    except ConfigError as refusal:
        return [error("pretrained_model_dir", str(refusal))]


def check_contents(config: Mapping[str, Any], first_rows: Optional[FirstRows] = None) -> List[Finding]:
    """Returns what is wrong in the base and in the data, as far as they are there, of a YAML whose settings are right.

    ``first_rows`` reads the first rows of a MindRecord; without it, the data is not looked at.
    """
    findings: List[Finding] = []
    checks: List[Iterator[Finding]] = [check_quantized_base(config), check_base_weights(config), check_batches(config)]
    if first_rows is not None:
        checks += [check_rows(config, first_rows), check_preference_rows(config, first_rows)]
        checks.append(check_labels(config, first_rows))
    for check in checks:
        try:
            findings += check
        except LoraError as refusal:
            unreadable = error("", str(refusal))
            # Several checks read the same file.
            findings += [] if unreadable in findings else [unreadable]
    return findings
