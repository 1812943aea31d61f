"""What is wrong with the callback Trackers of a YAML of the PyNative Trainer, whose callbacks nobody builds before."""

import inspect
from typing import Any, Iterator, Mapping

from mindlora.core.errors import ConfigError
from mindlora.core.text import suggestion
from mindlora.run.checks.finding import Finding, error
from mindlora.training.trackers.settings import check_settings

_WHERE = "callbacks.Trackers"


def check_pynative_trackers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for what is wrong with each Trackers in the callbacks of a YAML."""
    for node in config.get("callbacks") or []:
        if not isinstance(node, Mapping) or node.get("type") != "Trackers":
            continue
        settings = {key: value for key, value in node.items() if key != "type"}
        known = list(inspect.signature(check_settings).parameters)
        unknown = [key for key in settings if key not in known]
        for key in unknown:
            yield error(_WHERE, f"{_WHERE} has no argument {key!r}.{suggestion(str(key), known)}")
        if not unknown:
            try:
                check_settings(**{"report_to": None, **settings})
            except ConfigError as refusal:
                yield error(_WHERE, f"{_WHERE}: {refusal}")
