"""Typed look-ups in a checkpoint's configuration."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError


class Keys:
    """Typed look-ups in a configuration; an error names the file, the key and the value.

    Args:
        prefix: text in front of each key in errors.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``; ``default`` if the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def within(self, key: str) -> "Keys":
        """Return the keys of the object under ``key``, which are empty if it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Keys(self.path, value, f"{self.prefix}{key}.")

    def size(self, key: str, default: int | None = None, null: int | None = None) -> int:
        """Return the value of ``key``, which must be a positive integer.

        A null in the file counts as the argument ``null``; by default, it is refused.
        """
        value = self._required(key, default, null)
        if type(value) is not int or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value

    def heads(
        self, queries: str, groups: str, default: int | None = None, is_null_known: bool = False
    ) -> tuple[int, int]:
        """Return the numbers of query heads and of the KV heads that they share evenly.

        Args:
            default: number of KV heads if the key is absent; by default that of query heads.
            is_null_known: null counts as the number of query heads, as always without a default.
        """
        num_heads = self.size(queries)
        null = num_heads if default is None or is_null_known else None
        num_kv_heads = self.size(groups, default or num_heads, null)
        if num_heads % num_kv_heads:
            raise JaxinferError(
                f"{self.path}: {num_heads} query heads do not divide into groups over "
                f"{num_kv_heads} key-value heads"
            )
        return num_heads, num_kv_heads

    def count(self, key: str, default: int) -> int:
        """Return the value of ``key``, which must be an integer of at least 0."""
        value = self.values.get(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(key, value, "an integer from 0 on")
        return value

    def window(self, default: int | None) -> int | None:
        """Return the value of ``sliding_window``: a positive integer, or None for null."""
        if self.values.get("sliding_window", default) is None:
            return None
        return self.size("sliding_window", default)

    def number(self, key: str, default: float | None = None, null: float | None = None) -> float:
        """Return the value of ``key``, a positive number; see ``size`` for ``null``."""
        value = self._required(key, default, null)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def token(self, key: str, default: int | None = None) -> int | None:
        """Return the token id under ``key``, or None for null."""
        tokens = self.tokens(key, [] if default is None else [default])
        if len(tokens) > 1:
            raise self.wrong(key, self.values[key], "one token id")
        return tokens[0] if tokens else None

    def tokens(self, key: str, default: Sequence[int] = ()) -> list[int]:
        """Return the token ids under ``key``: a list, or one id; null means none."""
        value = self.values.get(key, list(default))
        value = [] if value is None else value
        tokens = value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in tokens):
            raise self.wrong(key, value, "a token id or a list of them")
        return tokens

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of ``key``, which must be true or false."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def only(self, key: str, supported: Any, *alike: Any) -> None:
        """Refuse any value of ``key`` except ``supported``, the default, and those in ``alike``."""
        value = self.values.get(key, supported)
        if value != supported and value not in alike:
            raise self.wrong(key, value, f"{supported!r}: nothing else is implemented")

    def wrong(self, key: str, value: Any, wanted: str) -> JaxinferError:
        """Return the error for an invalid value."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return JaxinferError(f"{self.path}: {self.prefix}{key} is {shown}, must be {wanted}")

    def _required(self, key: str, default: Any, null: Any) -> Any:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise JaxinferError(f"{self.path}: lacks {self.prefix + key!r}, which the model needs")
        return null if value is None else value
