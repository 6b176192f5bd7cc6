"""The click classes of all commands: one help line per option, suggestions for misspelt names, forgiving values.

Used by every command. Imports no torch. What always holds: an error for a wrong value lists the allowed ones and suggests the
nearest; the help of a command fits a screen.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import click

from torchquorum.cli.ctrl_c import raise_interrupts
from torchquorum.cluster.flags import parse_flags
from torchquorum.cluster.spec import strip_quotes
from torchquorum.cluster.worker_range import WorkerRange
from torchquorum.errors import ConfigError


def nearest(name: str, allowed: Sequence[str]) -> str:
    """Returns '; did you mean X?' for the nearest allowed name, or an empty text."""
    found = difflib.get_close_matches(name.lower(), allowed, 1, 0.5)
    return f"; did you mean {found[0]}?" if found else ""


class Option(click.Option):
    """An option with a section in the help."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section

    def line(self, ctx: click.Context) -> tuple[str, str]:
        """Returns the option's help line: its first name, and its text with the default."""
        name = self.opts[0] if not self.opts[0].startswith("-") or len(self.opts[0]) > 2 else self.opts[-1]
        name = name if name.startswith("--") else next((o for o in self.opts if o.startswith("--")), name)
        short = next((f"{o}, " for o in self.opts if re.fullmatch(r"-\w", o)), "")
        shown = short + name + (f"/{self.secondary_opts[0]}" if self.secondary_opts else "")
        if not self.is_flag and not self.count:
            shown += f" {self.make_metavar(ctx)}"
            shown = shown.rstrip()
        default = self.get_default(ctx, call=False)
        tail = f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
        worth_it = self.show_default and not self.is_flag and isinstance(default, int | float | str) and default != ""
        return shown, (self.help or "") + (tail if worth_it else "")


option = partial(click.option, cls=Option, show_default=True)


DURABLE = ("write", "fsync")


def durable_option(name: str, **more: Any) -> Callable[[Any], Any]:
    """The option `--durable`, alone or with a value after an equals sign; the next word may be a script's name."""
    text = "lose no update if a ps dies; =fsync: or power fails"
    return option(name, type=Named(*DURABLE), metavar="", help=text, **more)


def spell_durable(args: list[str]) -> list[str]:
    """Gives `--durable` its value, so that it does not take the next word; a script's own options stay untouched."""
    script = next((i for i, word in enumerate(args) if word.endswith(".py")), len(args))
    spelt: list[str] = []
    for word, following in zip(args[:script], [*args[1:], ""], strict=False):
        if word == "--durable":
            spelt.append(f"--durable={following if following in DURABLE else DURABLE[0]}")
        elif not (word in DURABLE and spelt and spelt[-1] == f"--durable={word}"):
            spelt.append(word)
    return spelt + args[script:]


class Command(click.Command):
    """A command whose help has sections, one line per option, and defaults in brackets."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, Option) and not param.hidden:
                sections.setdefault(param.section, []).append(param.line(ctx))
        sections.setdefault(next(reversed(sections), "Options"), []).append(("-h, --help", "show this help"))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width + 2)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the arguments; suggests the nearest name for an unknown option."""
        if any(param.name == "durable" for param in self.params):
            args = spell_durable(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for param in self.get_params(ctx) for name in param.opts if name.startswith("--")]
            hint = nearest(error.option_name.replace("_", "-"), known) or f"; see {ctx.command_path} --help"
            raise click.UsageError(f"No such option {error.option_name}{hint}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, which handles Ctrl-C by itself."""
        raise_interrupts()
        return super().invoke(ctx)


class ClusterCommand(Command):
    """A command that takes a cluster's flags in every spelling that tasks accept: quotes, spaces, `--ps_host`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the cluster's flags first, and passes them on in one spelling."""
        taken, rest = parse_flags(args)
        found = {
            "--job-name": taken.job_name,
            "--task-id": None if taken.task_index is None else str(taken.task_index),
            "--ps-hosts": ",".join(taken.ps_hosts) if taken.ps_hosts else None,
            "--worker-hosts": ",".join(taken.worker_hosts) if taken.worker_hosts else None,
            "--min-workers": None if taken.min_workers is None else str(taken.min_workers),
            "--transport": taken.transport,
            "--secret-file": taken.secret_file,
        }
        again = [f"{name}={value}" for name, value in found.items() if value is not None]
        again += ["--insecure"] if taken.insecure else []
        return super().parse_args(ctx, [*again, *rest])


class Group(click.Group):
    """The commands, each imported when it is called, with suggestions for misspelt names.

    Args:
        lazy: By name, in order: the command's module, and its line in the list.
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns all names, in the order of `lazy`."""
        return [*self._lazy, *(name for name in super().list_commands(ctx) if name not in self._lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's module when the command is called."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module = import_module(self._lazy[cmd_name][0])
        return getattr(module, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        rows = []
        for name in self.list_commands(ctx):
            known = self._lazy.get(name)
            command = super().get_command(ctx, name) if known is None else None
            rows.append((name, known[1] if known else command.get_short_help_str(70) if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds the command, or suggests the nearest name."""
        names = self.list_commands(ctx)
        given = strip_quotes(args[0]).replace("_", "-").lower()
        if not args[0].startswith("-") and given not in names:
            hint = nearest(given, names) or f"; the commands are {', '.join(names)}"
            raise click.UsageError(f"No such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, [given if given in names else args[0], *args[1:]])


class Named(click.ParamType):
    """One of a few names; case and quotes do not matter."""

    name = "name"

    def __init__(self, *names: str) -> None:
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the name in its proper spelling."""
        clean = strip_quotes(str(value))
        found = next((n for n in self.names if n.lower() == clean.lower().replace("-", "_")), None)
        if found is None:
            self.fail(f"{clean!r}: must be one of {', '.join(self.names)}{nearest(clean, self.names)}", param, ctx)
        return found

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the placeholder in the help."""
        return "NAME"


class Workers(click.ParamType):
    """A number of workers: N, or MIN:MAX where workers may join and leave."""

    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> WorkerRange:
        """Returns the range."""
        try:
            return WorkerRange.read(value, label="")
        except ConfigError as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the placeholder in the help."""
        return "N|MIN:MAX"


class Checked(click.ParamType):
    """A text that a parser checks; its ConfigError becomes the error for the option's value."""

    name = "text"

    def __init__(self, read: Callable[[str], object]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the text, without quotes, after checking it."""
        clean = strip_quotes(str(value))
        try:
            self._read(clean)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return clean
