"""transformers and PEFT on PyTorch, for serving_peft.py: a process that executes each line of its stdin.

A line is a JSON object: {"do": verb, and the verb's arguments}. Each is answered with one line of JSON. Only this file
imports PyTorch; nothing of mindlora is imported here.
"""

import contextlib
import copy
import json
import sys
import time
from typing import Any, Dict, Iterator, List, Optional

import peft
import torch
import transformers


class Side:
    """A model with adapters, and the caches of prompts that it has read.

    It is as fast as these libraries are without a compiler: no gradients, a key-value cache, fused attention, logits of
    only the last token, and PEFT's hooks set once per answer instead of once per step.
    """

    def load(self, base: str, adapters: Dict[str, str], threads: int) -> Dict[str, str]:
        """Loads a base and adapters, given as name -> folder; returns the versions of the packages."""
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
        names = list(adapters)
        self.model = peft.PeftModel.from_pretrained(model, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()
        self.prompts: Dict[str, Any] = {}
        return {package.__name__: package.__version__ for package in (torch, transformers, peft)}

    def read(self, key: str, prompts: List[List[int]], adapters: List[Optional[str]]) -> None:
        """Computes prompts of equal length, each with its adapter, and keeps their cache under a key."""
        cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode(), self._using(adapters) as model:
            self.prompts[key] = (cache, self._next(model, torch.tensor(prompts), cache), adapters)

    def decode(self, key: str, steps: int) -> Dict[str, Any]:
        """Continues the prompts of a key; returns the seconds of a step and all tokens, including the first."""
        kept, token, adapters = self.prompts[key]
        cache = copy.deepcopy(kept)
        tokens = [token]
        with torch.inference_mode(), self._using(adapters) as model:
            begin = time.perf_counter()
            for _ in range(steps):
                tokens.append(self._next(model, tokens[-1], cache))
            seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "tokens": torch.cat(tokens, 1).tolist()}

    def prefill(self, prompt: List[int], adapter: Optional[str]) -> Dict[str, Any]:
        """Computes one prompt and its first token; returns the seconds and the token."""
        tokens = torch.tensor([prompt])
        cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode(), self._using([adapter]) as model:
            begin = time.perf_counter()
            token = self._next(model, tokens, cache)
            return {"seconds": time.perf_counter() - begin, "token": token.item()}

    @staticmethod
    def _next(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    @contextlib.contextmanager
    def _using(self, adapters: List[Optional[str]]) -> Iterator[Any]:
        """Yields the model with an adapter for each row: none, one for all, or PEFT's mixed batch."""
        if set(adapters) == {None}:
            with self.model.disable_adapter():
                yield self.model.base_model
        elif len(set(adapters)) == 1:
            self.model.set_adapter(adapters[0])
            yield self.model.base_model
        else:
            names = [name or "__base__" for name in adapters]
            with self.model._enable_peft_forward_hooks(adapter_names=names):
                yield self.model.base_model


def main() -> None:
    side = Side()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(side, asked.pop("do"))(**asked)), flush=True)


if __name__ == "__main__":
    main()
