"""What users write, checked: errors are one line, with the nearest name for an unknown one."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError
from pydantic import model_validator as _model_validator

from jaxinfer.errors import JaxinferError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``name``'s nearest neighbour in ``known`` as a clause, else the list of what is known."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file ``path``.

    Raises:
        JaxinferError: the file cannot be read, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxinferError(f"{path}: cannot read the file: {error.strerror}") from None
    except ValueError as error:
        raise JaxinferError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise JaxinferError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


class Options(BaseModel):
    """Base of all option sets: frozen, strictly typed, no unknown key, no NaN or infinity.

    Raises:
        JaxinferError: instead of pydantic's report, naming the first wrong option.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @_model_validator(mode="wrap")
    @classmethod
    def _one_line_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise JaxinferError(_explain(cls, error)) from None


def _explain(cls: type[Options], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    # A union reports the tag of each member it tried behind the field's name.
    name = str(first["loc"][0]) if first["loc"] else cls.__name__
    value = repr(first["input"])
    if len(value) > 60:
        value = value[:57] + "..."
    match first["type"]:
        case "extra_forbidden":
            return f"unknown option {name!r}: {did_you_mean(name, cls.model_fields)}"
        case "missing":
            return f"{cls.__name__} needs {name!r}"
        case "model_type":
            return f"must be a mapping of options, not {value}"
        case "value_error":
            return f"{name}: {first['ctx']['error']}"
        case _:
            wanted = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            return f"{name} is {value}, must be {wanted}{_hint(first['input'])}"


def _hint(value: object) -> str:
    """For a number as YAML 1.1 does not know it, without a dot."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]+[eE][-+]?[0-9]+", value):
        return f": YAML wants a dot, {float(value):.1e}"
    return ""


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key, count in Counter(str(key) for key in keys).items():
            if count > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"{key!r} stands {count} times in the mapping at line {line}")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        JaxinferError: the file cannot be read, is not YAML, or has a key twice.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise JaxinferError(f"{path}: {reason}") from None
    except yaml.YAMLError as error:
        raise JaxinferError(f"{path}: {' '.join(str(error).split())}") from None
