"""What is wrong with the callback Trackers of a YAML, of either Trainer."""

import inspect
from typing import Any, Iterator, Mapping

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun
from mindlora.training.trackers.settings import check_settings


def check_trackers(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for what is wrong with each Trackers in the callbacks of a YAML of graph mode."""
    for where, node in run.callbacks_of("Trackers"):
        yield from _check(where, node)


def check_pynative_trackers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the same of a YAML of the PyNative Trainer."""
    for node in config.get("callbacks") or []:
        if isinstance(node, Mapping) and node.get("type") == "Trackers":
            yield from _check("callbacks.Trackers", node)


def _check(where: str, node: Mapping[str, Any]) -> Iterator[Finding]:
    settings = {key: value for key, value in node.items() if key != "type"}
    known = list(inspect.signature(check_settings).parameters)
    unknown = [key for key in settings if key not in known]
    for key in unknown:
        yield error(where, f"{where} has no argument {key!r}.{suggestion(str(key), known)}")
    if not unknown:
        try:
            check_settings(**{"report_to": None, **settings})
        except ConfigError as refusal:
            yield error(where, f"{where}: {refusal}")
