"""What the host decides: which request gets which slot, which prompt chunks run, which rows decode.

Pure Python on the standard library: no device, no clock, no threads, no randomness. The same code drives the
engine, a property test with a stand-in runner, and a simulator.
"""

from scheduler.config import SchedulerConfig as SchedulerConfig
from scheduler.crediting import Events as Events
from scheduler.plan import NO_CHOICE as NO_CHOICE
from scheduler.plan import NO_TOKEN as NO_TOKEN
from scheduler.plan import BlockCopy as BlockCopy
from scheduler.plan import BlockTable as BlockTable
from scheduler.plan import Chunk as Chunk
from scheduler.plan import Decision as Decision
from scheduler.plan import Decoded as Decoded
from scheduler.plan import Plan as Plan
from scheduler.plan import ResultMismatchError as ResultMismatchError
from scheduler.plan import Reuse as Reuse
from scheduler.plan import Row as Row
from scheduler.plan import Sample as Sample
from scheduler.plan import Slot as Slot
from scheduler.plan import StepResult as StepResult
from scheduler.plan import Swap as Swap
from scheduler.plan import TokenEvent as TokenEvent
from scheduler.request import PRIORITIES as PRIORITIES
from scheduler.request import FinishReason as FinishReason
from scheduler.request import Request as Request
from scheduler.request import Status as Status
from scheduler.scheduler import Scheduler as Scheduler
from scheduler.slots import Slots as Slots
from scheduler.slots import StaleSlotError as StaleSlotError
from scheduler.snapshot import Counters as Counters
from scheduler.snapshot import RequestView as RequestView
from scheduler.snapshot import SlotView as SlotView
from scheduler.snapshot import Snapshot as Snapshot
from scheduler.waiting import QueueFullError as QueueFullError
from scheduler.waiting import WaitingQueue as WaitingQueue
