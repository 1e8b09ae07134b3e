"""The errors that this package raises. Each message names the remedy.

`code` is the machine-readable word in batch error records. It follows the OpenAI and Azure batch services if they have
a word.
"""

from typing import ClassVar


class XlaEngineError(Exception):
    """Base of all errors this package raises on purpose."""

    code: ClassVar[str] = "engine_error"

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code


class InvalidRequestError(XlaEngineError, ValueError, code="invalid_request"):
    """One request is invalid; others are not affected."""


class AdaptersBusyError(InvalidRequestError):
    """All adapter slots are pinned or in use by unfinished requests; try again later."""


class TokenLimitError(InvalidRequestError, code="token_limit_exceeded"):
    """Prompt plus max_tokens does not fit into max_model_len."""


class ChatTemplateError(InvalidRequestError, code="chat_template_error"):
    """A conversation cannot be rendered: there is no chat template, or it fails on these messages."""


class InvalidImageError(InvalidRequestError, code="invalid_image"):
    """A picture cannot be read; the message says why."""


class ImageTooLargeError(InvalidImageError, code="image_too_large"):
    """A picture exceeds a limit on its bytes, pixels or sides; the message names it."""


class ImageNotAllowedError(InvalidImageError, code="image_not_allowed"):
    """A picture comes from a place that the operator does not allow; the message names option or remedy."""


class ImageUnreachableError(InvalidImageError, code="image_unreachable"):
    """A picture cannot be fetched or read from its place; the message says why."""


class ConfigError(XlaEngineError, ValueError, code="invalid_config"):
    """The configuration of the engine is invalid."""


class OneEngineError(ConfigError, code="one_engine_only"):
    """Several engines (`data_parallel_size`) cannot do this; the message says what to do instead."""


class CheckpointError(XlaEngineError, ValueError, code="invalid_checkpoint"):
    """A model directory cannot be loaded; the message names file, tensor and remedy."""


class NotPackableError(CheckpointError):
    """Quantised weights of a checkpoint cannot stay packed, but can be dequantised."""


class EngineFaultError(XlaEngineError, RuntimeError, code="engine_fault"):
    """A step on the device failed, and the engine cannot recover."""


class DeviceLostError(EngineFaultError, code="device_gone"):
    """The device does not answer any more; the engine is closed."""


class EngineClosedError(XlaEngineError, RuntimeError, code="engine_closed"):
    """The engine was closed or has failed; use another one."""


class RecordError(XlaEngineError, ValueError, code="invalid_record"):
    """A file is not a record, step log or trace this version can read; the message says where and why."""


class ReplayError(XlaEngineError, RuntimeError, code="replay_error"):
    """A request that ran again after a fault got another token than the first time."""


class OutputError(XlaEngineError, ValueError, code="cannot_write"):
    """A file cannot be the output of a run; the message says what to do."""


class ResumeError(XlaEngineError, ValueError, code="cannot_resume"):
    """An output file was not written by a run like this one, so it cannot be resumed."""


class CompareError(XlaEngineError, ValueError, code="invalid_results"):
    """A file is not a result file; the message names file and line."""


class ReceiptError(XlaEngineError, ValueError, code="invalid_receipts"):
    """A file of receipts cannot be read, or cannot be checked here; the message says why and what would help."""


class LogitsFileError(XlaEngineError, ValueError, code="invalid_logits_file"):
    """A file of saved logits is damaged, or belongs to another text or model; the message says what differs."""


class RecordMismatchError(XlaEngineError, ValueError, code="record_mismatch"):
    """The record was made by another model, configuration or version; the message says what differs."""


class ScheduleError(XlaEngineError, ValueError, code="invalid_schedule"):
    """The engine cannot run this schedule, which was made for another; the message names request and limit."""
