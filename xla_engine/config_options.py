"""What is known of each field of `EngineConfig`, for whoever shows, checks or compares options.

The fields declare it in their metadata, and nothing else does: the command line makes its options from it, with their
help and type; `EngineConfig` checks values against it, and decides by it what files and portable bits depend on.
"""

from dataclasses import Field, dataclass
from typing import Any, Literal

from xla_engine.errors import ConfigError
from xla_engine.utils.plain import integer_of
from xla_engine.utils.shown import shown

# Which commands have an option: "model" all that load a model; "slots" those of these that choose the number of slots;
# the others are groups that commands name (`xla_engine.cli._common`).
Group = Literal["model", "slots", "scheduling", "pooling", "lora", "limits", "timers", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, besides its name, type and default.

    help: what `--help` says; empty if no command has it as it is.
    section: the heading of `--help` above it. group: the commands that have it.
    metavar: what help calls the value, in place of the choices or limits.
    flag: name on the command line, if it is not the field's. no_flag: whether there is also `--no-NAME`.
    least: the least integer. above, low, high: limits of a number; `above` itself is excluded. unit: of the number.
    choices: the permitted words. words: the words that the command line offers, if the value is checked elsewhere.
    auto: whether "auto" is permitted, too.
    late: newer than some files; files omit it if it has its default.
    compared: whether files that differ in it have other results.
    bits: with `bits="portable"`, "free" changes no bit; "known": its bits are known on every processor; otherwise it
        must have its default. portable: the only values with known bits.
    """

    help: str = ""
    section: str = ""
    group: Group = "model"
    metavar: str | None = None
    flag: str = ""
    no_flag: bool = True
    least: int | None = None
    above: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    auto: bool = False
    late: bool = False
    compared: bool = True
    bits: Literal["free", "known"] | None = None
    portable: tuple[Any, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether values are numbers that need not be whole."""
        return self.above is not None or self.low is not None


def option(**known: Any) -> dict[str, Option]:
    """The metadata of a field."""
    return {"option": Option(**known)}


def option_of(each: Field[Any]) -> Option:
    """What a field of `EngineConfig` declares."""
    found: Option = each.metadata["option"]
    return found


def by_value(each: Field[Any], value: object) -> object:
    """A field's value, as an integer where it has to be one and is one by value: 2 for 2.0 and for NumPy's."""
    if option_of(each).least is None:
        return value
    number = integer_of(value)
    return value if number is None else number


def check_value(each: Field[Any], value: object) -> None:
    """Raise ConfigError unless a value fits its field's default and declaration."""
    about = option_of(each)
    if (value is None and each.default is None) or (about.auto and value == "auto"):
        return
    if about.least is not None:
        at_least(each.name, value, about.least)
    elif about.is_number:
        _check_number(each.name, value, about)
    elif about.choices and value not in about.choices:
        raise ConfigError(f"{each.name} must be one of {', '.join(about.choices)}, not {shown(value)}")
    elif isinstance(each.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{each.name} must be true or false, not {shown(value)}")


def _check_number(name: str, value: object, about: Option) -> None:
    """Raise ConfigError unless a value is a number within the limits of an option."""
    if isinstance(value, int | float) and is_number(value):
        over = value > about.above if about.above is not None else value >= (about.low or 0)
        if over and (value < 2**31 if about.high is None else value <= about.high):
            return
    unit = f" of {about.unit}" if about.unit else ""
    limits = f", {about.low} or more" if about.above is None else f" above {about.above}"
    if about.high is not None:
        limits = f" from {about.low}" if about.above is None else limits
        limits += f" to {about.high}" if about.above is None else f" and at most {about.high}"
    raise ConfigError(f"{name} must be a number{unit}{limits}, not {shown(value)}")


def at_least(name: str, value: object, low: int) -> None:
    """Raise ConfigError unless an option is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise ConfigError(f"{name} must be an integer of at least {low}, not {shown(value)}")


def check_ascending(name: str, sizes: object) -> None:
    """Raise ConfigError unless an option is ascending positive integers."""
    if not isinstance(sizes, tuple | list) or not sizes:
        raise ConfigError(f"{name} must be ascending positive sizes, not {shown(sizes)}")
    for low, size in zip((0, *sizes), sizes, strict=False):
        at_least(f"each next size of {name}", size, low + 1)


def is_number(value: object) -> bool:
    """Whether a value is a number, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
