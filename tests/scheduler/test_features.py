"""The vision tower's work in plans: when tiles are encoded, and that no place is overwritten while prompts read it."""

from __future__ import annotations

import random
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.runner.call_sizes import prefill_calls
from xla_engine.runner.features import FeatureBuffer
from xla_engine.scheduler import (
    Decoded,
    Encode,
    Plan,
    PromptImage,
    Request,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
    policy,
)

STAGES, LENGTH = 4, 5


def picture(number: int, *starts: int) -> PromptImage:
    digest = sha256(str(number).encode()).hexdigest()
    tiles = [f"tile {at} of picture {number}" for at in range(len(starts))]
    return PromptImage(digest=digest, tiles=tiles, spans=tuple((start, LENGTH) for start in starts))


def request(name: str, *images: PromptImage, max_tokens: int = 4, salt: str = "") -> Request:
    ids = list(range(30))
    return Request(
        request_id=name, prompt_token_ids=ids, max_tokens=max_tokens, images=images, cache_salt=salt
    )


def scheduler(places: int = 4, slots: int = 2, size: int = LENGTH, **options: Any) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=slots,
        chunk_size=4,
        max_num_batched_tokens=12,
        feature_places=places,
        feature_place_tokens=size,
        **{"encode_stages": STAGES, **options},
    )
    return Scheduler(config)


class Device:
    """Runs plans in order: what lies at each place, and what each position of a prompt reads."""

    def __init__(self, driven: Scheduler, requests: list[Request]) -> None:
        self.driven, self.requests = driven, {each.request_id: each for each in requests}
        self.at: dict[int, tuple[str, int]] = {}  # a tile, and the first of its rows there
        self.encodes: list[tuple[Encode, bool]] = []  # and whether rows decode beside it

    def run(self) -> None:
        while self.turn():
            pass
        assert not self.driven.num_running

    def turn(self) -> bool:
        """Run one plan; false if there is nothing to run."""
        if (plan := self.driven.plan()).is_empty:
            return False
        self.driven.check()
        self.step(plan)
        decoded = Decoded(tokens=[1] * self.driven.config.max_num_seqs)
        self.driven.commit(plan, StepResult(first=[Sample(1)] * len(plan.first_rows), decode=decoded))
        return True

    def step(self, plan: Plan) -> None:
        assert len(plan.encodes) <= 1
        for encode in plan.encodes:
            assert encode.begin == 0 or self.encodes[-1][0].end == encode.begin
            self.encodes.append((encode, bool(plan.decode)))
            for number, place in enumerate(encode.places):
                self.at.pop(place, None)
                if encode.end == STAGES:
                    self.at[place] = encode.tile, number * self.driven.config.feature_place_tokens
        for chunk in plan.chunks:
            read = {}
            for at, place, row, length, _ in chunk.features:
                tile, first = self.at[place]
                read.update({chunk.start + at + step: (tile, first + row + step) for step in range(length)})
            wanted = {
                start + row: (tile, row)
                for image in self.requests[chunk.request_id].images
                for tile, (start, length) in zip(image.tiles, image.spans, strict=True)
                for row in range(length)
            }
            inside = range(chunk.start, chunk.start + len(chunk.tokens))
            assert read == {at: each for at, each in wanted.items() if at in inside}


def test_beside_decode_rows_only_one_slice_runs_in_a_step() -> None:
    requests = [request("text", max_tokens=20), request("sees", picture(0, 3, 11))]
    driven = scheduler()
    device = Device(driven, requests)
    driven.submit(requests[0])
    for _ in range(5):
        assert device.turn()
    driven.submit(requests[1])
    device.run()
    assert [(each.begin, each.end, rows) for each, rows in device.encodes] == [
        (stage, stage + 1, True) for _ in range(2) for stage in range(STAGES)
    ]


def test_a_tile_has_as_many_slices_as_its_tokens_say() -> None:
    """Beside a row that decodes; the table may come from a file, as lists."""
    driven = scheduler(size=99, encode_stages=[[LENGTH - 1, 2], [LENGTH, 3], [LENGTH + 2, 6]])
    small, large = picture(0, 3), PromptImage(digest="1" * 64, tiles=["large"], spans=((9, LENGTH + 1),))
    ends: dict[str, list[int]] = {}
    driven.submit(request("text", max_tokens=40))
    step = 0
    while not (plan := driven.plan()).is_empty:
        for encode in plan.encodes:
            ends.setdefault(encode.tile, []).append(encode.end)
        decoded = Decoded(tokens=[1, 1])
        driven.commit(plan, StepResult(first=[Sample(1)] * len(plan.first_rows), decode=decoded))
        if (step := step + 1) == 5:
            driven.submit(request("sees", small, large))
    assert list(ends.values()) == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


def test_alone_a_tile_a_step_and_a_picture_only_once_for_each_salt() -> None:
    driven = scheduler()
    requests = [
        request("a", picture(0, 3)),
        request("b", picture(0, 20)),
        request("c", picture(0, 3), salt="c"),
    ]
    device = Device(driven, requests)
    for each in requests:
        driven.submit(each)
        device.run()
    assert [(each.request_id, each.begin, each.end) for each, _ in device.encodes] == [
        ("a", 0, STAGES),
        ("c", 0, STAGES),
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("blocks", [None, 30])
def test_every_position_reads_its_own_tile(seed: int, blocks: int | None) -> None:
    """With few places, cached prefixes, aborts and preemption."""
    draw = random.Random(seed)
    options = {"enable_prefix_caching": True, "block_size": 4, "preemption": True}
    size = draw.choice((LENGTH, 2, 99))  # several places for a tile, too
    places = draw.randint(2, 4) * -(-LENGTH // size)
    driven = scheduler(
        places, draw.randint(1, 3), size, **options | ({"num_blocks": blocks} if blocks else {})
    )
    requests = []
    for at in range(12):
        starts = draw.choice([(), (3,), (3, 11), (6, 20)])
        images = (picture(draw.randrange(3), *starts),) if starts else ()
        requests.append(request(str(at), *images, max_tokens=draw.randint(1, 9), salt=draw.choice("ab")))
    device = Device(driven, requests)
    for each in requests:
        driven.submit(each)
        for _ in range(draw.randrange(6)):
            if not device.turn():
                break
        if draw.random() < 0.2:
            driven.abort(str(draw.randrange(at + 1)))
        if draw.random() < 0.4:
            driven.preempt(str(draw.randrange(at + 1)))
    device.run()
    assert len(device.encodes) > 1


def test_pictures_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="need 2 places of the feature buffer, which has 1"):
        scheduler(1).submit(request("a", picture(0, 3, 11)))
    with pytest.raises(ValueError, match="need 4 places of the feature buffer, which has 3"):
        scheduler(3, size=3).submit(request("a", picture(0, 3, 11)))


def test_content_tells_pictures_apart_at_each_position() -> None:
    one, other, plain = (request("a", *each).content for each in ((picture(0, 3),), (picture(1, 3),), ()))
    assert [at for at in range(30) if one[at] != other[at]] == list(range(3, 3 + LENGTH))
    assert list(plain) == list(range(30)) and len(set(one)) == 30
    moved = request("a", picture(0, 4)).content
    assert one[3] == moved[4] and one[4] != moved[4]


class WholeTiles(Device):
    """Also checks that no plan splits a tile, or the calls of its chunks."""

    def step(self, plan: Plan) -> None:
        super().step(plan)
        for reuse in plan.moves.reuses:
            spans = self.requests[reuse.request_id].spans
            assert not any(start < reuse.length < start + length for start, length in spans)
        buffer = SimpleNamespace(sees_ahead=True)
        joined = FeatureBuffer.joined(buffer, plan.chunks)  # type: ignore[arg-type]
        calls = [call for call, _ in prefill_calls(plan.chunks, LANES, (), joined)]
        assert [chunk for call in calls for chunk in call] == list(plan.chunks)
        for call in calls:
            assert len(call) <= LANES
            for name in {chunk.request_id for chunk in call}:
                written = {
                    at
                    for chunk in call
                    if chunk.request_id == name
                    for at in range(chunk.start, chunk.start + len(chunk.tokens))
                }
                for start, length in self.requests[name].spans:
                    inside = written & set(range(start, start + length))
                    assert not inside or len(inside) == length, f"a tile of {name} is split"


LANES = 2


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 40}, {"max_chunks": LANES, "cut_invariant": True}], ids=str
)
def test_whole_tiles_run_in_one_call(seed: int, options: dict[str, Any]) -> None:
    """With cached prefixes, limits on them, aborts and preemption, and beside text."""
    draw = random.Random(seed)
    common = {"enable_prefix_caching": True, "block_size": 4, "preemption": True, "whole_tiles": True}
    if draw.random() < 0.5:
        common |= {"prefill_equals_decode": True, "recompute_tokens": 40}
    driven, requests = scheduler(6, draw.randint(1, 3), **common | options), []
    for at in range(14):
        images = []
        begin = draw.randrange(8)
        for _ in range(draw.randrange(4)):
            images.append(picture(draw.randrange(2), begin))
            begin += LENGTH + draw.randrange(5)
        ids = tuple(range(begin + draw.randrange(1, 9)))
        most = draw.choice([None, None, 0, draw.randrange(1, len(ids) + 1)])
        requests.append(
            Request(
                request_id=str(at),
                prompt_token_ids=ids,
                max_tokens=draw.randint(1, 6),
                images=tuple(images),
                max_cached_tokens=most,
            )
        )
    device = WholeTiles(driven, requests)
    for each in requests:
        driven.submit(each)
        for _ in range(draw.randrange(6)):
            if not device.turn():
                break
        if draw.random() < 0.4:
            name = draw.choice(requests).request_id
            driven.abort(name) if draw.random() < 0.3 else driven.preempt(name)
    device.run()


def test_a_split_tile_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "unsplit", lambda count, *_, **__: count)
    driven, asked = scheduler(whole_tiles=True, max_chunks=1), request("a", picture(0, 3))
    driven.submit(asked)
    with pytest.raises(AssertionError, match=r"is split|inside a picture"):
        WholeTiles(driven, [asked]).run()


positions = st.integers(0, 60)


@given(
    gaps=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=4),
    rest=st.integers(1, 12),
    size=st.integers(1, 6),
    cached=positions,
    most=st.none() | positions,
    invariant=st.booleans(),
)
def test_cuts_and_usable_prefixes_agree(
    gaps: list[tuple[int, int]], rest: int, size: int, cached: int, most: int | None, invariant: bool
) -> None:
    """Every usable prefix ends at a cut of the whole prompt, and leaves the cuts behind it where they were."""
    groups, end = [], 0
    for gap, length in gaps:
        groups.append((end + gap, length))
        end += gap + length
    end += rest
    cuts = policy.next_cuts(0, end, size, end, groups)
    assert policy.num_chunks(end, size, 0, groups) == len(cuts)
    assert [at for start, stop in cuts for at in range(start, stop)] == list(range(end))
    assert all(stop - start <= size for start, stop in cuts)
    assert {start for start, _ in groups} <= {start for start, _ in cuts}
    usable = policy.usable_prefix(
        min(cached, end), end, size, cut_invariant=invariant, most=most, groups=groups
    )
    assert 0 <= usable < end and usable <= cached and (most is None or usable <= most)
    assert not any(start < usable < start + length for start, length in groups)
    rest_of = policy.next_cuts(usable, end, size, end, groups)
    if invariant and usable in (end - 1, most):
        return
    assert rest_of == [cut for cut in cuts if cut[0] >= usable]
