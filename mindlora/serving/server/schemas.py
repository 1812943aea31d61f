"""Requests and answers of the API as pydantic models, which check all bodies and define /openapi.json."""

from typing import Annotated, Any, ClassVar, Dict, Iterable, Iterator, List, Literal, Optional, Union

from pydantic import BaseModel, Field

from mindlora.serving.constraints import Constraint, asked_outputs
from mindlora.serving.request import Sampling
from mindlora.serving.server.asked import Asked, Table, Text
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.tool_schemas import Function, Tool, ToolChoice, chosen_functions
from mindlora.serving.thoughts import WITHOUT

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# JSON has no numbers as keys.
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
StopText = Annotated[Text, Field(min_length=1, max_length=1000)]
MAX_LOGPROBS = 20


# Fields that Sampling has too.
_SAMPLED = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_SAMPLED += ("ignore_eos", "cache_salt")


class StreamOptions(Asked):
    """Options of a streamed answer."""

    unsupported: ClassVar[Table] = {"continuous_usage_stats": (False,), "include_obfuscation": (True, False)}
    include_usage: Optional[bool] = None


class JsonSchema(Asked):
    """The schema in a response_format."""

    name: Optional[Text] = None
    description: Optional[Text] = None
    schema_: Dict[str, Any] = Field(alias="schema")
    strict: Optional[bool] = Field(None, description="the schema is kept in any case")


class ResponseFormat(Asked):
    """OpenAI's constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Optional[JsonSchema] = None


class StructuredOutputs(Asked):
    """vLLM's constraint on the answer."""

    unsupported: ClassVar[Table] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
    json_: Union[Text, Dict[str, Any], None] = Field(None, alias="json")
    regex: Optional[Text] = None
    choice: Optional[List[Text]] = Field(None, min_length=1)
    grammar: Optional[Text] = None
    json_object: Optional[bool] = None


class _Generation(Asked):
    """The common fields of completions and chat completions. null stands for the default everywhere."""

    unsupported: ClassVar[Table] = {
        "best_of": (1,),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "priority": (0,),
        "prompt_logprobs": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }
    model: Text = Field(max_length=1000, description="the base's name, or an adapter's")
    max_tokens: Optional[int] = Field(None, ge=1)
    n: Optional[int] = Field(None, ge=1, description="answers to each prompt")
    stop: Union[StopText, Annotated[List[StopText], Field(max_length=16)], None] = None
    include_stop_str_in_output: Optional[bool] = Field(
        None, description="as in vLLM: the answer ends with its stop text"
    )
    stop_token_ids: Optional[List[TokenId]] = Field(None, max_length=64, description="as in vLLM")
    stream: Optional[bool] = None
    stream_options: Optional[StreamOptions] = None
    seed: Optional[int] = Field(None, ge=-(2**63), lt=2**63)
    temperature: Optional[float] = Field(None, ge=0, le=100)
    top_p: Optional[float] = Field(None, gt=0, le=1)
    presence_penalty: Optional[float] = Field(None, ge=-2, le=2)
    frequency_penalty: Optional[float] = Field(None, ge=-2, le=2)
    logit_bias: Optional[Dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]]] = Field(
        None, max_length=1024, description="token id -> what is added to its logit"
    )
    top_k: Optional[int] = Field(None, ge=-1, lt=2**31, description="as in vLLM; 0 or -1 for all")
    min_p: Optional[float] = Field(None, ge=0, le=1, description="as in vLLM")
    repetition_penalty: Optional[float] = Field(None, gt=0, le=100, description="as in vLLM")
    min_tokens: Optional[int] = Field(None, ge=0, description="as in vLLM: tokens before the answer may end")
    allowed_token_ids: Optional[List[TokenId]] = Field(
        None, min_length=1, description="as in vLLM: the answer consists of these alone, and its end"
    )
    bad_words: Optional[List[StopText]] = Field(
        None, max_length=256, description="as in vLLM: texts that the answer does not have"
    )
    ignore_eos: Optional[bool] = Field(None, description="as in vLLM")
    cache_salt: Optional[Annotated[Text, Field(min_length=1, max_length=1000)]] = Field(
        None, description="as in vLLM: the prompt's keys and values are shared only with requests of the same salt"
    )
    return_token_ids: Optional[bool] = Field(None, description="as in vLLM: show the ids of prompt and answer")
    service_tier: Optional[Literal["auto", "default", "flex", "scale", "priority"]] = Field(
        None, description="changes nothing: all requests are equal"
    )
    response_format: Optional[ResponseFormat] = None
    structured_outputs: Optional[StructuredOutputs] = Field(None, description="as in vLLM")
    guided_json: Union[Text, Dict[str, Any], None] = Field(None, description="as in vLLM: a JSON schema")
    guided_regex: Optional[Text] = Field(None, description="as in vLLM")
    guided_choice: Optional[List[Text]] = Field(None, min_length=1, description="as in vLLM")
    guided_grammar: Optional[Text] = Field(None, description="as in vLLM: in Lark or GBNF")

    def constraint(self) -> Optional[Constraint]:
        """The constraint on the answer; None for any text.

        Raises ApiError, 400, if several fields set it, or response_format lacks its schema.
        """
        said = list(self._constraints())
        if len(said) > 1:
            raise ApiError(
                f"{said[0].field} and {said[1].field} both say what the answer must be: leave one of them out.",
                param=said[1].field,
            )
        return said[0] if said else None

    def _constraints(self) -> Iterator[Constraint]:
        """Yields the constraint of each field that sets one."""
        for kind in ("json", "regex", "choice", "grammar"):
            field = f"guided_{kind}"
            if getattr(self, field) is not None:
                yield Constraint(kind, getattr(self, field), field)
        if self.structured_outputs is not None:
            yield from asked_outputs(self.structured_outputs.model_dump(by_alias=True), "structured_outputs")
        form = self.response_format
        if form is None or form.type == "text":
            return
        if form.type == "json_object":
            yield Constraint("json", {"type": "object"}, "response_format")
        elif form.json_schema is None:
            field = "response_format.json_schema"
            raise ApiError(f"{field} is missing: give the schema there.", code="missing_field", param=field)
        else:
            yield Constraint("json", form.json_schema.schema_, "response_format.json_schema.schema")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(
        self, logprobs: Optional[int], ends: Iterable[int] = (), prompt_logprobs: Optional[int] = None
    ) -> Sampling:
        chosen = {name: getattr(self, name) for name in _SAMPLED if getattr(self, name) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = None if self.seed is None else self.seed % 2**64
        stop_tokens = tuple({*(self.stop_token_ids or ()), *(() if self.ignore_eos else ends)})
        top_k = max(self.top_k or 0, 0)
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return Sampling(
            top_k=top_k,
            seed=seed,
            stop=tuple(stop),
            stop_is_shown=bool(self.include_stop_str_in_output),
            allowed_tokens=tuple(self.allowed_token_ids or ()),
            stop_tokens=stop_tokens,
            logit_bias=bias,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **chosen,
        )


class CompletionRequest(_Generation):
    """Body of /v1/completions."""

    unsupported: ClassVar[Table] = {**_Generation.unsupported, "prompt_embeds": (), "suffix": ("",)}

    prompt: Union[
        Text,
        Annotated[List[Text], Field(min_length=1)],
        Annotated[List[TokenId], Field(min_length=1)],
        Annotated[List[Annotated[List[TokenId], Field(min_length=1)]], Field(min_length=1)],
    ] = Field(description="a text, token ids, or a list of either")
    max_tokens: Optional[int] = Field(None, ge=0, description="0 with echo and logprobs, to score the prompt alone")
    add_special_tokens: Optional[bool] = Field(None, description="as in vLLM: begin texts with the tokenizer's bos")
    echo: Optional[bool] = Field(
        None, description="put the prompt before the answer, with its logprobs if they are asked for"
    )
    logprobs: Optional[int] = Field(None, ge=0, le=MAX_LOGPROBS, description="likeliest tokens to report")

    def sampling(self, ends: Iterable[int]) -> Sampling:
        """How to continue the prompts; the caller sets max_tokens. ``ends`` is for chats."""
        return self._sampling(self.logprobs, prompt_logprobs=self.logprobs if self.echo else None)

    def prompts(self) -> List[Union[str, List[int]]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ContentPart(Asked):
    """A part of a message: text alone."""

    passes_unknown: ClassVar[bool] = True
    type: Literal["text"]
    text: Text


class FunctionCall(Asked):
    """The function that the assistant called, and its arguments as JSON in a string."""

    passes_unknown: ClassVar[bool] = True
    name: Text
    arguments: Optional[Text] = Field(None, description='"" and null for none')


class ToolCall(Asked):
    """A call in an assistant's turn."""

    passes_unknown: ClassVar[bool] = True
    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Optional[int] = Field(None, description="as it came in a stream")


class Message(Asked):
    """A turn of a conversation."""

    unsupported: ClassVar[Table] = {"audio": (), "function_call": (), "refusal": ("",)}
    passes_unknown: ClassVar[bool] = True
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Union[Text, List[ContentPart], None] = None
    name: Optional[Text] = None
    tool_calls: Optional[List[ToolCall]] = Field(None, description="of the assistant")
    tool_call_id: Optional[Text] = Field(None, description="of a tool's answer: the call that it answers")
    reasoning_content: Any = Field(None, description="of the assistant: what it thought, which the template may show")
    reasoning: Any = Field(None, description="vLLM's newer name of reasoning_content")

    def for_template(self) -> Dict[str, Any]:
        """The message in the form of mindlora.serving.chat_prompt."""
        fields = {"role", "content", "name", "tool_calls", "tool_call_id"}
        shown = self.model_dump(include=fields, exclude_none=True)
        thoughts = [text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str) and text]
        return {**shown, "reasoning_content": thoughts[0]} if thoughts else shown


class ChatRequest(_Generation):
    """Body of /v1/chat/completions."""

    unsupported: ClassVar[Table] = {
        **_Generation.unsupported,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }
    messages: List[Message] = Field(min_length=1)
    tools: Optional[List[Tool]] = Field(None, max_length=128)
    tool_choice: ToolChoice = None
    parallel_tool_calls: Optional[bool] = Field(None, description="whether an answer may call several tools")
    chat_template_kwargs: Optional[Dict[str, Any]] = Field(None, description="as in vLLM: variables of the template")
    reasoning_effort: Optional[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]] = Field(
        None, description="none has the model answer without a thought; the template gets it as its variable"
    )
    include_reasoning: Optional[bool] = Field(None, description="as in vLLM: false for the answer without the thought")
    max_completion_tokens: Optional[int] = Field(None, ge=1, description="the same as max_tokens")
    prediction: Optional[Dict[str, Any]] = Field(None, description="changes nothing: it is about speed")
    store: Optional[bool] = Field(None, description="changes nothing: answers are not kept")
    verbosity: Optional[Literal["low", "medium", "high"]] = Field(
        None, description="changes nothing: tell the model in the prompt how long its answer should be"
    )
    logprobs: Optional[bool] = None
    top_logprobs: Optional[int] = Field(None, ge=0, le=MAX_LOGPROBS, description="likeliest tokens to report")

    @property
    def callable_tools(self) -> Dict[int, Function]:
        """The functions that the answer may call, by their places among the tools.

        Raises ApiError, 400, if tool_choice names a missing tool, or two tools have the same name.
        """
        return chosen_functions([tool.function for tool in self.tools or ()], self.tool_choice)

    @property
    def thinks(self) -> bool:
        """Whether the answer may begin with a thought."""
        return self.reasoning_effort != "none"

    def variables(self) -> Dict[str, Any]:
        """The variables of the template that the request sets."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **({} if self.thinks else WITHOUT), **(self.chat_template_kwargs or {})}

    def sampling(self, ends: Iterable[int]) -> Sampling:
        """How to continue the conversation, up to one of the tokens ``ends``; the caller sets max_tokens."""
        return self._sampling((self.top_logprobs or 0) if self.logprobs else None, ends)


class TextsRequest(Asked):
    """The common fields of requests whose input is texts; text_field is the name of their field, for messages."""

    unsupported: ClassVar[Table] = {
        "activation": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
        "messages": ([],),
        "normalize": (True,),
        "priority": (0,),
        "truncate_prompt_tokens": (),
    }
    text_field: ClassVar[str] = "input"
    model: Text = Field(max_length=1000, description="the base's name, or an adapter's")
    add_special_tokens: Optional[bool] = Field(None, description="as in vLLM: begin texts with the tokenizer's bos")


class TokenizeRequest(Asked):
    """Body of /tokenize, as in vLLM: a prompt or a conversation."""

    model: Optional[Text] = Field(None, max_length=1000, description="the base's name, or an adapter's")
    prompt: Optional[Text] = None
    messages: Optional[List[Message]] = Field(None, min_length=1)
    tools: Optional[List[Tool]] = Field(None, max_length=128)
    add_special_tokens: Optional[bool] = Field(None, description="of a prompt: begin with the tokenizer's bos")
    chat_template_kwargs: Optional[Dict[str, Any]] = Field(None, description="of messages: variables of the template")
    return_token_strs: Optional[bool] = None


class DetokenizeRequest(Asked):
    """Body of /detokenize, as in vLLM."""

    model: Optional[Text] = Field(None, max_length=1000, description="the base's name, or an adapter's")
    tokens: List[TokenId]


class LoadAdapterRequest(Asked):
    """Body of /v1/load_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=256)
    lora_path: Text = Field(min_length=1, max_length=4096)
    load_inplace: Optional[bool] = Field(None, description="replace an adapter of this name")


class UnloadAdapterRequest(Asked):
    """Body of /v1/unload_lora_adapter."""

    lora_name: Text = Field(min_length=1, max_length=256)
    lora_int_id: Optional[int] = None


class CachedTokens(BaseModel):
    """The origin of prompt tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request: its prompts, counted once each, and all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """The tokens of a choice, each with an entry in each list; the first of an echoed prompt has no log-probability."""

    tokens: List[str]
    token_logprobs: List[Optional[float]]
    top_logprobs: List[Optional[Dict[str, float]]]
    text_offset: List[int]


class CompletionChoice(BaseModel):
    """One answer to one prompt, or a piece of it."""

    index: int
    text: str
    logprobs: Optional[CompletionLogprobs]
    finish_reason: Optional[str]
    prompt_token_ids: Optional[List[int]] = Field(None, description="with return_token_ids; in the first piece")
    token_ids: Optional[List[int]] = Field(None, description="with return_token_ids")


class Completion(BaseModel):
    """Answer of /v1/completions, or each chunk of it in a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: List[CompletionChoice]
    usage: Optional[Usage] = None


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: List[int]
    token_strs: Optional[List[str]] = None


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class TopLogprob(BaseModel):
    """A token, its text and bytes."""

    token: str
    logprob: float
    bytes: Optional[List[int]]


class TokenLogprobs(TopLogprob):
    """A token of the answer, and the likeliest tokens in its place."""

    top_logprobs: List[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a choice."""

    content: List[TokenLogprobs]


class CalledFunction(BaseModel):
    """The function of a call; in a stream, its name first and then pieces of its arguments."""

    name: Optional[str] = None
    arguments: str


class CalledTool(BaseModel):
    """A call in an answer; in a stream, ``index`` identifies the call that a piece extends."""

    index: Optional[int] = None
    id: Optional[str] = None
    type: Optional[Literal["function"]] = None
    function: CalledFunction


class Answer(BaseModel):
    """The assistant's message, or an addition to it in a stream. A thought has both names that servers use for it."""

    role: Optional[Literal["assistant"]] = None
    content: Optional[str] = None
    reasoning_content: Optional[str] = None
    reasoning: Optional[str] = None
    tool_calls: Optional[List[CalledTool]] = None


class ChatChoice(BaseModel):
    """One answer to the conversation, in ``message`` or, in a stream, in ``delta``."""

    index: int
    message: Answer = Answer()
    delta: Answer = Answer()
    logprobs: Optional[ChatLogprobs]
    finish_reason: Optional[str]
    token_ids: Optional[List[int]] = Field(None, description="with return_token_ids")


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions, or each chunk of it in a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: List[ChatChoice]
    usage: Optional[Usage] = None
    prompt_token_ids: Optional[List[int]] = Field(None, description="with return_token_ids; in the first chunk")


class ErrorObject(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: Optional[str]
    code: Optional[str]


class ErrorAnswer(BaseModel):
    """Every answer other than success."""

    error: ErrorObject
