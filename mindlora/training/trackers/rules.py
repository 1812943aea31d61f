"""Checks of the callback Trackers and its settings, in a YAML of either Trainer."""

import inspect
from typing import Any, Iterator, Mapping, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.text import shown, suggestion
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun

# trackers.py has each one's class.
NAMES = ("tensorboard", "swanlab", "wandb", "mlflow")


def check_trackers(run: YamlRun) -> Iterator[Finding]:
    """Yields the errors of each Trackers in the callbacks of a YAML of graph mode."""
    for where, node in run.callbacks_of("Trackers"):
        yield from _check(where, node)


def check_pynative_trackers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields the errors of each Trackers in a YAML of the PyNative Trainer."""
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


def tracker_names(report_to: Any, key: str = "report_to") -> Tuple[str, ...]:
    """Returns the names of trackers in ``report_to``, one name or a list, without duplicates.

    Args:
        report_to (str or list of str): Some of NAMES.
        key (str): The key's name, for the error. Default: "report_to".

    Raises:
        ConfigError: ``report_to`` has another type, is empty, or names an unknown tracker.
    """
    names = [report_to] if isinstance(report_to, str) else report_to
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigError(f"{key} is {shown(report_to)}, but it must name trackers, some of {', '.join(NAMES)}.")
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{key} has {shown(name)}, which is not a tracker.{suggestion(str(name), list(NAMES))}")
    return tuple(dict.fromkeys(names))


def check_settings(
    report_to: Any, project: Any = None, name: Any = None, tags: Any = (), adapter: Any = None
) -> Tuple[str, ...]:
    """Checks the settings of a callback Trackers, and returns tracker_names of ``report_to``.

    Raises:
        ConfigError: A setting has a wrong value.
    """
    for key, value in (("project", project), ("name", name), ("adapter", adapter)):
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{key} is {shown(value)}, but it must be a text. Put it into quotation marks.")
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError(f"tags is {shown(tags)}, but it must be a list of texts, such as [first, qwen3].")
    return tracker_names(report_to)
