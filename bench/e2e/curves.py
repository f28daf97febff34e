"""Learning curves as an SVG: rewards by step, and by seconds since the command."""
COLORS = ["#c2410c", "#1d4ed8", "#15803d", "#7e22ce"]
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, GAP = 900, 360, 60, 40, 360, 260, 80


def panel(x0, title, unit, series):
    """series: name → points (x, reward)."""
    most = max(x for points in series.values() for x, _ in points)
    top = max(0.1, max(y for points in series.values() for _, y in points))
    place = lambda x, y: (x0 + PLOT_WIDTH * x / most, TOP + PLOT_HEIGHT * (1 - y / top))
    out = [f'<text x="{x0 + PLOT_WIDTH / 2}" y="{TOP - 14}" text-anchor="middle">{title}</text>',
           f'<rect x="{x0}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" fill="none" stroke="#888"/>']
    for i in range(5):
        x, y = place(most * i / 4, top * i / 4)
        bottom = TOP + PLOT_HEIGHT
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{most * i / 4:.3g}</text>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{top * i / 4:.2f}</text>')
        out.append(f'<line x1="{x0}" x2="{x0 + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
    out.append(f'<text x="{x0 + PLOT_WIDTH / 2}" y="{TOP + PLOT_HEIGHT + 38}" text-anchor="middle">{unit}</text>')
    for color, (name, points) in zip(COLORS, series.items()):
        line = " ".join("%.1f,%.1f" % place(x, y) for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
    return out


def write_svg(path, results):
    """results: name → {"ends": seconds of each step's end, "rewards": mean reward of each step}."""
    by_step = {name: list(enumerate(r["rewards"], 1)) for name, r in results.items()}
    by_time = {name: list(zip(r["ends"], r["rewards"])) for name, r in results.items()}
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    out += panel(LEFT, "mean reward of a step", "steps", by_step)
    out += panel(LEFT + PLOT_WIDTH + GAP, "the same", "seconds since the command", by_time)
    for i, (color, name) in enumerate(zip(COLORS, results)):
        y = TOP + 16 + 16 * i
        out.append(f'<text x="{LEFT + 8}" y="{y}" fill="{color}">{name}</text>')
    out.append("</svg>")
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n")
