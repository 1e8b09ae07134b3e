"""The scheduler: decides on the host which request gets which slot, which prompt chunks run, and which rows decode.

Pure Python on the standard library: no device, clock, threads or randomness. The engine, property tests with a fake
runner, and the simulator all use it.
"""

from xla_engine.scheduler.config import SchedulerConfig as SchedulerConfig
from xla_engine.scheduler.kv.allocator import Slots as Slots
from xla_engine.scheduler.kv.allocator import StaleSlotError as StaleSlotError
from xla_engine.scheduler.kv.prefix_cache import state_after as state_after
from xla_engine.scheduler.moves import BlockCopy as BlockCopy
from xla_engine.scheduler.moves import BlockTable as BlockTable
from xla_engine.scheduler.moves import Continuation as Continuation
from xla_engine.scheduler.moves import Moves as Moves
from xla_engine.scheduler.moves import Reuse as Reuse
from xla_engine.scheduler.moves import SavedState as SavedState
from xla_engine.scheduler.moves import Slot as Slot
from xla_engine.scheduler.moves import StoredBlock as StoredBlock
from xla_engine.scheduler.moves import Swap as Swap
from xla_engine.scheduler.peek import Peek as Peek
from xla_engine.scheduler.pictures import Encode as Encode
from xla_engine.scheduler.pictures import FeatureSpan as FeatureSpan
from xla_engine.scheduler.plan import Chunk as Chunk
from xla_engine.scheduler.plan import Decision as Decision
from xla_engine.scheduler.plan import Plan as Plan
from xla_engine.scheduler.plan import ResultMismatchError as ResultMismatchError
from xla_engine.scheduler.plan import Row as Row
from xla_engine.scheduler.plan import Speculation as Speculation
from xla_engine.scheduler.plan import StepResult as StepResult
from xla_engine.scheduler.plan import VerifyRow as VerifyRow
from xla_engine.scheduler.queue import QueueFullError as QueueFullError
from xla_engine.scheduler.queue import WaitingQueue as WaitingQueue
from xla_engine.scheduler.request import PRIORITIES as PRIORITIES
from xla_engine.scheduler.request import FinishReason as FinishReason
from xla_engine.scheduler.request import PromptImage as PromptImage
from xla_engine.scheduler.request import Request as Request
from xla_engine.scheduler.request import Status as Status
from xla_engine.scheduler.samples import NO_CHOICE as NO_CHOICE
from xla_engine.scheduler.samples import NO_TOKEN as NO_TOKEN
from xla_engine.scheduler.samples import Decoded as Decoded
from xla_engine.scheduler.samples import Sample as Sample
from xla_engine.scheduler.scheduler import Scheduler as Scheduler
from xla_engine.scheduler.snapshot import Counters as Counters
from xla_engine.scheduler.snapshot import RequestView as RequestView
from xla_engine.scheduler.snapshot import SlotView as SlotView
from xla_engine.scheduler.snapshot import Snapshot as Snapshot
from xla_engine.scheduler.snapshot import Times as Times
from xla_engine.scheduler.steps.commit import Events as Events
from xla_engine.scheduler.steps.commit import TokenEvent as TokenEvent
