"""The configuration of this process's run. (MindFormers passes a callback only its own node of the YAML.)"""

from typing import Any, Dict, Mapping

_configuration: Dict[str, Any] = {}


def remember_configuration(config: Mapping[str, Any]) -> None:
    """Keeps the run's YAML, with the command line's overrides and all filled-in settings."""
    _configuration.clear()
    _configuration.update(plain(config))


def run_configuration() -> Dict[str, Any]:
    """Returns a copy of the run's configuration; empty if mindlora-run did not start the run."""
    return dict(_configuration)


def plain(value: Any) -> Any:
    """Converts a value of a YAML to JSON's types; any other object that MindFormers puts in becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
