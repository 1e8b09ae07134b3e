"""`xla-engine chat`: a conversation through a pipe with an engine without a model, and in a terminal with one."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.again import again
from tests.support.command_line import assert_not_started, invoke
from tests.support.fake_engine import FakeEngine
from xla_engine.environment import embedded_model_directory

MARKDOWN = "{% for each in messages %}# {{ each.role }}\n{{ each.content }}\n{% endfor %}# assistant\n"


def talk(engine: FakeEngine, text: str, *options: str) -> tuple[list[str], str, int]:
    """Answers, notes and exit status of a conversation through a pipe."""
    result = invoke("chat", "--max-tokens", "5", *options, stdin=text.encode())
    return result.stdout.splitlines(), result.stderr, result.exit_code


def test_a_conversation_remembers_and_forgets(engine: FakeEngine) -> None:
    text = "a\n\nb\n/system s\nc\n/reset\nd\n/system\ne\n/exit\nf\n"
    answers, _, status = talk(engine, text)
    assert answers == ["<a>", "<a|<a>|b>", "<s|a|<a>|b|<a|<a>|b>|c>", "<s|d>", "<d|<s|d>|e>"] and status == 0
    assert engine.as_they_are == [False] * 5


def test_a_conversation_that_outgrows_the_context_drops_its_oldest_turns(engine: FakeEngine) -> None:
    """The limit is 100 tokens, here characters; an answer is as long as all that was sent, in angle brackets."""
    engine.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: list(text))
    answers, notes, status = talk(engine, "a\nbb\nccc\ndddd\neeeee\nf\n", "--system", "s")
    assert len(answers) == 6 and status == 0
    assert all(each.startswith("<s|") for each in answers)  # the system message stays
    assert answers[2].startswith("<s|a|") and answers[-1].endswith("|f>") and "|a|" not in answers[-1]
    assert "has outgrown the 100 tokens" in notes and "messages are no longer sent" in notes
    assert all(len(each) - 2 + 5 <= 100 for each in answers)


def test_messages_have_several_lines(engine: FakeEngine) -> None:
    answers, _, _ = talk(engine, 'a \\\nb\n/reset\n"""c\n d"""\n/reset\n /e\n', "--system", "s")
    assert answers == ["<s|a ", "b>", "<s|c", " d>", "<s|/e>"]


def test_fields_are_set_and_all_is_saved(engine: FakeEngine, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    _, notes, status = talk(
        engine, f"/seed 7\n/set top_p 0.5\nü\n/save {saved}\n/set\n/help\n", "--temperature", "1"
    )
    fields = {"max_tokens": 5, "temperature": 1.0, "top_k": 40, "top_p": 0.5, "min_p": 0.05, "seed": 7}
    said = [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "<ü>"}]
    assert json.loads(saved.read_text("utf-8")) == {"messages": said, **fields}
    assert json.dumps(fields) in notes and "/system TEXT" in notes and status == 0


def test_the_command_line_sets_any_sampling_field(engine: FakeEngine) -> None:
    """The two that have options of their own come first."""
    given = '{"top_p": 0.5, "temperature": 0.3}'
    _, notes, _ = talk(engine, "/set\n", "--temperature", "1", "--override-generation-config", given)
    expected = {"max_tokens": 5, "temperature": 1.0, "top_k": 40, "top_p": 0.5, "min_p": 0.05, "seed": 0}
    assert json.loads(notes.splitlines()[-1]) == expected


def test_what_fails_leaves_the_conversation_as_it_was(engine: FakeEngine, tmp_path: Path) -> None:
    bad = [
        "/nothing",
        "/seed x",
        "/set top_p 7",
        "/set topp 1",
        "/save",
        f"/save {tmp_path}",
        "no!",
        "x" * 99,
    ]
    answers, notes, status = talk(engine, "\n".join(["a", *bad, "b"]))
    assert answers == ["<a>", "<a|<a>|b>"] and status == 1
    for words in (
        "no command /nothing",
        "JSON",
        "top_p must be",
        "did you mean",
        "needs a file name",
        "not this one",
    ):
        assert words in notes
    assert "use a shorter message" in notes and "Traceback" not in notes


def test_the_embedded_model_is_no_partner_and_says_so(engine: FakeEngine) -> None:
    assert "answers with Python functions; name another with --model" in talk(engine, "a\n")[1]
    assert "--model" not in talk(engine, "a\n", "--model", str(embedded_model_directory()))[1]


def test_a_model_without_a_template_is_refused(engine: FakeEngine) -> None:
    engine.chat_template = None
    assert_not_started(invoke("chat", stdin=b"a\n"), "--chat-template FILE")
    assert engine.submitted == []


# So that a typed Ctrl-C is a signal, and one that is heeded, also if the tests run in the background of a shell.
TAKES_THE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "xla_engine", *sys.argv[1:]])
"""


class Terminal:
    """A process with a terminal."""

    def __init__(self, *arguments: str) -> None:
        own, theirs = pty.openpty()
        self._file, self.shown = own, ""
        command = [sys.executable, "-c", TAKES_THE_TERMINAL, *arguments]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def interrupt_until(self, words: str, seconds: float = 600) -> None:
        """Press Ctrl-C, again each second, until some words are shown.

        Python loses a signal that comes between readline's prompt and its wait for a key: a person presses again.
        """
        until = time.monotonic() + seconds
        while words not in self.shown and time.monotonic() < until:
            self.type("\x03")
            if select.select([self._file], [], [], 1)[0]:
                self.shown += os.read(self._file, 4096).decode(errors="replace")
        self.wait_for(words, 0)

    def wait_for(self, words: str, seconds: float = 600) -> str:
        """Return and forget everything that is shown up to some words."""
        until = time.monotonic() + seconds
        while words not in self.shown:
            assert select.select([self._file], [], [], max(until - time.monotonic(), 0))[0], self.shown
            try:
                self.shown += os.read(self._file, 4096).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"ended early: {self.shown}") from error
        before, self.shown = self.shown.split(words, 1)
        return before


@pytest.mark.full
@again
def test_a_person_talks_in_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends an answer and, at the prompt, nothing; the same seed gives the same answer; Ctrl-D leaves."""
    shutil.copytree(embedded_model_directory(), tmp_path / "model", dirs_exist_ok=True)
    (tmp_path / "model" / "chat_template.jinja").write_text(MARKDOWN)
    terminal = Terminal("chat", "--model", str(tmp_path / "model"), "--seed", "3")
    try:
        terminal.wait_for("> ")
        answers = []
        for _ in range(2):
            terminal.type("/reset\n/set max_tokens 12\n")
            terminal.wait_for("> "), terminal.wait_for("> ")
            terminal.type("def fib(n):\n")
            terminal.wait_for("def fib(n):\r\n")
            answers.append(terminal.wait_for("> "))
        assert answers[0] == answers[1] and answers[0].strip()
        terminal.type("/set ignore_eos true\n/set max_tokens null\n")
        terminal.wait_for("> "), terminal.wait_for("> ")
        terminal.type("def\n")
        terminal.wait_for("def\r\n")
        terminal.shown += os.read(terminal._file, 1).decode()  # it answers
        terminal.type("\x03")
        terminal.wait_for("(stopped)", 20)  # unless it has ended
        terminal.wait_for("> ")
        terminal.interrupt_until("(Ctrl-D or /exit quits)")
        terminal.type(f"/save {tmp_path / 'chat.json'}\n")
        terminal.wait_for("saved to")
        roles = [each["role"] for each in json.loads((tmp_path / "chat.json").read_text())["messages"]]
        assert roles == ["user", "assistant"] * 2
        terminal.type("\x04")
        assert terminal.process.wait(600) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal._file)
