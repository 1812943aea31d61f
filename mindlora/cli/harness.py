"""EleutherAI's lm-evaluation-harness on mindlora's engine: its model ``mindlora``, registered when this is imported."""

import argparse
import atexit
import itertools
from typing import Any, Dict, List, Optional, Sequence, Tuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text

from mindlora.cli.engine import add_engine_options, build, log_elsewhere, read_adapters, start
from mindlora.cli.model_source import source_of
from mindlora.core.errors import ConfigError, RequestError
from mindlora.core.overrides import split_overrides
from mindlora.core.text import suggestion
from mindlora.serving.evaluation.texts import Passage, ask, score, start_tokens, windows
from mindlora.serving.request import Sampling

# lm-eval's arguments for every model that are not needed here: the engine batches itself, on the YAML's device.
_IGNORED = ("batch_size", "max_batch_size", "device", "trust_remote_code")
_MAX_TOKENS = 256


@register_model("mindlora")
class HarnessModel(TemplateLM):
    """A base, or the base with one adapter, as a model for lm-eval's tasks.

    It equals lm-eval's own model ``hf`` token by token: the same tokens, windows, stops and numbers.

    Args:
        **options: The options of ``mindlora generate`` for base, adapter and sizes, under the command line's names:
            config or model, load_checkpoint, tokenizer, adapter, adapters, seq_length and so on; keys of the YAML have
            a dot in their names.

    Raises:
        LoraError: An option is unknown; also the errors of ``mindlora generate``.
    """

    def __init__(self, **options: Any):
        super().__init__()
        arguments = _arguments({name: value for name, value in options.items() if name not in _IGNORED})
        adapters = read_adapters(arguments)
        if len(adapters.chosen) > 1:
            raise ConfigError(f"adapter names {len(adapters.chosen)}, but lm-eval asks one model: name one adapter.")
        self.adapter: Optional[str] = next(iter(adapters.chosen), None)
        # No longer than this: lm-eval prints its tables to standard output.
        with log_elsewhere(arguments.verbose):
            self.engine = build(arguments, adapters.registry, defaults={"slots": 1}, chosen=adapters.chosen)
            start(self.engine)
        # lm-eval does not report its end.
        atexit.register(self.engine.stop)
        self.tokenizer = self.engine.tokenizer
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"The tokenizer of {source_of(arguments)} has no eos token, which lm-eval needs. Add one."
            )

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that comes before a text without a context."""
        return start_tokens(self.tokenizer)[0]

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a context and its continuation."""
        return self.engine.seq_length

    @property
    def tokenizer_name(self) -> str:
        """The identity of this tokenizer, for lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: List[Dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation formatted by the tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **_: Any) -> List[int]:
        """Returns the tokens of a text, with the tokenizer's special tokens unless it already begins with bos."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Tuple[Any, List[int], List[int]]], disable_tqdm: bool = False, **_: Any
    ) -> List[Tuple[float, bool]]:
        passages = [self._passage(context, continuation) for _, context, continuation in requests]
        results = []
        for passage, scores in zip(passages, score(self.engine, passages, [self.adapter])[self.adapter]):
            is_greedy = scores.likeliest.tolist() == passage.tokens[passage.first :]
            results.append((float(scores.logprobs.sum()), is_greedy))
        for (key, _, _), result in zip(requests, results):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _passage(self, context: List[int], continuation: List[int]) -> Passage:
        """Returns context and continuation, with the beginning of an overlong context cut off."""
        if not 0 < len(continuation) <= self.max_length:
            raise RequestError(
                f"A continuation of a task has {len(continuation)} tokens, and the model predicts 1 to "
                f"{self.max_length} at once: shorten the task's, or raise seq_length."
            )
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        return Passage(tokens, len(tokens) - len(continuation))

    def loglikelihood_rolling(self, requests: List[Instance], disable_tqdm: bool = False) -> List[float]:
        """Returns the log-likelihood of each text, in windows that each begin with the previous one's last token."""
        passages: List[Passage] = []
        counts = []
        for request in requests:
            tokens = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            made = _full_windows(tokens, self.max_length)
            passages += made
            counts.append(len(made))
        scores = iter(score(self.engine, passages, [self.adapter])[self.adapter])
        results = []
        for request, count in zip(requests, counts):
            of_request = itertools.islice(scores, count)
            results.append(sum(float(one.logprobs.sum()) for one in of_request))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: List[Instance], disable_tqdm: bool = False) -> List[str]:
        """Returns the model's continuation of each context, up to a stop."""
        asked = []
        stops = []
        end = self.tokenizer.decode([self.eot_token_id])
        for request in requests:
            context, options = request.args
            options = normalize_gen_kwargs(options, _MAX_TOKENS)
            until = handle_stop_sequences(options["until"], eos=end)
            stops.append(until)
            asked.append((*self._prompt(context, options, until), self.adapter))
        texts = []
        for request, until, (answered, _) in zip(requests, stops, ask(self.engine, asked)):
            text = self.tokenizer.decode(answered.generated, skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt(self, context: str, options: Dict[str, Any], until: List[str]) -> Tuple[List[int], Sampling]:
        """Returns the last tokens of a context that leave room for the answer, and its sampling."""
        limit = options["max_gen_toks"]
        room = self.max_length - limit
        if room < 1:
            raise RequestError(
                f"max_gen_toks is {limit}, but the model takes {self.max_length} tokens, the context included: lower "
                "it (--gen_kwargs max_gen_toks=N), or raise seq_length."
            )
        sampling = Sampling(
            max_tokens=limit,
            temperature=options["temperature"] if options["do_sample"] else 0.0,
            top_p=options.get("top_p", 1.0),
            top_k=options.get("top_k", 0),
            seed=0,
            stop=tuple(text for text in until if text),
        )
        return self.tok_encode(context)[-room:], sampling


def _full_windows(tokens: List[int], length: int) -> List[Passage]:
    """Returns lm-eval's windows: one token of overlap, and the last one as long as the others."""
    made = list(windows(tokens, length, 1))
    last = made[-1]
    scored = len(last.tokens) - last.first
    if len(made) > 1:
        made[-1] = Passage(tokens[-(length + 1) :], length + 1 - scored)
    return made


def _arguments(options: Dict[str, Any]) -> argparse.Namespace:
    """Returns the arguments of the equivalent ``mindlora generate``."""
    if ("config" in options) == ("model" in options):
        raise ConfigError("model_args must name one model: give config=YAML or model=FOLDER.")
    parser = argparse.ArgumentParser(prog="mindlora", add_help=False, exit_on_error=False)
    add_engine_options(parser, {})
    known = {word.lstrip("-").replace("-", "_") for action in parser._actions for word in action.option_strings}
    words: List[str] = []
    for name, value in options.items():
        if "." not in name and name not in known:
            raise ConfigError(f"model_args has {name}, which mindlora does not know.{suggestion(name, sorted(known))}")
        option = name if "." in name else name.replace("_", "-")
        words += [f"--{option}", str(value)] if value is not True else [f"--{option}"]
    try:
        arguments, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"model_args: {error}. Correct it.") from error
    arguments.overrides, rest = split_overrides(rest)
    return arguments
