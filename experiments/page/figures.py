"""Figures of the page: quality against speed, training memory and decode state."""

from pathlib import Path

from experiments.page.comparisons import COSTS, PERCENTAGES, Table, fronts


def draw(path: Path, table: Table) -> bool:
    """Draws quality against each cost, one panel each; returns whether there is any panel."""
    import matplotlib.pyplot as plt

    from effattn.analysis.style import COLOURS
    from experiments.harness.figure import name_points, save, set_costs

    best = fronts(table)
    if not best:
        return False
    figure, axes = plt.subplots(
        1, len(best), figsize=(4.2 * len(best), 3.6), layout="constrained", squeeze=False
    )
    values = table.measured(table.sets[0])
    scale = 100 if table.headline in PERCENTAGES else 1
    for axis, (cost, named) in zip(axes[0], best.items(), strict=True):
        points = {m: (x, values[m].value * scale) for m, x in table.costs(cost).items()}
        for mechanism, point in points.items():
            colour = COLOURS[0] if mechanism in named else "silver"
            axis.plot(*point, "o", color=colour, markersize=5)
        set_costs(axis)
        name_points(axis, {mechanism: points[mechanism] for mechanism in named})
        axis.set(xlabel=COSTS[cost][1])
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(table.heading())
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
    return True


def draw_all(folder: Path, tables: list[Table]) -> dict[str, str]:
    """Draws the figures of all tables; returns their file names by table.

    Earlier figures of tables that are gone are removed.
    """
    drawn = {table.name: f"report-{table.name}.png" for table in tables}
    for path in folder.glob("report-*.png"):
        if path.name not in drawn.values():
            path.unlink()
    return {t.name: drawn[t.name] for t in tables if draw(folder / drawn[t.name], t)}
