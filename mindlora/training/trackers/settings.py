"""What the callback Trackers is asked for, checked."""

from typing import Any, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.text import shown, suggestion

# registry.py has the class of each.
NAMES = ("tensorboard", "swanlab", "wandb", "mlflow")


def tracker_names(report_to: Any, key: str = "report_to") -> Tuple[str, ...]:
    """Returns the names of trackers that ``report_to`` has, one name or a list, each once.

    Args:
        report_to (str or list of str): Some of NAMES.
        key (str): What it is called where it stands. Default: "report_to".

    Raises:
        ConfigError: It is something else, names nothing or an unknown tracker.
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
    """Returns the names of trackers in ``report_to``, as tracker_names does, of the settings of a callback Trackers.

    Raises:
        ConfigError: A setting has a wrong value.
    """
    for key, value in (("project", project), ("name", name), ("adapter", adapter)):
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{key} is {shown(value)}, but it must be a text. Put it into quotation marks.")
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError(f"tags is {shown(tags)}, but it must be a list of texts, such as [first, qwen3].")
    return tracker_names(report_to)
