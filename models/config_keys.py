"""Typed look-ups in a checkpoint's configuration."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError


class Keys:
    """Typed look-ups in a configuration; an error names the file, the key and the value.

    Args:
        prefix: what stands before each key in errors.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """The value; ``default`` where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def within(self, key: str) -> "Keys":
        """The keys of the object under ``key``; none where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Keys(self.path, value, f"{self.prefix}{key}.")

    def size(self, key: str, default: int | None = None, null: int | None = None) -> int:
        """A positive integer; ``null`` is what null means, which is refused without."""
        value = self._required(key, default, null)
        if type(value) is not int or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value

    def heads(
        self, queries: str, groups: str, default: int | None = None, is_null_known: bool = False
    ) -> tuple[int, int]:
        """Query heads, and the KV heads that share them evenly.

        Args:
            default: KV heads where the key is absent; by default as many as query heads.
            is_null_known: null means as many as query heads, too, as it does without a default.
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
        """An integer from 0 on."""
        value = self.values.get(key, default)
        if type(value) is not int or value < 0:
            raise self.wrong(key, value, "an integer from 0 on")
        return value

    def window(self, default: int | None) -> int | None:
        """``sliding_window``: a positive integer, or null, which is none."""
        if self.values.get("sliding_window", default) is None:
            return None
        return self.size("sliding_window", default)

    def number(self, key: str, default: float | None = None, null: float | None = None) -> float:
        """A positive number; ``null`` as for ``size``."""
        value = self._required(key, default, null)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def token(self, key: str, default: int | None = None) -> int | None:
        """A token id or none, which null is."""
        tokens = self.tokens(key, [] if default is None else [default])
        if len(tokens) > 1:
            raise self.wrong(key, self.values[key], "one token id")
        return tokens[0] if tokens else None

    def tokens(self, key: str, default: Sequence[int] = ()) -> list[int]:
        """Token ids, given as one, a list, or not at all; null is none."""
        value = self.values.get(key, list(default))
        value = [] if value is None else value
        tokens = value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in tokens):
            raise self.wrong(key, value, "a token id or a list of them")
        return tokens

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def only(self, key: str, supported: Any, *alike: Any) -> None:
        """Refuse any value but ``supported``, which an absent key means, and those alike."""
        value = self.values.get(key, supported)
        if value != supported and value not in alike:
            raise self.wrong(key, value, f"{supported!r}: nothing else is implemented")

    def wrong(self, key: str, value: Any, wanted: str) -> JaxinferError:
        """The error for a value that will not do."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return JaxinferError(f"{self.path}: {self.prefix}{key} is {shown}, must be {wanted}")

    def _required(self, key: str, default: Any, null: Any) -> Any:
        value = self.values.get(key, default)
        if value is None and key not in self.values:
            raise JaxinferError(f"{self.path}: lacks {self.prefix + key!r}, which the model needs")
        return null if value is None else value
