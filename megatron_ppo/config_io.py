"""Reading the configuration: dataclass defaults, then ``--config FILE`` (YAML), then the command line.

YAML holds one mapping a section, or flat field names, or both::

    parallel: {tensor_model_parallel_size: 2}
    lr: 1.0e-6

Unknown keys are refused with file, line and the nearest valid name. ``write_config`` writes the resolved configuration in the same form.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from megatron_ppo.config import SECTION_OF, Config

Options = TypeVar("Options")

SECTIONS: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Config)}


def parse_arguments(arguments: Sequence[str], *, program: str) -> Config:
    """The configuration of a command line. Exits with code 2 and a message on standard error where it is not valid."""
    return parse_command(arguments, None, program=program)[1]


def parse_command(arguments: Sequence[str], options: Options, *, program: str) -> tuple[Options, Config]:
    """A command's own options and the configuration, out of one flat command line. Exits as ``parse_arguments`` does.

    ``options``: a dataclass instance with the options' defaults, its fields named unlike every field of the configuration; None: none.
    """
    rest, config_file = _take_config_file(list(arguments), program)
    try:
        base = read_yaml(config_file) if config_file is not None else Config()
    except (ValueError, OSError) as error:
        raise SystemExit(f"{program}: {error}") from None
    own: dict[str, Any] = {} if options is None else {"command": options}
    parts = own | {name: getattr(base, name) for name in SECTIONS}
    line = dataclasses.make_dataclass("CommandLine", [(name, type(part), part) for name, part in parts.items()], frozen=True)
    found = tyro.cli(
        tyro.conf.OmitArgPrefixes[line],  # type: ignore[misc, valid-type]
        args=rest,
        prog=f"python -m {program}" if program.startswith("megatron_ppo ") else program,
        description="Flags stand above the YAML file given by --config FILE, which stands above the defaults shown here.",
    )
    return getattr(found, "command", options), Config(**{name: getattr(found, name) for name in SECTIONS})


def _take_config_file(arguments: list[str], program: str) -> tuple[list[str], Path | None]:
    """Take ``--config FILE`` (or ``--config=FILE``) out of the arguments."""
    for index, argument in enumerate(arguments):
        if argument == "--config":
            if index + 1 == len(arguments):
                raise SystemExit(f"{program}: --config needs a file")
            return arguments[:index] + arguments[index + 2 :], Path(arguments[index + 1])
        if argument.startswith("--config="):
            return arguments[:index] + arguments[index + 1 :], Path(argument.removeprefix("--config="))
    return arguments, None


def read_yaml(path: Path) -> Config:
    """The defaults with the fields of a YAML file set. ``ValueError`` names file and line of what is wrong."""
    if not path.is_file():
        raise ValueError(f"--config {path}: there is no such file")
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    if root is None:
        return Config()
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:{root.start_mark.line + 1}: the file must hold a mapping of sections or fields")
    config = Config()
    seen: dict[str, int] = {}
    for name, node, line in _fields_of(root, path):
        if name in seen:
            raise ValueError(f"{path}:{line}: {name} was already set on line {seen[name]}")
        seen[name] = line
        value = yaml.SafeLoader("").construct_document(node)
        config = config.replace(**{name: _checked(name, value, f"{path}:{line}")})
    return config


def _fields_of(root: yaml.MappingNode, path: Path) -> list[tuple[str, yaml.Node, int]]:
    """(flat field name, value node, line) of every field in the file."""
    found: list[tuple[str, yaml.Node, int]] = []
    for key, value in root.value:
        line = key.start_mark.line + 1
        if key.value in SECTIONS and isinstance(value, yaml.MappingNode):
            for inner, inner_value in value.value:
                inner_line = inner.start_mark.line + 1
                if SECTION_OF.get(inner.value) != key.value:
                    names = [n for n, section in SECTION_OF.items() if section == key.value]
                    raise ValueError(f"{path}:{inner_line}: {_unknown(inner.value, names, f'section {key.value}')}")
                found.append((inner.value, inner_value, inner_line))
        elif key.value in SECTION_OF:
            found.append((key.value, value, line))
        elif key.value in SECTIONS:
            raise ValueError(f"{path}:{line}: section {key.value} must hold a mapping of fields")
        else:
            raise ValueError(f"{path}:{line}: {_unknown(key.value, [*SECTIONS, *SECTION_OF], 'the configuration')}")
    return found


def _unknown(name: str, valid: list[str], where: str) -> str:
    elsewhere = f"; it belongs to section {SECTION_OF[name]}" if name in SECTION_OF else ""
    near = difflib.get_close_matches(name, valid, n=1) or difflib.get_close_matches(name, SECTION_OF, n=1)
    hint = f"; did you mean {near[0]}?" if near and not elsewhere else ""
    return f"unknown key {name!r} in {where}{elsewhere}{hint}"


def _checked(name: str, value: Any, where: str) -> Any:
    """``value`` as the type of field ``name``, or ``ValueError``."""
    annotation = typing.get_type_hints(SECTIONS[SECTION_OF[name]])[name]
    try:
        return _coerce(value, annotation)
    except TypeError:
        shown = getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        raise ValueError(f"{where}: {name} must be {shown}, got {value!r}") from None


def _coerce(value: Any, annotation: Any) -> Any:  # noqa: PLR0911
    """``value`` as ``annotation``; ``TypeError`` where it is not one. YAML reads 1e-6 as a string: that is a number here."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in arguments):
            return value
        raise TypeError
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _coerce(value, next(a for a in arguments if a is not type(None)))
    if origin is list and isinstance(value, list):
        return [_coerce(v, arguments[0]) for v in value]
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(arguments):
        return tuple(_coerce(v, kind) for v, kind in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict):
        return {str(k): str(v) for k, v in value.items()}
    if annotation is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            raise TypeError from None
    if isinstance(annotation, type) and type(value) is annotation:
        return value
    raise TypeError


def write_config(config: Config, path: Path) -> None:
    """Write every field, by sections, so that ``--config`` of this file gives the same configuration again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config_text(config), encoding="utf-8")


def config_text(config: Config) -> str:
    """What ``write_config`` writes."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
