"""Classes in documents, by name: types, enum members, dataclasses, named tuples, dict subclasses.

A name is looked up among the modules that are loaded and nowhere else, so a document can neither
import a module nor run a constructor. Knows how instances are taken apart and put together.
Knows nothing of numbers, arrays or builtin containers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum, Flag
from functools import cached_property
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

from torch_ckpt.errors import ClassNotLoaded
from torch_ckpt.staging.scalars import read_str, write_str
from torch_ckpt.staging.walk import Json, Reading, Tag, Write, Writing, shown, tag

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_PICKLE_HOOKS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")


def find(name: str) -> type | None:
    """The class called "module:qualified.name", if its module is loaded; runs no code of its own.

    `__dict__` is read past a module's own attribute hooks: lazy modules import on any access.
    """
    module_name, _, qualified = name.partition(":")
    module = sys.modules.get(module_name)
    if not issubclass(type(module), ModuleType):
        return None
    scope: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    found: Any = None
    for part in qualified.split("."):
        found = scope.get(part)
        if not issubclass(type(found), type):
            return None
        scope = type.__dict__["__dict__"].__get__(found)
    return found


def reference(kind: type) -> str | None:
    """The name by which `find` gives this very class, or None."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if find(name) is kind else None


def _resolve(walk: Reading, name: Json, path: str) -> type:
    kind = find(walk.text(name, path))
    if kind is None and ":" not in name:
        walk.refuse(path, f"{name[:200]!r} where the name of a class should be")
    if kind is None:
        raise ClassNotLoaded(key=shown(path), name=name[:200])
    return kind


def _static(kind: type, name: str) -> Any:
    """A class attribute as it is in the class, no descriptor called."""
    for owner in type.__dict__["__mro__"].__get__(kind):
        scope = type.__dict__["__dict__"].__get__(owner)
        if name in scope:
            return scope[name]
    return MISSING


def _built_on(kind: type, *bases: type) -> bool:
    """Whether every ancestor was made by a class statement, these and object aside."""
    return all(
        owner is object or owner in bases or owner.__flags__ & _HEAP_TYPE for owner in kind.__mro__
    )


def _has_hooks(kind: type) -> bool:
    """Whether a class says itself how it is pickled; what dataclasses generate does not count."""
    found = [_static(kind, name) for name in _PICKLE_HOOKS]
    return any(
        hook is not MISSING
        and hook is not getattr(object, name, None)
        and hook is not vars(object).get(name)
        and getattr(hook, "__module__", None) != "dataclasses"
        for name, hook in zip(_PICKLE_HOOKS, found, strict=True)
    )


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    return {
        name: item
        for owner in reversed(kind.__mro__)
        if owner.__flags__ & _HEAP_TYPE
        for name, item in vars(owner).items()
        if type(item) is MemberDescriptorType
    }


def _attributes(value: object) -> dict[str, Any]:
    """Everything an instance holds in its slots and its dict."""
    slots = _slots(type(value))
    held = dict(getattr(value, "__dict__", {}))
    for name, slot in slots.items():
        try:
            held[name] = slot.__get__(value)
        except AttributeError:
            continue
    return held


def _write_type(walk: Writing, value: type, path: str) -> Json:
    name = reference(value)
    return walk.pickle(value, path) if name is None else {"$type": name}


def _write_enum(walk: Writing, value: Enum, path: str) -> Json:
    kind = type(value)
    name = reference(kind)
    if name is not None:
        if value._name_ is not None and kind._member_map_.get(value._name_) is value:
            return {"$enum": name, "member": write_str(walk, value._name_, path)}
        if isinstance(value, Flag) and _combines_plainly(kind) and type(value._value_) is int:
            return {"$enum": name, "bits": walk.value(value._value_, path)}
    return walk.pickle(value, path)


def _combines_plainly(kind: type) -> bool:
    """Whether combinations of flags are made by the enum module alone."""
    return type(kind).__module__ == "enum" and not any(
        name in vars(owner)
        for owner in kind.__mro__
        if owner.__module__ != "enum" and owner.__flags__ & _HEAP_TYPE
        for name in ("_missing_", "__new_member__", "__init__")
    )


def _read_enum(walk: Reading, document: dict[str, Json], path: str) -> object:
    kind: Any = _resolve(walk, document["$enum"], path)
    if not issubclass(kind, Enum):
        walk.refuse(path, f"a member of {document['$enum'][:200]!r}, which is not an Enum")
    if "member" in document and "bits" not in document:
        member = kind._member_map_.get(read_str(walk, document["member"], path))
        if member is None:
            walk.refuse(path, f"a member that {document['$enum'][:200]!r} has not")
        return member
    bits = walk.value(document["bits"], path)
    if "member" in document or type(bits) is not int or not issubclass(kind, Flag):
        walk.refuse(path, "an enum member with the wrong kind of value")
    if not _combines_plainly(kind):
        walk.refuse(path, f"a combination of {document['$enum'][:200]!r}, which makes its own")
    return kind(bits)


def _write_dataclass(walk: Writing, value: Any, path: str) -> Json:
    kind = type(value)
    name = reference(kind)
    if name is None or not _built_on(kind) or _has_hooks(kind):
        return walk.pickle(value, path)
    held = _attributes(value)
    declared = {item.name: item for item in fields(kind)}
    if not all(_may_hold(kind, declared, key) for key in held) or _lacking(declared, held):
        return walk.pickle(value, path)
    walk.enter(value, path, 2)
    prefix = f"{path}." if path else ""
    document = {key: walk.value(item, prefix + key) for key, item in held.items()}
    walk.leave(value)
    return {"$dataclass": name, "fields": document}


def _may_hold(kind: type, declared: Mapping[str, Field[Any]], name: object) -> bool:
    """Whether an attribute is a field, a cached property, or hides nothing of its class."""
    if not isinstance(name, str) or not name.isidentifier():
        return False
    found = _static(kind, name)
    if found is MISSING or type(found) in (cached_property, MemberDescriptorType):
        return True
    return name in declared and not hasattr(type(found), "__set__")


def _lacking(declared: Mapping[str, Field[Any]], held: Mapping[str, object]) -> list[str]:
    """Fields that an instance must have had."""
    return [
        name
        for name, item in declared.items()
        if name not in held and item.init and item.default is MISSING
    ]


def _read_dataclass(walk: Reading, document: dict[str, Json], path: str) -> object:
    name = document["$dataclass"]
    kind = _resolve(walk, name, path)
    if not is_dataclass(kind) or not _built_on(kind) or _has_hooks(kind):
        walk.refuse(path, f"an instance of {name[:200]!r}, which is not a plain dataclass")
    if type(document["fields"]) is not dict:
        walk.refuse(path, "a dataclass without fields")
    declared = {item.name: item for item in fields(kind)}
    held = document["fields"]
    odd = [key for key in held if not _may_hold(kind, declared, key)]
    if odd or _lacking(declared, held):
        walk.refuse(
            path, f"a {name[:200]!r} with the fields {sorted(held)[:20]}, not those of the class"
        )
    value: Any = object.__new__(kind)
    slots = _slots(kind)
    for key, item in held.items():
        found = walk.value(item, f"{path}.{key}" if path else key)
        if key in slots:
            slots[key].__set__(value, found)
        else:
            object.__getattribute__(value, "__dict__")[key] = found
    for key in declared.keys() - held.keys():
        if key in slots and declared[key].default is not MISSING:
            slots[key].__set__(value, declared[key].default)
    return value


def is_namedtuple(kind: type) -> bool:
    """Whether a class is a tuple whose items have names, made by a class statement."""
    names = _static(kind, "_fields")
    return (
        issubclass(kind, tuple)
        and _built_on(kind, tuple)
        and type(names) is tuple
        and all(type(name) is str for name in names)
    )


def _write_namedtuple(walk: Writing, value: Any, path: str) -> Json:
    kind = type(value)
    name = reference(kind)
    names = _static(kind, "_fields")
    items = tuple.__iter__(value)
    if name is None or getattr(value, "__dict__", None) or tuple.__len__(value) != len(names):
        return walk.pickle(value, path)
    return {"$namedtuple": name, "names": list(names), "values": walk.values(value, items, path)}


def _read_namedtuple(walk: Reading, document: dict[str, Json], path: str) -> object:
    name = document["$namedtuple"]
    kind = _resolve(walk, name, path)
    values = walk.values(document["values"], path)
    if not is_namedtuple(kind) or document["names"] != list(_static(kind, "_fields")):
        walk.refuse(path, f"a {name[:200]!r} with other names than the class has")
    if len(values) != len(document["names"]):
        walk.refuse(path, f"a {name[:200]!r} of another length")
    return tuple.__new__(kind, values)


def _dict_base(kind: type) -> type[dict[Any, Any]] | None:
    """The builtin whose items are all that an instance of a dict subclass has, or None."""
    if not issubclass(kind, dict) or issubclass(kind, defaultdict) or _slots(kind):
        return None
    if not _built_on(kind, dict, OrderedDict, Counter) or is_dataclass(kind):
        return None
    return OrderedDict if issubclass(kind, OrderedDict) else dict


def _write_dict_subclass(walk: Writing, value: Any, path: str) -> Json:
    base, name = _dict_base(type(value)), reference(type(value))
    held = _instance_dict(value)
    if base is None or name is None or held:
        return walk.pickle(value, path)
    return {"$mapping": name, "items": walk.pairs(value, base.items(value), path)}


def _instance_dict(value: object) -> object:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _read_dict_subclass(walk: Reading, document: dict[str, Json], path: str) -> object:
    name = document["$mapping"]
    kind = _resolve(walk, name, path)
    base = _dict_base(kind)
    if base is None:
        walk.refuse(path, f"items of {name[:200]!r}, which is not a plain subclass of dict")
    value: Any = base.__new__(kind)
    for key, item in walk.pairs(document["items"], path):
        base.__setitem__(value, key, item)
    return value


def _write_namespace(walk: Writing, value: Any, path: str) -> Json:
    mark = "$namespace" if type(value) is argparse.Namespace else "$simple_namespace"
    return {mark: walk.pairs(value, vars(value).items(), path)}


def _read_namespace(walk: Reading, document: dict[str, Json], path: str) -> object:
    ((mark, items),) = document.items()
    value = argparse.Namespace() if mark == "$namespace" else SimpleNamespace()
    for key, item in walk.pairs(items, path):
        if type(key) is not str:
            walk.refuse(path, "a namespace with a name that is not a string")
        vars(value)[key] = item
    return value


def write_by_class(kind: type) -> Write | None:
    """Who writes the instances of a class that no table names; None: pickle does."""
    if issubclass(kind, Enum):
        return _write_enum
    if issubclass(kind, type):
        return _write_type
    if issubclass(kind, dict):
        return _write_dict_subclass
    if is_namedtuple(kind):
        return _write_namedtuple
    return _write_dataclass if is_dataclass(kind) else None


WRITERS: Mapping[type, Write] = {
    type: _write_type,
    argparse.Namespace: _write_namespace,
    SimpleNamespace: _write_namespace,
}

READERS: Mapping[str, Tag] = {
    "$type": tag(lambda walk, document, path: _resolve(walk, document["$type"], path)),
    "$enum": tag(_read_enum, optional="member bits"),
    "$dataclass": tag(_read_dataclass, "fields"),
    "$namedtuple": tag(_read_namedtuple, "names values"),
    "$mapping": tag(_read_dict_subclass, "items"),
    "$namespace": tag(_read_namespace),
    "$simple_namespace": tag(_read_namespace),
}
