"""Messages that follow the proto and nothing else."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS = (0, 1, 2, 5, 96, 97, 1000, 2**31 - 1, 2**31, 2**32 - 1)
_FLOATS = (0.0, 1.0, 0.5, -1.0, 1e30, -1e30, float("nan"), float("inf"), 1e-40)
_TEXTS = ("", "a", "hello world", "\x00", "é日本🎉", "{}", "[1]", '{"type": "object"}', "x" * 300, "(", "start: /a+/")


def random_message(
    message: Message, rng: random.Random, *, leave_out: frozenset[str] = frozenset(), wild: bool = True
) -> Message:
    """Fills a message: each field with a chance, of a oneof at most one; without `wild` with values that may do."""
    for field in message.DESCRIPTOR.fields:
        if field.name in leave_out or rng.random() < 0.6:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.randrange(3)):
                getattr(message, field.name)[rng.choice(_INTS if wild else (5, 6))] = rng.choice(
                    _FLOATS if wild else (1.0,)
                )
        elif field.is_repeated:
            for _ in range(rng.randrange(4)):
                if field.message_type is not None:
                    random_message(getattr(message, field.name).add(), rng, leave_out=leave_out, wild=wild)
                else:
                    getattr(message, field.name).append(_value(field, rng, wild))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            random_message(getattr(message, field.name), rng, leave_out=leave_out, wild=wild)
        else:
            setattr(message, field.name, _value(field, rng, wild))
    return message


def _value(field: FieldDescriptor, rng: random.Random, wild: bool) -> Any:
    kind = field.cpp_type
    if not wild:
        tame = {FieldDescriptor.CPPTYPE_STRING: "a", FieldDescriptor.CPPTYPE_BOOL: rng.random() < 0.5}
        is_real = kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
        return tame.get(kind, rng.choice((0.5, 1.0)) if is_real else rng.randrange(1, 4))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(_TEXTS)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return rng.choice((*_INTS, 2**64 - 1))
    if kind == FieldDescriptor.CPPTYPE_INT32:
        return rng.choice((0, 1, -1, 2**31 - 1, -(2**31)))
    return rng.choice(_INTS)
