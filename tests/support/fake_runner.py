"""A stand-in for the device that samples by a pure function and refuses to run a wrong plan.

It keeps per-row state as the device does: the KV a row holds (here the tokens themselves, by position, and written
otherwise by decode where prefill does not give its bits), how many tokens the row may still sample, and its stop ids.
A free row keeps its KV, and a request may begin with what is in its row or in another. Where rows have blocks, the
tokens lie in these too, and after every step each row must find there what is its own. It learns nothing from the
scheduler but plans. `fake_loop` has the engine around it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from xla_engine.scheduler import (
    NO_CHOICE,
    NO_TOKEN,
    BlockTable,
    Chunk,
    Continuation,
    Decoded,
    FinishReason,
    Plan,
    Request,
    Reuse,
    Row,
    Sample,
    SavedState,
    SchedulerConfig,
    Slot,
    StepResult,
    StoredBlock,
    Swap,
    VerifyRow,
)

VOCABULARY = 13
GARBAGE = -777  # a rejected draft's key


def sample(context: Sequence[int]) -> Sample:
    """The token after `context`, a pure function of it and so of (prompt, position); one in 61 times none."""
    word = zlib.crc32(repr(tuple(context)).encode())
    if word % 61 == 0:
        return Sample(NO_CHOICE)
    return Sample(word % VOCABULARY, -(word % 997) / 997)


def expected(request: Request) -> tuple[list[Sample], FinishReason]:
    """What a request returns when it runs alone to its end."""
    context, samples = list(request.prompt_token_ids), []
    while len(samples) < request.max_tokens:
        found = sample(context)
        if found.token_id == NO_CHOICE:
            return samples, FinishReason.ERROR
        samples.append(found)
        context.append(found.token_id)
        if samples[-1].token_id in request.stop_token_ids:
            return samples, FinishReason.STOP
    return samples, FinishReason.LENGTH


def decoded_of(rows: Iterable[Row], samples: Iterable[Sample | None]) -> Decoded:
    """The columns of a step in which each of `rows` sampled so, None where the device had stopped it."""
    found = {row.slot.index: sample for row, sample in zip(rows, samples, strict=True)}
    column = [found.get(slot) or Sample(NO_TOKEN) for slot in range(max(found, default=-1) + 1)]
    return Decoded(
        tokens=[sample.token_id for sample in column],
        logprobs=[sample.logprob for sample in column],
        extra={slot: sample.extra for slot, sample in enumerate(column) if sample.extra is not None},
    )


@dataclass
class DeviceRow:
    """What the device knows of one row. `kv[p]` is the token written at position p."""

    slot: Slot | None = None
    request_id: str | None = None
    kv: list[int] = field(default_factory=list)
    prompt: tuple[int, ...] = ()
    token: int | None = None  # sampled, not written yet
    remaining: int = 0  # tokens it may still sample; 0 is inactive
    stop_ids: frozenset[int] = frozenset()
    over: bool = True  # nothing more will be asked of this occupancy
    guessed: bool = False  # it may have got further than the scheduler knows

    def take(self, sampled: Sample) -> Sample:
        self.token = sampled.token_id
        ends = sampled.token_id in self.stop_ids or sampled.token_id == NO_CHOICE
        self.remaining = 0 if ends else self.remaining - 1
        self.over = self.over or self.remaining == 0
        return sampled


class FakeRunner:
    """Runs plans at `start`, in order.

    Raises AssertionError for a plan that would corrupt a real device or breaks a promise of the scheduler.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.rows = [DeviceRow() for _ in range(config.max_num_seqs)]
        self.requests: dict[str, Request] = {}
        self.host: dict[str, DeviceRow] = {}  # state of parked requests
        self.blocks = [[-1] * config.block_size for _ in range(config.num_blocks or 0)]  # tokens, as in `kv`
        self.outside: dict[bytes, list[int]] = {}  # blocks and states that were stored, by key
        self.states_outside: dict[
            bytes, tuple[list[int], str]
        ] = {}  # those of them that are states, as in `states`
        self.states: dict[int, tuple[list[int], str]] = {}  # saved ones by place: their tokens and cache salt
        self.tables: list[list[int]] = [[] for _ in self.rows]
        self.steps = 0
        self.prefilled = 0  # tokens

    def lose_everything(self) -> None:
        """The contents of the rows are lost."""
        self.rows = [DeviceRow() for _ in self.rows]
        self.host.clear()
        self.states.clear()

    def release(self, request_id: str) -> None:
        """The engine is done with this request; its state may be overwritten."""
        self.vacate(request_id)
        self.host.pop(request_id, None)

    def vacate(self, request_id: str) -> None:
        """The request has no row any more."""
        for row in self.rows:
            if row.request_id == request_id:
                row.over = True

    def start(self, plan: Plan) -> StepResult:
        """Run a step; the result may be read any number of steps later."""
        assert not plan.is_empty, "an empty plan was started"
        assert plan.step == self.steps, f"step {plan.step} was started as number {self.steps}"
        self.steps += 1
        self._check_budget(plan)
        for swap in plan.moves.parks:
            self._park(swap)
        for each in plan.moves.stores:
            self._store(each)
        for each in plan.moves.loads:
            if each.is_state:
                self.states[each.block] = self.states_outside[each.key]
            else:
                self.blocks[each.block] = list(self.outside[each.key])
        for copy in plan.moves.copies:
            self.blocks[copy.target] = list(self.blocks[copy.source])
        for table in plan.moves.tables:
            self._set_table(table)
        for swap in plan.moves.resumes:
            self._resume(swap)
        for continuation in plan.moves.continues:
            self._go_on(continuation)
        for reuse in plan.moves.reuses:
            self._reuse(reuse)
        due = {(each.slot.index, each.length): each for each in plan.moves.saves}
        first = []
        for chunk in plan.chunks:
            first.append(self._prefill(chunk))
            if (save := due.pop((chunk.slot.index, chunk.start + len(chunk.tokens)), None)) is not None:
                self._save(save)
        assert not due, f"no chunk ends where a state is to be saved: {due}"
        decode = decoded_of(plan.decode, [self._decode(row) for row in plan.decode])
        assert not (plan.decode and plan.width > 1), f"decodes and verifies in one step: {plan}"
        assert all(row.width <= max(plan.width, 1) for row in plan.verify), f"a row is wider than {plan}"
        verify = [self._verify(row) for row in plan.verify]
        self._check_all_decode(plan)
        for row in self.rows if self.config.num_blocks is not None else ():
            if not row.over and self._in_blocks(row.slot, len(row.kv)) != row.kv:
                raise AssertionError(f"the blocks of {row} were overwritten")
        return StepResult(first=[token for token in first if token is not None], decode=decode, verify=verify)

    def _store(self, each: StoredBlock) -> None:
        if each.is_state:
            self.states_outside[each.key] = self.states[each.block]
            self.outside[each.key] = []
            return
        assert tuple(self.blocks[each.block]) == each.tokens, f"{each} finds {self.blocks[each.block]}"
        self.outside[each.key] = list(self.blocks[each.block])

    def _check_budget(self, plan: Plan) -> None:
        tokens = len(plan.decode) + len(plan.verify) + len(plan.chunks) * self.config.chunk_size
        within = tokens <= self.config.max_num_batched_tokens
        assert within or len(plan.chunks) <= 1, f"{tokens} tokens, beyond budget and floor: {plan}"

    def _set_table(self, table: BlockTable) -> None:
        own = self.tables[table.slot.index]
        assert table.start <= len(own), f"{table} leaves a gap behind {own}"
        own[table.start :] = table.blocks
        assert len(set(own)) == len(own), f"a block twice in {own}"

    def _in_blocks(self, slot: Slot | None, length: int) -> list[int]:
        assert slot is not None
        return [token for block in self.tables[slot.index] for token in self.blocks[block]][:length]

    def _write(self, row: DeviceRow, tokens: Sequence[int], start: int = 0) -> None:
        """Append to a row's tokens, and to its blocks from position `start` on."""
        row.kv.extend(tokens)
        if self.config.num_blocks is not None:
            assert row.slot is not None
            size, table = self.config.block_size, self.tables[row.slot.index]
            if len(row.kv) > len(table) * size:
                raise AssertionError(f"{row} has written behind its blocks {table}")
            for position in range(max(start, len(row.kv) - len(tokens)), len(row.kv)):
                self.blocks[table[position // size]][position % size] = row.kv[position]

    def _take_over(self, slot: Slot, request_id: str) -> DeviceRow:
        """A blank row for a new occupancy."""
        row = self.rows[slot.index]
        assert row.over, f"{slot} of {request_id} would overwrite {row}"
        newer = row.slot is None or slot.epoch > row.slot.epoch
        assert newer, f"{slot} has the epoch of an earlier occupancy {row.slot}"
        self.rows[slot.index] = DeviceRow(slot=slot, request_id=request_id, over=False)
        return self.rows[slot.index]

    def _park(self, swap: Swap) -> None:
        row = self.rows[swap.slot.index]
        assert (row.slot, row.request_id) == (swap.slot, swap.request_id), f"{swap} is not for {row}"
        assert row.token is not None, f"{swap} of a prompt that is not whole"
        assert len(row.kv) <= swap.length, f"{swap} leaves part of {row}"
        if self.config.num_blocks is not None:
            size = self.config.block_size
            assert len(swap.blocks) == -(-swap.length // size), f"{swap} has not the blocks of its length"
            found = [token for block in swap.blocks for token in self.blocks[block]][: len(row.kv)]
            assert found == row.kv, f"{swap} reads {found}, not {row}"
        self.host[swap.request_id] = replace(row, kv=list(row.kv))
        row.over = True

    def _resume(self, swap: Swap) -> None:
        self._take_over(swap.slot, swap.request_id)
        assert swap.request_id in self.host, f"{swap}: nothing of it is on the host"
        parked = self.host.pop(swap.request_id)
        assert parked.remaining > 0, f"{swap} of a row that is done: {parked}"
        assert len(parked.kv) == swap.length, f"{swap} is not {parked}"
        self.rows[swap.slot.index] = row = replace(parked, slot=swap.slot, over=False, kv=[])
        shared = swap.blocks.count(-1)
        assert set(swap.blocks[:shared]) <= {-1}, f"{swap} leaves blocks behind those it writes"
        self._write(row, parked.kv, start=shared * self.config.block_size)
        own = self.tables[swap.slot.index][shared : len(swap.blocks)]
        assert self.config.num_blocks is None or list(swap.blocks[shared:]) == own, f"{swap} is not for {own}"

    def _go_on(self, part: Continuation) -> None:
        """The row still holds the request's state, although others used it since."""
        row = self.rows[part.slot.index]
        assert row.over and row.request_id == part.request_id, f"{part} finds {row}"
        assert row.slot is not None and row.slot.epoch + 1 == part.slot.epoch, f"{part} finds {row}"
        assert row.token is not None and row.token not in row.stop_ids, (
            f"{part} goes on after the end of {row}"
        )
        assert len(row.kv) == part.length and part.remaining > 0, f"{part} is not {row}"
        row.slot, row.remaining, row.over, row.guessed = part.slot, part.remaining, False, False

    def _reuse(self, reuse: Reuse) -> None:
        """What the source holds is the very context of the request, as prefill writes it."""
        if self.config.num_blocks is None:
            found = self.rows[reuse.source].kv[: reuse.length]
        else:
            assert reuse.source == -1, f"{reuse} names a slot where there are blocks"
            found = self._in_blocks(reuse.slot, reuse.length)
        context = self._context(reuse.request_id)[: reuse.length]
        assert found == context, f"stale: {reuse} finds {found}, not {context}"
        if self.config.mamba_block_size is not None:
            salt = self.requests[reuse.request_id].cache_salt
            assert self.states.get(reuse.place) == (context, salt), f"{reuse} restores another state"
        row = self._take_over(reuse.slot, reuse.request_id)
        row.kv = found

    def _save(self, save: SavedState) -> None:
        row = self.rows[save.slot.index]
        assert row.slot == save.slot and row.request_id is not None, f"{save} is not for {row}"
        assert 0 <= save.place < self.config.mamba_cache_states, f"there is no place for {save}"
        self.states[save.place] = list(row.kv), self.requests[row.request_id].cache_salt

    def _context(self, request_id: str) -> list[int]:
        """A request's prompt and all it will ever sample."""
        request = self.requests[request_id]
        return [*request.prompt_token_ids, *(found.token_id for found in expected(request)[0])]

    def _prefill(self, chunk: Chunk) -> Sample | None:
        if chunk.start == 0:
            self._take_over(chunk.slot, chunk.request_id)
        row = self.rows[chunk.slot.index]
        is_first = not row.prompt
        if is_first:
            request = self.requests[chunk.request_id]
            size = len(request.prompt_token_ids) + chunk.generated
            row.prompt = tuple(self._context(chunk.request_id)[:size])
        assert (row.slot, row.request_id) == (chunk.slot, chunk.request_id), f"{chunk} is not for {row}"
        end = chunk.start + len(chunk.tokens)
        assert chunk.start == len(row.kv), f"{chunk} leaves a gap or goes back in {row}"
        alone = self.config.cut_invariant and is_first and end == len(row.prompt) == chunk.start + 1
        most = self.requests[chunk.request_id].max_cached_tokens if self.config.cut_invariant else None
        # behind what may be cached at most
        grids = {start % self.config.chunk_size for start in (0, most or 0)}
        assert chunk.start % self.config.chunk_size in grids or alone, f"{chunk} is off the chunk grid"
        assert chunk.tokens == row.prompt[chunk.start : end], f"{chunk} is not the prompt of {row}"
        assert chunk.is_last == (end == len(row.prompt)), f"{chunk} has the wrong is_last"
        assert chunk.is_last or len(chunk.tokens) == self.config.chunk_size, f"{chunk} is short"
        self._write(row, chunk.tokens)
        self.prefilled += len(chunk.tokens)
        if not chunk.is_last:
            return None
        request = self.requests[chunk.request_id]
        row.remaining, row.stop_ids = request.max_tokens - chunk.generated, request.stop_token_ids
        return row.take(self._sample(row))

    def _sample(self, row: DeviceRow) -> Sample:
        return sample([token if token >= 0 else ~token for token in row.kv])

    def _decode(self, asked: Row) -> Sample | None:
        row = self.rows[asked.slot.index]
        assert (row.slot, row.request_id) == (asked.slot, asked.request_id), f"{asked} is not for {row}"
        assert row.token is not None, f"{asked} decodes before its prompt ended: {row}"
        if row.remaining == 0:
            ended = row.token in row.stop_ids or row.token == NO_CHOICE or row.guessed
            assert ended, f"{asked} decodes beyond max_tokens: {row}"
            return None
        assert row.token is not None
        self._write(row, [row.token if self.config.prefill_equals_decode else ~row.token])
        return row.take(self._sample(row))

    def _verify(self, asked: VerifyRow) -> list[Sample]:
        """As many tokens as drafts are right, and garbage in place of the others."""
        row = self.rows[asked.slot.index]
        assert (row.slot, row.request_id) == (asked.slot, asked.request_id), f"{asked} is not for {row}"
        assert row.token is not None, f"{asked} decodes before its prompt ended: {row}"
        row.guessed = True
        begin, written = len(row.kv), min(asked.width, row.remaining)
        right = 1 + zlib.crc32(f"{asked.request_id} {self.steps}".encode()) % max(written, 1)
        found = []
        while len(found) < right and row.remaining:
            assert row.token is not None
            self._write(row, [row.token if self.config.prefill_equals_decode else ~row.token])
            found.append(row.take(self._sample(row)))
        if self.config.num_blocks is not None and found:
            size, table = self.config.block_size, self.tables[asked.slot.index]
            assert begin + written <= len(table) * size, f"{asked} would write behind the pages of {row}"
            for position in range(len(row.kv), begin + written):
                self.blocks[table[position // size]][position % size] = GARBAGE
        return found

    def _check_all_decode(self, plan: Plan) -> None:
        asked = [row.slot for row in (*plan.decode, *plan.verify)]
        assert len(set(asked)) == len(asked), f"a row decodes twice in {plan.decode}"
        if plan.joins > plan.step:  # rows that have just got their first token begin in the next step
            asked += [chunk.slot for chunk in plan.first_rows]
        for row in self.rows:
            free = row.request_id is not None and not self.requests[row.request_id].constrained
            stalls = free and row.token is not None and not row.over and row.slot not in asked
            assert not stalls, f"a live row was left out of step {plan.step}: {row}"
