"""LiteLLM with vLLM's prefix."""

import with_litellm


def _with_prefix(verb):
    def ask(**request):
        with_litellm.PREFIX = "hosted_vllm"
        try:
            return getattr(with_litellm, verb)(**request)
        finally:
            with_litellm.PREFIX = "openai"

    return ask


chat, stream, tools, typed = map(_with_prefix, ("chat", "stream", "tools", "typed"))
