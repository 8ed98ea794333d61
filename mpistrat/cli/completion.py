"""``mpistrat completion``: a script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Write a script with which a shell completes commands and options.

    \b
    eval "$(mpistrat completion bash)"    # in ~/.bashrc; zsh likewise, in ~/.zshrc
    mpistrat completion fish > ~/.config/fish/completions/mpistrat.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    variables = {
        "complete_func": "_mpistrat_completion",
        "complete_var": "_MPISTRAT_COMPLETE",
        "prog_name": "mpistrat",
    }
    click.echo(kind(root, {}, "mpistrat", "_MPISTRAT_COMPLETE").source_template % variables)
