"""Converts any Python value to one that JSON can represent. Asks NumPy and pandas values without importing either."""

from __future__ import annotations

from typing import Any

MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 60
REPR_LIMIT = 10_000
# Python refuses to format an integer of more than 4,300 digits.
MAX_INTEGER_BITS = 14_000


class TooLargeError(Exception):
    """The value is larger than a result may be."""

    def __init__(self) -> None:
        super().__init__(f"the returned value is too large: a result holds at most {MAX_BYTES} bytes")


def plain(value: object) -> Any:
    """Convert a value to None, bool, int, float, str, list or dict with string keys.

    NumPy and pandas objects become lists and numbers, a DataFrame a list of rows; NaN and infinities stay.
    Any other value becomes its repr.

    Raises:
        TooLargeError: the value does not fit into a result.
    """
    return _Encoder().encode(value, 0)


def fingerprint(value: object) -> str:
    """Return a hash that two equal values have in two processes, where sets have another order and objects move."""
    import hashlib  # only here: each import costs the other operations time
    import json

    text = json.dumps(_ComparableEncoder().encode(value, 0))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


class _Encoder:
    """Counts the size of its output, since a small value can expand without end (a list that contains itself twice)."""

    def __init__(self) -> None:
        self._room = MAX_BYTES

    def encode(self, value: object, depth: int) -> Any:
        self._spend(1)
        # A subclass (numpy.float64, an enum) becomes the plain type, without calls of its own methods.
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int.__int__(value) if int.bit_length(value) <= MAX_INTEGER_BITS else "(a very large integer)"
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return self._string(str.__str__(value))
        if depth >= MAX_DEPTH:
            # Not its repr: for lists that contain each other many times, repr takes for ever.
            return self._string(f"<{type(value).__name__} nested too deeply>")
        if isinstance(value, type):
            return self._representation(value)
        if isinstance(value, (list, tuple)):
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return self._dict(value, depth)
        return self._converted(value, depth)

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        return {self._key(key): self.encode(item, depth + 1) for key, item in value.items()}

    def _converted(self, value: object, depth: int) -> Any:
        """Ask the object for a simpler form of itself, which NumPy, pandas, Decimal and similar types provide."""
        for method, arguments in (("tolist", ()), ("item", ()), ("to_dict", ("records",)), ("__float__", ())):
            convert = getattr(value, method, None)
            if convert is None:
                continue
            try:
                simpler = convert(*arguments)
            except Exception:  # an unrelated method of that name, or a value without such a form
                continue
            if type(simpler) is not type(value):  # numpy.longdouble.item() returns itself
                return self.encode(simpler, depth + 1)
        return self._unconverted(value, depth)

    def _unconverted(self, value: object, depth: int) -> Any:
        return self._representation(value)

    def _key(self, key: object) -> str:
        try:
            text = str(key)
        except Exception:  # raised by the family's __str__
            return self._representation(key)
        return self._string(text)

    def _representation(self, value: object) -> str:
        try:
            text = repr(value)
        except Exception:  # raised by the family's __repr__, or the value is nested too deeply
            text = f"<{type(value).__name__} without a repr>"
        return self._string(text[:REPR_LIMIT])

    def _string(self, text: str) -> str:
        self._spend(len(text))
        return text

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise TooLargeError


class _ComparableEncoder(_Encoder):
    """Sorts sets and dicts, and encodes objects by their fields. Objects of a type without fields are all equal."""

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        pairs = [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in value.items()]
        return {"dict": _sorted(pairs)}

    def _converted(self, value: object, depth: int) -> Any:
        if isinstance(value, (set, frozenset)):
            return {"set": _sorted([self.encode(item, depth + 1) for item in value])}
        return super()._converted(value, depth)

    def _unconverted(self, value: object, depth: int) -> Any:
        import datetime
        from collections.abc import KeysView, ValuesView
        from pathlib import PurePath
        from re import Pattern

        if isinstance(value, (bytes, bytearray)):
            return {"bytes": self._string(value.hex())}
        # Their repr is the same in each process, and their fields are not: a path keeps its hash.
        dates = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
        if isinstance(value, (complex, range, PurePath, Pattern, *dates)):
            return self._representation(value)
        if isinstance(value, (KeysView, ValuesView)):
            return _sorted([self.encode(item, depth + 1) for item in value])
        kind = self._string(type(value).__qualname__)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(name, str):  # a function, method or module
            return [kind, self._string(name)]
        return [kind, self.encode(_fields(value), depth + 1)]

    def _representation(self, value: object) -> str:
        import re

        return re.sub("0x[0-9a-f]+", "0x", super()._representation(value))


def _sorted(encoded: list[Any]) -> list[Any]:
    import json

    return sorted(encoded, key=json.dumps)


def _fields(value: object) -> dict[str, Any]:
    """Return an object's fields: those of its __dict__ and of its classes' __slots__."""
    fields = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                fields[slot] = getattr(value, slot)
    return fields
