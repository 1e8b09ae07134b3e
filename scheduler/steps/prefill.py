"""Plans the chunks of prompts that have a slot."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.features import Features
from xla_engine.scheduler.kv.prefix_cache import SlotPrefixCache
from xla_engine.scheduler.kv.prefix_states import PrefixStates
from xla_engine.scheduler.moves import Reuse, SavedState
from xla_engine.scheduler.plan import Chunk, Decision
from xla_engine.scheduler.request_state import RequestState


class _Start(NamedTuple):
    """Where a prompt starts: slot `source` holds its first `length` tokens.

    wait: an older prompt in this step writes more of its prefix, so it should wait.
    """

    source: int
    length: int
    wait: bool


class PrefillPlan(NamedTuple):
    """This step's chunks in lane order, the prefixes they reuse, the states to save, and the requests that are now
    wholly planned."""

    chunks: tuple[Chunk, ...]
    reuses: tuple[Reuse, ...]
    saves: tuple[SavedState, ...]
    complete: tuple[RequestState, ...]


class Prefilling:
    """Prompts in order of admission: each gets chunks only if every older one has all it needs.

    Exception: a prompt that shares a prefix with an older one in this step waits for it instead of computing the
    prefix again; others may pass it meanwhile. Each older prompt can delay it only once.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: SlotPrefixCache | BlockManager | None,
        saved: PrefixStates | None = None,
        features: Features | None = None,
    ) -> None:
        """saved: the saved states of recurrent layers; None if the model has none. features: None without a tower."""
        self._features = features
        self._config = config
        self._chunk_size = config.chunk_size
        self._limit = config.max_num_batched_tokens
        self._cache = cache
        self._saved = saved
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def join(self, state: RequestState) -> None:
        """Add a request that was just admitted."""
        self._states[state.request_id] = state

    def leave(self, state: RequestState) -> None:
        """Remove a request. Raises KeyError if it is not here."""
        del self._states[state.request_id]

    def plan(self, decode_rows: int, decisions: list[Decision]) -> PrefillPlan:
        """Choose this step's chunks. decode_rows: the number of rows that decode in it.

        Removes requests that are now wholly planned. Appends to `decisions`, up to the first prompt that did not get
        all it needs.
        """
        chunks: list[Chunk] = []
        reuses: list[Reuse] = []
        served: list[tuple[RequestState, int]] = []  # with the tokens prefilled before
        complete: list[RequestState] = []
        coming: set[bytes] = set()  # blocks that older prompts write in this step
        saving: set[bytes] = set()  # states that they pass
        budget = self._limit - decode_rows  # decode rows take one token each and always run; may be negative
        for state in self:
            start = self._start(state, coming, saving)
            if start.wait:
                decisions.append(
                    state.decide("hold", "an older prompt with the same beginning is in this step")
                )
                continue
            left = self._chunks(state, start.length)
            joins = state.request.max_tokens - state.base > 1
            granted = policy.grant(left, budget, self._chunk_size, joins_decode=joins, first=not chunks)
            if self._config.max_chunks is not None:
                granted = min(granted, self._config.max_chunks - len(chunks))
            if groups := self._config.groups(state.request):
                stops = [stop for _, stop in self._cuts(state, start.length, left)]
                granted = policy.unsplit(granted, stops, groups, first=not chunks)
            if granted:
                served.append((state, start.length))
                if not state.prefilled:
                    reuses.extend(self._begin(state, start))
                chunks.extend(self._cut(state, granted))
                if self._cache is not None:
                    coming.update(self._cache.written(state))
                if self._saved is not None:
                    saving.update(self._saved.keys(state, start.length))
            budget -= policy.chunk_cost(granted, self._chunk_size, joins_decode=joins and granted == left)
            decisions.append(self._explain(state, granted, left, budget, decode_rows, len(chunks)))
            if granted < left:
                break
            complete.append(state)
        for state in complete:
            self.leave(state)
        if self._cache is not None:
            for state, _ in served:
                self._cache.extend(state, state.prefilled)
        saves: list[SavedState] = []
        if self._saved is not None:
            for state, begun in served:
                saves.extend(self._saved.save(state, begun))
        return PrefillPlan(tuple(chunks), tuple(reuses), tuple(saves), tuple(complete))

    def _start(self, state: RequestState, coming: set[bytes], saving: set[bytes]) -> _Start:
        """Where a prompt continues, or where it would start."""
        if state.prefilled or self._cache is None or state.request.max_cached_tokens == 0:
            return _Start(-1, state.prefilled, wait=False)
        source, cached = self._cache.match(state, own=state.slot.index)
        length = max(self._usable(state, cached), state.ready)
        if not coming:
            return _Start(source, length, wait=False)
        soon = self._usable(state, self._cache.known(state, coming), saving)
        return _Start(source, length, wait=self._chunks(state, soon) < self._chunks(state, length))

    def _chunks(self, state: RequestState, start: int) -> int:
        groups = self._config.groups(state.request)
        return policy.num_chunks(state.context_tokens, self._chunk_size, start, groups)

    def _cuts(self, state: RequestState, start: int, count: int) -> list[tuple[int, int]]:
        groups = self._config.groups(state.request)
        return policy.next_cuts(start, state.context_tokens, self._chunk_size, count, groups)

    def _usable(self, state: RequestState, cached: int, saving: Collection[bytes] = ()) -> int:
        if self._saved is not None:
            return self._saved.usable(state, cached, saving)
        return policy.usable_prefix(
            cached,
            state.context_tokens,
            self._chunk_size,
            cut_invariant=self._config.cut_invariant,
            most=state.request.max_cached_tokens,
            groups=self._config.groups(state.request),
        )

    def _begin(self, state: RequestState, start: _Start) -> Iterator[Reuse]:
        """Begin in the slot, after the cached prefix that is there or in another slot."""
        state.prefilled = start.length
        if self._cache is not None:
            self._cache.begin(state, start.length)
        if start.length:
            yield Reuse(
                slot=state.slot,
                request_id=state.request_id,
                source=start.source,
                length=start.length,
                place=-1 if self._saved is None else self._saved.restore(state, start.length),
            )

    def _explain(
        self, state: RequestState, granted: int, left: int, budget: int, decode_rows: int, chunks: int
    ) -> Decision:
        reason = f"{granted} of the {left} chunks left; "
        if granted and budget < 0:
            reason += f"one runs in every step, here beyond the token budget {self._limit}"
        elif granted == left:
            reason += f"within the token budget {self._limit}"
        elif chunks == self._config.max_chunks:
            reason += f"{chunks} chunks are as many as a prefill call has lanes"
        else:
            reason += (
                f"token budget {self._limit} used up by {decode_rows} decode rows and {chunks} chunks of "
                f"{self._chunk_size}"
            )
        return state.decide("prefill" if granted else "hold", reason)

    def _cut(self, state: RequestState, count: int) -> list[Chunk]:
        """The next `count` chunks of a context; counts them as planned."""
        context = state.context
        slot, name, end, generated = state.slot, state.request_id, len(context), state.base
        cuts = self._cuts(state, state.prefilled, count)
        state.prefilled = cuts[-1][1]
        chunks = [
            Chunk(slot, name, start, context[start:stop], stop == end, generated) for start, stop in cuts
        ]
        if self._features is None or not state.request.images:
            return chunks
        request, features = state.request, self._features
        return [
            chunk._replace(features=features.spans(request, start, stop))
            for chunk, (start, stop) in zip(chunks, cuts, strict=True)
        ]
