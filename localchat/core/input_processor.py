"""Input processor: renders the chat template, tokenizes, validates and compiles the grammar of a request.

Runs on input threads. It needs only the header and the tokenizer, so it never waits for a step or for the
weights.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import fields, replace
from functools import partial
from itertools import count
from typing import cast

import msgspec

from localchat.backend_api.interface import OpenModel, SamplingParams, Tokenizer
from localchat.backend_api.media import MediaModel, MediaPiece, MediaSpan
from localchat.backend_api.prompt_encoder import PromptEncoder
from localchat.backend_api.sampling.repetition import breaker_bits
from localchat.backend_api.sealed_text import TextPart
from localchat.chat_format import ChatFormat, chat_format
from localchat.chat_format.parser import Rendered
from localchat.chat_format.render_process import RenderProcess
from localchat.config.parameters import DRY_BREAKERS, NO_BREAKERS, SAMPLERS
from localchat.config.sampling import SamplingValues
from localchat.config.settings import DEFAULT_SAMPLING
from localchat.core.detokenizer import ChoiceOutput
from localchat.core.fim import infill_tokens
from localchat.core.media_layouts import MediaLayouts
from localchat.core.request_timer import RequestTimer
from localchat.core.sequence import RequestState, Sequence
from localchat.core.stop_strings import StopPatterns
from localchat.core.structured_output.compiler import (
    GrammarCompiler,
    GrammarSpec,
    relaxed_keywords,
    within_limit,
)
from localchat.core.structured_output.tool_grammar import answer_grammar
from localchat.core.think_budget import ThinkBudget
from localchat.core.token_bans import EndBan
from localchat.engine.attachments import check_attachments
from localchat.engine.events import Accepted, Limit
from localchat.engine.interface import TokenizerInfo
from localchat.engine.local import protocol
from localchat.engine.repetition import detector_for
from localchat.engine.request import (
    Attachment,
    GenerateRequest,
    Infill,
    Messages,
    TextPrompt,
    TokenIds,
    default_answer_tokens,
)
from localchat.errors import ContextExceeded, LocalchatError, UsageError
from localchat.fit.load_options import MAX_LORA_SCALE

_SEED_MASK = (1 << 64) - 1
_MAX_CHOICES = 64
_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 64 * 256
"""Limit for all stop strings of a request. Each character becomes a node of the automaton."""
_MAX_BIASES = 1024
"""Biases are added to the logits one by one, at every token of every choice."""
_MAX_LOGPROBS = 100
_MAX_BAD_WORDS = 256
_MAX_STOP_TOKENS = 256
_BANNED_BIAS = -1e9
_DEFAULTS = SamplingValues()
_KINDS = {field.name: type(getattr(_DEFAULTS, field.name)) for field in fields(_DEFAULTS)}
"""Types of the numbers of the sampling, int or float."""
_CACHED_BREAKERS = 16
_MAX_BREAKERS = 64
_MAX_BREAKER_CHARACTERS = 40
_NAMED_MODELS = 4


class _Pieces(dict[int, bytes]):
    """Bytes of tokens by id, read from the tokenizer at the first use."""

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int]) -> None:
        """`visible`: control tokens that are not empty."""
        self._tokenizer = tokenizer
        self._visible = visible

    def __missing__(self, token: int) -> bytes:
        piece = self._tokenizer.piece(token, special=token in self._visible)
        self[token] = piece
        return piece


class InputProcessor:
    """Prepares requests for an open model. Thread-safe."""

    def __init__(
        self,
        model: OpenModel,
        context_tokens: int,
        sampling: Mapping[str, float],
        notify: Callable[[str], None],
        render_process: RenderProcess | None = None,
    ) -> None:
        """`context_tokens`: longest sequence. `sampling`: defaults by name, which override the model's own.

        `notify`: shows a notice to the user. `render_process`: runs the chat template.
        """
        self._model = model
        self._context = context_tokens
        self._notify = notify
        self._warned: set[str] = set()
        self._pieces: list[bytes] = []
        """Bytes of all tokens, once a request needs them."""
        self.layouts = MediaLayouts()
        """Layouts of attachments that earlier processes read."""
        self._breakers_by_texts: dict[tuple[str, ...], bytes] = {}
        self.sampling = {**DEFAULT_SAMPLING, **self._model_defaults(), **sampling}
        """Defaults by name, for values that a request does not set."""
        self._numbers = count(1)
        tokenizer = model.tokenizer
        self.format: ChatFormat = chat_format(
            model.info.chat_template,
            _special_texts(tokenizer),
            process=render_process,
            vocabulary=lambda: tokenizer.special_tokens,
        )
        self._encoder = PromptEncoder(tokenizer)
        self._grammars = GrammarCompiler(tokenizer)
        visible = _control_tokens(tokenizer, self.format.markup)
        call_tokens = _control_tokens(tokenizer, self.format.tool_call_family.markup)
        self._answer_pieces = _Pieces(tokenizer, visible)
        self._call_pieces = _Pieces(tokenizer, visible | call_tokens)

    def _model_defaults(self) -> dict[str, float]:
        """The model's own sampling defaults, without values out of range."""
        defaults = dict(self._model.info.sampling)
        for name, value in self._model.info.sampling:
            low, high = SAMPLERS[name].engine_range
            if name == "top_k" and value < 0:
                # llama.cpp and vLLM write -1 for off.
                defaults[name] = 0
            elif not low <= value <= high:
                del defaults[name]
                self._notify(
                    f"The model file recommends {name} {value:g}, which is out of range; it is ignored."
                )
        return defaults

    def accept(self, id_: int, request: GenerateRequest) -> tuple[RequestState, Accepted]:
        """Build the state of a request for the engine core.

        Raises UsageError, TemplateError, ContextExceeded.
        """
        arrived_s = time.perf_counter()
        _check(request)
        adapters = self._adapters(request)
        if adapters:
            # KV depends on the adapters, so it is shared only between requests with the same ones.
            request = msgspec.structs.replace(request, salt=self._adapter_salt(request, adapters))
        rendered, tokens, media = self._prompt(request)
        if not tokens:
            raise UsageError("the prompt is empty, so there is nothing to continue")
        room = self._context - len(tokens)
        if room < 1:
            self._raise_too_long(len(tokens))
        max_tokens, limit = self._limit(request, room, rendered)
        grammar = self._grammar(request, rendered)
        sampling = self._sampling(request)
        seeded = request.sampling.seed is not None
        request_state = RequestState(
            id_,
            request,
            tuple(tokens),
            sampling,
            max_tokens,
            seeded,
            RequestTimer(arrived_s),
            limit,
            media,
            adapters,
        )
        end_ban = self._end_ban(request)
        stop_strings = list(request.stop)
        if rendered is not None:
            stop_strings += rendered.stop
        stops = StopPatterns(stop_strings)
        if grammar is not None and grammar.optional:
            grammar = self._usable(grammar)
        for choice in range(request.n):
            sequence = self._sequence(request_state, choice, rendered, stops, grammar)
            if grammar is None:
                sequence.end_ban = end_ban
            request_state.sequences.append(sequence)
        relaxed: tuple[str, ...] = ()
        if grammar is not None:
            relaxed = within_limit(partial(relaxed_keywords, grammar), grammar.name, grammar.field)
        return request_state, Accepted(len(tokens), max_tokens, sampling.seed, relaxed)

    def _sequence(
        self,
        request_state: RequestState,
        choice: int,
        rendered: Rendered | None,
        stops: StopPatterns,
        grammar: GrammarSpec | None,
    ) -> Sequence:
        """Return the sequence of a choice. Raises UsageError for an unusable grammar."""
        request = request_state.request
        max_tokens = request_state.max_tokens
        sequence = Sequence(
            number=next(self._numbers),
            request_state=request_state,
            choice=choice,
            sampling=replace(request_state.sampling, choice=choice),
            tokens=list(request_state.tokens),
            limit=request_state.prompt_tokens + max_tokens,
            output=self._choice_output(choice, stops, rendered, request),
        )
        if rendered is not None:
            sequence.think_budget = self._think_budget(rendered)
        if grammar is not None:
            sequence.grammar_matcher = self._grammars.grammar_matcher(
                grammar,
                room=max_tokens,
                ignore_ends=request.ignore_eos,
                min_tokens=request.min_tokens,
            )
        return sequence

    def _grammar(self, request: GenerateRequest, rendered: Rendered | None) -> GrammarSpec | None:
        """Return the grammar of the answer, None for a free one. Raises UsageError."""
        make = partial(answer_grammar, request, rendered, self.format, self._model.tokenizer)
        if request.grammar is not None:
            return within_limit(make, "the grammar of the answer", request.grammar.field)
        if isinstance(request.prompt, Messages) and request.prompt.tools:
            return within_limit(make, "the grammar of the tools", "tools")
        return make()

    def _usable(self, grammar: GrammarSpec) -> GrammarSpec | None:
        """Return an optional grammar, or None with a notice if it cannot be compiled."""
        try:
            self._grammars.grammar_matcher(grammar, room=self._context)
        except UsageError as problem:
            self._warn_once(
                (f"The arguments of tools are not bound by a grammar: {problem.message}.",)
            )
            return None
        return grammar

    def _adapters(self, request: GenerateRequest) -> tuple[float, ...]:
        """Return the scale of each LoRA adapter, or an empty tuple if none applies. Raises UsageError."""
        loaded = self._model.info.adapters
        if request.lora is None:
            scales = [scale for _, scale in loaded]
        else:
            scales = [0.0] * len(loaded)
            for number, scale in request.lora:
                if not 0 <= number < len(loaded):
                    raise UsageError(
                        f"there is no LoRA adapter {number}; the model was loaded with {len(loaded)}",
                        hint="--lora loads adapters, which are numbered from 0",
                        field="lora",
                    )
                if not abs(scale) <= MAX_LORA_SCALE:
                    raise UsageError(
                        f"the scale of LoRA adapter {number} is {scale}; expected -{MAX_LORA_SCALE:g} to "
                        f"{MAX_LORA_SCALE:g}",
                        field="lora",
                    )
                scales[number] = scale
        return tuple(scales) if any(scales) else ()

    def _adapter_salt(self, request: GenerateRequest, scales: Several[float]) -> str:
        """Return the salt of a request with adapters. The salts of clients contain no two NULs in a row."""
        applied = [
            f"{identity} {scale!r}"
            for (identity, _), scale in zip(self._model.info.adapters, scales, strict=True)
            if scale
        ]
        return "\0\0".join((request.salt, *sorted(applied)))

    def _limit(
        self, request: GenerateRequest, room: int, rendered: Rendered | None
    ) -> tuple[int, Limit]:
        """Return the longest answer in tokens, and what limits it."""
        limits: list[tuple[int, Limit]] = [(room, "context")]
        if request.default_limit:
            reasons = rendered is not None and rendered.may_reason
            limits.append((default_answer_tokens(self._context, reasons=reasons), "default"))
        if request.max_tokens is not None:
            limits.append((request.max_tokens, "max_tokens"))
        return min(limits, key=lambda limit: limit[0])

    def _think_budget(self, rendered: Rendered) -> ThinkBudget | None:
        """Return the thinking budget of a choice, if the request has one."""
        if rendered.think_budget is None:
            return None
        family = self.format.reasoning_family
        chat = self.format
        encode = partial(self._encode, special=True, add_bos=False)
        closings = (family.closing(again=bool(again or not rendered.tools)) for again in (0, 1))
        return ThinkBudget(
            rendered.think_budget,
            chat.reasoning_tracker(rendered),
            self._call_pieces.__getitem__,
            [encode(closing) for closing in closings],
            reopens=family.anywhere,
        )

    def _end_ban(self, request: GenerateRequest) -> EndBan | None:
        """Return the ban on end tokens of a request with a minimum length."""
        self._check_tokens(request.stop_tokens, "stop_token_ids")
        if not request.min_tokens:
            return None
        ends = {*request.stop_tokens}
        if not request.ignore_eos:
            ends |= self._model.tokenizer.eog
        return EndBan(request.min_tokens, ends, self._model.tokenizer.vocab_size)

    def _choice_output(
        self,
        choice: int,
        stops: StopPatterns,
        rendered: Rendered | None,
        request: GenerateRequest,
    ) -> ChoiceOutput:
        output = partial(
            ChoiceOutput,
            choice,
            stops=stops,
            keep_stop=request.keep_stop,
            loop_detector=detector_for(request),
        )
        if rendered is None:
            return output(piece=self._answer_pieces.__getitem__, parser=None)
        pieces = self._answer_pieces
        if rendered.tools:
            pieces = self._call_pieces
        parser = self.format.answer_parser(rendered)
        return output(piece=pieces.__getitem__, parser=parser)

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        requested = {
            name: value
            for name, value in msgspec.structs.asdict(request.sampling).items()
            if value is not None and name in SAMPLERS
        }
        # The defaults of models are floats.
        chosen = {
            name: _KINDS[name](value) for name, value in {**self.sampling, **requested}.items()
        }
        biases = dict(request.sampling.logit_bias)
        for text, bias in request.sampling.text_bias.items():
            biases |= dict.fromkeys(self._model.tokenizer.encode(text, special=True), bias)
        biases |= dict.fromkeys(self._banned_tokens(request.bad_words), _BANNED_BIAS)
        if len(biases) > _MAX_BIASES:
            raise UsageError(
                f"a request may have {_MAX_BIASES:,} logit biases; this one has {len(biases):,}",
                hint="bias the tokens that matter most, or forbid others by a grammar",
                field="logit_bias",
            )
        self._check_tokens(request.sampling.logit_bias, "logit_bias")
        breakers = b""
        if chosen.get("dry_multiplier"):
            breakers = self._breakers(request.sampling.dry_sequence_breakers)
        seed = request.sampling.seed
        top = request.logprobs
        return SamplingParams(
            **chosen,
            logit_bias=tuple(sorted(biases.items())),
            dry_breakers=breakers,
            seed=secrets.randbits(64) if seed is None else seed & _SEED_MASK,
            top_logprobs=-1 if top is None else top,
        )

    def _breakers(self, texts: tuple[str, ...] | None) -> bytes:
        """Return the tokens across which DRY sees no repetition."""
        if texts is None:
            texts = DRY_BREAKERS
        elif texts == (NO_BREAKERS,):
            texts = ()
        if texts not in self._breakers_by_texts:
            tokenizer = self._model.tokenizer
            if not self._pieces:
                self._pieces = [
                    tokenizer.piece(token, special=True) for token in range(tokenizer.vocab_size)
                ]
            last = [(tokenizer.encode(text) or [-1])[-1] for text in texts]
            if len(self._breakers_by_texts) == _CACHED_BREAKERS:
                self._breakers_by_texts.clear()
            self._breakers_by_texts[texts] = breaker_bits(texts, self._pieces, last)
        return self._breakers_by_texts[texts]

    def _banned_tokens(self, words: Iterable[str]) -> Iterable[int]:
        """Yield the tokens of banned words, with and without a space before them."""
        for bad_word in words:
            for text in {bad_word, f" {bad_word.lstrip()}"}:
                tokens = self._model.tokenizer.encode(text)
                if len(tokens) != 1:
                    raise UsageError(
                        f"the bad word {text[:50]!r} has {len(tokens)} tokens; only single tokens can be "
                        "forbidden",
                        hint="forbid a shorter word, or use a grammar",
                        field="bad_words",
                    )
                yield tokens[0]

    def _check_tokens(self, tokens: Iterable[int], field: str) -> None:
        """Raise UsageError for the first id outside the vocabulary. `field`: field of the request."""
        size = self._model.tokenizer.vocab_size
        bad = next((token for token in tokens if not 0 <= token < size), None)
        if bad is not None:
            raise UsageError(
                f"token id {bad} of {field} is not in the vocabulary of {size} (0 to {size - 1})",
                hint="token ids belong to one model; take them from this model's tokenizer",
                field=field,
            )

    def _prompt(
        self, request: GenerateRequest
    ) -> tuple[Rendered | None, Several[int], tuple[MediaSpan, ...]]:
        """Return the rendered conversation, if there is one, the tokens, and the pictures among them."""
        tokenizer = self._model.tokenizer
        match request.prompt:
            case Messages() as messages:
                check_attachments(messages.messages)
                rendered = self._render(messages)
                self._warn_once(rendered.warnings)
                self._check_length(rendered.text)
                if rendered.attachments and request.prompt_logprobs is not None:
                    raise UsageError(
                        "log probabilities of the prompt cannot be computed with attachments",
                        hint="leave out prompt_logprobs, or the pictures and recordings",
                        field="prompt_logprobs",
                    )
                return rendered, *self._encode_rendered(rendered, request.salt, request.owner)
            case TextPrompt(text, special):
                add_bos = tokenizer.add_bos
                return None, self._encode(text, special=special, add_bos=add_bos), ()
            case TokenIds(tokens, first_bos):
                if first_bos and tokenizer.add_bos and tokenizer.bos >= 0:
                    tokens = (tokenizer.bos, *tokens[1:])
                self._check_tokens(tokens, "prompt")
                return None, tokens, ()
            case Infill() as infill:
                plain = partial(self._encode, special=False, add_bos=False)
                return None, infill_tokens(infill, tokenizer, plain), ()

    def _render(self, messages: Messages) -> Rendered:
        rendered = self.format.render(messages)
        if rendered.opens_reasoning and rendered.think_budget == 0:
            return self._closed(rendered)
        return rendered

    def _encode_rendered(
        self, rendered: Rendered, salt: str = "", owner: str = ""
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Tokenize a rendered conversation. Text of its messages never becomes a control token.

        `salt`, `owner`: see GenerateRequest.
        """
        add_bos = rendered.add_bos and self._model.tokenizer.add_bos
        if not rendered.parts and not rendered.attachments:
            encode = self._model.tokenizer.encode
            return encode(rendered.text, special=rendered.special, add_bos=add_bos), ()
        start = 0
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        for place in rendered.attachments:
            parts = rendered.parts[start : place.part]
            tokens += self._encoder.encode(parts, add_bos=add_bos and not start)
            start = place.part
            for piece in self._media_pieces(place.attachment, salt, owner):
                if isinstance(piece, tuple):
                    tokens += piece
                else:
                    spans.append(MediaSpan(len(tokens), piece))
                    tokens += piece.ids
        tokens += self._encoder.encode(rendered.parts[start:], add_bos=add_bos and not start)
        return tokens, tuple(spans)

    def _media_pieces(self, attachment: Attachment, salt: str, owner: str) -> Several[MediaPiece]:
        """Return the tokens of an attachment. Raises UsageError if this model cannot read it."""
        kinds = self._model.info.media
        if attachment.kind not in kinds:
            raise UsageError(
                cannot_read(attachment.kind, kinds),
                hint=_how_to_read(attachment.kind),
                field="messages",
                media_kind=attachment.kind,
            )
        model = cast(MediaModel, self._model)
        return model.media_pieces(
            attachment.kind,
            attachment.data,
            attachment.name,
            salt=salt,
            layouts=self.layouts.of(owner),
        )

    def _encode(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        self._check_length(text)
        return self._model.tokenizer.encode(text, special=special, add_bos=add_bos)

    def _check_length(self, text: str) -> None:
        """Reject a text before tokenizing it, if its length alone shows that it cannot fit."""
        size_bytes = len(text.encode("utf-8", "replace"))
        minimum = size_bytes // max(1, self._model.tokenizer.longest_piece)
        if minimum >= self._context:
            self._raise_too_long(minimum, at_least=True)

    def _closed(self, rendered: Rendered) -> Rendered:
        """Return a prompt that ends inside reasoning, with the reasoning closed."""
        closing = self.format.reasoning_family.closing(again=True)
        text = rendered.text + closing
        parts = rendered.parts
        if parts:
            parts = (*parts, TextPart(closing, special=True))
        return replace(rendered, text=text, parts=parts, opens_reasoning=False, may_reason=False)

    def _raise_too_long(self, tokens: int, *, at_least: bool = False) -> None:
        about = "at least " if at_least else ""
        raise ContextExceeded(
            f"the prompt has {about}{tokens:,} tokens; the context holds {self._context:,}, of which the "
            "answer needs at least one",
            prompt_tokens=tokens,
            context_tokens=self._context,
            context_train=self._model.info.context_train,
            at_least=at_least,
        )

    def _warn_once(self, sentences: tuple[str, ...]) -> None:
        for sentence in sentences:
            if sentence not in self._warned:
                self._warned.add(sentence)
                self._notify(sentence)

    @property
    def warning(self) -> str:
        """Warning that applies to every answer. Warnings about one request are never shown to others."""
        return self.format.warning

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """Special tokens and chat template of the model."""
        tokenizer = self._model.tokenizer
        texts = _special_texts(tokenizer)
        return TokenizerInfo(
            texts.get("bos_token", ""),
            texts.get("eos_token", ""),
            tokenizer.add_bos,
            protocol.sendable(self._model.info.chat_template or ""),
        )

    def render(self, messages: Messages) -> str:
        return self.format.render(messages).text

    def prompt_tokens(self, messages: Messages) -> tuple[int, ...]:
        """Tokenize a conversation as a request for an answer does. Raises TemplateError."""
        return tuple(self._encode_rendered(self._render(messages))[0])

    def tokenize(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self._model.tokenizer.encode(text, special=special))

    def detokenize(self, tokens: Several[int]) -> str:
        self._check_tokens(tokens, "tokens")
        piece = self._model.tokenizer.piece
        return b"".join(piece(token, special=True) for token in tokens).decode("utf-8", "replace")


def cannot_read(kind: str, kinds: Several[str]) -> str:
    """Return the sentence about a model that cannot read a kind of attachment, but `kinds`."""
    verb = {"image": "see pictures", "audio": "hear recordings"}
    sentence = f"this model cannot {verb.get(kind, f'read attachments of the kind {kind}')}"
    if kinds:
        abilities = " and ".join(verb[other].split()[0] for other in kinds)
        sentence += f"; it can {abilities}"
    return sentence


def _how_to_read(kind: str) -> str:
    """Return advice with models of the catalogue that read a kind of attachment."""
    from localchat.models.catalog import models_that_read  # no other request needs the catalogue

    try:
        names = models_that_read(kind)[:_NAMED_MODELS]
    except LocalchatError:
        names = []
    hint = "name the mmproj file that goes with this model: --mmproj PATH"
    if names:
        hint = f"choose a model such as {', '.join(names)}, or {hint}"
    return hint


def _check_ranges(request: GenerateRequest) -> None:
    """Check numbers against the engine's ranges. Raises UsageError with field, value and range."""
    sampling = msgspec.structs.asdict(request.sampling)
    budget = None
    if isinstance(request.prompt, Messages):
        budget = request.prompt.think_budget
    for name, value, low, high in (
        *((name, sampling[name], *sampler.engine_range) for name, sampler in SAMPLERS.items()),
        ("n", request.n, 1, _MAX_CHOICES),
        ("max_tokens", request.max_tokens, 0, 1 << 31),
        ("min_tokens", request.min_tokens, 0, 1 << 31),
        ("the number of bad_words", len(request.bad_words), 0, _MAX_BAD_WORDS),
        ("the number of stop_token_ids", len(request.stop_tokens), 0, _MAX_STOP_TOKENS),
        ("think_budget", budget, 0, 1 << 31),
        ("logprobs", request.logprobs, 0, _MAX_LOGPROBS),
        ("prompt_logprobs", request.prompt_logprobs, 0, _MAX_LOGPROBS),
        ("prompt_logprobs_from", request.prompt_logprobs_from, 0, 1 << 31),
    ):
        if value is not None and not low <= value <= high:
            raise UsageError(f"{name} is {value}; it must be from {low} to {high}")


def _check(request: GenerateRequest) -> None:
    """Check the values of a request as far as possible without the model. Raises UsageError."""
    _check_ranges(request)
    breakers = request.sampling.dry_sequence_breakers or ()
    if len(breakers) > _MAX_BREAKERS or not all(
        0 < len(text) <= _MAX_BREAKER_CHARACTERS for text in breakers
    ):
        raise UsageError(
            f"dry_sequence_breakers may be {_MAX_BREAKERS} texts of 1 to {_MAX_BREAKER_CHARACTERS} "
            f"characters; there are {len(breakers)} texts of {min(map(len, breakers))} to "
            f"{max(map(len, breakers))}",
            field="dry_sequence_breakers",
        )
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise UsageError(
            f"min_tokens is {request.min_tokens}; it must not be above max_tokens, which is "
            f"{request.max_tokens}",
            field="min_tokens",
        )
    if len(request.stop) > _MAX_STOPS:
        raise UsageError(
            f"a request may have {_MAX_STOPS} stop strings; this one has {len(request.stop)}"
        )
    if (length := sum(map(len, request.stop))) > _MAX_STOP_CHARACTERS:
        raise UsageError(
            f"the stop strings of a request may have {_MAX_STOP_CHARACTERS:,} characters together; these have "
            f"{length:,}",
            field="stop",
        )


def _special_texts(tokenizer: Tokenizer) -> dict[str, str]:
    texts = {}
    for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)):
        if token >= 0:
            texts[name] = tokenizer.piece(token, special=True).decode("utf-8", "replace")
    return texts


def _control_tokens(tokenizer: Tokenizer, markup: Several[str]) -> frozenset[int]:
    """Return the control tokens whose text the answer parser needs."""
    visible: set[int] = set()
    for text in markup:
        tokens = tokenizer.encode(text, special=True)
        visible.update(token for token in tokens if not tokenizer.piece(token))
    return frozenset(visible - tokenizer.eog)
