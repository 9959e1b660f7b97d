"""Messages for the command line: options in place of arguments, ``--max-steps 0`` in place of ``max_steps=0``."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from typing import Any

from scbd import _argument_values as values

# options that are called otherwise than the argument behind them
_OTHER_NAMES = {
    "n_seeds": "--seeds",
    "n_folds": "--folds",
    "n_steps_alpha_warmup": "--alpha-warmup",
    "path": "--data",
    "report_only": "--report",
}
# calls, and lists of keys and columns, stay as they are
_AS_IT_IS = r"[\w.]+\([^()]*\)|\(it[s ][^()]*\)"
_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\([^)]*\)|[-+]?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan|True|False|None|…"""
_BEFORE, _AFTER = r"(?<![\w./'\"-])", r"(?![\w'\"(\]=/]|\.\w)"


def options_of(parser: argparse.ArgumentParser, command: str) -> dict[str, argparse.Action]:
    """Options of a command by the names of their arguments.

    Parameters
    ----------
    parser
        With the command.
    command
        Its name.
    """
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    actions = [action for action in commands.choices[command]._actions if action.option_strings]
    found = {action.dest: action for action in actions}
    by_option = {action.option_strings[-1]: action for action in actions}
    return found | {name: by_option[option] for name, option in _OTHER_NAMES.items() if option in by_option}


def in_options(message: str, options: dict[str, argparse.Action]) -> str:
    """The message with options in place of arguments. Words that may be plain English are left without a value.

    Parameters
    ----------
    message
        What is said to users of Python.
    options
        From :func:`options_of`.

    Examples
    --------
    >>> from scbd._command_line import parser_of_commands
    >>> from scbd._option_names import in_options, options_of
    >>> options = options_of(parser_of_commands(), "run")
    >>> in_options("Give max_steps or max_epochs; go on with resume=True, without z_s style_target=None.", options)
    'Give --max-steps or --max-epochs; go on with --resume, without z_s --style-target none.'
    """
    names = "|".join(map(re.escape, options))
    plain = "|".join(re.escape(name) for name in options if "_" in name)
    pattern = (
        f"(?P<kept>{_AS_IT_IS})|{_BEFORE}(?P<name>{names})=(?P<value>{_VALUE})"
        f"|{_BEFORE}(?P<alone>{plain or '(?!)'}){_AFTER}"
    )

    def put(found: re.Match[str]) -> str:
        if found["alone"]:
            return str(options[found["alone"]].option_strings[-1])
        return found[0] if found["kept"] else _typed(options[found["name"]], found["value"]) or found[0]

    return re.sub(pattern, put, message)


def _typed(action: argparse.Action, value: str) -> str:
    """What is typed for a value; nothing if there is no way to say it."""
    option = action.option_strings[-1]
    given: Any = value
    if value not in ("…", "inf", "nan"):
        try:
            given = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            return ""
    if action.nargs == 0:
        return option if given is action.const else ""
    if given is None:
        has_none = "none" in (action.choices or ()) or action.type in (values.word, values.count_or_auto)
        return f"{option} none" if has_none else ""
    if isinstance(given, (list, tuple)):
        parts = [_word(part) for part in given]
        return f"{option} {' '.join(parts) if action.nargs else 'x'.join(parts)}"
    return f"{option} {_word(given)}"


def _word(value: object) -> str:
    text = str(value)
    return text if text == "…" else shlex.quote(text)
