"""Draw the figure of the idea, `idea.svg` beside this file.

python docs/images/idea.py
"""

from pathlib import Path

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
RANK, GAP, TOP = 52, 14, 62  # height of the box of a rank, space between two, y of the first
WIDTH, HEIGHT = 860, TOP + 4 * (RANK + GAP) + 34
BOTTOM = TOP + 4 * RANK + 3 * GAP


def box(x, y, width, height, fill, stroke="none", radius=6):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{stroke}"/>'


def text(x, y, words, size=14, color="#222", weight="normal", anchor="middle"):
    style = f'font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def arrow(x1, y1, x2, y2):
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#777" stroke-width="1.5" fill="none" marker-end="url(#tip)"/>'


def figure():
    """Return the figure as a text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">',
        "<title>Each rank computes on its part of the batch; the sums make the variables equal</title>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>',
        box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "white", "#ddd", 10),
    ]
    titles = ((90, "a batch of rows"), (330, "each rank: its rows"), (565, "one sum"), (745, "equal variables"))
    parts += [text(x, 34, title, 16, weight="bold") for x, title in titles]
    parts.append(box(490, TOP, 150, BOTTOM - TOP, "#eef1f5", "#8793a5"))
    for line, words in enumerate(("all_reduce", "over shared memory,", "MPI or NCCL")):
        size, weight = ((15, "bold"), (12, "normal"), (12, "normal"))[line]
        parts.append(text(565, (TOP + BOTTOM) / 2 - 10 + 20 * line, words, size, weight=weight))
    for rank, color in enumerate(COLORS):
        y = TOP + rank * (RANK + GAP)
        middle = y + RANK / 2
        parts += [box(35, y + 13 * row + 1, 110, 11, color, radius=2) for row in range(4)]
        parts += [
            arrow(152, middle, 213, middle),
            box(220, y, 220, RANK, "white", color),
            box(220, y, 62, RANK, color),
            text(251, middle + 5, f"rank {rank}", 14, "white", "bold"),
            text(361, middle + 5, "step(rows)"),
            arrow(447, middle, 484, middle),
            arrow(646, middle, 683, middle),
            box(690, y, 110, RANK, "#eef1f5", color),
            text(745, middle + 5, "weights"),
        ]
    parts += [
        text(90, BOTTOM + 24, "HDF5 files, arrays", 12, "#555"),
        text(330, BOTTOM + 24, "one process, one program, one device", 12, "#555"),
        text(745, BOTTOM + 24, "on every rank, at all times", 12, "#555"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(figure())
