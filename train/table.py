"""What `--dry-run` shows: which parameter goes where, and what a step is made of."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from train.flops import flops_per_token
from train.loop import prepare_model
from train.parameters import table, take_apart
from train.settings import Settings


def show(settings: Settings) -> None:
    """Print the parameters by rule, and the size of a step."""
    model = prepare_model(settings)
    choice = settings.choice()
    _, parts = take_apart(model, choice)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    grid = Table(title="How every parameter is trained", title_justify="left", box=None, header_style="bold")
    for heading in ("role", "parameter", "shape", "method"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("rate", "decay", "matrices", "numbers"):
        grid.add_column(heading, justify="right", no_wrap=True)
    role = None
    rows = table(parts.all(), choice, model.config)
    for row in rows:
        rule = row.rule
        moved = rule.method not in ("frozen", "loads")
        grid.add_row(
            rule.role if rule.role != role else "",
            row.name,
            " x ".join(map(str, row.shape)),
            {"loads": "expert loads"}.get(rule.method, rule.method),
            f"x {rule.rate:g}" if moved else "",
            f"{settings.optimizer.weight_decay:g}" if moved and rule.decay else "",
            f"{row.matrices:,}" if rule.method == "muon" else "",
            f"{row.numbers:,}",
        )
        role = rule.role
    console.print(grid)
    trained = sum(row.numbers for row in rows if row.rule.method not in ("frozen", "loads"))
    data = settings.data
    tokens = data.tokens * data.rows * data.micro_batches
    flops = flops_per_token(model.config, parts, data.tokens) * tokens
    console.print(
        f"\n{trained:,} of {sum(row.numbers for row in rows):,} numbers are trained. A step: {data.micro_batches} x "
        f"{data.rows} rows of {data.tokens:,} tokens = {tokens:,} tokens, {flops:.2e} operations; {settings.run.steps:,} steps."
    )
