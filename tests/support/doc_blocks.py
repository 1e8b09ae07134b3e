"""Fenced blocks of Markdown pages, and what their titles say about running them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its language, the title a reader sees above it ("" if none), its text, and the line it stands on."""

    language: str
    title: str
    text: str
    line: int

    @property
    def why_not(self) -> str | None:
        """Why the tests do not run it; None if they do."""
        for mark in ("not run in the tests: ", "run by "):
            if self.title.startswith(mark):
                return self.title
        return None

    @property
    def prints(self) -> str:
        """What a transcript, or a block that is `printed`, says its commands print; empty where it says nothing."""
        if self.title.startswith("printed"):
            return self.text
        lines = self.text.splitlines(keepends=True) if self.language == "console" else []
        return "".join(line for line in lines if not line.startswith("$ "))

    def shows(self, printed: str) -> bool:
        """Whether that is what was printed: to the byte, with anything in the place of `...`; "other figures": but for
        numbers; "in any order": but for the order of lines and their numbers."""
        wanted = self.prints
        if "other figures" in self.title:
            wanted, printed = (re.sub(r"[+-]?[\d.,]*\d|[ \t]+", " ", text) for text in (wanted, printed))
            wanted, printed = (re.sub(r" +", " ", text) for text in (wanted, printed))
        if "in any order" in self.title:
            numbered = re.compile(r'"seq": \d+')
            wanted, printed = (
                "\n".join(sorted(numbered.sub("", text).splitlines())) for text in (wanted, printed)
            )
        parts = map(re.escape, wanted.strip().split("..."))
        return re.fullmatch(".*".join(parts), printed.strip(), re.DOTALL) is not None

    @property
    def slow(self) -> bool:
        return self.title.startswith("takes ")

    @property
    def exit_status(self) -> int:
        """What a shell block ends with."""
        return int(self.title.removeprefix("exit status ")) if self.title.startswith("exit status ") else 0

    @property
    def commands(self) -> str:
        """The shell commands of the block; of a transcript the lines after the prompt `$ `."""
        if self.language == "sh":
            return self.text
        lines = self.text.splitlines()
        return "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))


def blocks(path: Path) -> list[Block]:
    """Every fenced block with a language, in order."""
    text = path.read_text()
    return [
        Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]
