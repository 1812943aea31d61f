"""ServerSettings: the address of the server, its users, and its limits."""

import dataclasses
import ipaddress
from typing import Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, Range, check_number

_PORT = Range("a port, 0 to 65535", lambda value: 0 <= value < 65536, (int,))
_SECONDS = Range("a number of seconds above 0", lambda value: value > 0)
_AT_LEAST_ONE = ("max_body_bytes", "max_choices", "adapter_labels")
_ONE_OR_NONE = ("max_prompt_tokens", "max_output_tokens", "key_requests", "key_requests_per_minute")


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The operator's settings.

    Attributes:
        host (str): Address to listen on. Addresses other than this machine's own need keys, or no_auth.
        port (int): Port; 0 for a free one.
        api_key_file (str or None): File of keys, one "name key" per line; None for no keys.
        no_auth (bool): Whether to serve other machines without keys.
        cors_origins (tuple of str): Origins of web pages that may use the server; "*" for any.
        allow_runtime_loading (bool): Whether to enable /v1/load_lora_adapter and /v1/unload_lora_adapter.
        chat_template (str or None): File with a chat template, instead of the tokenizer's own.
        template (str or None): Instead of a chat template, the prompt template of instruction data, such as "alpaca".
        max_body_bytes (int): Maximum size of a request's body in bytes.
        max_prompt_tokens (int or None): Maximum number of tokens of a prompt; None for the model's limit.
        max_output_tokens (int or None): Maximum number of tokens of an answer; None for the model's limit.
        max_choices (int): Maximum number of answers to one request, prompts times n.
        key_requests (int or None): Maximum number of a key's running and waiting requests; None for no limit.
        key_requests_per_minute (int or None): Maximum number of a key's requests in a minute; None for no limit.
        idle_seconds (float): Time within which a connection must send the head of its next request, or it is closed.
        body_seconds (float): Time within which a request's body must arrive.
        request_seconds (float): Time within which a request must be answered.
        grace (float): Seconds that running requests get to finish when the server is asked to stop.
        request_log (str or None): File for one JSON line per request; None for standard error.
        log_prompts (bool): Whether the log includes prompts.
        page (bool): Whether to serve a page for browsers at /.
        adapter_labels (int): Number of adapters, the busiest ones, with their own labels in the metrics.

    Raises:
        ConfigError: A setting is out of range, or the server would be open to other machines without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Optional[str] = None
    no_auth: bool = False
    cors_origins: Tuple[str, ...] = ()
    allow_runtime_loading: bool = False
    chat_template: Optional[str] = None
    template: Optional[str] = None
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: Optional[int] = None
    max_output_tokens: Optional[int] = None
    max_choices: int = 64
    key_requests: Optional[int] = None
    key_requests_per_minute: Optional[int] = None
    idle_seconds: float = 75.0
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    grace: float = 30.0
    request_log: Optional[str] = None
    log_prompts: bool = False
    page: bool = True
    adapter_labels: int = 20

    def __post_init__(self):
        check_number(self.port, "port", _PORT)
        for name in (*_AT_LEAST_ONE, *_ONE_OR_NONE):
            value = getattr(self, name)
            if name in _AT_LEAST_ONE or value is not None:
                check_number(value, name, COUNT)
        for name in ("idle_seconds", "body_seconds", "request_seconds"):
            check_number(getattr(self, name), name, _SECONDS)
        check_number(self.grace, "grace", Range("a number of seconds, 0 or more", lambda value: value >= 0))
        if self.api_key_file and self.no_auth:
            raise ConfigError("--api-key-file and --no-auth were both given: leave one of them out.")
        if not (self.api_key_file or self.no_auth or is_local(self.host)):
            raise ConfigError(
                f"--host {self.host} lets other machines in, but no key is asked for: give --api-key-file FILE, or "
                "--no-auth if anyone who reaches the address may use the server."
            )


def is_local(host: str) -> bool:
    """Returns whether an address to listen on can be reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address
        return False
