"""The live requests of an engine: their sequences, their row settings for the device, and their collectors; and those
that are kept once they have ended, so that they can be extended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from xla_engine.engine.adapters import NO_ADAPTER, LoadedAdapter
from xla_engine.engine.protocol import RequestOptions, deadlines
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.pooling import PooledPrompt
from xla_engine.engine.requests.sequence import LiveSequence, SequenceGroup, sequence_ids, sequence_seed
from xla_engine.engine.requests.validation import CheckedRequest
from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.pooling import PoolingForm
from xla_engine.observability.distributions import Histograms
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.in_flight import PooledChunk, PromptScores
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.scheduler import FinishReason, PromptImage, Request, RequestView
from xla_engine.text.token_mask import TokenMask
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.call_thread import Pending

KeptRequest = tuple[LiveSequence, ...]  # the sequences of a request, in order


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request that is queued once its constraint is compiled; until then snapshots show it as `view`.

    sequences: how many sequences it will have.
    mask: the call that compiles the constraint.
    open: enters the request into the table, with its mask.
    on_refused: called with the error if the constraint is invalid.
    adapter: as in `RowSettings`.
    expires: (time, reason) of its deadlines, earliest first.
    """

    view: RequestView
    sequences: int
    mask: Pending[TokenMask | None]
    open: Callable[..., list[Request]]
    on_refused: Callable[[Exception], object]
    adapter: int
    expires: list[tuple[float, FinishReason]]

    def expired(self, now: float) -> FinishReason | None:
        """The reason of a deadline that has passed; None if there is none."""
        return self.expires[0][1] if self.expires and self.expires[0][0] <= now else None


class KeptRequests:
    """The latest `most` finished requests that can be extended, by id; the oldest is evicted first. 0: none is kept.

    Memory: at most `max_model_len` tokens for each sequence, with log-probabilities if they were requested.

    saved: saved requests, by name; also at most `most`.
    """

    def __init__(self, most: int = 0, forget: Callable[[str], object] = lambda name: None) -> None:
        """forget: called with the id of each sequence that is no longer kept."""
        self.most = most
        self.saved: dict[str, KeptRequest] = {}
        self._forget = forget
        self._requests: dict[str, KeptRequest] = {}  # oldest first

    def put(self, request_id: str, request: KeptRequest) -> None:
        """Keep a request that has ended if it can be extended, and evict the oldest beyond `most`."""
        own = {part.request_id for part in request}
        gone = {part.request_id for part in self._requests.pop(request_id, ())} - own
        if any(part.can_go_on for part in request):
            self._requests[request_id] = request
        else:
            gone |= own
        while len(self._requests) > self.most:
            gone.update(part.request_id for part in self._requests.pop(next(iter(self._requests))))
        for name in gone:
            self._forget(name)

    def get(self, request_id: str) -> KeptRequest | None:
        """The kept request of this id; None if there is none."""
        return self._requests.get(request_id)

    def take(self, request_id: str) -> None:
        """Remove a request that is being extended."""
        del self._requests[request_id]

    def clear(self) -> None:
        """Forget all kept and all saved requests."""
        for part in chain.from_iterable(self._requests.values()):
            self._forget(part.request_id)
        self._requests.clear()
        self.saved.clear()

    def sequences(self) -> Iterator[LiveSequence]:
        """Those of all kept and saved requests."""
        return chain.from_iterable((*self._requests.values(), *self.saved.values()))


class RequestTable:
    """Live sequences by id; if n is 1, the id is the request's. Each is opened once and ended once.

    live: the live sequences by id. settings: their row settings, for the runner.
    histograms: the times of all requests.
    kept: finished requests that can be extended, and saved ones.
    submitted: requests since start-up. finished: sequences since start-up, by reason.
    pending: requests that wait for their constraint, by id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        kept: KeptRequests | None = None,
        pooler: PoolingForm | None = None,
    ) -> None:
        """kept: None keeps none. pooler: how requests pool; None if they generate."""
        self._pooler = pooler
        self.kept = KeptRequests() if kept is None else kept
        self.settings: dict[str, RowSettings] = {}
        self.histograms = Histograms()
        self.submitted = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.pending: dict[str, PendingRequest] = {}
        self._tokenizer = tokenizer
        self.live: dict[str, LiveSequence] = {}
        self._groups: dict[str, SequenceGroup] = {}  # requests with n above 1
        self._ended_tokens = 0  # of the sequences that have ended

    @property
    def pools(self) -> bool:
        """Whether requests pool and do not generate."""
        return self._pooler is not None

    @property
    def generated(self) -> int:
        """Tokens of all sequences since start-up."""
        return self._ended_tokens + sum(sequence.num_new_tokens for sequence in self.live.values())

    def __len__(self) -> int:
        return len(self.live)

    def __iter__(self) -> Iterator[str]:
        """The ids of the live sequences, oldest first; the table may change during the iteration."""
        return iter(list(self.live))

    def __getitem__(self, name: str) -> LiveSequence:
        return self.live[name]

    def get(self, name: str) -> LiveSequence | None:
        return self.live.get(name)

    def sequences(self, request_id: str) -> list[str]:
        """The ids of a request's sequences, some of which may have ended."""
        group = self._groups.get(request_id)
        return [request_id] if group is None else [part.request_id for part in group.parts]

    def parts(self, request_id: str) -> KeptRequest:
        """The sequences of a live request, in order.

        Raises InvalidRequestError if one has ended and is not kept.
        """
        group = self._groups.get(request_id)
        parts = (self.live[request_id],) if group is None else group.parts
        if not self.kept.most and any(part.finished for part in parts):
            raise InvalidRequestError(
                f"sequences of request {request_id!r} have ended and are not kept: set keep_finished"
            )
        return parts

    def free_id(self, n: int) -> str:
        """A free id for a request of n sequences: its number, with a suffix if a caller uses that already."""
        name, count = str(self.submitted), 0
        while self._taken(name, n):
            count += 1
            name = f"{self.submitted}.{count}"
        return name

    def _taken(self, request_id: str, n: int) -> list[str]:
        """Those ids of a request and its sequences that are in use."""
        names = (request_id, *sequence_ids(request_id, n))
        taken = [name for name in names if name in self.live or name in self._groups]
        for own, one in self.pending.items():
            held = (own, *sequence_ids(own, one.sequences))
            taken += [name for name in names if name in held]
        return taken

    def taken(self, request_id: str) -> bool:
        return bool(self._taken(request_id, 1))

    def check_free(self, request_id: str, n: int) -> None:
        """Raise InvalidRequestError unless a request of n sequences can have this id."""
        if taken := self._taken(request_id, n):
            raise InvalidRequestError(
                f"request id {min(taken)!r} is in use by a live request; choose another"
            )

    def open(
        self,
        request_id: str,
        checked: CheckedRequest,
        *,
        mask: TokenMask | None,
        adapter: LoadedAdapter = NO_ADAPTER,
        seed: int,
        collector: OutputCollector,
        now: float,
        options: RequestOptions,
    ) -> list[Request]:
        """Enter a request of `n` sequences, each with its own copy of the mask. The id must be free.

        Returns the sequences as requests for the scheduler.
        """
        params, hashes = checked.params, _hashes(checked.images)
        names = sequence_ids(request_id, params.n)
        parts, pooler = [], self._pooler
        masks = [mask, *(None if mask is None else mask.copy() for _ in names[1:])]
        first = params if params.n == 1 else replace(params, n=1)  # a copy would be checked again
        others = first if params.n == 1 else replace(first, prompt_logprobs=None, logprobs_start=0)
        deadline, queue_deadline = deadlines(options, now)
        for index, (name, own) in enumerate(zip(names, masks, strict=True)):
            part = others if index else first
            settings = RowSettings(
                max_tokens=params.token_limit,
                stop_token_ids=checked.stop_ids[:MAX_STOP_TOKEN_IDS],
                params=part,
                seed=sequence_seed(seed, index),
                mask=own,
                prompt_token_ids=checked.token_ids,
                dry_breakers=checked.dry_breakers,
                adapter=adapter.slot,
                positions=checked.positions,
                second_text=checked.second_text,
            )
            request = Request(
                request_id=name,
                prompt_token_ids=checked.token_ids,
                max_tokens=params.token_limit,
                stop_token_ids=frozenset(settings.stop_token_ids),
                constrained=own is not None and own.constrained,
                cache_salt=options.get("cache_salt", ""),
                max_cached_tokens=part.max_cached_tokens,
                priority=options.get("priority", 0),
                deadline=deadline,
                queue_deadline=queue_deadline,
                quantum=options.get("quantum"),
                adapter=adapter.key,
                images=checked.images,
            )
            parts.append(
                LiveSequence(
                    request,
                    settings,
                    checked,
                    self._tokenizer,
                    histograms=self.histograms,
                    collector=collector,
                    now=now,
                    pooling=PooledPrompt(pooler, part)
                    if pooler and isinstance(part, PoolingParams)
                    else None,
                    images_sha256=hashes,
                )
            )
        return self.enter(request_id, tuple(parts))

    def enter(self, request_id: str, parts: KeptRequest) -> list[Request]:
        """Enter all sequences of a request, in order; if it is extended, some may be finished. The id must be free.

        Returns those that are not finished as requests for the scheduler.
        """
        going_on = [part for part in parts if not part.finished]
        for part in going_on:
            self.live[part.request_id], self.settings[part.request_id] = part, part.settings
        if len(parts) > 1:
            self._groups[request_id] = SequenceGroup(request_id, parts)
        self.submitted += 1
        return [part.request for part in going_on]

    def add_of_prompt(self, part: PromptScores | PooledChunk) -> None:
        """Give a sequence its prompt log-probabilities or pooled chunk, unless its id was reused since the step."""
        if self.settings.get(part.request_id) is not part.settings:
            return
        request = self.live[part.request_id]
        if isinstance(part, PromptScores):
            request.add_prompt_logprobs(part.start, part.scores)
        elif request.pooling is not None:
            request.pooling.add(part.start, part.vectors)

    def take_back(self, request_id: str) -> None:
        """Undo `open`, without telling the collector."""
        for name in self.sequences(request_id):
            self.live.pop(name, None)
            self.settings.pop(name, None)
        self._groups.pop(request_id, None)
        self.submitted -= 1

    def end(self, name: str, reason: FinishReason, now: float, error: str | None = None) -> FinishReason:
        """End a sequence and put it into its collector; its id becomes free.

        Returns the final reason: "error" if its text cannot be decoded.
        """
        request = self.live.pop(name)
        del self.settings[name]
        reason = request.finish(reason, now, error)
        request.collector.put(reader := request.reader)
        self.finished[reason] += 1
        self._ended_tokens += request.num_new_tokens
        if reader.finished:
            group = self._groups.pop(reader.request_id, None)
            if self.kept.most:
                self.kept.put(reader.request_id, (request,) if group is None else group.parts)
        return reason


def _hashes(images: Sequence[PromptImage]) -> tuple[str, ...]:
    if not images:
        return ()
    from xla_engine.images.pictures import tiles_sha256  # late: text needs nothing of it

    return tuple(tiles_sha256(image.tiles) for image in images)
