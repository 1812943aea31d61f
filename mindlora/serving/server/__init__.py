"""An HTTP server for an engine, with OpenAI's API as in vLLM: completions, chat, models, adapters at run time."""
