"""vLLM, in a process of its own: reads one request from stdin as JSON, and writes the answers to stdout.

{"model": folder, "adapters": {name: folder or null}, "prompts": [token ids, ...], "count": N} becomes
{name: {"tokens": [greedy continuation, ...]} or {"error": text}}.
"""

import json
import os
import sys

# What vLLM prints must not come between.
ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

LARGEST_RANK = 512


def main():
    request = json.load(sys.stdin)
    llm = LLM(
        model=request["model"],
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=LARGEST_RANK,
        enforce_eager=True,
        max_model_len=256,
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["count"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    found = {}
    for number, (name, folder) in enumerate(request["adapters"].items(), 1):
        lora = LoRARequest(name, number, folder) if folder else None
        try:
            if lora:
                # Refused while a request runs, an adapter leaves it in the scheduler, and what follows waits forever.
                llm.llm_engine.add_lora(lora)
            answers = llm.generate(prompts, sampling, lora_request=lora, use_tqdm=False)
            found[name] = {"tokens": [list(answer.outputs[0].token_ids) for answer in answers]}
        except Exception as error:  # whatever vLLM says of the adapter
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), file=ANSWERS, flush=True)
    # vLLM's threads would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
