"""An HTTP server for an engine, with OpenAI's API as vLLM has it: completions, chat, models, adapters at run time."""
