"""Commands whose files are loaded when they are used: neither help nor a typo should wait for PyTorch."""

import ast
import difflib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import typer
import typer.core
import typer.main

from protofed.errors import UserError, did_you_mean

PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
# Each command: the file in protofed.cli, and what it calls the function.
COMMANDS = {
    "run": ("run", "run"),
    "compare": ("compare", "compare"),
    "report": ("report", "report"),
    "watch": ("watch", "watch"),
    "sweep": ("sweep", "sweep"),
    "table": ("table", "table"),
    "reproduce": ("reproduce", "reproduce"),
    "join": ("join", "join"),
    "oneshot": ("oneshot", "oneshot"),
    "export": ("export", "export"),
    "predict": ("predict", "predict"),
    "attack": ("attack", "attack"),
    "partition": ("partition", "partition"),
    "explain": ("explain", "explain"),
    "bench": ("bench", "bench"),
    "list": ("list", "list_"),
    "import-pfllib": ("import_pfllib", "import_pfllib"),
    "federation": ("federation", "federation"),
    "server": ("server", "server"),
    "client": ("client", "client"),
}


FOREIGN = ("import-pfllib",)  # commands whose arguments may be flags of another program


class Known(typer.core.TyperGroup):
    """A group of commands that refuses a misspelt command in one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in (names := self.list_commands(ctx)):
            raise UserError(f"there is no command {args[0]!r}. {did_you_mean(args[0], names)}")
        return super().resolve_command(ctx, args)


class Plain(typer.core.TyperCommand):
    """A command that explains how keys are written when somebody writes them as options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            left = super().parse_args(ctx, args)
            _refuse_options(self, ctx.params.get("overrides") or ctx.params.get("methods") or [])
            return left
        except click.NoSuchOption as error:
            keys = any(param.name in ("overrides", "methods") for param in self.params)
            if keys and not difflib.get_close_matches(error.option_name, error.possibilities or (), 1, 0.75):
                key = error.option_name.lstrip("-").replace("-", "_")
                if key == "seeds":
                    raise UserError(
                        "there is no option --seeds here. Write seed=N, or use protofed compare METHOD ... --seeds 0,1 "
                        "for several."
                    ) from None
                raise UserError(
                    f"there is no option {error.option_name}. A key of the experiment has no dashes: {key}=VALUE."
                ) from None
            raise


def _refuse_options(command: click.Command, words: list[str]) -> None:
    """Refuse an option that is written like a key of the experiment."""
    options = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
    for word in words:
        key, equals, value = word.partition("=")
        if equals and (option := f"--{key.strip().replace('_', '-')}") in options:
            raise UserError(f"{word!r}: {key} is an option, not a key of the experiment. Write {option} {value}.")


class Commands(Known):
    """All commands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        room = formatter.width - 6 - max(map(len, COMMANDS))
        rows = [(name, click.Command(name, help=about(name)).get_short_help_str(room)) for name in COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@cache
def load_command(name: str) -> click.Command:
    """A command with its options."""
    file, attribute = COMMANDS[name]
    made, one = getattr(import_module(f"protofed.cli.{file}"), attribute), typer.Typer(**PLAIN)
    if isinstance(made, typer.Typer):
        one.add_typer(made, name=name)
    else:
        loose = {"ignore_unknown_options": True} if name in FOREIGN else None
        one.command(name, cls=Plain, context_settings=loose)(made)
    return typer.main.get_group(one).commands[name]


def about(name: str) -> str:
    """The first lines of a command's help, read from its file without loading it."""
    file, attribute = COMMANDS[name]
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == attribute)
    return ast.get_docstring(next(functions, tree)) or ""  # commands that belong together are described by their file
