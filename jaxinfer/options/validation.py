"""Checks options; errors are one line, with the nearest name for an unknown one."""

import difflib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
)
from pydantic import model_validator as _model_validator

from jaxinfer.errors import FAILURES, JaxinferError, one_line, raised
from jaxinfer.files.shipped import data_path, why_not


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause that suggests the nearest name in ``known``, or lists all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def shown(value: object) -> str:
    """Return a value as part of a message, shortened to its start."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in the JSON file ``path``.

    Raises:
        JaxinferError: the file cannot be read, or has no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxinferError(f"{path}: cannot read the file: {error.strerror}") from None
    except ValueError as error:
        raise JaxinferError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise JaxinferError(f"{path}: nested too deeply") from None
    if not isinstance(values, dict):
        raise JaxinferError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


def import_own(name: str) -> Any:
    """Import the object that ``my_module:thing`` names.

    Raises:
        JaxinferError: there is no such module, it has nothing of that name, or importing it raises
            an exception.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise JaxinferError(f"{name!r}: must look like my_module:thing")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise JaxinferError(f"{name!r}: {one_line(error)}") from error
    except FAILURES as error:
        # Any other type in a user's file.
        raise JaxinferError(f"{name!r}: importing {module} raises {raised(error)}") from error


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        JaxinferError: the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise JaxinferError(f"must be HOST:PORT, not {shown(address)}")
    if len(port) > 5 or int(port) > 65535:
        raise JaxinferError(f"{shown(address)}: the port must be at most 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


class OptionError(JaxinferError):
    """A mistake in one option; the message begins with its path, such as ``stages[0].group``."""


def within(name: str, error: JaxinferError) -> OptionError:
    """Return the error of an option with the name of its parent in front."""
    return OptionError(f"{name}{'.' if isinstance(error, OptionError) else ': '}{error}")


class Options(BaseModel):
    """Base of all option sets: frozen, strictly typed, no unknown key, no NaN or infinity.

    Raises:
        JaxinferError: instead of pydantic's report, naming the first wrong option with its path.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _explain(type(self), error) from None

    # __init__ does not make nested options; the outermost ones report errors, with the path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Check the options of a file or a caller."""
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            raise _explain(cls, error) from None

    @_model_validator(mode="wrap")
    @classmethod
    def _place_refusals(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Let pydantic record the paths of options that ``model_post_init`` refuses."""
        try:
            return handler(data)
        except JaxinferError as error:
            raise ValueError(error) from None


def make_with_options(kind: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return an object of a class that may have a class ``Options``; the object is callable.

    Raises:
        JaxinferError: the options are wrong, or making the object raises an exception.
    """
    wanted, name = getattr(kind, "Options", None), kind.__name__
    if wanted is not None and not (isinstance(wanted, type) and issubclass(wanted, Options)):
        raise JaxinferError(
            f"{name}.Options is {shown(wanted)}, must be a subclass of "
            "jaxinfer.options.validation.Options"
        )
    if wanted is None and options:
        raise OptionError(f"{next(iter(options))}: {name} has no options")
    try:
        made = kind(wanted.model_validate(options)) if wanted else kind()
    except JaxinferError:
        raise
    except FAILURES as error:
        raise JaxinferError(f"making a {name} raises {raised(error)}") from error
    if not callable(made):
        raise JaxinferError(f"a {name} cannot be called, must be as a function is")
    found: Callable[..., Any] = made
    return found


T = TypeVar("T")


def _text_keys(value: object) -> object:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


# Names of the user's choice, which may look like numbers in YAML.
Named = Annotated[dict[str, T], BeforeValidator(_text_keys)]


def _by_name(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        raise ValueError(f"must be a name, or a mapping of name and options, not {shown(value)}")
    return value


# A ``name`` and options; a name alone means one without options.
ByName = Annotated[dict[str, Any], BeforeValidator(_by_name)]

# Our words for pydantic's kinds of errors, where its own are not for users.
_WANTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "a string",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


def _explain(kind: type[Options], error: ValidationError) -> JaxinferError:
    # If a required option is mistyped, it is also missing; the mistyped name says more.
    first = min(error.errors(include_url=False), key=lambda each: each["type"] == "missing")
    path, options = _follow(kind, first["loc"])
    value = shown(first["input"])
    wanted = _WANTED.get(first["type"])
    match first["type"]:
        case "extra_forbidden" | "invalid_key":
            known = did_you_mean(str(first["loc"][-1]), options.model_fields)
            return OptionError(f"{path}: unknown option, {known}")
        case "missing":
            field = options.model_fields.get(str(first["loc"][-1]))
            return OptionError(f"{path} is missing{_entries(field.annotation) if field else ''}")
        case "value_error":
            reason = first["ctx"]["error"]
            refusal = reason.args[0]
            inner = refusal if isinstance(refusal, JaxinferError) else JaxinferError(str(reason))
            return within(path, inner) if path else inner
        case _ if not path:
            return JaxinferError(f"must be {wanted}, not {value}")
        case _:
            said = re.sub(r"^\w+ should ", "", first["msg"]).partition(" after validation")[0]
            wanted = f"be {wanted}" if wanted else said
            return OptionError(
                f"{path} is {value}, must {wanted}{_hint(first['input'], first['type'])}"
            )


def _follow(kind: type[Options], loc: Sequence[int | str]) -> tuple[str, type[Options]]:
    """Return the path that pydantic reports, as a user would write it, and its options class."""
    path, options = "", kind
    annotation: Any = kind
    for key in map(_as_name, loc):
        at = _without_none(annotation)
        if isinstance(at, type) and issubclass(at, Options):
            options, field = at, at.model_fields.get(key)
            path, annotation = f"{path}.{key}", field.annotation if field else None
        elif get_origin(at) is dict:
            path, annotation = f"{path}.{key}", get_args(at)[1]
        elif get_origin(at) is tuple:
            path, annotation = f"{path}[{key}]", get_args(at)[0]
        else:
            break  # The rest of the path says which member of a union was tried.
    return path.removeprefix("."), options


def _entries(annotation: Any) -> str:
    if get_origin(at := _without_none(annotation)) is not dict:
        return ""
    entry = _without_none(get_args(at)[1])
    if not (isinstance(entry, type) and issubclass(entry, Options)):
        return ""
    return f", must be {{NAME: {{{': ..., '.join(entry.model_fields)}: ...}}}}"


def _as_name(key: int | str) -> str:
    """Return a key unchanged if it can only be a name, otherwise as ``shown``."""
    text = str(key)
    return text if re.fullmatch(r"[\w.-]{1,60}", text) else shown(text)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _without_none(get_args(annotation)[0])
    members = [member for member in get_args(annotation) if member is not NoneType]
    is_optional = NoneType in get_args(annotation) and len(members) == 1
    return _without_none(members[0]) if is_optional else annotation


def _hint(value: object, kind: str) -> str:
    """Suggest how to write a number that YAML 1.1 reads as text because it has no dot."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]+[eE][-+]?[0-9]+", value):
        return ""
    number = float(value)
    if kind == "float_type":
        return f": YAML wants a dot, {number:.1e}"
    is_short = kind == "int_type" and number < 1e15 and number.is_integer()
    return f": {int(number)}" if is_short else ""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, since the first value would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check keys before merging (``<<``), since merged keys may be overridden."""
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, yaml.MappingNode)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        merge = "tag:yaml.org,2002:merge"
        names = [key.value if key.tag == merge else self.construct_object(key) for key in keys]
        # As names, 1 and "1" are equal; as keys, 1 and 1.0 are.
        for name, count in [*Counter(map(str, names)).items(), *Counter(names).items()]:
            if count > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{name!r} stands {count} times in the mapping at line {line}")
        return node


def parse_yaml(text: str) -> Any:
    """Return the contents of a YAML text.

    Raises:
        JaxinferError: it is not YAML, has a key twice, or is nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise JaxinferError(one_line(error)) from None
    except RecursionError:
        raise JaxinferError("nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as error:
        # Errors of yaml for 2024-13-45, for numbers with thousands of digits, and for !!bool x.
        raise JaxinferError(f"not a YAML value: {one_line(error)}") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file, which may be a shipped one.

    Raises:
        JaxinferError: the file cannot be read, or ``parse_yaml`` refuses its contents.
    """
    try:
        return parse_yaml(data_path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = why_not(path, error) if isinstance(error, OSError) else "not UTF-8 text"
        raise JaxinferError(f"{path}: {reason}") from None
    except JaxinferError as error:
        raise JaxinferError(f"{path}: {error}") from None
