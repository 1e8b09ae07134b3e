"""Compute blocks and saved states of a prefix cache on disk again, alone, and compare the bytes.

Keys and values are a function of the tokens, so a stored block and a computed one have the same bytes. A block can be
computed if all blocks before it are there, and the first belongs to no adapter: the key of a block with another
`cache_salt` or adapter begins with something that files do not contain.
"""

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.runner.prefix_files.files import ABOUT, DamagedFileError, StoredContent, read_file
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Request, state_after, stored_blocks


@dataclass(slots=True)
class StoredCheck:
    """same: blocks with equal bytes. different: keys of others. damaged: files that are no whole block.
    left_out: blocks that cannot be computed: of a salt or an adapter, longer than the engine's context, or behind a
    block that is missing."""

    same: int = 0
    different: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether no block differs and no file is damaged."""
        return not self.different and not self.damaged


def check_stored(
    directory: Path,
    open_engine: Callable[[EngineConfig], XlaBatchEngine],
    config: EngineConfig,
    *,
    sample: int,
    seed: int = 0,
) -> StoredCheck:
    """Check up to `sample` blocks of the engine's own kind, and those before them.

    open_engine: makes an engine; `config` names any `prefix_cache_dir`.

    Raises InvalidRequestError if the directory has no blocks of this model, these options and this machine.
    """
    check = StoredCheck()
    with (
        tempfile.TemporaryDirectory(prefix="xla-engine-") as scratch,
        open_engine(replace(config, prefix_cache_dir=scratch)) as engine,
    ):
        assert engine.state.prefixes is not None
        files = engine.state.prefixes.storage.files
        folder = directory / files.folder.name
        if not (folder / ABOUT).exists():
            raise InvalidRequestError(
                f"{directory} has no blocks of this model, with these options, code and machine; `xla-engine cache "
                "list` shows what it has"
            )
        found = _read(folder, check)
        chosen = random.Random(seed).sample(sorted(found), min(sample, len(found)))
        compared: set[bytes] = set()
        for key in chosen:
            if key in compared:
                continue
            if (chain := _chain(key, found, engine)) is None:
                check.left_out += 1
                continue
            _compute(engine, [token for each in chain for token in found[each].tokens])
            for each in chain:
                if each not in compared:
                    _compare(each, found, files.read, check)
            compared.update(chain)
    return check


def _read(folder: Path, check: StoredCheck) -> dict[bytes, StoredContent]:
    """All blocks of a folder, without their content."""
    found = {}
    for path in sorted(folder.glob("??/*")):
        try:
            stored = read_file(path)
            if stored.key.hex() != path.name:
                raise DamagedFileError("it holds another block")
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (OSError, DamagedFileError) as error:
            check.damaged.append(f"{path.name}: {error}")
        else:
            found[stored.key] = stored
    return found


def _chain(key: bytes, found: Mapping[bytes, StoredContent], engine: XlaBatchEngine) -> list[bytes] | None:
    """The blocks from the first to this one; None if the engine cannot compute them."""
    chain = [key]
    while (parent := found[chain[-1]].parent) in found:
        chain.append(parent)
    chain.reverse()
    tokens = [token for each in chain for token in found[each].tokens]
    if len(_whole(engine, tokens)) + 2 > engine.max_model_len:
        return None
    request = Request(request_id="check", prompt_token_ids=tokens, max_tokens=1)
    keys = [each.key for each in stored_blocks.full_blocks(engine.scheduler, request)]
    if not found[key].tokens and keys:
        keys.append(state_after(keys[-1]).key)
    return chain if keys == chain else None


def _whole(engine: XlaBatchEngine, tokens: list[int]) -> list[int]:
    """These tokens, and more up to where a state is saved, because blocks behind the last state are not shared."""
    config = engine.config
    return [*tokens, *[tokens[0]] * (-len(tokens) % config.state_interval if config.saves_states else 0)]


def _compute(engine: XlaBatchEngine, tokens: list[int]) -> None:
    """Let the engine compute blocks, and store them as a second request shares them."""
    assert engine.state.prefixes is not None
    tokens = _whole(engine, tokens)
    for _ in range(2):
        engine.submit([*tokens, tokens[0]], SamplingParams(max_tokens=1, temperature=0))
        engine.drain()
    engine.state.prefixes.storage.flush()


def _compare(
    key: bytes, found: dict[bytes, StoredContent], read: Callable[[bytes], StoredContent], check: StoredCheck
) -> None:
    try:
        same = read(key) == found[key]
    except (OSError, DamagedFileError):
        check.left_out += 1
        return
    check.same += same
    if not same:
        check.different.append(key.hex())
