"""
The moving picture of README, light and dark, into docs/: python experiments/moving_picture.py

A clock is the angle between query and key in a slow pair (26 of 0 to 31), grey where training
showed it. The curves are results/figure1.json's losses along texts, means over the seeds.
"""

import json
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PLACES, SPEED = np.array([0, 512, 8192]), 10000 ** (-2 * 26 / 64)
SECONDS, START = 10, {"rope": 0.5, "fope": 5.3}  # of all; when each begins
CLOCK = """<circle r="90" stroke="var(--line)" stroke-width="2"/>
<path fill="var(--seen)" d="M0 0L%sA90 90 0 0 1 %sZ"/><g class="m %s" transform="rotate(%.1f)">
<path d="M0 0V-90" stroke="var(--%s)" stroke-width="8" stroke-linecap="round"/></g>"""


def seconds(name, place):
    """When the model's reader is there: a second for what training had, 2.7 for the rest."""
    return START[name] + np.interp(place, PLACES, [0, 1, 3.7])


def animated(name, times, style, values):
    """CSS that gives elements of this class these values at these times, and between them."""
    frames = zip([0, *times, SECONDS], [values[0], *values, values[-1]], strict=True)
    frames = " ".join(f"{100 * t / SECONDS:.1f}% {{ {style % value} }}" for t, value in frames)
    return f".{name} {{ animation-name: {name}; }} @keyframes {name} {{ {frames} }}\n"


def picture(colours, losses):
    """The svg, which without its animation is its last moment."""
    angles, at, plot = SPEED * PLACES, seconds("rope", PLACES), ""
    css = animated("hand", at, "transform: rotate(%.1fdeg)", np.degrees(angles))
    # of a line the first 999 - offset are drawn
    css += animated("arc", at[1:], "stroke-dashoffset: %.1f", 999 - 90 * (angles[1:] - angles[1]))
    for name, time in ("new", at[1] + 0.3), ("lost", at[2]), ("less", seconds("fope", 8192)):
        css += animated(name, [time, time + 0.3], "opacity: %d", [0, 1])
    for name, runs in losses.items():
        places, loss = np.arange(128, 8192, 256), np.reshape(runs, (-1, 32, 4)).mean((0, 2))
        x, y = 415 + 430 * places / 8192, 412 - 350 * (loss - 1) / 3
        drawn = np.append(0, np.hypot(np.diff(x), np.diff(y)).cumsum())
        css += animated(name, seconds(name, places), "stroke-dashoffset: %.1f", 999 - drawn)
        points = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(x, y, strict=True))
        plot += f'<path class="m {name}" stroke="var(--{name})" stroke-width="6" d="M{points}"/>'
    for n in (1, 2, 3, 4):
        plot += f'<text x="393" y="{420 - 350 * (n - 1) / 3:.0f}">{n}</text>'
        plot += f'<text x="{378 + 430 * n / 4}" y="442">{2048 * n:,}</text>'
    rim = [f"{90 * np.sin(a):.1f} {-90 * np.cos(a):.1f}" for a in (*angles, -0.16, 0.16)]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 896 500" fill="none">
<style>svg {{ {"".join(re.findall("--.+?;", colours))} font: 25px system-ui, sans-serif }}
text {{ fill: var(--ink) }} text.m, .b {{ font-weight: 700 }} .m {{ stroke-dasharray: 999 }}
@media (prefers-reduced-motion: no-preference) {{ .m {{ animation: {SECONDS}s linear 3 both; }}
{css}}}</style><rect width="896" height="500" rx="8" fill="var(--page)"/>
<text x="12" y="34" class="b" style="fill: var(--rope)">RoPE: a slow hand turns</text>
<g transform="translate(140 150)">{CLOCK % (*rim[:2], "hand", np.degrees(angles[2]), "rope")}
<path class="m arc" d="M{rim[1]}A90 90 0 1 1 {rim[2]}" stroke="var(--new)" stroke-width="14"/>
<text class="m new" x="110" y="50" style="fill: var(--new)">new</text></g>
<text x="12" y="294" class="b" style="fill: var(--fope)">FoPE stops it</text>
<g transform="translate(140 402)">{CLOCK % (*rim[3:], "", 0, "fope")}</g>
<path fill="var(--seen)" d="M415 62h{430 / 16}V412H415Z"/>
<path stroke="var(--line)" stroke-width="2" d="M415 62V412H845"/>{plot}
<text x="415" y="34">grey: seen in training, 512 tokens</text>
<text class="m lost" x="770" y="190" style="fill: var(--rope)">lost</text>
<text class="m less" x="660" y="380" style="fill: var(--fope)">far less lost</text>
<text transform="translate(384 255) rotate(-90)">loss</text>
<text x="540" y="484">position in the text</text></svg>"""


if __name__ == "__main__":
    losses, page = {}, (ROOT / "docs" / "index.html").read_text("utf-8")
    for run in json.loads((ROOT / "results" / "figure1.json").read_text()):
        if run["kind"] == "perplexity" and (name := run["recipe"]["pos"]) in START:
            losses.setdefault(name, []).append(run["lengths"]["8192"]["by_position"])
    light, dark = re.findall(r":root {(.*?)}", page, re.S)
    for file, colours in ("clocks", light), ("clocks_dark", dark):
        (ROOT / "docs" / f"{file}.svg").write_text(picture(colours, losses))
