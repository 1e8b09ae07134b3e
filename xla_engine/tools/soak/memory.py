"""Measures whether a process grows: memory, objects of requests, threads."""

import gc
import resource
import threading
from collections import Counter

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.sequence import LiveSequence, SequenceGroup
from xla_engine.outputs import RequestOutput
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.kv_moves import ParkedState
from xla_engine.runner.runner import Runner
from xla_engine.scheduler.request_state import RequestState
from xla_engine.text.token_mask import TokenMask
from xla_engine.utils import resident

# What must be gone when the engine is.
MORTAL = (
    XlaBatchEngine,
    Runner,
    LiveSequence,
    SequenceGroup,
    TokenMask,
    RequestState,
    InFlight,
    ParkedState,
    OutputCollector,
    RequestOutput,
)


def resident_bytes() -> int:
    """Memory of this process that is not paged out; where the system does not tell, the most there has been.

    What glibc's allocator keeps of memory that was freed is given back first: it grows with every engine.
    """
    resident.release_free_memory()
    return resident.resident_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def survivors() -> Counter[str]:
    """Objects of `MORTAL` classes that are alive, by class."""
    gc.collect()
    kinds = frozenset(MORTAL)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def threads() -> int:
    """How many wait for steps."""
    return sum(thread.name == "xla-engine-wait" for thread in threading.enumerate())
