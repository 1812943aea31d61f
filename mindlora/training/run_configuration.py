"""The configuration of the run of this process. (MindFormers gives a callback nothing but its own node of the YAML.)"""

from typing import Any, Dict, Mapping

_configuration: Dict[str, Any] = {}


def remember_configuration(config: Mapping[str, Any]) -> None:
    """Keeps the YAML of the run, with the command line's overrides and all that was filled in."""
    _configuration.clear()
    _configuration.update(plain(config))


def run_configuration() -> Dict[str, Any]:
    """Returns a copy of it; empty if mindlora-run did not start the run."""
    return dict(_configuration)


def plain(value: Any) -> Any:
    """Returns a value of a YAML as JSON has it; whatever else MindFormers puts in is named."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
