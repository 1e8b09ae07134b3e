"""Directories, the compiler and keys from environment variables. The only file that reads the environment."""

import importlib.util
import os
import tempfile
from pathlib import Path

from xla_engine.errors import ConfigError

_AHEAD_OF_TIME = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to a cloud's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # of this host; the topology says what is compiled for
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile; only one can use chips
}


def requested_isa(isa: str = "auto") -> str:
    """The requested instruction set: `EngineConfig.isa`, else `XLA_ENGINE_ISA`, else "auto". Raises ConfigError."""
    # Imported late, because it imports jax, and callers that only need a directory should not wait for that.
    from xla_engine.config import AUTO, ISAS

    asked = isa if isa != AUTO else os.environ.get("XLA_ENGINE_ISA") or AUTO
    if asked not in ISAS:
        name = "isa" if isa != AUTO else "XLA_ENGINE_ISA"
        raise ConfigError(f"{name} must be one of {', '.join(ISAS)}, not {asked!r}")
    return asked


def bf16_products() -> str:
    """How products in bf16 multiply on processors with vdpbf16ps, with the same bits: `XLA_ENGINE_BF16_PRODUCTS`.

    "pairs": by that instruction. "widened": by fused multiply-adds. "auto", the default: by what a timing at the first
    start finds faster. Raises ConfigError.
    """
    asked = os.environ.get("XLA_ENGINE_BF16_PRODUCTS") or "auto"
    if asked not in ("auto", "pairs", "widened"):
        raise ConfigError(f"XLA_ENGINE_BF16_PRODUCTS must be one of auto, pairs, widened, not {asked!r}")
    return asked


def compile_cache_directory() -> Path:
    """The directory of compiled programs: `XLA_ENGINE_CACHE`, else in the user's cache directory."""
    if explicit := os.environ.get("XLA_ENGINE_CACHE"):
        return Path(explicit)
    return cache_directory() / "programs"


def native_cache_directory() -> Path:
    """The directory of compiled C++ kernels, inside that of compiled programs."""
    return compile_cache_directory() / "native"


def xla_flags() -> str:
    """XLA's options, on which compiled programs depend: `XLA_FLAGS`."""
    return os.environ.get("XLA_FLAGS", "")


def settings_of_programs() -> list[str]:
    """Every variable on which compiled programs, or what is known of them, may depend, with its value: JAX's, XLA's
    and this package's."""
    return sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))
    )


def compiler() -> str:
    """The C++ compiler: `CXX`, else the system's."""
    return os.environ.get("CXX") or "c++"


def api_keys_from_environment() -> tuple[str, ...]:
    """The API keys of the server: `XLA_ENGINE_API_KEY`, separated by commas."""
    return tuple(key.strip() for key in os.environ.get("XLA_ENGINE_API_KEY", "").split(",") if key.strip())


def api_key(name: str) -> str:
    """The API key in the variable of this name, for a client; empty if it is not set."""
    return os.environ.get(name, "").strip()


def cache_directory() -> Path:
    """The package's directory in the user's cache directory, or in the temporary directory if there is no home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "xla-engine"
    try:
        return Path.home() / ".cache" / "xla-engine"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"xla-engine-{os.getuid()}"


def embedded_model_directory() -> Path:
    """The checkpoint that ships inside the package."""
    return Path(__file__).parent / "embedded"


def named_platforms() -> str | None:
    """`JAX_PLATFORMS`, which JAX reads when it is imported."""
    return os.environ.get("JAX_PLATFORMS")


def has_accelerator() -> bool:
    """Whether JAX may choose another device than the CPU: it has a plugin for one, and `JAX_PLATFORMS` permits it."""
    permitted = not os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    return permitted and importlib.util.find_spec("jax_plugins") is not None


def visible_gpus() -> tuple[str, ...]:
    """The NVIDIA devices for this process: `CUDA_VISIBLE_DEVICES`, else all; none if `JAX_PLATFORMS` is the CPU."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return tuple(str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*")))
    return tuple(name.strip() for name in given.split(",") if name.strip())


def prepare_to_compile_ahead() -> None:
    """Set what libtpu reads when it compiles for chips that are not there, unless it is set. Called before JAX looks
    for devices: it then takes none of this machine's accelerators."""
    for name, value in _AHEAD_OF_TIME.items():
        os.environ.setdefault(name, value)
