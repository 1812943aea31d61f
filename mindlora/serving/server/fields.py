"""Fields of OpenAI's and vLLM's APIs that this server lacks: taken where they ask for nothing, else refused by name."""

from typing import Any, Dict, Mapping, Optional, Tuple

from mindlora.serving.server.errors import ApiError

# Field -> values besides null that ask for nothing.
_Table = Dict[str, Tuple[Any, ...]]
# They only describe the request.
_NOTES = ("metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "user")
_BOTH: _Table = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
COMPLETION: _Table = {**_BOTH, "prompt_embeds": (), "suffix": ("",)}
CHAT: _Table = {
    **_BOTH,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True, False),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
MESSAGE: _Table = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
STREAM_OPTIONS: _Table = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
PLAIN_PART: _Table = {}


def check(extra: Optional[Mapping[str, Any]], table: _Table, where: str = "") -> None:
    """Checks the fields of a request that its schema does not have.

    Args:
        extra (dict or None): Those fields.
        table (dict): The fields that may be there as long as they ask for nothing.
        where (str, optional): Path of the object that has them, with a dot behind it. Default: "".

    Raises:
        ApiError: 400, a field asks for something, or is not known.
    """
    for name, value in (extra or {}).items():
        path = f"{where}{name}"
        if name in table:
            if value is not None and value not in table[name]:
                raise ApiError(
                    f"{path} is not supported by this server: leave it out.", code="unsupported_field", param=path
                )
        elif where or name not in _NOTES:
            raise ApiError(f"{path} is not a field of this request.", code="unknown_field", param=path)
