"""The report of a probe on a screen."""

from typing import Any

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise ImportError(
        "the table of gravac_jax.probe needs rich: pip install gravac_jax[tools]"
    ) from error

from gravac_jax._probe.verdict import Range

_WIDTH = 100  # columns, where no terminal has its own


def show(report: dict[str, Any]) -> None:
    """Print what `findings.report` has."""
    console = Console(highlight=False)
    if not console.is_terminal:  # nothing needs to be cut
        console = Console(highlight=False, width=_WIDTH)
    processes = report["processes"]
    where = "1 process" if processes == 1 else f"{processes} processes"
    console.print(
        f"{report['params']:,} params; {report['devices']} devices of {where};"
        f" {report['rounds']} rounds"
    )
    for axis, links in report["axes"].items():
        console.print(f"{links['replicas']} replicas over {axis}:")
        for kind in (x for x in links if x != "replicas"):
            alpha, beta = links[kind].values()
            speed = f"{1e6 * alpha:.3g} us a message, {beta / 1e6:.4g} MB/s"
            console.print(f"  {kind} {speed}")
    if report["ceiling"]:
        bare, times = _ms(report["compute_seconds"]), Range(*report["ceiling"])
        console.print(
            f"Without any exchange a step takes {bare} ms, and is {times} times as fast"
            " as a dense one"
        )
    console.print(_table(report))
    console.print(_break_even(report))
    console.print(f"\n[bold]{report['verdict']}[/]\n")
    for note in report["notes"]:
        console.print(f"- {note}")


def _table(report: dict[str, Any]) -> Table:
    whole = "exchange" if report["compute_seconds"] is None else "step"
    title = f"MB that one replica sends, milliseconds, and dense {whole} over {whole}"
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True, title=title)
    table.add_column("exchange", no_wrap=True)
    for column in ("factor", "MB", "select", "send", whole, "times (90%)", "pays"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in (report["dense"], *report["rows"]):
        low, middle, high = row["speed_up"]
        is_dense = row is report["dense"]
        table.add_row(
            row["exchange"],
            f"{row['factor']:g}",
            f"{row['wire_bytes'] / 1e6:.3g}",
            _ms(row["selection_seconds"]),
            _ms(row["exchange_seconds"]),
            _ms(row["step_seconds"][1]),
            "1" if is_dense else f"{middle:.2f} ({low:.2f}-{high:.2f})",
            "" if is_dense else row["pays"],
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _break_even(report: dict[str, Any]) -> str:
    lowest = min((x["factor"] for x in report["rows"] if x["factor"] > 1), default=0)
    words = []
    for name, factor in report["break_even"].items():
        less = " or less" if factor == lowest else ""
        words.append(f"{name} {'none' if factor is None else f'{factor:.3g}'}{less}")
    return f"Break-even factor: {', '.join(words) or 'none'}"
