"""The command line of a server, generated from `ServerArgs`.

Precedence: command line, then environment (STATEWISE_PORT=...), then the file named by --config
(YAML, names as in `ServerArgs`, dashes allowed), then defaults. Unknown names are refused with the
nearest known one.

This module starts nothing.
"""

from __future__ import annotations

import argparse
import difflib
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from statewise.runtime.config import GROUPS, ServerArgs, checked, choices_of, meta_of
from statewise.runtime.errors import InvalidRequestError

ENVIRONMENT_PREFIX = "STATEWISE_"
ALIASES = {"model_path": ("--model",)}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest name for an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; unknown arguments end the program with a suggestion for each."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self._unknown(word) for word in unknown))
        return parsed

    def _unknown(self, word: str) -> str:
        name = word.split("=", 1)[0]
        if not name.startswith("-"):
            return f"unexpected value {word!r}"
        known = [o for action in self._actions for o in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return f"unknown argument {name}" + (f" (did you mean {near[0]}?)" if near else "")


def flag_of(name: str) -> str:
    """Return a setting's command-line name."""
    return "--" + name.replace("_", "-")


def make_parser(prog: str) -> Parser:
    """Return the parser of `ServerArgs`; what is not given stays absent from the result."""
    parser = Parser(
        prog=prog,
        usage="%(prog)s --model-path MODEL [--port PORT] [--config FILE] [...]",
        description="Serve a language model over HTTP, reusing cached state where it is exact.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        epilog="Every setting can also come from --config FILE (YAML) or from the environment, as "
        f"{ENVIRONMENT_PREFIX}PORT=30001.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for field in msgspec.structs.fields(ServerArgs):
        extra = meta_of(field).extra or {}
        _add_field(groups[extra["group"]], field)
    return parser


def _add_field(group: argparse._ArgumentGroup, field: msgspec.structs.FieldInfo) -> None:
    names = [flag_of(field.name), *ALIASES.get(field.name, ())]
    text = (meta_of(field).description or "").replace("%", "%%")
    shown = "" if field.default in ("", msgspec.NODEFAULT) else f" (default: {field.default})"
    kind = value_type(field)
    if kind is bool:
        action: Any = argparse.BooleanOptionalAction if field.default else "store_true"
        group.add_argument(*names, dest=field.name, action=action, help=text + shown)
        return
    choices = choices_of(field)
    metavar = "{" + ",".join(choices) + "}" if choices else kind.__name__.upper()
    group.add_argument(*names, dest=field.name, type=kind, metavar=metavar, help=text + shown)


def value_type(field: msgspec.structs.FieldInfo) -> type:
    """Return a setting's plain type: str, int, float or bool."""
    plain: type = typing.get_args(field.type)[0]
    return plain


# ----------------------------------------------------------------- file and environment


def from_file(path: str) -> dict[str, Any]:
    """Read settings from a YAML file. Raises InvalidRequestError that names the file."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequestError(f"config file {path}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InvalidRequestError(f"config file {path}: it must hold names and values")
    known = ServerArgs.__struct_fields__
    settings = {str(name).replace("-", "_"): value for name, value in data.items()}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InvalidRequestError(f"config file {path}: unknown setting {name!r}{hint}")
    return settings


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from environment variables. Raises InvalidRequestError naming the variable."""
    settings: dict[str, Any] = {}
    for field in msgspec.structs.fields(ServerArgs):
        name = ENVIRONMENT_PREFIX + field.name.upper()
        if name in environment:
            settings[field.name] = _parsed(name, environment[name], value_type(field))
    return settings


def _parsed(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise InvalidRequestError(f"{name} is {text!r}; it must be a {kind.__name__}") from None


def parse(argv: Sequence[str], prog: str = "statewise serve") -> ServerArgs:
    """Build the settings from a command line; a wrong one ends the program with status 2."""
    parser = make_parser(prog)
    given = vars(parser.parse_args(list(argv)))
    try:
        path = given.pop("config", None)
        settings = from_file(path) if path else {}
        settings |= from_environment(os.environ)
        settings |= given
        if "model_path" not in settings:
            raise InvalidRequestError(
                "--model-path is needed: a directory, a .gguf file, or a name such as smollm2-135m"
            )
        return checked(settings)
    except InvalidRequestError as error:
        _end(parser, str(error))


def _end(parser: Parser, message: str) -> NoReturn:
    parser.error(message)
