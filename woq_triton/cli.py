"""The command line: one function a subcommand, each in its own file under `woq_triton/commands`."""

from typing import Annotated

import typer

from woq_triton import __version__
from woq_triton.commands.audit import audit
from woq_triton.commands.generate import generate

app = typer.Typer(
    name="woq-triton",
    help="Weight-only quantization for models that DeepSpeed AutoTP shards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Weight-only quantization for models that DeepSpeed AutoTP shards."""


app.command()(generate)
app.command()(audit)
