"""Everything a user can get wrong, by name. Each message names the remedy.

`code` is the machine-readable word written to batch error records; the vocabulary follows the OpenAI
and Azure batch services where they have a word.
"""

from __future__ import annotations

from typing import ClassVar


class XlaEngineError(Exception):
    """Base of all errors this package raises on purpose."""

    code: ClassVar[str] = "engine_error"


class InvalidRequestError(XlaEngineError, ValueError):
    """One request is wrong; no other is concerned."""

    code: ClassVar[str] = "invalid_request"


class TokenLimitError(InvalidRequestError):
    """Prompt plus max_tokens does not fit into max_model_len."""

    code: ClassVar[str] = "token_limit_exceeded"


class ChatTemplateError(InvalidRequestError):
    """A conversation cannot become a prompt: no chat template, or it fails on these messages."""

    code: ClassVar[str] = "chat_template_error"


class ConfigError(XlaEngineError, ValueError):
    """The engine was asked for something it cannot be."""

    code: ClassVar[str] = "invalid_config"


class CheckpointError(XlaEngineError, ValueError):
    """A model directory cannot be loaded; the message names file, tensor and remedy."""

    code: ClassVar[str] = "invalid_checkpoint"


class EngineFaultError(XlaEngineError, RuntimeError):
    """A step on the device failed where going on is not enough."""

    code: ClassVar[str] = "engine_fault"


class DeviceGoneError(EngineFaultError):
    """The device does not answer any more; the engine is given up."""

    code: ClassVar[str] = "device_gone"


class EngineClosedError(XlaEngineError, RuntimeError):
    """The engine was closed or died; submit elsewhere."""

    code: ClassVar[str] = "engine_closed"


class CheckpointWarning(UserWarning):
    """A checkpoint loads, but its weights are suspicious; the message names the tensor."""


class RecordError(XlaEngineError, ValueError):
    """A file is not a record, step log or trace this version can read; the message says where and why."""

    code: ClassVar[str] = "invalid_record"


class ReplayError(XlaEngineError, RuntimeError):
    """A request that ran again after a fault got another token than the first time."""

    code: ClassVar[str] = "replay_error"


class OutputError(XlaEngineError, ValueError):
    """A file cannot be the output of a run; the message says what to do."""

    code: ClassVar[str] = "cannot_write"


class ResumeError(XlaEngineError, ValueError):
    """An output file is not what this run would have left behind."""

    code: ClassVar[str] = "cannot_resume"


class CompareError(XlaEngineError, ValueError):
    """A file is not a result file; the message names file and line."""

    code: ClassVar[str] = "invalid_results"


class RecordMismatchError(XlaEngineError, ValueError):
    """The record was made by another model, configuration or version; the message says what differs."""

    code: ClassVar[str] = "record_mismatch"


class ScheduleError(XlaEngineError, ValueError):
    """The engine cannot run a schedule that was not drawn for it; the message names request and limit."""

    code: ClassVar[str] = "invalid_schedule"
