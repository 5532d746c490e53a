"""Draws the pictures of the documentation: `python docs/drawings.py` writes docs/drawings/*.svg.

Each has a light ground of its own, so that it is readable on a light and on a dark page.
"""

from pathlib import Path
from xml.sax.saxutils import escape

INK, PALE, GROUND = "#1f2937", "#6b7280", "#f8fafc"
BLUE, GREEN, AMBER = "#dbeafe", "#dcfce7", "#fef3c7"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="{ink}"/></marker></defs>
<rect width="{width}" height="{height}" rx="10" fill="{ground}"/>
"""


class Drawing:
    """Boxes, arrows and words on a ground of `width` x `height`; `title` is read to those who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [HEAD.format(width=width, height=height, title=escape(title), ink=INK, ground=GROUND)]

    def words(self, x: float, y: float, text: str, size: int = 15, colour: str = INK, anchor: str = "middle") -> None:
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
        self.parts.append(f"<text {place}>{escape(text)}</text>\n")

    def box(self, x: float, y: float, width: float, height: float, lines: str, fill: str = BLUE) -> None:
        """A box with lines of text in its middle; the first is larger."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {size} rx="6" fill="{fill}" stroke="{INK}"/>\n')
        rows = lines.split("\n")
        for number, row in enumerate(rows):
            middle = y + height / 2 + 5 + 19 * (number - (len(rows) - 1) / 2)
            self.words(x + width / 2, middle, row, 15 if number == 0 else 13, INK if number == 0 else PALE)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = f'fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"'
        self.parts.append(f'<path d="{path}" {line}{dash}/>\n')

    def text(self) -> str:
        return "".join(self.parts) + "</svg>\n"


def one_round() -> Drawing:
    """H local steps, transform, signs, mean, and the error that is kept."""
    drawing = Drawing(760, 330, "A round of LocalDeMo, on one of several workers")
    drawing.words(20, 30, "A round, on each worker", 17, anchor="start")
    for number in range(3):
        drawing.box(20 + 44 * number, 60, 36, 44, ("1", "...", "H")[number], GREEN)
    drawing.words(20, 126, "H local steps, no network", 13, PALE, "start")
    drawing.arrow((146, 82), (182, 82))
    drawing.box(184, 52, 160, 60, "weights: change D\nstart - now")
    drawing.arrow((344, 82), (376, 82))
    drawing.box(378, 52, 160, 60, "error e + DCT(D)\nblocks of 64 x 64")
    drawing.arrow((538, 82), (570, 82))
    drawing.box(572, 52, 168, 60, "signs, and a scale\n1 bit per coefficient", AMBER)
    drawing.arrow((656, 112), (656, 210))
    drawing.words(664, 165, "message", 13, PALE, "start")
    drawing.box(572, 212, 168, 60, "messages of all\nthe network", AMBER)
    drawing.arrow((572, 242), (540, 242))
    drawing.box(378, 212, 160, 60, "mean, inverse DCT\nthe same bits on all")
    drawing.arrow((378, 242), (346, 242))
    drawing.box(184, 212, 160, 60, "global weights\nequal on all workers")
    drawing.arrow((184, 242), (82, 242), (82, 136))
    drawing.words(20, 266, "the next H steps", 13, PALE, "start")
    drawing.arrow((600, 112), (600, 160), (458, 160), (458, 114), dashed=True)
    drawing.words(458, 180, "not sent: kept as e for the next round", 13, PALE)
    drawing.words(20, 310, "Only the messages travel: a 32nd of the gradients, every H steps.", 13, PALE, "start")
    return drawing


def a_run() -> Drawing:
    """A run as a folder: machines that reach the folder only."""
    drawing = Drawing(760, 330, "A run is a folder: workers come and go")
    drawing.words(20, 30, "A run is a folder or a bucket", 17, anchor="start")
    drawing.box(270, 60, 220, 210, "", AMBER)
    drawing.words(380, 84, "s3://bucket/mine")
    for number, line in enumerate(
        ("settings", "messages of round 12", "manifest of round 12", "messages of round 13", "checkpoint")
    ):
        drawing.box(285, 98 + 34 * number, 190, 27, line, "#ffffff")
    homes = (
        (20, 70, "home A, GPU\ntrain --run", GREEN),
        (20, 200, "home B, GPU\njoin", GREEN),
        (570, 70, "cloud, spot GPU\njoin, leaves, returns", GREEN),
        (570, 200, "laptop\nstatus, stop", BLUE),
    )
    for x, y, lines, fill in homes:
        drawing.box(x, y, 170, 60, lines, fill)
        left = x < 300
        inner, outer = (268, x + 172) if left else (492, x - 2)
        drawing.arrow((outer, y + 22), (inner, y + 22))
        drawing.arrow((inner, y + 40), (outer, y + 40))
    drawing.words(
        20,
        300,
        "Each worker puts its message and reads those of all. The manifest names the messages that count,",
        13,
        PALE,
        "start",
    )
    drawing.words(
        20,
        318,
        "so all workers apply the same ones. No machine reaches another, and no port is open.",
        13,
        PALE,
        "start",
    )
    return drawing


def replicas() -> Drawing:
    """Replicas and shards: FSDP2 inside a node, demopt between nodes."""
    drawing = Drawing(760, 330, "Replicas and shards: FSDP2 inside a machine, demopt between machines")
    drawing.words(20, 30, "Replicas between machines, shards inside", 17, anchor="start")
    for row, name in enumerate(("machine 0, replica 0", "machine 1, replica 1")):
        top = 50 + 140 * row
        drawing.box(20, top, 560, 90, "", BLUE)
        drawing.words(36, top + (22 if row == 0 else 80), name, anchor="start")
        inside = top + (34 if row == 0 else 12)
        for shard in range(4):
            drawing.box(36 + 136 * shard, inside, 116, 44, f"GPU {shard}\nshard {shard} of 4", GREEN)
            if shard:
                drawing.arrow((20 + 136 * shard - 2, inside + 22), (34 + 136 * shard, inside + 22))
        drawing.words(596, top + 42, "FSDP2, tensor parallel:", 13, PALE, "start")
        drawing.words(596, top + 60, "fast links, dense", 13, PALE, "start")
    for shard in range(4):
        x = 94 + 136 * shard
        drawing.arrow((x - 8, 130), (x - 8, 200))
        drawing.arrow((x + 8, 200), (x + 8, 130))
    drawing.words(596, 172, "demopt: signs between", 13, PALE, "start")
    drawing.words(596, 190, "equal shards, slow link", 13, PALE, "start")
    drawing.words(
        20,
        312,
        'process_group=mesh["replicate"]: each GPU exchanges its shard with the same GPU of the other machines.',
        13,
        PALE,
        "start",
    )
    return drawing


DRAWINGS = {"round": one_round, "run": a_run, "replicas": replicas}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name("drawings").joinpath(f"{name}.svg").write_text(draw().text(), encoding="utf-8")
