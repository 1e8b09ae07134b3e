"""Progress bars on a terminal, and occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

BAR_SECONDS = 0.1  # between redraws on a terminal
LINE_SECONDS = 5.0  # between lines anywhere else
BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} requests [{elapsed}<{remaining}{postfix}]"
BAR_FORMAT_OPEN_END = "{desc}{n_fmt} requests [{elapsed}{postfix}]"


class Progress:
    """Shows finished requests, tokens per second and busy slots: as a bar on a terminal, else as occasional lines.

    total: number of lines; None if unknown. before: of them done by an earlier run. slots: `max_num_seqs`. stream:
    None shows nothing. Calls between redraws only read the clock.
    """

    def __init__(
        self,
        total: int | None,
        *,
        slots: int,
        stream: TextIO | None,
        before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._before = total, before
        self._slots = slots
        self._stream = stream
        self._clock = clock
        self._start = self._last = clock()
        self._bar: Any = None
        if stream is not None and stream.isatty():
            self._bar = new_bar(stream, total, BAR_FORMAT if total else BAR_FORMAT_OPEN_END)

    @property
    def due(self) -> bool:
        """Whether it is time to redraw."""
        if self._stream is None:
            return False
        return self._clock() - self._last >= (BAR_SECONDS if self._bar is not None else LINE_SECONDS)

    def show(self, *, done: int, tokens: int, busy: int) -> None:
        """Redraw. done: finished requests. tokens: generated since the start, or pooled. busy: slots busy now."""
        self._last = self._clock()
        rate = tokens / max(self._last - self._start, 1e-9)
        state = f"{rate:.0f} tok/s, {busy}/{self._slots} slots busy"
        if self._bar is not None:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(done - self._bar.n)
        elif self._stream is not None:
            of_total = "" if self._total is None else f"/{self._total}"
            self._stream.write(
                f"{done}{of_total} requests, {self._last - self._start:.0f} s{self._left(done)}, {state}\n"
            )
            self._stream.flush()

    def _left(self, done: int) -> str:
        """The time left, if requests take as long as until now."""
        if self._total is None or not self._before < done < self._total:
            return ""
        seconds = (self._last - self._start) / (done - self._before) * (self._total - done)
        minutes, seconds = divmod(round(seconds), 60)
        return f" (about {minutes}:{seconds:02d} left)"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """End the bar, so that what follows starts on a new line."""
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def counting(verb: str, stream: TextIO, total: int | None = None) -> Iterator[Callable[[str], None] | None]:
    """A callback that counts names in a bar, which disappears at the end; None if there is no terminal."""
    if not stream.isatty():
        yield None
        return
    of_total = "" if total is None else "/{total_fmt}"
    bar_format = f"{verb}: {{n_fmt}}{of_total} [{{elapsed}}{{postfix}}]"
    with new_bar(stream, total, bar_format, leave=False, position=0, mininterval=BAR_SECONDS) as bar:

        def count(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield count


def new_bar(stream: TextIO, total: int | None, bar_format: str, **options: Any) -> Any:
    """A tqdm bar on a terminal of any kind, or in a notebook."""
    from tqdm.auto import tqdm  # imported where used: a run without a terminal needs none

    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    size = {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}  # some terminals have none
    return tqdm(total=total, file=stream, bar_format=bar_format, **{"mininterval": 0, **size, **options})


def prompts_bar(total: int, *, enabled: bool) -> Any:
    """tqdm's bar, as vLLM draws it, on a terminal and in a notebook."""
    from tqdm.auto import tqdm  # imported where used: the engine core runs without it

    return tqdm(total=total, unit="req", desc="Processed prompts", disable=not enabled)
