"""Plans as the first of several hosts sends them to the others: JSON objects with all that `Runner.start` reads."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.row_settings import RowSettings
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import (
    BlockCopy,
    BlockTable,
    Chunk,
    Continuation,
    Moves,
    Plan,
    Reuse,
    Row,
    SavedState,
    Slot,
    Swap,
)
from xla_engine.text.token_mask import TokenMask

Message = dict[str, Any]
# Sampling parameters that only the engine reads; what they do to the device is in the mask and in `RowSettings`.
_OF_ENGINE = {
    "n", "structured_outputs", "stop", "include_stop_str_in_output", "bad_words", "allowed_token_ids",
    "dry_sequence_breakers", "detokenize", "skip_special_tokens", "truncate_prompt_tokens",
}  # fmt: skip


class StepSender:
    """Turns plans into messages.

    Settings are sent once, and the rows that decode only if they are not those of the step before.
    """

    def __init__(self) -> None:
        self._settings: dict[str, RowSettings] = {}
        self._decode: tuple[Row, ...] = ()

    def message(self, plan: Plan, settings: Mapping[str, RowSettings]) -> Message:
        """The message for a plan. settings: as in `Runner.start`, of the live requests."""
        gone = [name for name in self._settings if name not in settings]
        for name in gone:
            del self._settings[name]
        moves = plan.moves
        parts: tuple[Chunk | Row | Swap | Continuation, ...]
        parts = (*plan.chunks, *plan.decode, *moves.resumes, *moves.continues)
        rows = {part.request_id: settings[part.request_id] for part in parts}
        new = {name: row for name, row in rows.items() if self._settings.get(name) is not row}
        self._settings |= new
        same, self._decode = plan.decode is self._decode, plan.decode
        return {
            "step": plan.step,
            "gone": gone,
            "settings": {name: _settings(row) for name, row in new.items()},
            "masks": {
                name: _text(row.mask.words)
                for name, row in rows.items()
                if row.mask is not None and (name in new or row.mask.constrained)
            },
            "decode": None if same else [[*_slot(row.slot), row.request_id] for row in plan.decode],
            "chunks": [
                [
                    *_slot(each.slot),
                    each.request_id,
                    each.start,
                    list(each.tokens),
                    each.is_last,
                    each.generated,
                ]
                for each in plan.chunks
            ],
            "moves": _moves(moves),
        }


class StepReader:
    """Turns messages into plans.

    settings: of the live requests, for `Runner.start`.
    """

    def __init__(self, vocab_size: int) -> None:
        self.settings: dict[str, RowSettings] = {}
        self._vocab_size = vocab_size
        self._decode: tuple[Row, ...] = ()

    def plan(self, message: Message) -> Plan:
        """The plan of a message, all but what only the engine reads. Updates `settings`."""
        for name in message["gone"]:
            del self.settings[name]
        for name, sent in message["settings"].items():
            self.settings[name] = _settings_of(sent, self._vocab_size)
        for name, words in message["masks"].items():
            mask = self.settings[name].mask
            assert mask is not None
            mask.set_words(np.frombuffer(base64.b64decode(words), np.uint32))
        if message["decode"] is not None:
            self._decode = tuple(
                Row(slot=Slot(index=index, epoch=epoch), request_id=name)
                for index, epoch, name in message["decode"]
            )
        return Plan(
            step=message["step"],
            decode=self._decode,
            chunks=tuple(
                Chunk(Slot(index=index, epoch=epoch), name, start, tuple(tokens), is_last, generated)
                for index, epoch, name, start, tokens, is_last, generated in message["chunks"]
            ),
            moves=_moves_of(message["moves"]),
        )


def _slot(slot: Slot) -> tuple[int, int]:
    return slot.index, slot.epoch


def _text(words: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(words, np.uint32)).decode("ascii")


def _settings(row: RowSettings) -> Message:
    """Settings without the words of the mask."""
    assert not isinstance(row.params, PoolingParams)
    params = {name: value for name, value in row.params.to_mapping().items() if name not in _OF_ENGINE}
    return {
        "params": params,
        "max_tokens": row.max_tokens,
        "stop_token_ids": row.stop_token_ids,
        "seed": row.seed,
        "prompt": row.prompt_token_ids if row.params.prompt_logprobs is not None else (),
        "dry_breakers": row.dry_breakers,
        "constrained": None if row.mask is None else row.mask.constrained,
    }


def _settings_of(sent: Message, vocab_size: int) -> RowSettings:
    constrained = sent["constrained"]
    return RowSettings(
        params=SamplingParams(**sent["params"]),
        max_tokens=sent["max_tokens"],
        stop_token_ids=tuple(sent["stop_token_ids"]),
        seed=sent["seed"],
        prompt_token_ids=tuple(sent["prompt"]),
        dry_breakers=tuple(sent["dry_breakers"]),
        mask=None if constrained is None else TokenMask.received(vocab_size, constrained=constrained),
    )


def _moves(moves: Moves) -> Message:
    """Those that are there, by name."""
    found: Message = {
        "parks": [_swap(each) for each in moves.parks],
        "resumes": [_swap(each) for each in moves.resumes],
        "copies": [[each.source, each.target] for each in moves.copies],
        "continues": [
            [*_slot(each.slot), each.request_id, each.length, each.remaining] for each in moves.continues
        ],
        "reuses": [
            [*_slot(each.slot), each.request_id, each.source, each.length, each.place]
            for each in moves.reuses
        ],
        "tables": [[*_slot(each.slot), each.request_id, each.blocks, each.start] for each in moves.tables],
        "saves": [[*_slot(each.slot), each.length, each.place] for each in moves.saves],
    }
    return {name: each for name, each in found.items() if each}


def _moves_of(sent: Message) -> Moves:
    def parts(name: str) -> Sequence[Any]:
        found: Sequence[Any] = sent.get(name, ())
        return found

    return Moves(
        parks=tuple(_swap_of(*each) for each in parts("parks")),
        resumes=tuple(_swap_of(*each) for each in parts("resumes")),
        copies=tuple(BlockCopy(source=source, target=target) for source, target in parts("copies")),
        continues=tuple(
            Continuation(
                slot=Slot(index=index, epoch=epoch), request_id=name, length=length, remaining=remaining
            )
            for index, epoch, name, length, remaining in parts("continues")
        ),
        reuses=tuple(
            Reuse(
                slot=Slot(index=index, epoch=epoch),
                request_id=name,
                source=source,
                length=length,
                place=place,
            )
            for index, epoch, name, source, length, place in parts("reuses")
        ),
        tables=tuple(
            BlockTable(
                slot=Slot(index=index, epoch=epoch), request_id=name, blocks=tuple(blocks), start=start
            )
            for index, epoch, name, blocks, start in parts("tables")
        ),
        saves=tuple(
            SavedState(slot=Slot(index=index, epoch=epoch), length=length, place=place)
            for index, epoch, length, place in parts("saves")
        ),
    )


def _swap(swap: Swap) -> list[Any]:
    return [*_slot(swap.slot), swap.request_id, swap.length, swap.blocks]


def _swap_of(index: int, epoch: int, name: str, length: int, blocks: Sequence[int]) -> Swap:
    return Swap(slot=Slot(index=index, epoch=epoch), request_id=name, length=length, blocks=tuple(blocks))
