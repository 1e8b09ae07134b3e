"""`LoRARequest`: the adapter of a request."""

from dataclasses import dataclass

from xla_engine.errors import InvalidRequestError
from xla_engine.utils.shown import shown


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, with vLLM's field names. It is loaded on first use. Raises InvalidRequestError.

    lora_name: its name as the `model` of batch lines and HTTP requests.
    lora_int_id: 1 or more; identifies the adapter in an engine.
    lora_path: a directory that PEFT saved, with adapter_config.json and adapter_model.safetensors.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequestError(f"lora_int_id must be an integer of at least 1, not {shown(number)}")
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if name == "lora_path" and hasattr(value, "__fspath__"):
                object.__setattr__(self, name, value := str(value))
            if not isinstance(value, str) or not value:
                raise InvalidRequestError(f"{name} must be a string that is not empty, not {shown(value)}")
