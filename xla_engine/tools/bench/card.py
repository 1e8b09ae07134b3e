"""The card: the record of a benchmark as text, and with `--record` as a section of this kind of machine's page."""

import datetime
import re
import shlex
import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from xla_engine import __version__
from xla_engine.tools.bench.peers import BARE, OURS
from xla_engine.tools.bench.rounds import OTHERS_MAY_TAKE
from xla_engine.utils.tables import pad

_ROOT = Path(__file__).parents[3]
_FILES = {"--cache", "--output", "--plot", "--record"}  # options that do not affect what is measured
_FORMS = {"table": "{}", "heading": "### {}", "list": "- {}"}
_COLUMNS = {  # per workload: heading and figure
    "uniform": {
        "decode tok/s": "decode_tok_s",
        "of read limit": "gb_s_share",
        "job tok/s": "tok_s",
        "TTFT p50 ms": "ttft_p50_ms",
        "token p50 ms": "itl_p50_ms",
        "p99": "itl_p99_ms",
    },
    "prefill": {
        "prefill tok/s": "prefill_tok_s",
        "of FLOP limit": "gflop_s_share",
        "TTFT p50 ms": "ttft_p50_ms",
    },
    "prefill-heavy": {
        "new tok/s": "tok_s",
        "requests/s": "requests_s",
        "TTFT p50 ms": "ttft_p50_ms",
        "p99": "ttft_p99_ms",
    },
    "ragged": {
        "new tok/s": "tok_s",
        "requests/s": "requests_s",
        "TTFT p50 ms": "ttft_p50_ms",
        "p99": "ttft_p99_ms",
        "token p50 ms": "itl_p50_ms",
        "p99 ": "itl_p99_ms",
    },
    "pair": {"pair ratio": "pair_ratio", "first slowed": "first_slowdown", "TTFT p99 ms": "ttft_p99_ms"},
}
_OWN = {
    "host CPU ms per step": "host_ms_per_step",
    "occupancy": "occupancy",
    "while requests wait": "occupancy_queued",
    "stale row-steps": "stale_share",
}
_OF_LIMITS = ("gb_s_share", "gflop_s_share")
_SHARES = (*_OF_LIMITS, "occupancy", "occupancy_queued", "stale_share")


def card(record: dict[str, Any]) -> str:
    """The whole record as text."""
    limits = record["limits"]
    lines = [
        f"{record['model']}, {record['dtype']}, {record['threads']} threads, {record['rounds']} rounds in turns",
        record["machine"],
        f"read limit {limits['read_gb_s']:g} GB/s; product limit "
        + ", ".join(f"{value:g} GFLOP/s ({name})" for name, value in limits["gflops"].items()),
    ]
    if record["judge"]:
        lines.append(f"judge of streams: {record['judge']}")
    for name, engine in record["engines"].items():
        notes = f"; {engine['notes']}" if engine["notes"] else ""
        isa = f"; instruction set {engine['isa']}" if "isa" in engine else ""
        lines.append(f"{name}: {engine['about']}; {engine['versions']}{isa}{notes}")
    lines += [f"skipped {name}: {reason}" for name, reason in record["skipped"].items()]
    for batch, workloads in record["workloads"].items():
        for name, about in workloads.items():
            entries = [
                entry
                for entry in record["results"]
                if entry["workload"] == name and entry["batch"] == int(batch)
            ]
            lines += ["", f"B = {batch}, {name}: {about}", "", *_table(name, entries), *_own_lines(entries)]
    lines += ["", *_closing_lines(record)]
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with columns padded to line up; the first column left, the others right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(pad(row, widths, range(1, len(header)))) + " |" for row in cells]
    rule = "|" + "|".join("-" * (w + 1) + (":" if at else "-") for at, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _table(workload: str, entries: list[dict[str, Any]]) -> list[str]:
    known = _COLUMNS[workload]
    columns = {
        heading: key for heading, key in known.items() if any(key in entry["figures"] for entry in entries)
    } or dict(list(known.items())[:1])  # a column for the case that every rate is void
    ratio_of = next((key for entry in entries for key in entry.get("ratio", ())), None)
    rows = []
    for entry in entries:
        if entry["void"]:
            cells = ["void"] + [""] * (len(columns) - 1)
        else:
            cells = [_cell(key, entry["figures"].get(key)) for key in columns.values()]
        ratio = entry.get("ratio", {}).get(ratio_of) if ratio_of else None
        rows.append(
            [entry["engine"], *cells, "" if ratio is None else _spread(ratio, ".2f"), _streams(entry)]
        )
    lines = markdown_table(["engine", *columns, "ours / it", "off, worst regret"], rows).splitlines()
    return lines + [f"  {entry['engine']}: {entry['void']}" for entry in entries if entry["void"]]


def _cell(key: str, values: list[float] | None) -> str:
    if values is None:
        return ""
    if key in _SHARES:
        return f"{values[0]:.0%}"
    return _spread(values, ".2f" if values[0] < 10 else ".0f")


def _spread(values: list[float], form: str) -> str:
    """`median (least-most)`."""
    middle, low, high = (format(value, form) for value in values)
    return middle if low == high else f"{middle} ({low}-{high})"


def _streams(entry: dict[str, Any]) -> str:
    streams = entry.get("streams")
    return "" if streams is None else f"{streams['off']:.2%}, {streams['worst_regret']:.3g}"


def _own_lines(entries: list[dict[str, Any]]) -> list[str]:
    """Figures that only this engine reports."""
    lines = []
    for entry in entries:
        found = {title: entry["figures"].get(key) for title, key in _OWN.items()}
        told = [
            f"{title} {values[0]:.2%}" if _OWN[title] in _SHARES else f"{title} {values[0]:.2f}"
            for title, values in found.items()
            if values is not None
        ]
        if told:
            lines.append(f"{entry['engine']}: {', '.join(told)}")
    for entry in entries:
        if entry["engine"] == BARE and "decode_tok_s" in entry.get("ratio", {}):
            lines.append(f"{OURS}: end to end at {entry['ratio']['decode_tok_s'][0]:.1%} of its bare step")
    return lines


def _closing_lines(record: dict[str, Any]) -> list[str]:
    lines = []
    for name, engine in record["engines"].items():
        peaks = ", ".join(f"{mib} MiB at B = {batch}" for batch, mib in engine.get("peak_mib", {}).items())
        seconds = ", ".join(f"{s:g} s" for s in engine.get("compile_seconds", {}).values())
        if peaks:
            lines.append(f"{name}: peak memory {peaks}" + (f"; compiled in {seconds}" if seconds else ""))
    if any(entry["figures"].get(key, [0])[0] > 1 for entry in record["results"] for key in _OF_LIMITS):
        lines.append(
            "shares above 100%: the machine was faster later than when its limits were measured, so no share of this "
            "run can be relied on"
        )
    taken = [
        entry["figures"]["others_share"][2]
        for entry in record["results"]
        if "others_share" in entry["figures"]
    ]
    if taken:
        lines.append(
            f"others took at most {max(taken):.1%} of the cores' time in a turn"
            + (": measure again on a quieter machine" if max(taken) > OTHERS_MAY_TAKE else "")
        )
    for found in record["verify"]:
        lines.append(
            f"verify at B = {found['batch']}: {found['requests']} requests, {found['tokens']} tokens alone and "
            f"batched, {found['differing_tokens']} differing tokens, {found['differing_bits']} differing logprob "
            f"bits, {found['compiles']} compiles"
        )
    return lines


def write(record: dict[str, Any], words: Sequence[str], directory: Path) -> Path:
    """Write the card of `record` to DIRECTORY/MACHINE.md; returns the path.

    words: the command line behind `xla-engine bench`. A section of the same command is replaced; others stay.
    """
    processor, isa = record["processor"], record["engines"][OURS].get("isa", "none")
    kind = f"{processor['model']}, {isa}, {processor['cores']} cores"
    path = directory / (re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".md")
    text = path.read_text() if path.exists() else f"# {kind}\n\nWritten by `xla-engine bench --record`.\n"
    page, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    heading = f"## `{command(words)}`\n"
    when = (
        f"Measured on {datetime.date.today().isoformat()} at {_version()}; load before it {record['load']:g}."
    )
    section = f"{heading}\n{when}\n\n{_markdown(card(record))}\n"
    places = [place for place, each in enumerate(sections) if each.startswith(heading)]
    if places:
        sections[places[0]] = section
    else:
        sections.append(section)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(each.rstrip("\n") + "\n" for each in (page, *sections)))
    return path


def command(words: Sequence[str]) -> str:
    """The command that measures the same again, without options for files and with PYTHON for peers' interpreters."""
    kept: list[str] = []
    skipping = False
    for word in words:
        name, equals, _ = word.partition("=")
        if name.startswith("--"):
            skipping = name in _FILES
        if not skipping:
            is_peer = equals and (name == "--peer" or kept[-1:] == ["--peer"])
            kept.append(re.sub(r"(\w)=[^=]*$", r"\1=PYTHON", word) if is_peer else word)
    return shlex.join(["xla-engine", "bench", *kept])


def _markdown(text: str) -> str:
    """A card as Markdown: its tables as they are, headings for workloads, and lists of all other lines."""
    blocks = []
    for form, lines in groupby(filter(None, text.splitlines()), key=_form):
        blocks.append("\n".join(_FORMS[form].format(line.strip()) for line in lines))
    return "\n\n".join(blocks)


def _form(line: str) -> str:
    if line.startswith("|"):
        return "table"
    return "heading" if line.startswith("B = ") else "list"


def _version() -> str:
    """The commit of the checkout, or the version of an installed package."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout

    try:
        changed = ", with changes" if git("status", "--porcelain", ":!findings").strip() else ""
        return f"commit {git('rev-parse', '--short', 'HEAD').strip()}{changed}"
    except (OSError, subprocess.CalledProcessError):
        return f"version {__version__}"
